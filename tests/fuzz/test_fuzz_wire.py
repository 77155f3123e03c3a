"""Mutated vectors against our decoders, the reference decoder and the CDDL. Same seed, same inputs.

Longer: `ATTESTED_FUZZ_SECONDS=600 pytest tests/fuzz --timeout 0`. A failure prints the input in hex.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client_sdk.wire import cbor, cose, names
from client_sdk.wire.attestation import AttestationBundle, AttestationClaims, AttestationRequest, ChannelProof
from client_sdk.wire.errors import WireError
from client_sdk.wire.receipt import ReceiptClaims
from client_sdk.wire.stream import Checkpoint
from tests import cddl
from tests import reference_decoder as reference
from tests.vectors import honest as h

LIMIT = 1 << 20
INTERESTING = [b"\xf5", b"\xf7", b"\xff", b"\xbf", b"\x9f", b"\x5f", b"\x1b" + b"\xff" * 8, b"\xbb" + b"\xff" * 8]
INTERESTING += [
    b"\xd8\x1c",
    b"\xd8\x1d\x00",
    b"\xd2",
    b"\x18\x00",
    b"\xf9\x7e\x00",
    b"\xfb" + bytes(8),
    b"\x81" * 20,
    b"",
]

PAYLOADS: dict[str, tuple[bytes, Callable[[bytes], object], Callable[..., bytes]]] = {
    "receipt-claims": (h.whole_answer().encode(), ReceiptClaims.parse, ReceiptClaims.encode),
    "receipt-claims of vectors": (h.embedding().encode(), ReceiptClaims.parse, ReceiptClaims.encode),
    "checkpoint-payload": (reference.read_cbor(h.checkpoint(3)[1:])[2], Checkpoint.parse, Checkpoint.encode),
    "attestation-claims": (h.attestation_claims().encode(), AttestationClaims.parse, AttestationClaims.encode),
    "attestation-request": (
        AttestationRequest(nonce=h.NONCE, have=h.attested()).encode(),
        AttestationRequest.parse,
        AttestationRequest.encode,
    ),
    "channel-proof-payload": (
        ChannelProof(nonce=h.NONCE, binder=h.BINDER, claims=h.attested()).encode(),
        ChannelProof.parse,
        ChannelProof.encode,
    ),
    "bundle": (h.bundle(h.attestation_claims().encode()), AttestationBundle.parse, AttestationBundle.encode),
}


def mutated(source: random.Random, data: bytes) -> bytes:
    """One to three edits: a flipped bit, a replaced, removed or doubled slice, an inserted troublemaker."""
    work = bytearray(data)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(work) + 1)
        end = min(len(work), at + source.choice((1, 1, 2, 4, 33)))
        match source.randrange(6):
            case 0 if at < len(work):
                work[at] ^= 1 << source.randrange(8)
            case 1:
                work[at:end] = source.randbytes(end - at)
            case 2:
                del work[at:end]
            case 3:
                work[at:at] = work[at:end]
            case 4:
                work[at:at] = source.choice(INTERESTING)
            case _:
                work[at:end] = source.choice(INTERESTING)
    return bytes(work)


def inputs(seconds: float, data: bytes, seed: str) -> Iterator[bytes]:
    source, deadline = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(50):
            yield mutated(source, data)


def ours(parse: Callable[[bytes], object], data: bytes) -> object | None:
    try:
        return parse(data)
    except WireError:
        return None


@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_what_a_parser_accepts_it_would_have_written_and_the_cddl_allows(kind: str, fuzz_seconds: float) -> None:
    honest, parse, encode = PAYLOADS[kind]
    tried = accepted = 0
    for data in inputs(fuzz_seconds / 4, honest, kind):
        tried += 1
        value = ours(parse, data)
        if value is None:
            continue
        accepted += 1
        if data != honest:
            assert encode(value) == data, data.hex()
        if kind not in ("bundle", "attestation-claims"):  # keys and embedded objects are checked by who uses them
            cddl.validate(kind.partition(" ")[0], data)
    assert tried > 20
    assert ours(parse, honest) is not None


def test_two_decoders_agree_on_what_is_cbor(fuzz_seconds: float) -> None:
    agreed = 0
    for data in inputs(fuzz_seconds / 2, h.whole_answer().encode(), "cbor"):
        value = ours(lambda raw: [cbor.decode(raw, limit_bytes=LIMIT)], data)
        try:
            other: object | None = [reference.read_cbor(data)]
        except reference.Refused:
            other = None
        assert (value is None) == (other is None), data.hex()
        assert value == other, data.hex()
        agreed += 1
    assert agreed > 20


def test_no_mutated_receipt_passes_for_a_signed_one(fuzz_seconds: float) -> None:
    honest = h.sealed(h.whole_answer())
    key = h.RECEIPT.cose_key()
    payload = h.whole_answer().encode()
    for data in inputs(fuzz_seconds / 2, honest, "receipt"):
        try:
            envelope = cose.parse_sign1(data, typ=names.TYP_RECEIPT, salted=True, limit_bytes=names.LIMIT_RECEIPT_BYTES)
            reference.read_sign1(data, "receipt", key)
        except (WireError, reference.Refused):
            continue
        assert envelope.payload == payload, data.hex()  # only the unsigned salt may differ


def test_every_vector_survives_every_parser() -> None:
    """Objects of one kind fed to the parsers of all others: an error, never a crash."""
    for path in sorted((Path(__file__).parents[1] / "vectors").glob("*/vector.json")):
        data = bytes.fromhex(json.loads(path.read_text(encoding="utf-8"))["data"])
        for _, parse, _ in PAYLOADS.values():
            ours(parse, data)
