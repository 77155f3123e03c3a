"""Receipt claims: a closed map that binds model, configuration, device, input and output (docs/receipt-format.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from client_sdk.wire import cbor
from client_sdk.wire import names as n
from client_sdk.wire.embedding import EmbeddingFacts
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader
from client_sdk.wire.receipt_facts import DeviceFacts as DeviceFacts
from client_sdk.wire.receipt_facts import EngineFacts as EngineFacts
from client_sdk.wire.receipt_facts import ModelFacts as ModelFacts
from client_sdk.wire.receipt_facts import OutputFacts as OutputFacts
from client_sdk.wire.receipt_facts import PromptFacts as PromptFacts
from client_sdk.wire.receipt_facts import RequestFacts as RequestFacts
from client_sdk.wire.receipt_facts import ResponseFacts as ResponseFacts
from client_sdk.wire.receipt_facts import StreamFacts as StreamFacts

_CODE = "MALFORMED_RECEIPT_CLAIMS"

DECODING_FIELDS: Mapping[str, tuple[type, ...]] = {
    "temperature": (float,),
    "top_p": (float,),
    "top_k": (int,),
    "min_p": (float,),
    "repeat_penalty": (float,),
    "presence_penalty": (float,),
    "frequency_penalty": (float,),
    "logit_bias": (bytes, type(None)),
    "seed": (int,),
    "deterministic": (bool,),
    "max_tokens": (int,),
    "n": (int,),
    "prompts": (int,),
    "echo": (bool,),
    "logprobs": (int, type(None)),
    "stop": (bytes, type(None)),
    "response_format": (bytes, type(None)),
    "tools": (bytes, type(None)),
    "tool_choice": (str,),
    "parallel_tool_calls": (bool,),
}
"""Every effective parameter of generation with the types it may have. Bytes are commitments, null where nothing of
the kind is in force."""

MAX_EXECUTION_FACTS = 256
"""Of one receipt. A fact that differs between choices is there once for each: 30 of 8 choices, 16 of all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptClaims:
    """Payload of a receipt. Which optional claims are present for which terminal status: see `_check_presence`."""

    iss: str
    iat: int
    cti: bytes
    eat_nonce: bytes | None
    chain: bytes
    sequence: int
    previous: bytes | None
    mode: str
    attestation: bytes | None
    channel: bytes | None
    config: bytes
    device: DeviceFacts
    engine: EngineFacts
    request: RequestFacts
    response: ResponseFacts
    model: ModelFacts | None = None
    prompt: PromptFacts | None = None
    decoding: Mapping[str, object] | None = None
    output: tuple[OutputFacts, ...] | None = None
    stream: StreamFacts | None = None
    execution: Mapping[str, object] | None = field(default=None)
    embedding: EmbeddingFacts | None = None

    def encode(self) -> bytes:
        fields: dict[int, object] = {
            n.CLAIM_ISS: self.iss,
            n.CLAIM_IAT: self.iat,
            n.CLAIM_CTI: self.cti,
            n.CLAIM_PROFILE: n.RECEIPT_PROFILE,
            n.CLAIM_CHAIN: self.chain,
            n.CLAIM_SEQUENCE: self.sequence,
            n.CLAIM_PREVIOUS: self.previous,
            n.CLAIM_MODE: self.mode,
            n.CLAIM_ATTESTATION: self.attestation,
            n.CLAIM_CHANNEL: self.channel,
            n.CLAIM_CONFIG: self.config,
            n.CLAIM_DEVICE: self.device.to_map(),
            n.CLAIM_ENGINE: self.engine.to_map(),
            n.CLAIM_REQUEST: self.request.to_map(),
            n.CLAIM_RESPONSE: self.response.to_map(),
        }
        optional: dict[int, object] = {
            n.CLAIM_NONCE: self.eat_nonce,
            n.CLAIM_MODEL: self.model and self.model.to_map(),
            n.CLAIM_PROMPT: self.prompt and self.prompt.to_map(),
            n.CLAIM_DECODING: self.decoding,
            n.CLAIM_OUTPUT: None if self.output is None else [choice.to_map() for choice in self.output],
            n.CLAIM_STREAM: self.stream and self.stream.to_map(),
            n.CLAIM_EXECUTION: self.execution,
            n.CLAIM_EMBEDDING: self.embedding and self.embedding.to_map(),
        }
        fields.update({key: value for key, value in optional.items() if value is not None})
        return cbor.encode(fields)

    @classmethod
    def parse(cls, data: bytes) -> ReceiptClaims:
        """Parse and check form: types, sizes, closed maps, presence by terminal status. Raises WireError."""
        reader = MapReader(cbor.decode(data, limit_bytes=n.LIMIT_RECEIPT_BYTES), "receipt", _CODE)
        if reader.take(n.CLAIM_PROFILE, str) != n.RECEIPT_PROFILE:
            raise WireError("UNSUPPORTED_PROFILE", f"receipt profile is not {n.RECEIPT_PROFILE}")
        claims = cls(
            iss=reader.text(n.CLAIM_ISS),
            iat=reader.uint(n.CLAIM_IAT),
            cti=reader.bstr(n.CLAIM_CTI, n.CTI_BYTES),
            eat_nonce=_eat_nonce(reader) if reader.has(n.CLAIM_NONCE) else None,
            chain=reader.bstr(n.CLAIM_CHAIN, 16),
            sequence=reader.uint(n.CLAIM_SEQUENCE),
            previous=reader.bstr_or_null(n.CLAIM_PREVIOUS, 32),
            mode=reader.one_of(n.CLAIM_MODE, n.MODES),
            attestation=reader.bstr_or_null(n.CLAIM_ATTESTATION, 32),
            channel=reader.bstr_or_null(n.CLAIM_CHANNEL, 32),
            config=reader.bstr(n.CLAIM_CONFIG, 32),
            device=DeviceFacts.parse(reader.take(n.CLAIM_DEVICE, dict)),
            engine=EngineFacts.parse(reader.take(n.CLAIM_ENGINE, dict)),
            request=RequestFacts.parse(reader.take(n.CLAIM_REQUEST, dict)),
            response=ResponseFacts.parse(reader.take(n.CLAIM_RESPONSE, dict)),
            model=ModelFacts.parse(reader.take(n.CLAIM_MODEL, dict)) if reader.has(n.CLAIM_MODEL) else None,
            prompt=PromptFacts.parse(reader.take(n.CLAIM_PROMPT, dict)) if reader.has(n.CLAIM_PROMPT) else None,
            decoding=_decoding(reader.take(n.CLAIM_DECODING, dict)) if reader.has(n.CLAIM_DECODING) else None,
            output=_outputs(reader.take(n.CLAIM_OUTPUT, list)) if reader.has(n.CLAIM_OUTPUT) else None,
            stream=StreamFacts.parse(reader.take(n.CLAIM_STREAM, dict)) if reader.has(n.CLAIM_STREAM) else None,
            execution=_execution(reader.take(n.CLAIM_EXECUTION, dict)) if reader.has(n.CLAIM_EXECUTION) else None,
            embedding=(
                EmbeddingFacts.parse(reader.take(n.CLAIM_EMBEDDING, dict)) if reader.has(n.CLAIM_EMBEDDING) else None
            ),
        )
        reader.finish()
        _check_presence(claims)
        return claims


