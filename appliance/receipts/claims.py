"""From what happened to one request to the claims of its receipt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from appliance.errors import ApplianceError
from appliance.receipts.transcript import OutputTranscript, StreamTranscript, Subject
from client_sdk.wire import names
from client_sdk.wire.embedding import EmbeddingFacts
from client_sdk.wire.receipt import (
    DeviceFacts,
    EngineFacts,
    ModelFacts,
    PromptFacts,
    ReceiptClaims,
    RequestFacts,
    ResponseFacts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """What is the same in every receipt of this boot."""

    iss: str
    mode: str
    config: bytes
    device: DeviceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model a request was for, and the engine that runs it."""

    model: ModelFacts
    engine: EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the engine did with a request. Present as a whole or not at all.

    Text has `decoding` and `outputs`, vectors have `embedding`.
    """

    prompt: PromptFacts
    execution: Mapping[str, object]
    decoding: Mapping[str, object] | None = None
    outputs: tuple[OutputTranscript, ...] = ()
    embedding: EmbeddingFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended. `body` is the whole answer, None for a stream (then `stream` is its transcript)."""

    status: str
    http_status: int
    media_type: str
    body: bytes | None
    stream: StreamTranscript | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position of a receipt in its chain, assigned by the issuer."""

    chain: bytes
    sequence: int
    previous: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything that goes into one receipt, its place in the chain excepted."""

    subject: Subject
    request: RequestFacts
    outcome: Outcome
    engine: EngineFacts
    served: Served | None
    evaluation: Evaluation | None


def build(instance: InstanceFacts, record: Record, place: Place) -> ReceiptClaims:
    """The claims of one receipt. A refusal drops what an engine may have done before: it is no part of the answer."""
    subject, outcome = record.subject, record.outcome
    evaluation = None if outcome.status == names.STATUS_REFUSED else record.evaluation
    outputs = evaluation.outputs if evaluation else ()
    body = outcome.body
    return ReceiptClaims(
        iss=instance.iss,
        iat=subject.iat,
        cti=subject.cti,
        eat_nonce=subject.eat_nonce,
        chain=place.chain,
        sequence=place.sequence,
        previous=place.previous,
        mode=instance.mode,
        attestation=subject.attestation,
        channel=subject.channel,
        config=instance.config,
        device=instance.device,
        engine=record.engine,
        request=record.request,
        response=ResponseFacts(
            status=outcome.status,
            http_status=outcome.http_status,
            media_type=outcome.media_type,
            length=None if body is None else len(body),
            body=None if body is None else subject.commit(names.LABEL_RESPONSE, body),
        ),
        model=record.served.model if record.served else None,
        prompt=evaluation.prompt if evaluation else None,
        decoding=evaluation.decoding if evaluation else None,
        output=tuple(o.facts(subject, i) for i, o in enumerate(outputs)) or None,
        stream=outcome.stream.facts() if outcome.stream else None,
        execution=evaluation.execution if evaluation else None,
        embedding=evaluation.embedding if evaluation else None,
    )


def failed_status(error: ApplianceError, *, streaming: bool) -> str:
    """How an answer ended that ended with an error. Once a stream has begun, what fails is no refusal any more."""
    if error.status == 408:
        return names.STATUS_DEADLINE
    return names.STATUS_REFUSED if error.status < 500 and not streaming else names.STATUS_ERROR
