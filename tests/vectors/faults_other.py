"""Streams, checkpoints and attestation with exactly one fault each."""

# ruff: noqa: E501 - one fault a line is a table, and reads as one
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from client_sdk.wire import attestation, cbor, digests, names, stream
from tests.vectors import honest as h
from tests.vectors.faults_receipt import Fault

EVENTS = "004-event-stream"
CHECKPOINT = "005-checkpoint"
BUNDLE = "006-full-bundle"
CONTINUED = "007-continued-bundle"
REQUEST = "008-attestation-request"


def stream_faults() -> Iterator[Fault]:
    good = h.event_stream()
    mark = names.COMMENT_CHECKPOINT
    other_cti = stream.comment(mark, h.checkpoint(3, cti=h.seed("another cti")[:16]))
    salt = h.seed("another salt")
    resalted = stream.comment(mark, h.checkpoint(3, chain=chain_under(salt), salt=salt))
    wrong = "STREAM_CHECKPOINT_MISMATCH"
    table: tuple[tuple[str, str, str, list[bytes]], ...] = (
        ("600-frame-changed", "a checkpointed frame was edited", wrong, [*good[:3], good[3].replace(b"2026", b"1926"), *good[4:]]),
        ("601-frame-dropped", "a frame is missing", wrong, [*good[:3], *good[4:]]),
        ("602-frames-swapped", "two frames changed places", wrong, [*good[:3], good[4], good[3], *good[5:]]),
        ("603-frame-doubled", "a frame occurs twice", wrong, [*good[:4], good[3], *good[4:]]),
        ("604-last-frame-changed", "the frame behind the last checkpoint", "STREAM_CHAIN_MISMATCH", [*good[:6], good[6].replace(b"stop", b"length"), *good[7:]]),
        ("605-last-frame-dropped", "no frame behind the last checkpoint", "STREAM_CHAIN_MISMATCH", [*good[:6], *good[7:]]),
        ("606-checkpoint-of-another-stream", "the second checkpoint has another cti", wrong, [*good[:5], other_cti, *good[6:]]),
        ("607-salt-changed", "the second checkpoint has another salt", wrong, [*good[:5], resalted, *good[6:]]),
        ("608-checkpoint-early", "a checkpoint one frame too early", wrong, [*good[:4], good[5], good[4], *good[6:]]),
        ("609-no-receipt", "cut behind a good checkpoint", "STREAM_TRUNCATED", good[:6]),
        ("610-frame-after-receipt", "a frame follows the receipt", "STREAM_AFTER_RECEIPT", [*good[:8], h.FRAMES[0], *good[8:]]),
    )  # fmt: skip
    for name, what, code, blocks in table:
        data = b"".join(blocks)
        yield Fault(name=name, what=what, kind="event-stream", code=code, data=data, twin=EVENTS, stage="verify")


def chain_under(salt: bytes) -> bytes:
    value = h.context().initial_chain(salt)
    for index in (1, 2, 3):
        value = stream.next_chain(value, index, h.FRAMES[index - 1])
    return value


def checkpoint_faults() -> Iterator[Fault]:
    honest = h.checkpoint(3)
    fields: dict[str, Any] = dict(payload_of(honest))

    def fault(name: str, what: str, code: str, payload: object, **more: Any) -> Fault:
        data = h.RECEIPT.seal(more.pop("typ", names.TYP_CHECKPOINT), cbor.encode(payload), h.SALT)
        return Fault(name=name, what=what, kind="checkpoint", code=code, data=data, twin=CHECKPOINT, cddl=True)

    yield fault("650-chain-short", "h has 31 bytes", "MALFORMED_CHECKPOINT", {**fields, "h": fields["h"][:31]})
    yield fault("651-index-negative", "i is negative", "MALFORMED_CHECKPOINT", {**fields, "i": -1})
    yield fault("652-unknown-field", "a field nobody defined", "MALFORMED_CHECKPOINT", {**fields, "x": 1})
    yield fault("653-request-null", "no request commitment", "MALFORMED_CHECKPOINT", {**fields, "request": None})
    yield fault("654-receipt-type", "typ says receipt", "MALFORMED_TYP", fields, typ=names.TYP_RECEIPT)
    yield fault(
        "655-receipt-profile",
        "profile of a receipt",
        "UNSUPPORTED_PROFILE",
        {**fields, "profile": names.RECEIPT_PROFILE},
    )


def payload_of(sign1: bytes) -> dict[str, Any]:
    parts: Any = cbor.decode(sign1[1:], limit_bytes=1 << 20)
    payload: Any = cbor.decode(parts[2], limit_bytes=1 << 20)
    return dict(payload)


def request_faults() -> Iterator[Fault]:
    malformed = "MALFORMED_ATTESTATION_REQUEST"
    table: tuple[tuple[str, str, str, bytes, bool], ...] = (
        ("700-zero-nonce", "the nonce is all zero", malformed, cbor.encode({"nonce": bytes(32)}), False),
        ("701-nonce-short", "the nonce has 31 bytes", malformed, cbor.encode({"nonce": h.NONCE[:31]}), True),
        ("702-have-null", "have is null instead of absent", malformed, cbor.encode({"nonce": h.NONCE, "have": None}), True),
        ("703-report-data", "asks to sign chosen bytes", malformed, cbor.encode({"nonce": h.NONCE, "report-data": bytes(64)}), True),
        ("704-too-long", "257 bytes", "MALFORMED_CBOR", cbor.encode({"nonce": h.NONCE, "have": bytes(209)}), True),
    )  # fmt: skip
    for name, what, code, data, cddl in table:
        assert code != "MALFORMED_CBOR" or len(data) == 257
        yield Fault(name=name, what=what, kind="attestation-request", code=code, data=data, twin=REQUEST, cddl=cddl)