def _check_presence(claims: ReceiptClaims) -> None:
    """Which claims go together (docs/receipt-format.md, table of presence).

    An evaluated request has prompt, execution and model, and what was made of it: decoding and output, or embedding.
    One that never reached the engine has none of these but perhaps the model. `complete` is always evaluated, `refused`
    never; the others may be either.
    """
    made = [claims.decoding, claims.output] if claims.embedding is None else [claims.embedding]
    evaluated = [claims.prompt, *made, claims.execution]
    present = [part is not None for part in evaluated]
    status = claims.response.status
    generated = claims.decoding is not None or claims.output is not None
    if any(present) != all(present) or (claims.embedding is not None and generated):
        raise WireError(_CODE, "prompt, execution and either decoding and output or embedding must be present together")
    if status == n.STATUS_COMPLETE and not all(present):
        raise WireError(_CODE, "a complete answer needs prompt, execution and what was made")
    if status == n.STATUS_REFUSED and any(present):
        raise WireError(_CODE, "a refusal has no prompt, decoding, output, embedding or execution")
    if all(present) and claims.model is None:
        raise WireError(_CODE, "an evaluated request needs a model")
    streamed = claims.response.media_type == n.MEDIA_EVENT_STREAM
    if streamed != (claims.stream is not None) or streamed != (claims.response.length is None):
        raise WireError(_CODE, "stream facts belong to event streams, length and body to whole answers")
    if streamed and claims.embedding is not None:
        raise WireError(_CODE, "vectors do not come in streams")
    if status == n.STATUS_COMPLETE and any(choice.finish is None for choice in claims.output or ()):
        raise WireError(_CODE, "a complete answer needs a finish reason for every choice")
    if status == n.STATUS_COMPLETE and claims.embedding is not None and claims.embedding.vectors is None:
        raise WireError(_CODE, "a complete answer needs the commitment to its vectors")
    if (claims.sequence == 0) != (claims.previous is None):
        raise WireError(_CODE, "previous is null exactly at sequence 0")


def _eat_nonce(reader: MapReader) -> bytes:
    nonce = reader.take(n.CLAIM_NONCE, bytes)
    if not n.INFERENCE_NONCE_MIN_BYTES <= len(nonce) <= n.INFERENCE_NONCE_MAX_BYTES:
        raise WireError(_CODE, "eat_nonce must have 8..64 bytes")
    return nonce


def _decoding(value: dict[object, object]) -> dict[str, object]:
    reader = MapReader(value, "decoding", _CODE)
    left = reader.rest()
    if set(left) != set(DECODING_FIELDS):
        raise WireError(_CODE, f"decoding must hold exactly {', '.join(sorted(DECODING_FIELDS))}")
    for key, allowed in DECODING_FIELDS.items():
        if type(left[key]) not in allowed:
            raise WireError(_CODE, f"decoding[{key!r}] has the wrong type")
        item = left[key]
        if (type(item) is int and item < 0) or (type(item) is bytes and len(item) != 32):
            raise WireError(_CODE, f"decoding[{key!r}] is out of range")
    return {str(key): item for key, item in left.items()}


def _outputs(value: list[object]) -> tuple[OutputFacts, ...]:
    if not value or len(value) > 128:
        raise WireError(_CODE, "output must list 1..128 choices")
    return tuple(OutputFacts.parse(entry) for entry in value)


def _execution(value: dict[object, object]) -> dict[str, object]:
    if len(value) > MAX_EXECUTION_FACTS:
        raise WireError(_CODE, f"more than {MAX_EXECUTION_FACTS} execution facts")
    facts: dict[str, object] = {}
    for key, item in value.items():
        if type(key) is not str or not key or type(item) not in (int, float, bool, str, bytes, type(None)):
            raise WireError(_CODE, "execution facts must be text keys with plain values")
        facts[key] = item
    return facts
