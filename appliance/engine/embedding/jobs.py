"""The nouns of vectors: what a job is, what comes back, and both as worker messages. Free of llama.cpp and of HTTP."""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from appliance.engine.host.channel import ChannelError
from appliance.engine.host.messages import take, unpack_event
from appliance.engine.types import Finished, TokenPrompt
from appliance.errors import ApplianceError

POOLINGS: Final = ("mean", "cls", "last")
"""How the states of an input's tokens become one vector: their mean, that of the first, that of the last."""

MAX_INPUTS: Final = 2048
MAX_TOKENS: Final = 300_000
"""Of one job, all inputs together: what comes back for it has to fit one message."""
MAX_NUMBERS: Final = 1 << 21
"""Of one job's vectors together: 8 MiB as float32, about 25 MB written out in decimal."""

TextInput = str | TokenPrompt
"""Text, between the special tokens that the model wants, or token ids as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob:
    """Vectors for `inputs`, 1..MAX_INPUTS of them. `dimensions` None is all that the model has.

    `job_id` is 16 bytes, unique among live jobs.
    """

    job_id: bytes
    inputs: tuple[TextInput, ...]
    dimensions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsReady:
    """First event of every accepted job: what will be evaluated, and how vectors are made of it.

    `texts` and `token_ids` (u32 little-endian each) are of the inputs in order. `native` is the number of dimensions
    the model has, `dimensions` that of the vectors to come.
    """

    texts: tuple[str, ...]
    token_ids: tuple[bytes, ...]
    native: int
    dimensions: int
    pooling: str
    execution: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """The vector of input `index`: float32 little-endian, of Euclidean length 1."""

    index: int
    numbers: bytes


EmbeddingEvent = InputsReady | Vector | Finished


class Embedder(Protocol):
    """What an engine with an embedding model can do beside `base.Engine`."""

    def embed(self, job: EmbeddingJob) -> AsyncGenerator[EmbeddingEvent, None]:
        """Yield InputsReady, then a Vector for every input, in any order, then Finished. Closing cancels the job.

        Raises BadRequest (`context_length_exceeded`, `too_many_tokens`, `too_many_numbers`, `invalid_dimensions`,
        `control_token_in_content`, `empty_prompt`, `invalid_token`), EngineFailed, TooLarge, Unavailable.
        """


def pack_job(job: EmbeddingJob) -> dict[str, object]:
    """Message `embed`."""
    return {
        "t": "embed",
        "id": job.job_id,
        "inputs": [
            struct.pack(f"<{len(item.tokens)}I", *item.tokens) if isinstance(item, TokenPrompt) else item
            for item in job.inputs
        ],
        "dimensions": job.dimensions or 0,
    }


def unpack_job(message: Mapping[str, object]) -> EmbeddingJob:
    """Raises ChannelError."""
    inputs = tuple(_unpack_input(item) for item in take(message, "inputs", list))
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise ChannelError("a job has no inputs, or too many")
    return EmbeddingJob(
        job_id=take(message, "id", bytes), inputs=inputs, dimensions=take(message, "dimensions", int) or None
    )


def _unpack_input(item: object) -> TextInput:
    if isinstance(item, str):
        return item
    if not isinstance(item, bytes) or len(item) % 4:
        raise ChannelError("an input is neither text nor token ids")
    return TokenPrompt(tokens=struct.unpack(f"<{len(item) // 4}I", item))


def pack_inputs_ready(job_id: bytes, event: InputsReady) -> dict[str, object]:
    """Message `inputs`."""
    return {
        "t": "inputs",
        "id": job_id,
        "texts": list(event.texts),
        "tokens": list(event.token_ids),
        "native": event.native,
        "dimensions": event.dimensions,
        "pooling": event.pooling,
        "execution": dict(event.execution),
    }


def pack_vector(job_id: bytes, event: Vector) -> dict[str, object]:
    """Message `vector`."""
    return {"t": "vector", "id": job_id, "index": event.index, "numbers": event.numbers}


def unpack_embedding_event(message: Mapping[str, object]) -> EmbeddingEvent | ApplianceError:
    """Raises ChannelError."""
    kind = take(message, "t", str)
    if kind == "vector":
        return Vector(index=take(message, "index", int), numbers=take(message, "numbers", bytes))
    if kind == "inputs":
        texts, token_ids = take(message, "texts", list), take(message, "tokens", list)
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(ids, bytes) for ids in token_ids):
            raise ChannelError("inputs are not texts and token ids")
        return InputsReady(
            texts=tuple(texts),
            token_ids=tuple(token_ids),
            native=take(message, "native", int),
            dimensions=take(message, "dimensions", int),
            pooling=take(message, "pooling", str),
            execution=take(message, "execution", dict),
        )
    event = unpack_event(message)
    if not isinstance(event, Finished | ApplianceError):
        raise ChannelError("an embedding model sends generated text")
    return event
