"""The loop over a toy runtime that checks what the context would hold."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.chat_template import ChatTemplate
from appliance.engine.prompt import PromptBuilder
from appliance.engine.scheduler import Limits, Scheduler
from appliance.engine.types import Delta, EngineEvent, Finished, GenerationJob, PromptReady, SamplingParams
from appliance.errors import ApplianceError

END = 0


class Interrupted(Exception):
    pass


class ToyRuntime:
    """Answers each prompt with its own bytes in reverse, then the end token. Fails on any hole in the context."""

    control_texts: Sequence[tuple[int, str]] = ()
    bos: int | None = None

    def __init__(self) -> None:
        self.context: list[int] = []
        self.interrupt_next = False
        self.open_samplers = 0

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def is_end(self, token: int) -> bool:
        return token == END

    def decode(self, tokens: Sequence[int], *, position: int, sequence: int, want_logits: bool) -> None:
        assert position == len(self.context)
        if self.interrupt_next:
            self.interrupt_next = False
            self.context += tokens[:1]  # an interrupted batch leaves a part behind
            raise Interrupted
        self.context += tokens

    def forget(self, sequence: int, *, start: int = 0) -> None:
        del self.context[start:]

    def sampler(self, params: SamplingParams) -> ToySampler:
        self.open_samplers += 1
        return ToySampler(self)


class ToySampler:
    logprobs = ()

    def __init__(self, runtime: ToyRuntime) -> None:
        self._runtime = runtime
        self._plan: list[int] | None = None

    def sample(self) -> int:
        if self._plan is None:
            self._plan = [END, *self._runtime.context]
        return self._plan.pop()

    def close(self) -> None:
        self._runtime.open_samplers -= 1


class Bench:
    def __init__(self, context_length: int = 64, n_batch: int = 4) -> None:
        self.runtime = ToyRuntime()
        self.events: dict[bytes, list[EngineEvent | ApplianceError]] = {}
        prompts = PromptBuilder(self.runtime, ChatTemplate(None, bos_text="", eos_text=""), random_bytes=os.urandom)
        limits = Limits(context_length=context_length, n_batch=n_batch, facts={"threads": 1})
        self.scheduler = Scheduler(self.runtime, prompts, limits, self.emit)

    def emit(self, job_id: bytes, event: EngineEvent | ApplianceError) -> None:
        self.events.setdefault(job_id, []).append(event)

    def submit(self, number: int, prompt: str, *, max_tokens: int | None = None) -> bytes:
        sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=max_tokens)
        job_id = number.to_bytes(16, "big")
        self.scheduler.submit(
            GenerationJob(job_id=job_id, prompt=prompt, sampling=sampling, template_date="2026-12-01")
        )
        return job_id

    def step(self) -> None:
        try:
            self.scheduler.step()
        except Interrupted:
            self.scheduler.rewind()

    def drain(self) -> None:
        while not self.scheduler.idle:
            self.step()
        assert self.runtime.context == []
        assert self.runtime.open_samplers == 0

    def text(self, job_id: bytes) -> str:
        return "".join(event.text for event in self.events[job_id] if isinstance(event, Delta))


def test_fifo_and_one_end_each() -> None:
    bench = Bench()
    jobs = [bench.submit(number, prompt) for number, prompt in enumerate(("abcdefghij", "kl", "m"))]
    assert [type(events[0]) for events in bench.events.values()] == [PromptReady] * 3  # before their turn
    bench.drain()
    assert [bench.text(job) for job in jobs] == ["jihgfedcba", "lk", "m"]
    for events in bench.events.values():
        assert [event for event in events if isinstance(event, Finished)] == [Finished(reason="stop")]
        assert events[-2:-1] == [Delta(text="", token_ids=bytes(4))]


@pytest.mark.parametrize(("size", "code"), [(7, None), (8, "context_length_exceeded"), (9, "context_length_exceeded")])
def test_b125_the_border_of_the_context(size: int, code: str | None) -> None:
    bench = Bench(context_length=8)
    job = bench.submit(1, "x" * size)
    bench.drain()
    last = bench.events[job][-1]
    assert (last.code if isinstance(last, ApplianceError) else None) == code
    if code is None:
        assert last == Finished(reason="length")
        assert bench.text(job) == "x"


def test_an_interrupted_batch_is_repeated_without_a_trace() -> None:
    bench = Bench()
    job = bench.submit(1, "abcdefghij")
    for _ in range(30):
        bench.runtime.interrupt_next = True
        bench.step()
        bench.step()
    bench.drain()
    assert bench.text(job) == "jihgfedcba"


@given(st.lists(st.tuples(st.sampled_from(["submit", "cancel", "step", "interrupt"]), st.integers(0, 5)), max_size=60))
def test_any_order_of_jobs_cancels_and_interrupts(actions: list[tuple[str, int]]) -> None:
    bench = Bench()
    cancelled: set[bytes] = set()
    prompts: dict[bytes, str] = {}
    for index, (action, number) in enumerate(actions):
        if action == "submit":
            prompt = f"job {index}!"
            prompts[bench.submit(index, prompt)] = prompt
        elif action == "cancel" and prompts:
            job = list(prompts)[number % len(prompts)]
            cancelled.add(job)
            bench.scheduler.cancel(job)
        elif action == "interrupt":
            bench.runtime.interrupt_next = True
        else:
            bench.step()
    bench.drain()
    for job, prompt in prompts.items():
        ended = isinstance(bench.events[job][-1], Finished)
        assert ended or job in cancelled
        if ended:
            assert bench.text(job) == prompt[::-1]
