"""What receipts say of one thing each: a model, a request, an output. Closed maps (docs/receipt-format.md)."""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk.wire import names as n
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader

_CODE = "MALFORMED_RECEIPT_CLAIMS"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    name: str
    identity: bytes
    weights: tuple[tuple[int, bytes], ...]
    tokenizer: bytes
    chat_template: bytes | None
    format: str

    def to_map(self) -> dict[str, object]:
        return {
            "name": self.name,
            "identity": self.identity,
            "weights": [[size, digest] for size, digest in self.weights],
            "tokenizer": self.tokenizer,
            "chat-template": self.chat_template,
            "format": self.format,
        }

    @classmethod
    def parse(cls, value: object) -> ModelFacts:
        reader = MapReader(value, "model", _CODE)
        facts = cls(
            name=reader.text("name"),
            identity=reader.bstr("identity", 32),
            weights=_weights(reader.take("weights", list)),
            tokenizer=reader.bstr("tokenizer", 32),
            chat_template=reader.bstr_or_null("chat-template", 32),
            format=reader.text("format"),
        )
        reader.finish()
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    kind: str
    digest: bytes
    gpu: bytes | None = None

    def to_map(self) -> dict[str, object]:
        fields: dict[str, object] = {"kind": self.kind, "digest": self.digest}
        if self.gpu is not None:
            fields["gpu"] = self.gpu
        return fields

    @classmethod
    def parse(cls, value: object) -> DeviceFacts:
        reader = MapReader(value, "device", _CODE)
        facts = cls(
            kind=reader.text("kind"),
            digest=reader.bstr("digest", 32),
            gpu=reader.bstr("gpu", 32) if reader.has("gpu") else None,
        )
        reader.finish()
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """`arithmetic` names what fixes every bit of the logits, `kernels` the variant that computed; None: not stated."""

    name: str
    version: str
    digest: bytes
    arithmetic: str | None = None
    kernels: str | None = None

    def to_map(self) -> dict[str, object]:
        fields: dict[str, object] = {"name": self.name, "version": self.version, "digest": self.digest}
        stated = {"arithmetic": self.arithmetic, "kernels": self.kernels}
        return fields | {key: text for key, text in stated.items() if text is not None}

    @classmethod
    def parse(cls, value: object) -> EngineFacts:
        reader = MapReader(value, "engine", _CODE)
        facts = cls(
            name=reader.text("name"),
            version=reader.text("version"),
            digest=reader.bstr("digest", 32),
            arithmetic=reader.text("arithmetic") if reader.has("arithmetic") else None,
            kernels=reader.text("kernels") if reader.has("kernels") else None,
        )
        reader.finish()
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """`length` is the number of body bytes received, `body` the commitment to them; `complete` says they are all."""

    method: str
    route: str
    length: int
    complete: bool
    body: bytes

    def to_map(self) -> dict[str, object]:
        return {
            "method": self.method,
            "route": self.route,
            "length": self.length,
            "complete": self.complete,
            "body": self.body,
        }

    @classmethod
    def parse(cls, value: object) -> RequestFacts:
        reader = MapReader(value, "request", _CODE)
        facts = cls(
            method=reader.text("method"),
            route=reader.text("route"),
            length=reader.uint("length"),
            complete=reader.take("complete", bool),
            body=reader.bstr("body", 32),
        )
        reader.finish()
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    text: bytes
    tokens: bytes
    count: int

    def to_map(self) -> dict[str, object]:
        return {"text": self.text, "tokens": self.tokens, "count": self.count}

    @classmethod
    def parse(cls, value: object) -> PromptFacts:
        reader = MapReader(value, "prompt", _CODE)
        facts = cls(text=reader.bstr("text", 32), tokens=reader.bstr("tokens", 32), count=reader.uint("count"))
        reader.finish()
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFacts:
    """`length` and `body` (a commitment) are null for streams, whose bytes the chain commits to."""

    status: str
    http_status: int
    media_type: str
    length: int | None
    body: bytes | None

    def to_map(self) -> dict[str, object]:
        return {
            "status": self.status,
            "http-status": self.http_status,
            "media-type": self.media_type,
            "length": self.length,
            "body": self.body,
        }

    @classmethod
    def parse(cls, value: object) -> ResponseFacts:
        reader = MapReader(value, "response", _CODE)
        facts = cls(
            status=reader.one_of("status", n.STATUSES),
            http_status=reader.uint("http-status"),
            media_type=reader.text("media-type"),
            length=reader.take_or_null("length", int),
            body=reader.bstr_or_null("body", 32),
        )
        reader.finish()
        if (facts.length is None) != (facts.body is None) or (facts.length is not None and facts.length < 0):
            raise WireError(_CODE, "response length and body must be both there or both null")
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFacts:
    """One choice. `finish` is null when the answer did not end by itself (error, cancelled, deadline)."""

    text: bytes
    tokens: bytes
    count: int
    finish: str | None

    def to_map(self) -> dict[str, object]:
        return {"text": self.text, "tokens": self.tokens, "count": self.count, "finish": self.finish}

    @classmethod
    def parse(cls, value: object) -> OutputFacts:
        reader = MapReader(value, "output", _CODE)
        facts = cls(
            text=reader.bstr("text", 32),
            tokens=reader.bstr("tokens", 32),
            count=reader.uint("count"),
            finish=reader.take_or_null("finish", str),
        )
        reader.finish()
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """Frames handed to the transport, the final chain value, the last checkpoint (index, chain value) if any."""

    frames: int
    chain: bytes
    checkpoint: tuple[int, bytes] | None

    def to_map(self) -> dict[str, object]:
        fields: dict[str, object] = {"frames": self.frames, "chain": self.chain}
        if self.checkpoint is not None:
            fields["checkpoint"] = list(self.checkpoint)
        return fields

    @classmethod
    def parse(cls, value: object) -> StreamFacts:
        reader = MapReader(value, "stream", _CODE)
        frames, chain = reader.uint("frames"), reader.bstr("chain", 32)
        checkpoint = _sized_pair(reader.take("checkpoint", list), "checkpoint") if reader.has("checkpoint") else None
        reader.finish()
        if checkpoint is not None and checkpoint[0] > frames:
            raise WireError(_CODE, "the last checkpoint lies behind the last frame")
        return cls(frames=frames, chain=chain, checkpoint=checkpoint)


def _weights(value: list[object]) -> tuple[tuple[int, bytes], ...]:
    if not value or len(value) > 1024:
        raise WireError(_CODE, "weights must list 1..1024 files")
    return tuple(_sized_pair(entry, "weights") for entry in value)


def _sized_pair(value: object, where: str) -> tuple[int, bytes]:
    if type(value) is list and len(value) == 2:
        number, digest = value
        if type(number) is int and number >= 0 and type(digest) is bytes and len(digest) == 32:
            return number, digest
    raise WireError(_CODE, f"{where} must hold [unsigned integer, 32 bytes]")