def claims_faults() -> Iterator[Fault]:
    fields = claims_map()
    gone = {key: value for key, value in fields.items() if key != "config"}
    table: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
        ("710-claim-unknown", "a claim nobody defined", {**fields, "debug": True}, True),
        ("711-claim-missing", "no config digest", gone, True),
        ("712-binder-missing", "binder left out instead of null", {k: v for k, v in fields.items() if k != "binder"}, True),
        ("713-zero-nonce", "the nonce is all zero", {**fields, "nonce": bytes(32)}, False),
        ("714-model-digest-short", "a model identity of 31 bytes", {**fields, "models": {"tiny": bytes(31)}}, True),
        ("715-device-extra", "a device with an unknown field", {**fields, "devices": [{"kind": "x", "evidence": bytes(32), "n": 1}]}, True),
        ("716-mode-unknown", "mode is debug", {**fields, "mode": "debug"}, True),
    )  # fmt: skip
    for name, what, changed, cddl in table:
        data = h.bundle(cbor.encode(changed))
        yield Fault(
            name=name, what=what, kind="bundle", code="MALFORMED_ATTESTATION_CLAIMS", data=data, twin=BUNDLE, cddl=cddl
        )
    other = h.bundle(cbor.encode({**fields, "profile": "tag:attested-inference,2026:attestation-v2"}))
    yield Fault(
        name="717-other-profile",
        what="the profile is v2",
        kind="bundle",
        code="UNSUPPORTED_PROFILE",
        data=other,
        twin=BUNDLE,
        cddl=True,
    )


def claims_map() -> dict[str, Any]:
    decoded: Any = cbor.decode(h.attestation_claims().encode(), limit_bytes=1 << 20)
    return dict(decoded)


def bundle_faults() -> Iterator[Fault]:
    claims = h.attestation_claims().encode()
    proof = h.channel_proof(claims)
    item = h.insecure_item(claims)
    pair = [item.kind, item.content]
    later = dataclasses.replace(h.attestation_claims(), issued_at=h.IAT + 1).encode()
    stale = dataclasses.replace(h.attestation_claims(), nonce=h.seed("an older nonce")).encode()
    relayed = dataclasses.replace(h.attestation_claims(), binder=h.seed("binder of the relay")).encode()
    mistyped = h.CHANNEL.seal(names.TYP_RECEIPT, attestation.ChannelProof(nonce=h.NONCE, binder=h.BINDER, claims=digests.sha256(claims)).encode())  # fmt: skip
    malformed = "MALFORMED_BUNDLE"
    form: tuple[tuple[str, str, str, bytes], ...] = (
        ("720-no-evidence", "claims without evidence", malformed, cbor.encode({"claims": claims, "channel-proof": proof})),
        ("721-evidence-empty", "evidence is empty", malformed, cbor.encode({"claims": claims, "channel-proof": proof, "evidence": []})),
        ("722-evidence-without-claims", "evidence without claims", malformed, cbor.encode({"channel-proof": proof, "evidence": [pair]})),
        ("723-item-of-three", "an item with three parts", malformed, cbor.encode({"claims": claims, "channel-proof": proof, "evidence": [[*pair, 1]]})),
        ("724-no-proof", "no channel proof", malformed, cbor.encode({"claims": claims, "evidence": [pair]})),
        ("725-proof-of-other-type", "the channel proof is typed as a receipt", "MALFORMED_TYP", h.bundle(claims, proof=mistyped)),
    )  # fmt: skip
    for name, what, code, data in form:
        yield Fault(name=name, what=what, kind="bundle", code=code, data=data, twin=BUNDLE, cddl=True)
    held: tuple[tuple[str, str, str, bytes], ...] = (
        ("730-evidence-of-other-claims", "H is over other claims", "EVIDENCE_BINDING", h.bundle(claims, evidence_over=later)),
        ("731-stale-nonce", "claims of an older nonce", "NONCE_MISMATCH", h.bundle(stale)),
        ("732-relayed", "claims of another connection", "BINDER_MISMATCH", h.bundle(relayed)),
        ("733-proof-of-other-claims", "the proof names other claims", "CLAIMS_MISMATCH", h.bundle(claims, proof=h.channel_proof(later))),
        ("734-proof-by-receipt-key", "the proof is signed by the receipt key", "WRONG_KEY", h.bundle(claims, proof=h.channel_proof(claims, signer=h.RECEIPT))),
        ("735-proof-of-other-channel", "the proof has another binder", "BINDER_MISMATCH", h.bundle(claims, proof=h.channel_proof(claims, binder=h.seed("binder of the relay")))),
        ("736-proof-stale", "the proof has an older nonce", "NONCE_MISMATCH", h.bundle(claims, proof=h.channel_proof(claims, nonce=h.seed("an older nonce")))),
    )  # fmt: skip
    for name, what, code, data in held:
        yield Fault(name=name, what=what, kind="bundle", code=code, data=data, twin=BUNDLE, stage="verify")
    replayed = attestation.AttestationBundle(channel_proof=h.channel_proof(claims, nonce=h.NONCE)).encode()
    yield Fault(
        name="740-continued-replay",
        what="a continued answer to an earlier nonce",
        kind="bundle",
        code="NONCE_MISMATCH",
        data=replayed,
        twin=CONTINUED,
        stage="verify",
    )


def faults() -> Iterator[Fault]:
    for group in (stream_faults, checkpoint_faults, request_faults, claims_faults, bundle_faults):
        yield from group()
