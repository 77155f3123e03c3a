"""Receipt claims: round trip, presence by terminal status, commitments, redaction, and the CDDL's view of each."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_sdk.wire import cbor, cose, digests, names
from client_sdk.wire.errors import WireError
from client_sdk.wire.receipt import ReceiptClaims
from client_sdk.wire.stream import Checkpoint, decode_base64url, encode_base64url, next_chain
from tests import cddl
from tests import reference_decoder as reference
from tests.vectors import honest as h

EARLY = (names.STATUS_ERROR, names.STATUS_CANCELLED, names.STATUS_DEADLINE)


def with_status(claims: ReceiptClaims, status: str) -> ReceiptClaims:
    return dataclasses.replace(claims, response=dataclasses.replace(claims.response, status=status))


def accepted(claims: ReceiptClaims) -> None:
    encoded = claims.encode()
    assert ReceiptClaims.parse(encoded) == claims
    cddl.validate("receipt-claims", encoded)


def refused(claims: ReceiptClaims) -> None:
    with pytest.raises(WireError) as caught:
        ReceiptClaims.parse(claims.encode())
    assert caught.value.code == "MALFORMED_RECEIPT_CLAIMS"
    with pytest.raises(cddl.CddlMismatch):
        cddl.validate("receipt-claims", claims.encode())


def unevaluated(claims: ReceiptClaims) -> ReceiptClaims:
    return dataclasses.replace(claims, prompt=None, decoding=None, output=None, execution=None)


@pytest.mark.parametrize("claims", [h.whole_answer(), h.streamed_answer()], ids=["whole", "stream"])
@pytest.mark.parametrize("status", sorted(names.STATUSES))
def test_presence_by_terminal_status(claims: ReceiptClaims, status: str) -> None:
    """The table of docs/receipt-format.md, checked against the parser and the CDDL alike."""
    evaluated, empty = with_status(claims, status), with_status(unevaluated(claims), status)
    (refused if status == names.STATUS_REFUSED else accepted)(evaluated)
    (refused if status == names.STATUS_COMPLETE else accepted)(empty)
    for gone in ("prompt", "decoding", "output", "execution"):
        absent: dict[str, Any] = {gone: None}
        refused(dataclasses.replace(evaluated, **absent))


@pytest.mark.parametrize("status", EARLY)
def test_finish_may_be_null_only_where_the_answer_did_not_end_by_itself(status: str) -> None:
    claims = h.whole_answer()
    assert claims.output
    cut = dataclasses.replace(claims, output=(dataclasses.replace(claims.output[0], finish=None),))
    accepted(with_status(cut, status))
    refused(cut)


def test_an_evaluated_request_needs_its_model_and_a_refusal_does_not() -> None:
    refused(dataclasses.replace(h.whole_answer(), model=None))
    accepted(dataclasses.replace(h.refusal(), model=h.whole_answer().model))
    accepted(dataclasses.replace(h.refusal(), attestation=None, channel=None))


@given(st.integers(0, (1 << 64) - 1), st.none() | st.binary(min_size=8, max_size=64), st.text(min_size=1, max_size=200))
def test_round_trip(sequence: int, nonce: bytes | None, name: str) -> None:
    previous = None if sequence == 0 else h.seed("previous")
    claims = dataclasses.replace(
        h.whole_answer(), sequence=sequence, previous=previous, eat_nonce=nonce, iss=name, iat=sequence
    )
    assert ReceiptClaims.parse(claims.encode()) == claims


def test_commitments_are_nested_hmacs_and_open_one_by_one() -> None:
    inner = hmac.new(h.SALT, b"request", hashlib.sha256).digest()
    expected = hmac.new(inner, b"body", hashlib.sha256).digest()
    assert digests.commitment(h.SALT, "request", b"body") == expected
    assert digests.inner_key(h.SALT, "request") == inner
    assert digests.inner_key(h.SALT, "response") != inner
    assert reference.C(h.SALT, "request", b"body") == expected


def test_labels_keep_choices_apart() -> None:
    labels = [
        names.LABEL_REQUEST,
        names.LABEL_RESPONSE,
        names.LABEL_PROMPT_TEXT,
        names.LABEL_PROMPT_TOKENS,
        names.LABEL_STOP,
    ]
    labels += [label(n) for n in range(3) for label in (names.label_output_text, names.label_output_tokens)]
    assert len({digests.commitment(h.SALT, label, b"same") for label in labels}) == len(labels)


def test_a_redacted_receipt_verifies_and_opens_nothing() -> None:
    full = h.sealed(h.whole_answer())
    stripped = cose.redacted(full, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    assert stripped == h.sealed(h.whole_answer(), salt=None)
    claims, salt = reference.read_receipt(stripped, h.RECEIPT.cose_key())
    assert salt is None
    assert h.SALT not in stripped
    assert claims[7] == h.CTI
    cddl.validate("receipt", stripped)
    assert cose.redacted(stripped, limit_bytes=names.LIMIT_RECEIPT_BYTES) == stripped


def test_the_link_to_the_previous_receipt_is_over_its_redacted_form() -> None:
    full = h.sealed(h.whole_answer())
    stripped = cose.redacted(full, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    assert digests.receipt_link(stripped) == reference.link(full) == reference.link(stripped)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [path]


DECODED: Any = cbor.decode(h.whole_answer().encode(), limit_bytes=names.LIMIT_RECEIPT_BYTES)


@pytest.mark.parametrize("path", leaves(DECODED), ids=lambda path: "/".join(map(str, path)))
def test_no_field_can_change_under_the_signature_B084_B086(path: tuple[Any, ...]) -> None:
    """Name, weights, parameters, counts, digests: whichever is altered, the signature no longer holds."""
    changed: Any = cbor.decode(h.whole_answer().encode(), limit_bytes=names.LIMIT_RECEIPT_BYTES)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = other(holder[path[-1]])
    honest = h.sealed(h.whole_answer())
    parts: Any = cbor.decode(honest[1:], limit_bytes=names.LIMIT_RECEIPT_BYTES)
    forged = honest[:1] + cbor.encode([parts[0], parts[1], cbor.encode(changed), parts[3]])
    with pytest.raises(reference.Refused) as caught:
        reference.read_receipt(forged, h.RECEIPT.cose_key())
    assert caught.value.code == "BAD_SIGNATURE"


def other(value: Any) -> Any:
    if value is None:
        return bytes(32)
    if isinstance(value, bool):
        return not value
    if isinstance(value, bytes):
        return bytes((value[0] ^ 1,)) + value[1:]
    return value + "x" if isinstance(value, str) else value + 1


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_the_chain_agrees_with_the_reference(frames: list[bytes]) -> None:
    value = h.context().initial_chain(h.SALT)
    for index, frame in enumerate(frames, 1):
        value = next_chain(value, index, frame)
    c = h.context()
    assert value == reference.chain([c.cti, c.eat_nonce, c.attestation, c.channel, c.request], h.SALT, frames)


def test_the_chain_starts_from_everything_it_is_tied_to() -> None:
    start = h.context().initial_chain(h.SALT)
    for field in ("cti", "eat_nonce", "attestation", "channel", "request"):
        moved = dataclasses.replace(h.context(), **{field: h.seed(field)})
        assert moved.initial_chain(h.SALT) != start
    assert h.context().initial_chain(h.seed("another salt")) != start


def test_a_checkpoint_round_trips_with_and_without_nulls() -> None:
    for context in (h.context(), dataclasses.replace(h.context(), eat_nonce=None, attestation=None, channel=None)):
        checkpoint = Checkpoint(context=context, index=7, chain=h.seed("h"))
        assert Checkpoint.parse(checkpoint.encode()) == checkpoint
        cddl.validate("checkpoint-payload", checkpoint.encode())


@given(st.binary(max_size=200))
def test_base64url_is_canonical(content: bytes) -> None:
    text = encode_base64url(content)
    assert decode_base64url(text, limit_bytes=200) == content
    for bad in (text + b"=", text + b"\n", b" " + text, text + b"+"):
        with pytest.raises(WireError):
            decode_base64url(bad, limit_bytes=200)


@pytest.mark.parametrize("text", [b"A", b"AB", b"AAB", b"A+AA", b"A/AA", b"AA==", b"AAA\n", b"\xff\xff\xff\xff"])
def test_base64url_has_one_text_per_content(text: bytes) -> None:
    with pytest.raises(WireError):
        decode_base64url(text, limit_bytes=100)
