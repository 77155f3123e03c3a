"""An embedding model without a model: vectors made of hashes, injected delays and failures. Keeps the real contract."""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from appliance.engine.embedding.jobs import EmbeddingEvent, EmbeddingJob, InputsReady, TextInput, Vector
from appliance.engine.generation.fake import FakeEngine, FakeScript
from appliance.engine.types import EngineEvent, Finished, GenerationJob, TokenPrompt
from appliance.errors import BadRequest, EngineFailed, Unavailable

DIMENSIONS = 8
START_TOKEN, END_TOKEN = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingScript:
    """`fail_at` k raises EngineFailed in place of vector k (from 0), `drop` leaves that vector out.

    `delay_s` is slept before each vector. Inputs of more than `context_length` tokens are too long: every byte of a
    text is one, and two stand around it.
    """

    fail_at: int | None = None
    drop: int | None = None
    delay_s: float = 0.0
    context_length: int = 64


class FakeEmbedder(FakeEngine):
    """`embedding.Embedder`, and `base.Engine` for everything but generation. The last vector of a job comes first."""

    def __init__(
        self,
        script: EmbeddingScript | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.embedding = script or EmbeddingScript()
        super().__init__(FakeScript(context_length=self.embedding.context_length), sleep=sleep)
        self.cancelled = 0

    def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        """Raises BadRequest."""
        raise BadRequest("model_does_not_generate", "This model makes vectors, no text.", param="model")

    async def embed(self, job: EmbeddingJob) -> AsyncGenerator[EmbeddingEvent, None]:
        """See `embedding.Embedder.embed`."""
        if not self.ready:
            raise Unavailable("engine_restarting", "the engine is being restarted", retry_after_s=1)
        ended = False
        try:
            ready = self._ready_inputs(job)
            yield ready
            for count, index in enumerate(reversed(range(len(job.inputs)))):
                if self.embedding.delay_s:
                    await self._sleep(self.embedding.delay_s)
                if count == self.embedding.fail_at:
                    raise EngineFailed("engine_failed", "the engine stopped in the middle of this answer")
                if index != self.embedding.drop:
                    yield Vector(index=index, numbers=vector_of(ready.token_ids[index], ready.dimensions))
            ended = True
            yield Finished(reason="stop")
        except (BadRequest, EngineFailed):
            ended = True
            raise
        finally:
            self.cancelled += not ended

    def _ready_inputs(self, job: EmbeddingJob) -> InputsReady:
        dimensions = DIMENSIONS if job.dimensions is None else job.dimensions
        if dimensions > DIMENSIONS:
            message = f"The model's vectors have {DIMENSIONS} dimensions; {dimensions} were asked for."
            raise BadRequest("invalid_dimensions", message, param="dimensions")
        read = [self._tokens(item, f"input[{index}]") for index, item in enumerate(job.inputs)]
        return InputsReady(
            texts=tuple(text for text, _ in read),
            token_ids=tuple(struct.pack(f"<{len(tokens)}I", *tokens) for _, tokens in read),
            native=DIMENSIONS,
            dimensions=dimensions,
            pooling="mean",
            execution={"threads": 1, "batching": "single", "exact": True},
        )

    def _tokens(self, item: TextInput, param: str) -> tuple[str, list[int]]:
        if isinstance(item, TokenPrompt):
            text = bytes(token - 3 for token in item.tokens if token > END_TOKEN).decode("utf-8", "replace")
            tokens = list(item.tokens)
        else:
            text, tokens = item, [START_TOKEN, *(byte + 3 for byte in item.encode()), END_TOKEN]
        limit = self.embedding.context_length
        if len(tokens) > limit:
            message = f"{param} has {len(tokens)} tokens; the context holds {limit}."
            raise BadRequest("context_length_exceeded", message, param=param)
        return text, tokens


def vector_of(token_ids: bytes, dimensions: int) -> bytes:
    """The vector of these tokens (u32 little-endian): float32 little-endian, of Euclidean length 1."""
    digest = hashlib.sha256(token_ids).digest()
    numbers = [value - 127.5 for value in digest[:dimensions]]
    length = math.hypot(*numbers)
    return struct.pack(f"<{dimensions}f", *(number / length for number in numbers))
