"""Attestation on the wire: request, claims, evidence bundle, channel proof (docs/attestation.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from client_sdk.wire import cbor
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader
from client_sdk.wire.names import (
    ATTESTATION_PROFILE,
    CHANNEL_PROOF_PROFILE,
    LIMIT_ATTESTATION_BUNDLE_BYTES,
    LIMIT_ATTESTATION_REQUEST_BYTES,
    LIMIT_CHANNEL_PROOF_BYTES,
    MODES,
    NONCE_BYTES,
)

_CLAIMS = "MALFORMED_ATTESTATION_CLAIMS"
_BUNDLE = "MALFORMED_BUNDLE"
_REQUEST = "MALFORMED_ATTESTATION_REQUEST"
_PROOF = "MALFORMED_CHANNEL_PROOF"
_MAX_ITEMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationRequest:
    """What a client posts: its 32-byte nonce and, to save a quote, the SHA-256 of claims it already verified."""

    nonce: bytes
    have: bytes | None = None

    def encode(self) -> bytes:
        fields: dict[str, object] = {"nonce": self.nonce}
        if self.have is not None:
            fields["have"] = self.have
        return cbor.encode(fields)

    @classmethod
    def parse(cls, data: bytes) -> AttestationRequest:
        reader = MapReader(cbor.decode(data, limit_bytes=LIMIT_ATTESTATION_REQUEST_BYTES), "request", _REQUEST)
        nonce = _nonce(reader, _REQUEST)
        have = reader.bstr("have", 32) if reader.has("have") else None
        reader.finish()
        return cls(nonce=nonce, have=have)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationClaims:
    """What the evidence vouches for. Digests are 32 bytes, keys are encoded COSE_Keys, `issued_at` is Unix seconds."""

    nonce: bytes
    binder: bytes | None
    tls_key: bytes | None
    receipt_key: bytes
    channel_key: bytes
    config: bytes
    models: Mapping[str, bytes]
    mode: str
    instance: bytes
    issued_at: int
    devices: tuple[tuple[str, bytes], ...] = ()
    sealing_key: bytes | None = None
    air_key: bytes | None = None

    def encode(self) -> bytes:
        fields: dict[str, object] = {
            "profile": ATTESTATION_PROFILE,
            "nonce": self.nonce,
            "binder": self.binder,
            "tls-key": self.tls_key,
            "receipt-key": self.receipt_key,
            "channel-key": self.channel_key,
            "config": self.config,
            "models": dict(self.models),
            "devices": [{"kind": kind, "evidence": digest} for kind, digest in self.devices],
            "mode": self.mode,
            "instance": self.instance,
            "issued-at": self.issued_at,
        }
        if self.sealing_key is not None:
            fields["sealing-key"] = self.sealing_key
        if self.air_key is not None:
            fields["air-key"] = self.air_key
        return cbor.encode(fields)

    @classmethod
    def parse(cls, data: bytes) -> AttestationClaims:
        reader = MapReader(cbor.decode(data, limit_bytes=LIMIT_ATTESTATION_BUNDLE_BYTES), "claims", _CLAIMS)
        if reader.take("profile", str) != ATTESTATION_PROFILE:
            raise WireError("UNSUPPORTED_PROFILE", f"attestation profile is not {ATTESTATION_PROFILE}")
        claims = cls(
            nonce=_nonce(reader, _CLAIMS),
            binder=reader.bstr_or_null("binder", 32),
            tls_key=reader.bstr_or_null("tls-key", 32),
            receipt_key=reader.take("receipt-key", bytes),
            channel_key=reader.take("channel-key", bytes),
            sealing_key=reader.take("sealing-key", bytes) if reader.has("sealing-key") else None,
            air_key=reader.take("air-key", bytes) if reader.has("air-key") else None,
            config=reader.bstr("config", 32),
            models=_models(reader.take("models", dict)),
            devices=tuple(_device(entry) for entry in _bounded(reader.take("devices", list), _CLAIMS)),
            mode=reader.one_of("mode", MODES),
            instance=reader.bstr("instance", 16),
            issued_at=reader.uint("issued-at"),
        )
        reader.finish()
        return claims


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceItem:
    """One typed piece of evidence, an endorsement or an event log: [kind, content] on the wire."""

    kind: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationBundle:
    """The answer of the endpoint. Full: claims and evidence. Continued: the channel proof alone (claims is None)."""

    channel_proof: bytes
    claims: bytes | None = None
    evidence: tuple[EvidenceItem, ...] = ()
    endorsements: tuple[EvidenceItem, ...] = field(default=())
    event_logs: tuple[EvidenceItem, ...] = field(default=())

    @property
    def continued(self) -> bool:
        return self.claims is None

    def encode(self) -> bytes:
        fields: dict[str, object] = {"channel-proof": self.channel_proof}
        if self.claims is not None:
            fields["claims"] = self.claims
            fields["evidence"] = _encode_items(self.evidence)
        if self.endorsements:
            fields["endorsements"] = _encode_items(self.endorsements)
        if self.event_logs:
            fields["event-logs"] = _encode_items(self.event_logs)
        return cbor.encode(fields)

    @classmethod
    def parse(cls, data: bytes) -> AttestationBundle:
        reader = MapReader(cbor.decode(data, limit_bytes=LIMIT_ATTESTATION_BUNDLE_BYTES), "bundle", _BUNDLE)
        proof = reader.take("channel-proof", bytes)
        if not reader.has("claims"):
            reader.finish()
            return cls(channel_proof=proof)
        bundle = cls(
            channel_proof=proof,
            claims=reader.take("claims", bytes),
            evidence=_items(reader, "evidence"),
            endorsements=_items(reader, "endorsements") if reader.has("endorsements") else (),
            event_logs=_items(reader, "event-logs") if reader.has("event-logs") else (),
        )
        reader.finish()
        if not bundle.evidence:
            raise WireError(_BUNDLE, "evidence is empty")
        return bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelProof:
    """Payload of the proof that the attested channel key answers on this very connection."""

    nonce: bytes
    binder: bytes | None
    claims: bytes

    def encode(self) -> bytes:
        return cbor.encode(
            {
                "profile": CHANNEL_PROOF_PROFILE,
                "nonce": self.nonce,
                "binder": self.binder,
                "claims": self.claims,
            }
        )

    @classmethod
    def parse(cls, data: bytes) -> ChannelProof:
        reader = MapReader(cbor.decode(data, limit_bytes=LIMIT_CHANNEL_PROOF_BYTES), "channel proof", _PROOF)
        if reader.take("profile", str) != CHANNEL_PROOF_PROFILE:
            raise WireError("UNSUPPORTED_PROFILE", f"channel proof profile is not {CHANNEL_PROOF_PROFILE}")
        proof = cls(
            nonce=_nonce(reader, _PROOF),
            binder=reader.bstr_or_null("binder", 32),
            claims=reader.bstr("claims", 32),
        )
        reader.finish()
        return proof


def _nonce(reader: MapReader, code: str) -> bytes:
    nonce = reader.bstr("nonce", NONCE_BYTES)
    if not any(nonce):
        raise WireError(code, "the all-zero nonce is refused")
    return nonce


def _models(value: dict[object, object]) -> dict[str, bytes]:
    if len(value) > _MAX_ITEMS:
        raise WireError(_CLAIMS, f"more than {_MAX_ITEMS} models")
    models: dict[str, bytes] = {}
    for name, digest in value.items():
        if type(name) is not str or not name or type(digest) is not bytes or len(digest) != 32:
            raise WireError(_CLAIMS, "models must map names to 32-byte digests")
        models[name] = digest
    return models


def _device(entry: object) -> tuple[str, bytes]:
    reader = MapReader(entry, "device", _CLAIMS)
    device = (reader.text("kind"), reader.bstr("evidence", 32))
    reader.finish()
    return device


def _bounded(values: list[object], code: str) -> list[object]:
    if len(values) > _MAX_ITEMS:
        raise WireError(code, f"more than {_MAX_ITEMS} entries")
    return values


def _items(reader: MapReader, key: str) -> tuple[EvidenceItem, ...]:
    items = []
    for entry in _bounded(reader.take(key, list), _BUNDLE):
        if type(entry) is not list or len(entry) != 2 or type(entry[0]) is not str or type(entry[1]) is not bytes:
            raise WireError(_BUNDLE, f"{key} must hold [text, bytes] pairs")
        items.append(EvidenceItem(kind=entry[0], content=entry[1]))
    return tuple(items)


def _encode_items(items: tuple[EvidenceItem, ...]) -> list[list[object]]:
    return [[item.kind, item.content] for item in items]
