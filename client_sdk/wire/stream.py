"""The hash chain over the frames of a stream, its checkpoints, and the SSE comments that carry them."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from client_sdk.wire import cbor, digests
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader
from client_sdk.wire.names import (
    CHECKPOINT_PROFILE,
    CTI_BYTES,
    INFERENCE_NONCE_MAX_BYTES,
    INFERENCE_NONCE_MIN_BYTES,
    LIMIT_CHECKPOINT_BYTES,
)

_CODE = "MALFORMED_CHECKPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamContext:
    """What a stream is tied to before its first frame: known to both sides, repeated in every checkpoint."""

    cti: bytes
    eat_nonce: bytes | None
    attestation: bytes | None
    channel: bytes | None
    request: bytes

    def initial_chain(self, salt: bytes) -> bytes:
        """h_0 = D("stream v1", salt || dCBOR([cti, eat_nonce, attestation, channel, request commitment]))."""
        fields = [self.cti, self.eat_nonce, self.attestation, self.channel, self.request]
        return digests.labelled("stream v1", salt + cbor.encode(fields))


def next_chain(chain: bytes, index: int, frame: bytes) -> bytes:
    """h_i = D("frame v1", h_{i-1} || u64be(i) || frame_i), i from 1; `frame` ends with its blank line."""
    return digests.labelled("frame v1", chain + index.to_bytes(8, "big") + frame)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Payload of a checkpoint: the stream's context and the chain value after frame `index`."""

    context: StreamContext
    index: int
    chain: bytes

    def encode(self) -> bytes:
        context = self.context
        return cbor.encode(
            {
                "profile": CHECKPOINT_PROFILE,
                "cti": context.cti,
                "eat_nonce": context.eat_nonce,
                "attestation": context.attestation,
                "channel": context.channel,
                "request": context.request,
                "i": self.index,
                "h": self.chain,
            }
        )

    @classmethod
    def parse(cls, data: bytes) -> Checkpoint:
        reader = MapReader(cbor.decode(data, limit_bytes=LIMIT_CHECKPOINT_BYTES), "checkpoint", _CODE)
        if reader.take("profile", str) != CHECKPOINT_PROFILE:
            raise WireError("UNSUPPORTED_PROFILE", f"checkpoint profile is not {CHECKPOINT_PROFILE}")
        checkpoint = cls(
            context=StreamContext(
                cti=reader.bstr("cti", CTI_BYTES),
                eat_nonce=_eat_nonce(reader.take_or_null("eat_nonce", bytes)),
                attestation=reader.bstr_or_null("attestation", 32),
                channel=reader.bstr_or_null("channel", 32),
                request=reader.bstr("request", 32),
            ),
            index=reader.uint("i"),
            chain=reader.bstr("h", 32),
        )
        reader.finish()
        return checkpoint


def _eat_nonce(nonce: bytes | None) -> bytes | None:
    if nonce is not None and not INFERENCE_NONCE_MIN_BYTES <= len(nonce) <= INFERENCE_NONCE_MAX_BYTES:
        raise WireError(_CODE, "eat_nonce must have 8..64 bytes")
    return nonce


def comment(prefix: bytes, content: bytes) -> bytes:
    """An SSE comment block `: word base64url` with its blank line; every SSE client ignores it."""
    return prefix + encode_base64url(content) + b"\n\n"


def encode_base64url(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")


def decode_base64url(text: bytes, *, limit_bytes: int) -> bytes:
    """Strict unpadded base64url (RFC 4648 section 5): one text per content. Raises WireError MALFORMED_BASE64."""
    if len(text) > limit_bytes * 4 // 3 + 4:
        raise WireError("MALFORMED_BASE64", f"longer than the limit of {limit_bytes} bytes")
    try:
        content = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise WireError("MALFORMED_BASE64", "not base64url") from None
    if encode_base64url(content) != text:
        raise WireError("MALFORMED_BASE64", "not the canonical base64url form")
    return content
