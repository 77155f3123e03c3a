"""A draft model with the real one: the first layers of SmolLM2 guess ahead, and no token changes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from appliance.boot.identities import draft_of
from appliance.config.settings import ModelConfig
from appliance.engine.generation.draft import DraftWeights
from appliance.engine.generation.prefix_cache import CacheLimits
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import EngineSettings, SpeculationSettings
from appliance.errors import BootError
from appliance.models.manifest import ModelFacts as Promise
from appliance.models.store import ModelStore
from tests.draft_model import write_draft
from tests.integration.test_engine_batching import COPY, OFF, Answer, ask, settings_for

pytestmark = pytest.mark.model

NO_GIVING_UP = SpeculationSettings(kind="draft-model", adaptive=False, draft_tokens=4)


@pytest.fixture(scope="module")
def draft_file(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(smollm2, tmp_path_factory.mktemp("draft") / "first-layers.gguf", blocks=20)


def weights(path: Path) -> DraftWeights:
    content = path.read_bytes()
    return DraftWeights(paths=(path,), sha256=hashlib.sha256(content).digest(), size_bytes=len(content))


def drafting(model: Path, draft: Path, **changes: object) -> EngineSettings:
    return settings_for(model, draft=weights(draft), **{"speculation": NO_GIVING_UP, **changes})


@pytest.fixture
async def engine(smollm2: Path, draft_file: Path) -> AsyncIterator[SupervisedEngine]:
    made = SupervisedEngine(drafting(smollm2, draft_file))
    await made.start(lambda phase, fraction: None)
    yield made
    await made.stop(5.0)


async def answers_of(engine: SupervisedEngine) -> list[Answer]:
    prompts = (COPY, "The capital of France is", "Some words to begin with. " * 20)
    return [await ask(engine, prompt, seed=seed, max_tokens=24) for prompt in prompts for seed in (None, 3)]


async def test_h27_greedy_and_sampled_answers_are_those_of_the_model_alone(
    engine: SupervisedEngine, smollm2: Path, draft_file: Path
) -> None:
    guessed = await answers_of(engine)
    plain_engine = SupervisedEngine(settings_for(smollm2, speculation=OFF))
    await plain_engine.start(lambda phase, fraction: None)
    try:
        plain = await answers_of(plain_engine)
    finally:
        await plain_engine.stop(5.0)
    assert [answer.tokens for answer in guessed] == [answer.tokens for answer in plain]
    for answer in guessed:
        facts = answer.facts
        assert (facts["speculation"], facts["exact"]) == ("draft-model", True)
        assert facts["draft-model"] == weights(draft_file).sha256
        assert int(str(facts["target-passes"])) + int(str(facts["accepted-tokens"])) == len(answer.tokens)
    assert sum(int(str(answer.facts["accepted-tokens"])) for answer in guessed) > 0
    assert all("draft-model" not in answer.facts for answer in plain)


async def test_it_is_lent_from_answer_to_answer_and_changes_none(engine: SupervisedEngine) -> None:
    prompts = [COPY + f" number {number}" for number in range(4)]
    alone = [(await ask(engine, prompt, seed=number)).tokens for number, prompt in enumerate(prompts)]
    lengths = (16, 12, 8, 4)  # they end one after another: the last is alone for a while
    together = await asyncio.gather(
        *(
            ask(engine, prompt, seed=number, max_tokens=length)
            for (number, prompt), length in zip(enumerate(prompts), lengths, strict=True)
        )
    )
    assert [answer.tokens for answer in together] == [
        tokens[:length] for tokens, length in zip(alone, lengths, strict=True)
    ]


async def test_a_worker_that_comes_back_has_its_draft_again(engine: SupervisedEngine) -> None:
    before = await ask(engine, COPY)
    assert engine.worker_pid is not None
    os.kill(engine.worker_pid, signal.SIGKILL)
    for _ in range(600):
        await asyncio.sleep(0.05)
        if engine.restarts and engine.ready:
            break
    after = await ask(engine, COPY)
    assert after.tokens == before.tokens
    assert after.facts["accepted-tokens"] == before.facts["accepted-tokens"]


async def test_another_vocabulary_is_refused_with_the_difference(smollm2: Path, tmp_path: Path) -> None:
    def renamed(texts: list[str]) -> list[str]:
        return [*texts[:100], "otherwise", *texts[101:]]

    other = write_draft(smollm2, tmp_path / "other.gguf", blocks=1, tokens=renamed)
    engine = SupervisedEngine(drafting(smollm2, other))
    with pytest.raises(BootError, match="token 100 is 'otherwise', the model's is "):
        await engine.start(lambda phase, fraction: None)
    assert engine.worker_pid is None


async def test_other_bytes_than_the_pinned_ones_are_refused(smollm2: Path, draft_file: Path, tmp_path: Path) -> None:
    content = bytearray(draft_file.read_bytes())
    content[-1] ^= 1
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(content)
    pinned = weights(draft_file)
    draft = DraftWeights(paths=(changed,), sha256=pinned.sha256, size_bytes=pinned.size_bytes)
    engine = SupervisedEngine(settings_for(smollm2, draft=draft, speculation=NO_GIVING_UP))
    with pytest.raises(BootError, match=r"changed\.gguf has SHA-256"):
        await engine.start(lambda phase, fraction: None)


@pytest.mark.parametrize(("kind", "with_draft"), [("draft-model", False), ("auto", True), ("off", True)])
async def test_a_draft_that_is_missing_or_would_never_be_asked_is_refused(
    smollm2: Path, draft_file: Path, kind: str, with_draft: bool
) -> None:
    draft = weights(draft_file) if with_draft else None
    engine = SupervisedEngine(settings_for(smollm2, draft=draft, speculation=SpeculationSettings(kind=kind)))
    with pytest.raises(BootError, match="draft"):
        await engine.start(lambda phase, fraction: None)


async def test_h35_a_draft_that_does_not_fit_is_refused_with_the_numbers(smollm2: Path, draft_file: Path) -> None:
    def machine(path: str) -> str | None:
        return f"MemAvailable: {540 << 10} kB\n" if path == "/proc/meminfo" else None

    # 8,192 cells of the model take 180 MiB, 1,024 of the draft 15, its scratch another 16.
    limits: dict[str, object] = {"kv_tokens": 8192, "cache": CacheLimits(limit_bytes=160 << 20)}
    alone = SupervisedEngine(settings_for(smollm2, speculation=OFF, **limits), read=machine)
    await alone.start(lambda phase, fraction: None)
    await alone.stop(5.0)
    engine = SupervisedEngine(drafting(smollm2, draft_file, **limits), read=machine)
    with pytest.raises(BootError, match=r"195 MiB for cells, .* 540 MiB are available"):
        await engine.start(lambda phase, fraction: None)
    assert engine.worker_pid is None


def test_the_configuration_names_and_pins_the_draft(draft_file: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    pinned = weights(draft_file)
    promise = Promise(name="draft", sha256=pinned.sha256, size=pinned.size_bytes, licence="", source="test")
    store.add(draft_file, promise)
    hexadecimal = pinned.sha256.hex()

    def draft(**entries: Any) -> DraftWeights | None:
        return draft_of(ModelConfig(name="m", **entries), store)

    assert draft() is None
    for found in (
        draft(draft_model="draft", draft_sha256=hexadecimal),
        draft(draft_file=str(draft_file), draft_sha256=hexadecimal),
    ):
        assert found is not None
        assert (found.sha256, found.size_bytes) == (pinned.sha256, pinned.size_bytes)
    for entries, message in (
        ({"draft_model": "draft"}, "takes draft_sha256"),
        ({"draft_sha256": hexadecimal}, "takes draft_sha256 and either"),
        ({"draft_model": "draft", "draft_file": "f", "draft_sha256": hexadecimal}, "either"),
        ({"draft_model": "draft", "draft_sha256": "00" * 32}, "in the store has SHA-256"),
        ({"draft_model": "draft", "draft_sha256": hexadecimal.upper()}, "lower-case"),
        ({"draft_model": "draft", "draft_sha256": hexadecimal[:-2]}, "64 hex digits"),
        ({"draft_file": str(tmp_path / "none.gguf"), "draft_sha256": hexadecimal}, "cannot be read"),
        ({"draft_model": "other", "draft_sha256": hexadecimal}, "other"),
    ):
        with pytest.raises(BootError, match=message):
            draft(**entries)
