"""One loop owning one context: jobs in, events out.

A job is prepared (rendered, tokenised, measured) when it arrives, waits in a FIFO, and is then evaluated one step at a
time. All state of a running job is in its `_Sequence`, and `step` alone touches the context: a later scheduler that
packs several sequences into one batch changes `step` and the number of slots, and nothing around it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from appliance.engine.prompt import PromptBuilder
from appliance.engine.text import TextAssembler
from appliance.engine.types import (
    Delta,
    EngineEvent,
    Finished,
    FinishReason,
    GenerationJob,
    PromptReady,
    SamplingParams,
    TokenLogprob,
)
from appliance.errors import ApplianceError, BadRequest

Emit = Callable[[bytes, EngineEvent | ApplianceError], None]
SLOTS = 1


class TokenSampler(Protocol):
    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the token sampled last, where the job asked for them."""

    def sample(self) -> int: ...
    def close(self) -> None: ...


class Runtime(Protocol):
    """What the scheduler needs of `llama_cpp.runtime.LlamaRuntime`."""

    def piece(self, token: int) -> bytes: ...
    def is_end(self, token: int) -> bool: ...
    def decode(self, tokens: Sequence[int], *, position: int, sequence: int, want_logits: bool) -> None: ...
    def forget(self, sequence: int, *, start: int = 0) -> None: ...
    def sampler(self, params: SamplingParams) -> TokenSampler: ...


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """One job on its way. `position` tokens of `tokens` are in the context."""

    job_id: bytes
    tokens: list[int]
    max_tokens: int
    sampler: TokenSampler
    text: TextAssembler
    slot: int = -1
    position: int = 0
    generated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Lengths in tokens; `facts` go into every PromptReady's `execution`."""

    context_length: int
    n_batch: int
    facts: dict[str, object] = field(default_factory=dict)


class Scheduler:
    """Runs jobs on one runtime. Every job ends in exactly one Finished or error, or was cancelled."""

    def __init__(self, runtime: Runtime, prompts: PromptBuilder, limits: Limits, emit: Emit) -> None:
        self._runtime = runtime
        self._prompts = prompts
        self._limits = limits
        self._emit = emit
        self._waiting: deque[_Sequence] = deque()
        self._running: _Sequence | None = None

    @property
    def idle(self) -> bool:
        return self._running is None and not self._waiting

    def submit(self, job: GenerationJob) -> None:
        """Prepare the job and queue it; emits PromptReady, or the error that refuses it."""
        try:
            sequence = self._prepare(job)
        except ApplianceError as error:
            self._emit(job.job_id, error)
            return
        self._waiting.append(sequence)

    def cancel(self, job_id: bytes) -> None:
        """Drop a job wherever it is; unknown ids are jobs that just ended."""
        running = self._running
        if running is not None and running.job_id == job_id:
            self._release()
            return
        for sequence in self._waiting:
            if sequence.job_id == job_id:
                sequence.sampler.close()
                self._waiting.remove(sequence)
                return

    def step(self) -> None:
        """Evaluate one batch: the next piece of a prompt, or one new token. Raises what the runtime raises.

        After an Aborted the same step can be repeated: the context is cut back to what was complete.
        """
        sequence = self._running
        if sequence is None:
            if not self._waiting:
                return
            sequence = self._running = self._waiting.popleft()
            sequence.slot = 0
        pending = len(sequence.tokens) - sequence.position
        count = min(pending, self._limits.n_batch)
        batch = sequence.tokens[sequence.position : sequence.position + count]
        self._runtime.decode(batch, position=sequence.position, sequence=sequence.slot, want_logits=count == pending)
        sequence.position += count
        if count == pending:
            self._advance(sequence)

    def rewind(self) -> None:
        """Forget what an interrupted `step` left behind."""
        sequence = self._running
        if sequence is not None:
            self._runtime.forget(sequence.slot, start=sequence.position)

    def _prepare(self, job: GenerationJob) -> _Sequence:
        prompt = self._prompts.build(job.prompt, job.template_date)
        count, limit = len(prompt.tokens), self._limits.context_length
        if count >= limit:
            raise BadRequest(
                "context_length_exceeded",
                f"the prompt has {count} tokens; the context holds {limit}, at least one of them for the answer",
                param="prompt" if isinstance(job.prompt, str) else "messages",
            )
        sampler = self._runtime.sampler(job.sampling)
        room = limit - count
        max_tokens = room if job.sampling.max_tokens is None else min(room, job.sampling.max_tokens)
        date = None if isinstance(job.prompt, str) else job.template_date
        ready = PromptReady(
            prompt_text=prompt.text,
            token_ids=struct.pack(f"<{count}I", *prompt.tokens),
            max_tokens=max_tokens,
            execution={**self._limits.facts, "template-date": date},
        )
        self._emit(job.job_id, ready)
        return _Sequence(
            job_id=job.job_id,
            tokens=prompt.tokens,
            max_tokens=max_tokens,
            sampler=sampler,
            text=TextAssembler(job.sampling.stop),
        )

    def _advance(self, sequence: _Sequence) -> None:
        token = sequence.sampler.sample()
        sequence.tokens.append(token)
        sequence.generated += 1
        reason: FinishReason | None = None
        logprobs = sequence.sampler.logprobs
        if self._runtime.is_end(token):
            text, logprobs = "", ()  # the end is no part of the text
            reason = "stop"
        else:
            text = sequence.text.feed(self._runtime.piece(token))
            if sequence.text.stopped:
                reason = "stop"
            elif sequence.generated >= sequence.max_tokens:
                reason = "length"
        if reason is not None:
            text += sequence.text.finish()
        self._emit(sequence.job_id, Delta(text=text, token_ids=token.to_bytes(4, "little"), logprobs=logprobs))
        if reason is not None:
            # The held-back tail may itself complete a stop string only by an incomplete character's U+FFFD.
            self._emit(sequence.job_id, Finished(reason="stop" if sequence.text.stopped else reason))
            self._release()

    def _release(self) -> None:
        sequence = self._running
        if sequence is not None:
            self._runtime.forget(sequence.slot)
            sequence.sampler.close()
            self._running = None
