"""One request for vectors on its way: the call, what the engine says of it, and what its receipt will."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from appliance.engine.embedding.jobs import Embedder, EmbeddingEvent, EmbeddingJob, InputsReady, TextInput, Vector
from appliance.engine.types import Finished
from appliance.errors import ApplianceError, BadRequest, EngineFailed
from appliance.inference.event_reader import EventReader, Interrupts
from appliance.inference.request import Heading
from appliance.receipts.claims import Evaluation
from appliance.receipts.transcript import Subject, prompt_facts
from client_sdk.wire import names
from client_sdk.wire.embedding import NUMBER_BYTES, EmbeddingFacts, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorCall:
    """One parsed request. `encoding` is how the answer writes numbers, one of `wire.embedding.ENCODINGS`."""

    model: str
    inputs: tuple[TextInput, ...]
    dimensions: int | None
    encoding: str


@runtime_checkable
class VectorDialect(Protocol):
    """The JSON of a route that makes vectors. See `request.Dialect` for `explain` and `failure`."""

    def parse_inputs(self, body: bytes) -> VectorCall: ...
    def vectors(self, heading: Heading, call: VectorCall, vectors: Sequence[bytes], prompt_tokens: int) -> bytes:
        """The whole answer; `vectors` are float32 little-endian. Long work for many of them: not for the event loop."""

    def explain(self, error: ApplianceError) -> ApplianceError: ...
    def failure(self, heading: Heading, error: ApplianceError) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorWork:
    """What making the vectors of one request needs."""

    subject: Subject
    heading: Heading
    call: VectorCall
    dialect: VectorDialect

    async def steps(
        self, embedder: Embedder | None, interrupts: Interrupts
    ) -> AsyncGenerator[tuple[Evaluation, bytes], None]:
        """What the receipt says once the engine has taken the inputs, and again, with the answer, at the end.

        Raises BadRequest for a model without an embedder, what the engine raises, and as `Interrupts.check`.
        """
        if embedder is None:
            message = "This model generates text; neither its metadata nor the configuration pool it to vectors."
            raise BadRequest("model_does_not_embed", message, param="model")
        job = EmbeddingJob(job_id=self.subject.cti, inputs=self.call.inputs, dimensions=self.call.dimensions)
        reader = EventReader([embedder.embed(job)], interrupts)
        try:
            ready = await _inputs_ready(reader)
            begun = self._evaluation(ready, None)
            yield begun, b""
            vectors = await _collect(reader, ready)
        finally:
            await reader.aclose()
        # Thousands of numbers take long to write out: beside the event loop, not in it.
        write = asyncio.to_thread(self.dialect.vectors, self.heading, self.call, vectors, begun.prompt.count)
        written = await interrupts.bound(write)
        yield self._evaluation(ready, vectors), written

    def _evaluation(self, ready: InputsReady, vectors: Sequence[bytes] | None) -> Evaluation:
        return Evaluation(
            prompt=prompt_facts(self.subject, tuple(zip(ready.texts, ready.token_ids, strict=True))),
            execution=ready.execution,
            embedding=EmbeddingFacts(
                inputs=len(ready.token_ids),
                dimensions=ready.dimensions,
                native=ready.native,
                pooling=ready.pooling,
                encoding=self.call.encoding,
                vectors=None if vectors is None else self.subject.commit(names.LABEL_VECTORS, joined(vectors)),
            ),
        )


async def _inputs_ready(reader: EventReader[EmbeddingEvent]) -> InputsReady:
    """Wait until the engine has accepted the inputs. Raises what it refuses them with."""
    arrived = await reader.next()
    if arrived is None or not isinstance(arrived[1], InputsReady):
        raise _out_of_order()
    return arrived[1]


async def _collect(reader: EventReader[EmbeddingEvent], ready: InputsReady) -> tuple[bytes, ...]:
    """All vectors, in the order of the inputs. Raises EngineFailed where the engine leaves one out or cuts one."""
    vectors: dict[int, bytes] = {}
    while (arrived := await reader.next()) is not None:
        match arrived[1]:
            case Vector() as vector:
                vectors[vector.index] = vector.numbers
            case Finished():
                break
            case InputsReady():
                raise _out_of_order()
    size = NUMBER_BYTES * ready.dimensions
    if vectors.keys() != set(range(len(ready.token_ids))) or any(len(numbers) != size for numbers in vectors.values()):
        raise _out_of_order()
    return tuple(vectors[index] for index in range(len(vectors)))


def _out_of_order() -> EngineFailed:
    return EngineFailed("engine_failed", "the engine gave other vectors than it was asked for")
