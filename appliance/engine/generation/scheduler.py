"""One loop owning one context: jobs in, events out, many answers in each evaluation.

A job is prepared (rendered, tokenised, measured) when it arrives, waits in a FIFO until there is a slot and cells for
all it may come to, joins at the next step, and leaves at its end. A step is one evaluation: nothing changes before all
of its rows are evaluated and every token is drawn, so a step that failed is repeated and gives the same tokens.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from appliance.engine.batch import Exactness, Segment
from appliance.engine.generation.cells import CellPool
from appliance.engine.generation.pace import Pace
from appliance.engine.generation.planner import Piece, plan
from appliance.engine.generation.prefix_cache import PrefixCache
from appliance.engine.generation.prompt import PromptBuilder
from appliance.engine.generation.rollback import LIMIT_BYTES, Rollback
from appliance.engine.generation.sequence import Sequence, TokenSampler
from appliance.engine.generation.speculation import Speculation
from appliance.engine.phases import ADMIT, COMMIT, COPY, DRAW, EVALUATE, PROPOSE, Phases
from appliance.engine.text import TextAssembler
from appliance.engine.types import (
    Begun,
    EngineEvent,
    Finished,
    FinishReason,
    GenerationJob,
    PromptReady,
    SamplingParams,
    TokenLogprob,
)
from appliance.engine.weights.memory import JobMemory
from appliance.errors import ApplianceError, BadRequest

LIMIT_TOKENIZED = 1 << 20
"""Most tokens that a prompt is told as without being evaluated: its message to the supervisor is bounded."""
LIMIT_TOLD_CHARACTERS = 1 << 20
"""Longest text that is told in tokens: everybody else waits while it is read, for about a second at most."""

Emit = Callable[[bytes, EngineEvent | ApplianceError], None]


class Runtime(Protocol):
    """What the scheduler needs of `llama_cpp.runtime.LlamaRuntime`."""

    def piece(self, token: int) -> bytes: ...
    def is_end(self, token: int) -> bool: ...
    def decode(self, segments: Many[Segment]) -> None: ...
    def forget(self, sequence: int, *, start: int = 0) -> bool: ...
    def save(self, sequence: int) -> bytes: ...
    def restore(self, sequence: int, state: bytes) -> bool: ...
    def sampler(self, params: SamplingParams) -> TokenSampler: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Lengths in tokens; `facts` go into every PromptReady's `execution`.

    `kv_tokens` cells are shared by all, at most `slots` jobs run at a time, `n_batch` rows make a step. The context
    knows `sequences` of them, more than there are slots: those that have left stay a while.
    `deterministic` holds for every job, as the field of the same name in SamplingParams does for one.
    `rollback_bytes` bounds the copy of a sequence that cannot be cut, while guesses are evaluated behind it.
    """

    context_length: int
    n_batch: int
    kv_tokens: int
    slots: int
    sequences: int
    exactness: Exactness
    deterministic: bool = False
    speculation: str = "off"
    rollback_bytes: int = LIMIT_BYTES
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Since the start. `prefill` and `answer` are tokens evaluated for the one and made for the other.

    `replayed` are accepted ones that were evaluated again, because the guesses behind them could not be cut off.
    """

    prefill_tokens: int = 0
    answer_tokens: int = 0
    target_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    replayed_tokens: int = 0
    failed_steps: int = 0


class Scheduler:
    """Runs jobs on one runtime. Every job ends in exactly one Finished or error, or was cancelled."""

    def __init__(
        self,
        runtime: Runtime,
        prompts: PromptBuilder,
        limits: Limits,
        emit: Emit,
        *,
        cache: PrefixCache,
        speculate: Callable[[], Speculation | None] = lambda: None,
        memory: JobMemory | None = None,
        clock_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._runtime = runtime
        self._prompts = prompts
        self._limits = limits
        self._emit = emit
        self._cache = cache
        self._speculate = speculate
        self._memory = memory
        self._clock_ns = clock_ns
        self._phases = Phases(clock_ns)
        self._pace = Pace(limits.n_batch)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._unsettled: list[Sequence] = []
        self._pool = CellPool(runtime, capacity=limits.kv_tokens, sequences=limits.sequences)
        self._rollback = Rollback(runtime, by_copy=not limits.exactness.rollback, limit_bytes=limits.rollback_bytes)
        self._reserved = 0
        self.counters = Counters()

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def stats(self) -> dict[str, int]:
        """Levels and counts for metrics."""
        counters, cache = self.counters, self._cache.counters
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "cells_reserved": self._reserved,
            "cells": self._limits.kv_tokens,
            "cells_used": self._pool.used,
            "cell_sweeps": self._pool.sweeps,
            "prefill_tokens": counters.prefill_tokens,
            "answer_tokens": counters.answer_tokens,
            "target_passes": counters.target_passes,
            "drafted_tokens": counters.drafted_tokens,
            "accepted_tokens": counters.accepted_tokens,
            "replayed_tokens": counters.replayed_tokens,
            "failed_steps": counters.failed_steps,
            "cache_hits": cache.hits,
            "cache_misses": cache.misses,
            "cache_reused_tokens": cache.reused_tokens,
            "cache_evictions": cache.evictions,
            "cache_entries": len(self._cache),
            "cache_bytes": self._cache.size_bytes,
            **self._phases.microseconds(),
        }

    # -- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, job: GenerationJob) -> None:
        """Prepare the job and queue it; emits PromptReady, or the error that refuses it."""
        try:
            if not job.evaluate:
                self._tokenize(job)
                return
            sequence = self._prepare(job)
        except ApplianceError as error:
            self._emit(job.job_id, error)
            return
        self._waiting.append(sequence)

    def cancel(self, job_id: bytes) -> None:
        """Drop a job wherever it is; unknown ids are jobs that just ended."""
        for sequence in self._running:
            if sequence.job_id == job_id:
                self._release(sequence)
                return
        for sequence in self._waiting:
            if sequence.job_id == job_id:
                sequence.close()
                self._waiting.remove(sequence)
                return

    def _tokenize(self, job: GenerationJob) -> None:
        if isinstance(job.prompt, str) and len(job.prompt) > LIMIT_TOLD_CHARACTERS:
            message = f"the prompt has {len(job.prompt)} characters; {LIMIT_TOLD_CHARACTERS} are read at most"
            raise BadRequest("prompt_too_large", message, param=job.prompt_field)
        prompt = self._prompts.build(job.prompt, job.template_date)
        count = len(prompt.tokens)
        if count > LIMIT_TOKENIZED:
            message = f"the prompt has {count} tokens; {LIMIT_TOKENIZED} are told at most"
            raise BadRequest("prompt_too_large", message, param=job.prompt_field)
        packed = struct.pack(f"<{count}I", *prompt.tokens)
        kept = {"context-length": self._limits.context_length, "evaluated": False}
        self._emit(job.job_id, PromptReady(prompt_text=prompt.text, token_ids=packed, max_tokens=0, execution=kept))
        self._emit(job.job_id, Finished(reason="length"))

    def _prepare(self, job: GenerationJob) -> Sequence:
        limits = self._limits
        prompt = self._prompts.build(job.prompt, job.template_date, most=limits.context_length)
        count, limit = len(prompt.tokens), limits.context_length
        param = job.prompt_field
        if count >= limit:
            raise BadRequest(
                "context_length_exceeded",
                f"the prompt has {count} tokens; the context holds {limit}, at least one of them for the answer",
                param=param,
            )
        room = limit - count
        max_tokens = room if job.sampling.max_tokens is None else min(room, job.sampling.max_tokens)
        self._check_memory(count + max_tokens)
        sampler = self._runtime.sampler(job.sampling)
        exactness = limits.exactness
        deterministic = limits.deterministic or job.sampling.deterministic
        date = job.template_date if job.prompt_field == "messages" else None
        ready = PromptReady(
            prompt_text=prompt.text,
            token_ids=struct.pack(f"<{count}I", *prompt.tokens),
            max_tokens=max_tokens,
            execution={**limits.facts, **exactness.facts(), "deterministic": deterministic, "template-date": date},
        )
        self._emit(job.job_id, ready)
        scored: dict[int, TokenLogprob] | None = {} if job.sampling.score_prompt else None
        # Logits for every row of a prompt are the shape that verification has.
        exact = exactness.batch and exactness.chunk and (exactness.verify or scored is None)
        alone = deterministic and not exact
        # What cannot be cut off is replayed, in the shape that a prompt has.
        guessed_exactly = exactness.verify and (exactness.rollback or exactness.chunk)
        return Sequence(
            job_id=job.job_id,
            tokens=list(prompt.tokens),
            prompt_count=count,
            max_tokens=max_tokens,
            sampler=sampler,
            text=TextAssembler(job.sampling.stop),
            scope=b"" if alone or scored is not None else job.cache_scope,
            alone=alone,
            scored=scored,
            speculation=None if deterministic and not guessed_exactly else self._speculate(),
        )

    def _check_memory(self, cells: int) -> None:
        """Raises Unavailable."""
        if self._memory is not None:
            waiting = sum(sequence.cells for sequence in self._waiting)
            self._memory.check(
                cells=self._reserved + waiting + cells,
                jobs=len(self._running) + len(self._waiting) + 1,
                cache_room=self._cache.room_bytes,
            )

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Evaluate one batch. Raises what the runtime raises; the step can then be repeated as if it never was."""
        phases = self._phases
        phases.start()
        self.settle()
        self._admit()
        self._pool.make_room(self._limits.n_batch, self._running)
        phases.lap(ADMIT)
        pieces: list[Piece] = []
        try:
            pieces = plan(self._running, self._step_rows())
            phases.lap(PROPOSE)
            if not pieces:
                return
            for piece in pieces:
                self._rollback.prepare(piece.sequence)
            phases.lap(COPY)
            began = self._clock_ns()
            self._runtime.decode([piece.segment() for piece in pieces])
            self._pace.note(sum(piece.rows for piece in pieces), (self._clock_ns() - began) / 1e9)
            phases.lap(EVALUATE)
            self._draw(pieces)
            phases.lap(DRAW)
        except BaseException:
            self.counters.failed_steps += 1
            self._rewind(pieces)
            phases.lap(COMMIT)
            raise
        self._pool.placed(sum(piece.rows for piece in pieces))
        for piece in pieces:
            self._commit(piece)
        self._rollback.release()
        served = {id(piece.sequence) for piece in pieces}
        if any(id(sequence) not in served for sequence in self._running):
            # Whoever found no room this time comes first the next time; among prompts the order of arrival stays.
            self._running.sort(key=lambda sequence: id(sequence) in served and sequence.pending == 1)
        phases.lap(COMMIT)

    def _step_rows(self) -> int:
        """Where shapes may differ they follow from the jobs alone: an answer that runs by itself is the same again."""
        exactness = self._limits.exactness
        if not (exactness.batch and exactness.chunk):
            return self._limits.n_batch
        return self._pace.rows(answering=any(sequence.pending == 1 for sequence in self._running))

    def settle(self) -> None:
        """What a step left for when its events are on their way: a copy of each prompt that is done, for reuse.

        Copying a thousand tokens takes as long as evaluating one, and nobody's first token should wait for it.
        """
        unsettled, self._unsettled = self._unsettled, []
        if not unsettled:
            return
        self._phases.start()
        for sequence in unsettled:
            if any(other is sequence for other in self._running):
                self._keep(sequence)
        self._phases.lap(COPY)

    def _admit(self) -> None:
        """Let waiting jobs in, first come first served, while there is a slot and cells for all they may come to."""
        while self._waiting and len(self._running) < self._limits.slots:
            sequence = self._waiting[0]
            if self._reserved + sequence.cells > self._limits.kv_tokens:
                return
            # A shape proven exact shares its steps; one that is not must find the context as empty as every time.
            if self._running and (sequence.alone or self._running[0].alone):
                return
            self._waiting.popleft()
            sequence.slot = self._pool.claim(self._running)
            self._reuse(sequence)
            self._reserved += sequence.cells
            self._running.append(sequence)

    def _reuse(self, sequence: Sequence) -> None:
        """Start from the longest prefix kept for the same scope, at least one token short of the whole prompt."""
        if not sequence.scope or not self._cache.enabled:
            return
        room = self._limits.kv_tokens - self._reserved
        prefix = self._cache.find(sequence.scope, sequence.tokens, room=room)
        if prefix is None:
            return
        self._pool.make_room(prefix.size, self._running)
        if not self._runtime.restore(sequence.slot, prefix.state):
            return
        if prefix.length < prefix.size and not self._runtime.forget(sequence.slot, start=prefix.length):
            self._runtime.forget(sequence.slot)
            return
        sequence.position = sequence.cached = prefix.length
        self._pool.placed(prefix.length)

    def _keep(self, sequence: Sequence) -> None:
        """Keep what the context holds of a sequence for later prompts of its scope."""
        held = sequence.tokens[: sequence.position]
        if self._cache.wants(sequence.scope, held):
            self._cache.put(sequence.scope, held, self._runtime.save(sequence.slot))

    def _draw(self, pieces: list[Piece]) -> None:
        row = 0
        for piece in pieces:
            if piece.sequence.scoring:
                piece.sequence.score(row, piece.count)
            if piece.draws:
                piece.sequence.draw(row + piece.count - 1, self._runtime)
            row += piece.rows

    def _rewind(self, pieces: list[Piece]) -> None:
        """Cut every sequence of a failed step back to what is committed of it.

        A memory that cannot be cut and has no copy is filled again from the start; the tokens are still the same.
        """
        emptied = False
        for piece in pieces:
            sequence = piece.sequence
            emptied |= self._rollback.cut(sequence) > 0 and not sequence.position
            if sequence.speculation is not None:
                sequence.speculation.drafter.rewind(len(sequence.tokens))
        self._rollback.release()
        if emptied:
            self._pool.sweep(self._running)  # the holes are below what others have

    def _commit(self, piece: Piece) -> None:
        sequence, counters = piece.sequence, self.counters
        if not sequence.begun:
            sequence.begun = True
            self._emit(sequence.job_id, Begun(execution={"cached-prompt-tokens": sequence.cached}))
        sequence.position += piece.count
        if sequence.position <= sequence.prompt_count:
            counters.prefill_tokens += piece.count
        if not piece.draws:
            return
        if sequence.generated == 0:
            self._unsettled.append(sequence)
        proposed, before = len(sequence.drafts), sequence.generated
        end = sequence.position + proposed
        delta, reason = sequence.commit(self._runtime)
        made = sequence.generated - before
        if proposed and made <= proposed:
            counters.replayed_tokens += self._rollback.cut(sequence)
            self._pool.placed(sequence.position - end)
        counters.target_passes += 1
        counters.answer_tokens += made
        counters.drafted_tokens += proposed
        counters.accepted_tokens += made - 1
        self._emit(sequence.job_id, delta)
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._keep(sequence)
        self._emit(sequence.job_id, Finished(reason=reason, execution=self._end_facts(sequence)))
        self._release(sequence)

    def _end_facts(self, sequence: Sequence) -> dict[str, object]:
        exactness, speculation = self._limits.exactness, sequence.speculation
        exact = sequence.alone or (
            exactness.batch and exactness.chunk and (exactness.verify or sequence.scored is None)
        )
        facts: dict[str, object] = {"cached-prompt-tokens": sequence.cached, "target-passes": sequence.passes}
        if speculation is not None:
            facts |= {
                "speculation": self._limits.speculation,
                "drafted-tokens": speculation.proposed,
                "accepted-tokens": speculation.accepted,
            }
            exact = exact and (exactness.verify or not speculation.proposed)
        return {**facts, "exact": exact}

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._reserved -= sequence.cells
        self._pool.leave(sequence.slot)
        if not self._running:
            self._pool.sweep(())
        sequence.close()
