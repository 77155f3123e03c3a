"""Recurrent models, with attention and without: states are not cut back but put back, and no token changes."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.engine.batch import Exactness
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions
from appliance.engine.phases import PHASES
from appliance.engine.settings import EngineSettings, SpeculationSettings
from tests.integration.test_engine_batching import COPY, OFF, Answer, ask, settings_for
from tests.recurrent_model import write_recurrent

pytestmark = pytest.mark.model

PROMPTS = (COPY, "The capital of France is", "Some words to begin with. " * 20)
LENGTH = 60


@pytest.fixture(scope="module", params=["mamba", "jamba"])
def recurrent(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recurrent") / f"{request.param}.gguf"
    return write_recurrent(smollm2, file, attention=request.param == "jamba")


def guessing(kind: str) -> SpeculationSettings:
    return SpeculationSettings(kind=kind, adaptive=False, draft_tokens=4)


def recurrent_settings(model: Path, kind: str, **changes: object) -> EngineSettings:
    content = model.read_bytes()
    weights = {"sha256": hashlib.sha256(content).digest(), "size_bytes": len(content)}
    return settings_for(model, speculation=OFF if kind == "off" else guessing(kind), **weights, **changes)


async def started(settings: EngineSettings) -> SupervisedEngine:
    engine = SupervisedEngine(settings)
    await engine.start(lambda phase, fraction: None)
    return engine


@pytest.fixture
async def plain(recurrent: Path) -> AsyncIterator[SupervisedEngine]:
    engine = await started(recurrent_settings(recurrent, "off"))
    yield engine
    await engine.stop(5.0)


async def answers_of(engine: SupervisedEngine) -> list[Answer]:
    return [await ask(engine, prompt, seed=seed, max_tokens=LENGTH) for prompt in PROMPTS for seed in (None, 3)]


def test_a_state_is_put_back_bit_for_bit_and_not_cut(recurrent: Path) -> None:
    from appliance.engine.batch import Segment

    fd = os.open(recurrent, os.O_RDONLY)
    options = RuntimeOptions(fd=fd, kv_tokens=256, n_batch=16, n_sequences=3, threads=1)
    runtime = LlamaRuntime(options, progress=lambda _: None)
    os.close(fd)
    runtime.decode([Segment(sequence=0, position=0, tokens=list(range(1, 9)), outputs=0)])
    state = runtime.save(0)
    after = Segment(sequence=0, position=8, tokens=[11], outputs=1)
    runtime.decode([after])
    logits = runtime.logits(0).tobytes()
    assert runtime.forget(0, start=9), "there is nothing behind it"
    assert not runtime.forget(0, start=8)
    assert runtime.forget(0)
    assert runtime.restore(0, state)
    runtime.decode([after])
    assert runtime.logits(0).tobytes() == logits


@pytest.mark.parametrize("kind", ["prompt-lookup", "n-gram"])
async def test_h27_h34_guesses_that_are_taken_back_by_a_copy_change_no_token(
    recurrent: Path, plain: SupervisedEngine, kind: str
) -> None:
    engine = await started(recurrent_settings(recurrent, kind))
    try:
        guessed = await answers_of(engine)
        stats = engine.stats
    finally:
        await engine.stop(5.0)
    alone = await answers_of(plain)
    assert [answer.tokens for answer in guessed] == [answer.tokens for answer in alone]
    for answer in guessed:
        facts = answer.facts
        assert (facts["speculation"], facts["exact"]) == (kind, False), "nothing has shown these shapes to be exact"
        assert int(str(facts["target-passes"])) + int(str(facts["accepted-tokens"])) == len(answer.tokens)
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert stats["target_passes"] < plain.stats["target_passes"]
    assert stats["replayed_tokens"] > 0
    assert all(stats[phase] > 0 for phase in PHASES)
    assert plain.stats["replayed_tokens"] == 0
    assert stats["running"] == stats["cells_reserved"] == 0


async def test_h34_by_itself_nothing_is_guessed_in_a_memory_that_cannot_be_cut(recurrent: Path) -> None:
    engine = await started(recurrent_settings(recurrent, "auto"))
    try:
        answer = await ask(engine, COPY, max_tokens=8)
        assert engine.info.exactness == Exactness(batch=False, verify=False, chunk=False, rollback=False)
        assert "speculation" not in answer.facts
        assert answer.facts["exact"] is False
    finally:
        await engine.stop(5.0)


async def test_h46_answers_of_a_recurrent_model_share_its_steps_and_are_their_own(plain: SupervisedEngine) -> None:
    prompts = [f"{'Some words to begin with. ' * number}The number {number} is" for number in range(6)]
    alone = [(await ask(plain, prompt, max_tokens=24)).tokens for prompt in prompts]
    together = await asyncio.gather(*(ask(plain, prompt, max_tokens=24) for prompt in prompts))
    assert [answer.tokens for answer in together] == alone


async def test_h51_only_a_whole_kept_prefix_is_a_hit_and_the_rest_a_miss(recurrent: Path) -> None:
    engine = await started(recurrent_settings(recurrent, "prompt-lookup"))
    shared = "The history of the lighthouse began long before the harbour was built. " * 6
    try:
        first = await ask(engine, shared + "First", scope=b"tenant", max_tokens=20)
        fork = shared + "Second"
        apart = await ask(engine, fork, max_tokens=20)
        scoped = await ask(engine, fork, scope=b"tenant", max_tokens=20)
        assert (scoped.facts["cached-prompt-tokens"], scoped.tokens) == (0, apart.tokens)
        assert (engine.stats["cache_hits"], engine.stats["cache_misses"]) == (0, 2)
        assert len(first.tokens) == 20
    finally:
        await engine.stop(5.0)


async def test_h52_guessing_behind_a_kept_prefix_changes_no_token(smollm2: Path) -> None:
    await _guess_behind_a_prefix(settings_for(smollm2, speculation=guessing("prompt-lookup")), exact=True)


async def test_h34_h52_guessing_behind_a_kept_state_changes_no_token(recurrent: Path) -> None:
    await _guess_behind_a_prefix(recurrent_settings(recurrent, "prompt-lookup"), exact=False)


async def _guess_behind_a_prefix(settings: EngineSettings, *, exact: bool) -> None:
    engine = await started(settings)
    shared = COPY * 3
    try:
        for seed in (None, 5):
            alone = await ask(engine, shared + " three four", seed=seed, max_tokens=LENGTH)
            await ask(engine, shared, scope=b"tenant", max_tokens=1)
            both = await ask(engine, shared + " three four", scope=b"tenant", seed=seed, max_tokens=LENGTH)
            assert alone.facts["cached-prompt-tokens"] == 0
            assert int(str(both.facts["cached-prompt-tokens"])) > 100
            assert int(str(both.facts["accepted-tokens"])) > 0
            assert both.facts["accepted-tokens"] == alone.facts["accepted-tokens"]
            assert both.tokens == alone.tokens
            assert both.facts["exact"] is exact
    finally:
        await engine.stop(5.0)
