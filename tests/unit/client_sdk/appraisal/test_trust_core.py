"""Across the trust core: parsers under any bytes, and every code of these modules reached by some test of one fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_sdk.appraisal.verifier import appraise
from client_sdk.errors import MalformedError, Rejection, VerificationError
from client_sdk.receipts.sse import BlockSplitter
from client_sdk.receipts.verify import verify_receipt
from client_sdk.routes.chat import DeltaCollector, load_request, read_whole
from client_sdk.tee.insecure import abi
from client_sdk.wire.errors import WireError
from tests.simulators.attested import attested
from tests.simulators.insecure_appliance import CHAT, COMPLETIONS, NOW

# Codes that other modules raise: TLS, HTTP, saved answers; and hardware families, each with tests of its own.
ELSEWHERE = {
    *("MALFORMED_CERTIFICATE", "BAD_CERTIFICATE", "CERTIFICATE_NOT_VALID_NOW", "UNSOLICITED_BYTES"),
    *("CONTENT_ENCODING", "REDIRECT", "FOREIGN_ORIGIN", "ATTESTATION_TOO_OLD", "MALFORMED_SAVED_ANSWER"),
    *("MEASUREMENT_NOT_ALLOWED", "DEBUG_NOT_ALLOWED", "TCB_NOT_ALLOWED", "GUEST_POLICY_NOT_ALLOWED"),
    *("PLATFORM_NOT_ALLOWED", "CHAIN_NOT_TRUSTED", "CERTIFICATE_REVOKED", "ENDORSEMENT_MISMATCH"),
    *("EVENT_LOG_MISMATCH", "MALFORMED_ENDORSEMENT"),
}
TESTS = ("test_verifier", "test_receipts", "test_streams", "test_signatures", "test_receipt_chain")

CLIENT = attested()
BUNDLE = CLIENT.appliance.bundle(CLIENT.nonce, CLIENT.appliance.connect())
ANSWER = CLIENT.answer()


def test_every_code_of_the_trust_core_is_reached_by_a_test_of_one_fault() -> None:
    tested: set[str] = set()
    for name in TESTS:
        text = next(Path(__file__).parents[1].rglob(f"{name}.py")).read_text(encoding="utf-8")
        tested |= set(re.findall(r"\b(?:R|Rejection)\.([A-Z_0-9]+)", text))
    assert {code.value for code in Rejection} - tested == ELSEWHERE


def mutations(honest: bytes) -> st.SearchStrategy[bytes]:
    """One byte changed, one run cut out or doubled, or any bytes at all."""
    places = st.integers(0, len(honest) - 1)
    return st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda at, flip: honest[:at] + bytes((honest[at] ^ flip,)) + honest[at + 1 :], places, st.integers(1, 255)
        ),
        st.builds(lambda a, b: honest[: min(a, b)] + honest[max(a, b) + 1 :], places, places),
        st.builds(lambda a, b: honest[: max(a, b)] + honest[min(a, b) :] + b"\x00", places, places),
    )


@settings(max_examples=300, deadline=None)
@given(mutations(BUNDLE))
def test_no_other_bytes_are_an_acceptable_bundle(data: bytes) -> None:
    with pytest.raises(VerificationError):
        appraise(data, nonce=CLIENT.nonce, channel=CLIENT.connection.channel, policy=CLIENT.policy, now=NOW)


@settings(max_examples=300, deadline=None)
@given(mutations(ANSWER.receipt))
def test_no_other_bytes_are_an_acceptable_receipt(data: bytes) -> None:
    with pytest.raises(VerificationError):
        verify_receipt(data, ANSWER.exchange, CLIENT.result, CLIENT.policy)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=200), mutations(ANSWER.body)), st.sampled_from([CHAT, COMPLETIONS, "/v1/other"]))
def test_answers_of_any_shape(data: bytes, route: str) -> None:
    load_request(data)
    for read in (lambda: read_whole(route, data), lambda: DeltaCollector(route).add(data)):
        try:
            read()
        except MalformedError:
            continue


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "index", "delta", "message", "content", "text", "usage", "id", "model", "error"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_answers_of_any_json(value: object) -> None:
    import json

    data = json.dumps(value).encode()
    for route in (CHAT, COMPLETIONS):
        for read in (lambda r=route: read_whole(r, data), lambda r=route: DeltaCollector(r).add(data)):
            try:
                read()
            except MalformedError:
                continue


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"choices":' * 100_000, b"1" * 10_000, b'{"a":1e999}', b"\xff"])
def test_hostile_json_is_malformed_not_a_crash(data: bytes) -> None:
    load_request(data)
    with pytest.raises(MalformedError):
        read_whole(CHAT, data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_evidence_items_of_any_bytes(data: bytes) -> None:
    with pytest.raises(WireError):
        abi.parse_item(data)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([b"data: ", b"\n", b"\n\n", b": p ", b": receipt ", b"x", b"\r", b"[DONE]"]), max_size=30)
)
def test_any_stream_splits_or_is_malformed(parts: list[bytes]) -> None:
    data = b"".join(parts)
    splitter = BlockSplitter()
    try:
        blocks = splitter.split(data)
    except MalformedError:
        return
    taken = b"".join(block.raw for block in blocks)
    assert data.startswith(taken)
    assert splitter.pending_bytes == len(data) - len(taken)
