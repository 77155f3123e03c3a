"""Many answers in one evaluation with the real model: the same bits as alone, in every shape found exact."""

from __future__ import annotations

import array
import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from appliance.engine.generation.prefix_cache import CacheLimits
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import EngineSettings, SpeculationSettings
from appliance.engine.types import Delta, Finished, GenerationJob, PromptReady, SamplingParams
from appliance.errors import BootError

pytestmark = pytest.mark.model

SHA256 = bytes.fromhex("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
OFF = SpeculationSettings(kind="off")
COPY = "one two three four five six " * 6 + "one two"
_ids = itertools.count(1)


def settings_for(model: Path, **changes: object) -> EngineSettings:
    base = EngineSettings(
        model_paths=(model,),
        sha256=SHA256,
        size_bytes=98_362_432,
        worker_python=sys.executable,
        context_length=1024,
        threads=1,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
async def engine(smollm2: Path) -> AsyncIterator[SupervisedEngine]:
    made = SupervisedEngine(settings_for(smollm2))
    await made.start(lambda phase, fraction: None)
    yield made
    await made.stop(5.0)


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    facts: dict[str, object]


async def ask(
    engine: SupervisedEngine, prompt: str, *, scope: bytes = b"", seed: int | None = None, max_tokens: int = 16
) -> Answer:
    sampling = SamplingParams(
        temperature=0.0 if seed is None else 0.9, top_p=0.95, top_k=40, seed=seed or 0, max_tokens=max_tokens
    )
    job = GenerationJob(
        job_id=next(_ids).to_bytes(16, "big"),
        prompt=prompt,
        sampling=sampling,
        template_date="2026-12-01",
        cache_scope=scope,
    )
    tokens = array.array("I")
    facts: dict[str, object] = {}
    async for event in engine.generate(job):
        if isinstance(event, PromptReady | Finished):
            facts |= event.execution
        if isinstance(event, Delta):
            tokens.frombytes(event.token_ids)
    return Answer(tuple(tokens), facts)


async def test_one_thread_and_short_steps_are_exact_in_every_shape(engine: SupervisedEngine) -> None:
    exactness = engine.info.exactness
    assert (exactness.batch, exactness.verify, exactness.chunk, exactness.rollback) == (True,) * 4
    facts = (await ask(engine, "Hello")).facts
    assert [facts[f"exact-{shape}"] for shape in ("batch", "verify", "chunk")] == [True] * 3
    assert (facts["exact"], facts["batching"], facts["threads"]) == (True, "continuous", 1)


async def test_b147_sampled_answers_of_any_length_equal_their_solo_answers(engine: SupervisedEngine) -> None:
    prompts = [f"{'Some words to begin with. ' * (number * 3)}The number {number} is" for number in range(8)]
    solo = [(await ask(engine, prompt, seed=number)).tokens for number, prompt in enumerate(prompts)]
    together = await asyncio.gather(*(ask(engine, prompt, seed=number) for number, prompt in enumerate(prompts)))
    assert [answer.tokens for answer in together] == solo
    assert engine.stats["running"] == engine.stats["cells_reserved"] == 0


async def test_b139_prefixes_are_reused_within_a_scope_and_change_no_token(engine: SupervisedEngine) -> None:
    shared = "The history of the lighthouse began long before the harbour was built. " * 12
    first = await ask(engine, shared + "First question:", scope=b"tenant a")
    assert first.facts["cached-prompt-tokens"] == 0
    alone = await ask(engine, shared + "Second question:", scope=b"tenant b")
    assert alone.facts["cached-prompt-tokens"] == 0
    reused = await ask(engine, shared + "Second question:", scope=b"tenant a")
    assert int(str(reused.facts["cached-prompt-tokens"])) > 100
    assert reused.tokens == alone.tokens
    unscoped = await ask(engine, shared + "Second question:")
    assert (unscoped.facts["cached-prompt-tokens"], unscoped.tokens) == (0, alone.tokens)
    assert (engine.stats["cache_hits"], engine.stats["cache_misses"]) == (1, 2)


@pytest.mark.parametrize("kind", ["prompt-lookup", "n-gram"])
async def test_h28_h29_guessing_changes_no_token_and_takes_fewer_passes(smollm2: Path, kind: str) -> None:
    answers: list[list[Answer]] = []
    for speculation in (OFF, SpeculationSettings(kind=kind)):
        engine = SupervisedEngine(settings_for(smollm2, speculation=speculation))
        await engine.start(lambda phase, fraction: None)
        answers.append([await ask(engine, COPY, seed=seed, max_tokens=40) for seed in (None, 3)])
        await engine.stop(5.0)
    plain, guessed = answers
    assert [answer.tokens for answer in guessed] == [answer.tokens for answer in plain]
    facts = guessed[0].facts
    assert (facts["speculation"], facts["exact"]) == (kind, True)
    assert int(str(facts["target-passes"])) < 0.7 * len(guessed[0].tokens)
    assert "speculation" not in plain[0].facts


async def test_where_nothing_was_measured_a_deterministic_engine_says_so_and_gives_the_same_bits(
    smollm2: Path,
) -> None:
    """As on a machine where an evaluation takes seconds: the careful answer is that no shape is exact."""
    settings = replace(
        settings_for(smollm2, n_batch=128, deterministic=True, cache=CacheLimits(entries=0)), selftest_limit_s=0.0
    )
    engine = SupervisedEngine(settings)
    await engine.start(lambda phase, fraction: None)
    try:
        assert not engine.info.exactness.chunk
        prompts = [f"{'Some words to begin with. ' * 20}The number {number} is" for number in range(3)]
        solo = [(await ask(engine, prompt, seed=number)).tokens for number, prompt in enumerate(prompts)]
        together = await asyncio.gather(*(ask(engine, prompt, seed=number) for number, prompt in enumerate(prompts)))
        assert [answer.tokens for answer in together] == solo
        assert together[0].facts["exact"] is True
        assert together[0].facts["exact-chunk"] is False
        assert together[0].facts["threads"] == 1
        assert "exactness" in str(together[0].facts["start-cut-short"])
        assert "exactness" in engine.info.cut
    finally:
        await engine.stop(5.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_tokens": 1 << 28, "cache": CacheLimits(limit_bytes=1)}, "for cells"),
        ({"kv_tokens": 1000}, "context length 1024"),
        ({"speculation": SpeculationSettings(kind="magic")}, "magic"),
        ({"speculation": SpeculationSettings(kind="n-gram", draft_tokens=8), "n_batch": 9}, "10"),
    ],
)
async def test_h35_what_cannot_run_is_refused_before_it_is_loaded(
    smollm2: Path, changes: dict[str, object], message: str
) -> None:
    engine = SupervisedEngine(settings_for(smollm2, **changes))
    with pytest.raises(BootError, match=message):
        await engine.start(lambda phase, fraction: None)
    assert engine.worker_pid is None
