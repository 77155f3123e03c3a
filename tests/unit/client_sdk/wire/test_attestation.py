"""Attestation on the wire: round trips, H, binder and the pinned digests, against sums made here."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_sdk.wire import cbor, digests, names
from client_sdk.wire.attestation import (
    AttestationBundle,
    AttestationClaims,
    AttestationRequest,
    ChannelProof,
    EvidenceItem,
)
from client_sdk.wire.errors import WireError
from tests import cddl
from tests import reference_decoder as reference
from tests.vectors import honest as h

digest = st.binary(min_size=32, max_size=32)
nonces = digest.filter(any)
items = st.lists(
    st.builds(
        lambda kind, content: EvidenceItem(kind=kind, content=content), st.text(max_size=20), st.binary(max_size=60)
    ),
    min_size=1,
    max_size=5,
).map(tuple)


@given(nonces, st.none() | digest)
def test_request_round_trip(nonce: bytes, have: bytes | None) -> None:
    request = AttestationRequest(nonce=nonce, have=have)
    assert AttestationRequest.parse(request.encode()) == request
    assert len(request.encode()) <= names.LIMIT_ATTESTATION_REQUEST_BYTES
    cddl.validate("attestation-request", request.encode())


@given(nonces, st.none() | digest, st.dictionaries(st.text(min_size=1, max_size=20), digest, max_size=5))
def test_claims_round_trip(nonce: bytes, binder: bytes | None, models: dict[str, bytes]) -> None:
    claims = dataclasses.replace(
        h.attestation_claims(), nonce=nonce, binder=binder, models=models, devices=(("gpu", h.seed("item")),)
    )
    assert AttestationClaims.parse(claims.encode()) == claims
    cddl.validate("attestation-claims", claims.encode())


@given(items, items)
def test_bundle_round_trip(evidence: tuple[EvidenceItem, ...], logs: tuple[EvidenceItem, ...]) -> None:
    bundle = AttestationBundle(channel_proof=b"p", claims=b"c", evidence=evidence, event_logs=logs)
    assert AttestationBundle.parse(bundle.encode()) == bundle
    assert not bundle.continued
    assert AttestationBundle.parse(AttestationBundle(channel_proof=b"p").encode()).continued


def test_too_many_entries_are_refused() -> None:
    item = EvidenceItem(kind="k", content=b"")
    full = AttestationBundle(channel_proof=b"p", claims=b"c", evidence=(item,) * 64)
    assert AttestationBundle.parse(full.encode()) == full
    with pytest.raises(WireError):
        AttestationBundle.parse(dataclasses.replace(full, evidence=(item,) * 65).encode())
    many = {str(number): bytes(32) for number in range(65)}
    with pytest.raises(WireError):
        AttestationClaims.parse(dataclasses.replace(h.attestation_claims(), models=many).encode())


def test_a_channel_proof_is_tied_to_nonce_binder_and_claims() -> None:
    proof = ChannelProof(nonce=h.NONCE, binder=None, claims=h.attested())
    assert ChannelProof.parse(proof.encode()) == proof
    cddl.validate("channel-proof-payload", proof.encode())


def test_h_is_sha512_over_the_label_and_the_claims_as_received() -> None:
    claims = h.attestation_claims().encode()
    expected = hashlib.sha512(b"attested-inference report-data v1" + b"\x00" + claims).digest()
    assert digests.report_data(claims) == expected
    assert len(expected) == 64


def test_the_binder_is_sha256_over_spki_and_exporter() -> None:
    assert digests.channel_binder(h.spki(), h.EXPORTED) == hashlib.sha256(h.spki() + h.EXPORTED).digest()
    assert len(h.spki()) == names.SPKI_P256_BYTES


def test_labelled_hashes() -> None:
    assert digests.labelled("x v1", b"data") == hashlib.sha256(b"attested-inference x v1\x00data").digest()
    assert digests.gpu_nonce(h.NONCE, None) == hashlib.sha256(b"attested-inference gpu v1\x00" + h.NONCE).digest()
    assert digests.item_digest("k", b"c") == reference.D("item v1", reference.write_cbor(["k", b"c"]))


def test_model_identity_is_content_alone_B086() -> None:
    """File order does not matter; content, sizes, template, format and the order of adapters do."""
    one, two = (1, h.seed("one")), (2, h.seed("two"))

    def identity(**changes: object) -> bytes:
        fields: dict[str, object] = {
            "format_name": "gguf",
            "weights": [one, two],
            "tokenizer": h.seed("t"),
            "chat_template": None,
            "files": [],
            "adapters": [one, two],
        }
        return digests.model_identity(**{**fields, **changes})  # type: ignore[arg-type]

    base = identity()
    assert identity(weights=[two, one]) == base
    changed = [
        identity(weights=[one]),
        identity(weights=[one, (3, two[1])]),
        identity(tokenizer=h.seed("u")),
        identity(chat_template=h.seed("c")),
        identity(format_name="safetensors"),
        identity(files=[one]),
        identity(adapters=[two, one]),
    ]
    assert len({base, *changed}) == len(changed) + 1
    listed = sorted(([1, one[1]], [2, two[1]]), key=lambda entry: entry[1])  # type: ignore[arg-type,return-value]
    content = {
        "format": "gguf",
        "weights": listed,
        "files": [],
        "tokenizer": h.seed("t"),
        "chat-template": None,
        "adapters": [[1, one[1]], [2, two[1]]],
    }
    cddl.validate("model-identity-input", reference.write_cbor(content))
    assert base == reference.D("model v1", reference.write_cbor(content))


def test_engine_and_config_digests() -> None:
    libraries = [("libz.so", h.seed("z")), ("liba.so", h.seed("a"))]
    content = [["liba.so", h.seed("a")], ["libz.so", h.seed("z")]]
    cddl.validate("engine-digest-input", cbor.encode(content))
    assert digests.engine_digest(libraries) == reference.D("engine v1", reference.write_cbor(content))
    assert digests.config_digest({"threads": "auto"}) == reference.D("config v1", b"\xa1\x67threads\x64auto")


@given(st.binary(max_size=300))
def test_random_bytes_raise_wire_errors_only(data: bytes) -> None:
    for parse in (AttestationRequest.parse, AttestationClaims.parse, AttestationBundle.parse, ChannelProof.parse):
        with pytest.raises(WireError):
            parse(data)
