"""A toy language model for the scheduler: a pure function of the context, over a memory checked on every use."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Sequence

from appliance.engine.batch import EXACT, Exactness, Segment
from appliance.engine.chat.chat_template import ChatTemplate
from appliance.engine.generation.prefix_cache import CacheLimits, PrefixCache
from appliance.engine.generation.prompt import PromptBuilder
from appliance.engine.generation.scheduler import Limits, Scheduler
from appliance.engine.generation.speculation import DRAFTERS, Drafter, Speculation, WidthController
from appliance.engine.types import Delta, EngineEvent, GenerationJob, SamplingParams, TokenLogprob
from appliance.engine.weights.memory import JobMemory
from appliance.errors import ApplianceError

END = 0
LETTERS = 4


class Broken(Exception):
    """An injected failure."""


def next_token(context: Sequence[int], draw: int) -> int:
    """Depends on the last three tokens, so that answers repeat themselves, and on the number drawn."""
    number = zlib.crc32(bytes(context[-3:]) + bytes([draw]))
    return END if number % 29 == 0 else ord("a") + number % LETTERS


def draws(params: SamplingParams) -> Callable[[], int]:
    if params.temperature == 0.0:
        return lambda: 0
    generator = random.Random(params.seed)
    return lambda: generator.randrange(2)


def alone(prompt: str, params: SamplingParams, context_length: int) -> list[int]:
    """What the job answers when nothing else exists: token by token."""
    context, draw = list(prompt.encode()), draws(params)
    limit = context_length - len(context) if params.max_tokens is None else params.max_tokens
    answer: list[int] = []
    while len(answer) < limit and END not in answer:
        answer.append(next_token(context + answer, draw()))
    return answer


class ToyRuntime:
    """Fails on any hole in the memory, on too many rows, on too many cells."""

    control_texts: Sequence[tuple[int, str]] = ()
    bos: int | None = None

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.memory: dict[int, list[int]] = {}
        self.cells: dict[int, list[int]] = {}
        self.rows: list[list[int]] = []
        self.batches: list[list[Segment]] = []
        self.open_samplers = 0
        self.failures: list[str] = []
        """Taken from the front, one a step: "before", "within" the evaluation, "drawing" a later token, or ""."""
        self.draw_failure = -1
        self.restores = True
        self.now_ns = 0
        self.costs_ns: dict[str, int] = {}
        """What an evaluation, a drawn token, a copy takes; all in `now_ns`."""

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def is_end(self, token: int) -> bool:
        return token == END

    def decode(self, segments: Sequence[Segment]) -> None:
        failure = self.failures.pop(0) if self.failures else ""
        self.draw_failure = 1 if failure == "drawing" else -1
        if failure == "before":
            raise Broken
        self.now_ns += self.costs_ns.get("decode", 0)
        self.batches.append(list(segments))
        assert 0 < sum(len(segment.tokens) for segment in segments) <= self._limits.n_batch
        assert len({segment.sequence for segment in segments}) == len(segments)
        self.rows = []
        for segment in segments:
            assert 0 <= segment.sequence < self._limits.sequences
            held = self.memory.setdefault(segment.sequence, [])
            assert segment.position == len(held)
            for index, token in enumerate(segment.tokens):
                held.append(token)
                self._fill(segment.sequence)
                wanted = index >= len(segment.tokens) - segment.outputs
                self.rows.append(list(held) if wanted else [])
            if failure == "within":
                raise Broken
        assert sum(map(len, self.memory.values())) <= self._limits.kv_tokens

    def forget(self, sequence: int, *, start: int = 0) -> bool:
        if 0 < start < len(self.memory.get(sequence, [])) and not self._limits.exactness.rollback:
            return False
        del self.memory.get(sequence, [])[start:]
        del self.cells.get(sequence, [])[start:]
        return True

    def _fill(self, sequence: int) -> None:
        """Take the first free cell, as llama.cpp does; it must come after all the sequence has."""
        taken = {cell for cells in self.cells.values() for cell in cells}
        cell = next(number for number in range(self._limits.kv_tokens) if number not in taken)
        own = self.cells.setdefault(sequence, [])
        assert not own or own[-1] < cell, "a newer token before an older one"
        own.append(cell)

    def save(self, sequence: int) -> bytes:
        self.now_ns += self.costs_ns.get("save", 0)
        return bytes(self.memory[sequence])

    def restore(self, sequence: int, state: bytes) -> bool:
        assert not self.memory.get(sequence)
        if not self.restores:
            return False
        self.memory[sequence] = list(state)
        for _ in state:
            self._fill(sequence)
        return True

    def sampler(self, params: SamplingParams) -> ToySampler:
        self.open_samplers += 1
        return ToySampler(self, draws(params))


class ToySampler:
    logprobs: tuple[TokenLogprob, ...] = ()

    def __init__(self, runtime: ToyRuntime, draw: Callable[[], int]) -> None:
        self._runtime = runtime
        self._draw = draw

    def sample(self, row: int) -> int:
        if self._runtime.draw_failure == 0:
            self._runtime.draw_failure = -1
            raise Broken
        self._runtime.draw_failure -= 1
        assert self._runtime.rows[row], "no logits were asked for in this row"
        self._runtime.now_ns += self._runtime.costs_ns.get("sample", 0)
        return next_token(self._runtime.rows[row], self._draw())

    def measure(self, row: int, token: int) -> TokenLogprob:
        """A number that names what came before and the token: rows mixed up would show."""
        assert self._runtime.rows[row], "no logits were asked for in this row"
        return TokenLogprob(token=bytes([token]), logprob=-float(zlib.crc32(bytes([*self._runtime.rows[row], token]))))

    def name(self, token: int) -> bytes:
        return bytes([token])

    def close(self) -> None:
        self._runtime.open_samplers -= 1


class Bench:
    """A scheduler over the toy, and what came out of it."""

    def __init__(
        self,
        *,
        context_length: int = 64,
        n_batch: int = 8,
        kv_tokens: int = 256,
        slots: int = 4,
        exactness: Exactness = EXACT,
        drafter: str = "off",
        width: int = 4,
        deterministic: bool = False,
        memory: JobMemory | None = None,
        rollback_bytes: int = 4096,
    ) -> None:
        limits = Limits(
            context_length=context_length,
            n_batch=n_batch,
            kv_tokens=kv_tokens,
            slots=slots,
            sequences=slots + 2,
            exactness=exactness,
            speculation=drafter,
            deterministic=deterministic,
            rollback_bytes=rollback_bytes,
            facts={"threads": 1},
        )
        self.limits = limits
        self.now = 0.0
        self.runtime = ToyRuntime(limits)
        self.events: dict[bytes, list[EngineEvent | ApplianceError]] = {}
        prompts = PromptBuilder(self.runtime, ChatTemplate(None, bos_text="", eos_text=""), random_bytes=os.urandom)
        kept = CacheLimits(entries=8, limit_bytes=4096, ttl_s=60.0)
        self.cache = PrefixCache(kept, lambda: self.now, cuttable=exactness.rollback)
        self.make_drafter: Callable[[], Drafter] | None = DRAFTERS.get(drafter)
        self._width = width
        self.scheduler = Scheduler(
            self.runtime,
            prompts,
            limits,
            self.emit,
            cache=self.cache,
            speculate=self._speculation,
            memory=memory,
            clock_ns=lambda: self.runtime.now_ns,
        )

    def _speculation(self) -> Speculation | None:
        if self.make_drafter is None:
            return None
        return Speculation(drafter=self.make_drafter(), controller=WidthController(wide=self._width))

    def emit(self, job_id: bytes, event: EngineEvent | ApplianceError) -> None:
        self.events.setdefault(job_id, []).append(event)

    def submit(
        self, number: int, prompt: str, *, scope: bytes = b"", seed: int | None = None, **sampling: object
    ) -> bytes:
        params = SamplingParams(
            temperature=0.0 if seed is None else 1.0,
            top_p=1.0,
            top_k=0,
            seed=seed or 0,
            **{"max_tokens": None, **sampling},  # type: ignore[arg-type]
        )
        job_id = number.to_bytes(16, "big")
        job = GenerationJob(
            job_id=job_id, prompt=prompt, sampling=params, template_date="2026-12-01", cache_scope=scope
        )
        self.scheduler.submit(job)
        return job_id

    def step(self) -> bool:
        """False where an injected failure came through."""
        try:
            self.scheduler.step()
        except Broken:
            return False
        return True

    def drain(self) -> None:
        for _ in range(10_000):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle
        assert not any(self.runtime.memory.values())
        assert self.runtime.open_samplers == 0
        stats = self.scheduler.stats()
        assert (stats["running"], stats["waiting"], stats["cells_reserved"]) == (0, 0, 0)

    def tokens(self, job_id: bytes) -> list[int]:
        packed = b"".join(event.token_ids for event in self.events[job_id] if isinstance(event, Delta))
        return [int.from_bytes(packed[index : index + 4], "little") for index in range(0, len(packed), 4)]

    def text(self, job_id: bytes) -> str:
        return "".join(event.text for event in self.events[job_id] if isinstance(event, Delta))
