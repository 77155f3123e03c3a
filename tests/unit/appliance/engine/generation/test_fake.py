from __future__ import annotations

from contextlib import aclosing

import pytest

from appliance.engine.base import Engine
from appliance.engine.generation.fake import FakeEngine, FakeScript
from appliance.engine.types import ChatMessage, Delta, EngineEvent, Finished, GenerationJob, PromptReady, SamplingParams
from appliance.errors import BadRequest, EngineFailed


def job(prompt: str = "hi", *, max_tokens: int | None = None, stop: tuple[str, ...] = ()) -> GenerationJob:
    sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=7, max_tokens=max_tokens, stop=stop)
    return GenerationJob(
        job_id=bytes(16),
        prompt=(ChatMessage(role="user", content=prompt),),
        sampling=sampling,
        template_date="2026-12-01",
    )


async def answer(engine: Engine, wanted: GenerationJob) -> list[EngineEvent]:
    return [event async for event in engine.generate(wanted)]


async def started(script: FakeScript) -> FakeEngine:
    engine = FakeEngine(script)
    await engine.start(lambda phase, fraction: None)
    return engine


@pytest.mark.parametrize(
    ("changes", "text", "reason"),
    [({}, "Hello world.", "stop"), ({"max_tokens": 2}, "Hello world", "length"), ({"stop": ("o w",)}, "Hell", "stop")],
)
async def test_b103_every_answer_has_one_end(changes: dict[str, object], text: str, reason: str) -> None:
    engine = await started(FakeScript())
    events = await answer(engine, job(**changes))  # type: ignore[arg-type]
    assert isinstance(events[0], PromptReady)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == text
    assert [event for event in events if isinstance(event, Finished)] == [Finished(reason=reason)]  # type: ignore[arg-type]
    assert engine.counters.live == engine.counters.cancelled == 0


async def test_b106_failure_at_a_token_raises_after_what_came_before() -> None:
    engine = await started(FakeScript(fail_at=2))
    seen: list[EngineEvent] = []

    async def collect() -> None:
        async for event in engine.generate(job()):
            seen.append(event)

    with pytest.raises(EngineFailed):
        await collect()
    assert len(seen) == 3


async def test_closing_early_counts_as_cancelled() -> None:
    engine = await started(FakeScript())
    async with aclosing(engine.generate(job())) as events:
        await anext(events)
    assert (engine.counters.live, engine.counters.cancelled) == (0, 1)


async def test_b125_too_long() -> None:
    engine = await started(FakeScript(context_length=8))
    with pytest.raises(BadRequest) as caught:
        await answer(engine, job("a long prompt"))
    assert caught.value.code == "context_length_exceeded"
