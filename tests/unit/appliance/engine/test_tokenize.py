"""A job that asks for tokens alone: told at once, whatever runs, and nothing is evaluated for it."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from appliance.engine.generation import scheduler
from appliance.engine.generation.fake import FakeEngine
from appliance.engine.host.messages import pack_job, unpack_job
from appliance.engine.types import Finished, GenerationJob, PromptReady, SamplingParams, TokenPrompt
from appliance.engine.weights.sizes import PART_CHARACTERS
from appliance.errors import BadRequest
from tests.unit.appliance.engine.toy import Bench

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=0, max_tokens=0)


def job(prompt: str | TokenPrompt, number: int = 9) -> GenerationJob:
    return GenerationJob(
        job_id=bytes([number]) * 16, prompt=prompt, sampling=SAMPLING, template_date="2026-01-01", evaluate=False
    )


def test_it_survives_the_way_to_the_worker() -> None:
    assert unpack_job(pack_job(job("x"))) == job("x")


@pytest.mark.parametrize("size", [1, 8, 500])
def test_it_is_told_at_once_and_takes_no_slot_however_long_it_is(size: int) -> None:
    bench = Bench(context_length=8, slots=1)
    running = bench.submit(1, "abc")
    asked = job("x" * size)
    bench.scheduler.submit(asked)
    ready, finished = bench.events[asked.job_id]
    assert isinstance(ready, PromptReady)
    assert (ready.prompt_text, ready.max_tokens) == ("x" * size, 0)
    assert struct.unpack(f"<{size}I", ready.token_ids) == (ord("x"),) * size
    assert ready.execution == {"context-length": 8, "evaluated": False}
    assert finished == Finished(reason="length")
    bench.drain()
    assert isinstance(bench.events[running][-1], Finished)
    assert len(bench.runtime.memory) <= 1, "nothing was evaluated for it"


def test_more_tokens_than_a_message_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LIMIT_TOKENIZED", 4)
    bench = Bench()
    bench.scheduler.submit(job("x" * 5))
    (refusal,) = bench.events[job("x").job_id]
    assert isinstance(refusal, BadRequest)
    assert (refusal.code, refusal.param) == ("prompt_too_large", "prompt")


def test_a_text_that_takes_long_to_read_is_refused_unread() -> None:
    bench = Bench()
    bench.scheduler.submit(job("x" * (scheduler.LIMIT_TOLD_CHARACTERS + 1)))
    (refusal,) = bench.events[job("x").job_id]
    assert isinstance(refusal, BadRequest)
    assert (refusal.code, refusal.param) == ("prompt_too_large", "prompt")


def test_a_prompt_far_beyond_the_context_is_refused_by_its_beginning() -> None:
    bench = Bench(context_length=8)
    asked = replace(job("x" * (2 * PART_CHARACTERS)), evaluate=True)
    bench.scheduler.submit(asked)
    (refusal,) = bench.events[asked.job_id]
    assert isinstance(refusal, BadRequest)
    assert (refusal.code, refusal.param) == ("context_length_exceeded", "prompt")
    assert "more than 8" in refusal.message


async def test_the_fake_engine_does_the_same() -> None:
    engine = FakeEngine()
    engine.ready = True
    events = [event async for event in engine.generate(job("hi"))]
    assert [type(event) for event in events] == [PromptReady, Finished]
    assert (engine.counters.cancelled, engine.counters.live) == (0, 0)
