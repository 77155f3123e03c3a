"""Whose input is evaluated next. Jobs take turns input by input, so that a long list does not hold up a short one."""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from appliance.engine.embedding.jobs import (
    MAX_NUMBERS,
    MAX_TOKENS,
    EmbeddingEvent,
    EmbeddingJob,
    InputsReady,
    TextInput,
    Vector,
)
from appliance.engine.types import Finished, TokenPrompt
from appliance.engine.weights.sizes import surely_longer
from appliance.errors import ApplianceError, BadRequest, EngineFailed

Emit = Callable[[bytes, EmbeddingEvent | ApplianceError], None]


class PoolingModel(Protocol):
    """What is needed of `llama_cpp.embedding.EmbeddingRuntime`."""

    @property
    def dimensions(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def control_ids(self) -> frozenset[int]: ...
    def tokenize(self, text: str, *, parse_special: bool) -> list[int]: ...
    def tokenize_input(self, text: str) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...
    def embed(self, inputs: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLimits:
    """`rows` is the most of one evaluation, `together` the most inputs of one: 1 where packing is not exact.

    `facts` go into receipts as they are.
    """

    context_length: int
    rows: int
    together: int
    pooling: str
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Running:
    job_id: bytes
    inputs: tuple[tuple[int, ...], ...]
    dimensions: int
    next: int = 0
    done: int = 0


class EmbeddingScheduler:
    """Belongs to one thread. `step` evaluates once; `submit` and `cancel` come between steps."""

    def __init__(self, model: PoolingModel, limits: EmbeddingLimits, emit: Emit) -> None:
        self._model = model
        self._limits = limits
        self._emit = emit
        self._jobs: OrderedDict[bytes, _Running] = OrderedDict()
        self._tokens = self._vectors = self._failed = 0
        self._around = self._controls(model.tokenize_input(""))  # control tokens that stand around every text

    @property
    def idle(self) -> bool:
        return not self._jobs

    def stats(self) -> dict[str, int]:
        """Counts of this worker, by the names in `stats.ENGINE_STATS`."""
        return {
            "prefill_tokens": self._tokens,
            "vectors": self._vectors,
            "failed_steps": self._failed,
        }

    def submit(self, job: EmbeddingJob) -> None:
        """Accept or refuse a job; either is told by an event."""
        try:
            ready, inputs = self._prepare(job)
        except BadRequest as error:
            self._emit(job.job_id, error)
            return
        self._emit(job.job_id, ready)
        self._jobs[job.job_id] = _Running(job_id=job.job_id, inputs=inputs, dimensions=ready.dimensions)

    def cancel(self, job_id: bytes) -> None:
        self._jobs.pop(job_id, None)

    def step(self) -> None:
        """Evaluate some inputs. What it raises has changed nothing: the same inputs come again."""
        picked = self._pick()
        if not picked:
            return
        try:
            vectors = self._model.embed([job.inputs[index] for job, index in picked])
        except BaseException:
            self._failed += 1
            for job, index in picked:
                job.next = min(job.next, index)
            raise
        for (job, index), vector in zip(picked, vectors, strict=True):
            self._tokens += len(job.inputs[index])
            self._commit(job, index, vector)

    def _pick(self) -> list[tuple[_Running, int]]:
        """One input of each job in turn while they fit. Whoever was served goes to the end."""
        picked: list[tuple[_Running, int]] = []
        rows = 0
        turns = deque(self._jobs.values())
        while turns and len(picked) < self._limits.together:
            job = turns.popleft()
            size = len(job.inputs[job.next])
            if picked and rows + size > self._limits.rows:
                continue  # this one has had its turn for now
            picked.append((job, job.next))
            job.next += 1
            rows += size
            if job.next < len(job.inputs):
                turns.append(job)
        for job, _ in picked:
            self._jobs.move_to_end(job.job_id)
        return picked

    def _commit(self, job: _Running, index: int, vector: npt.NDArray[np.float32]) -> None:
        if job.job_id not in self._jobs:
            return  # an earlier vector of it was none
        numbers = normalized(vector, job.dimensions)
        if numbers is None:
            del self._jobs[job.job_id]
            self._emit(job.job_id, EngineFailed("engine_failed", "the model gave a vector without direction"))
            return
        self._vectors += 1
        job.done += 1
        self._emit(job.job_id, Vector(index=index, numbers=numbers))
        if job.done == len(job.inputs):
            del self._jobs[job.job_id]
            self._emit(job.job_id, Finished(reason="stop"))

    # -- what is asked for -----------------------------------------------------------------------------------------

    def _prepare(self, job: EmbeddingJob) -> tuple[InputsReady, tuple[tuple[int, ...], ...]]:
        """Raises BadRequest; nothing is evaluated then."""
        native = self._model.dimensions
        dimensions = native if job.dimensions is None else job.dimensions
        if not 1 <= dimensions <= native:
            raise BadRequest(
                "invalid_dimensions",
                f"The model's vectors have {native} dimensions; {dimensions} were asked for.",
                param="dimensions",
            )
        if dimensions * len(job.inputs) > MAX_NUMBERS:
            raise BadRequest(
                "too_many_numbers",
                f"{len(job.inputs)} vectors of {dimensions} dimensions are {dimensions * len(job.inputs)} numbers; "
                f"one answer has at most {MAX_NUMBERS}.",
                param="input",
            )
        texts: list[str] = []
        inputs: list[tuple[int, ...]] = []
        total = 0
        for index, item in enumerate(job.inputs):
            text, tokens = self._read(item, "input" if len(job.inputs) == 1 else f"input[{index}]")
            total += len(tokens)
            if total > MAX_TOKENS:
                raise BadRequest(
                    "too_many_tokens",
                    f"The inputs have more than {MAX_TOKENS} tokens together, the most of one request.",
                    param="input",
                )
            texts.append(text)
            inputs.append(tokens)
        ready = InputsReady(
            texts=tuple(texts),
            token_ids=tuple(struct.pack(f"<{len(tokens)}I", *tokens) for tokens in inputs),
            native=native,
            dimensions=dimensions,
            pooling=self._limits.pooling,
            execution=self._limits.facts,
        )
        return ready, tuple(inputs)

    def _read(self, item: TextInput, param: str) -> tuple[str, tuple[int, ...]]:
        model = self._model
        if isinstance(item, TokenPrompt):
            if item.tokens and max(item.tokens) >= model.vocabulary_size:
                raise BadRequest("invalid_token", f"{param} has a token that the model does not have.", param=param)
            text = b"".join(model.piece(token) for token in item.tokens).decode("utf-8", "replace")
            tokens = item.tokens
        else:
            if surely_longer(item, self._limits.context_length, self._plain):
                raise self._too_long(param, f"more than {self._limits.context_length}")
            text, tokens = item, tuple(model.tokenize_input(item))
            # Some tokenizers merge ordinary pieces up to a control token's text even when told not to parse it.
            if self._controls(tokens) > self._around:
                message = f"{param} contains text that the model reads as a control token."
                raise BadRequest("control_token_in_content", message, param=param)
        if not tokens:
            raise BadRequest("empty_prompt", f"{param} has no tokens.", param=param)
        if len(tokens) > self._limits.context_length:
            raise self._too_long(param, f"{len(tokens)}")
        return text, tokens

    def _too_long(self, param: str, count: str) -> BadRequest:
        message = f"{param} has {count} tokens; the context holds {self._limits.context_length}."
        return BadRequest("context_length_exceeded", message, param=param)

    def _plain(self, text: str) -> list[int]:
        return self._model.tokenize(text, parse_special=False)

    def _controls(self, tokens: Sequence[int]) -> int:
        return sum(token in self._model.control_ids for token in tokens)


def normalized(vector: npt.NDArray[np.float32], dimensions: int) -> bytes | None:
    """The first `dimensions` numbers at Euclidean length 1, float32 little-endian. None for one without direction."""
    cut = vector[:dimensions].astype(np.float64)
    length = float(np.sqrt(np.sum(cut * cut)))
    if not np.isfinite(length) or length == 0.0:
        return None
    return (cut / length).astype("<f4").tobytes()
