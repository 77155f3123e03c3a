"""Sampling parameters and log probabilities with the real small model."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import EngineSettings
from appliance.engine.types import (
    ChatMessage,
    Delta,
    Finished,
    GenerationJob,
    PromptReady,
    SamplingParams,
    TokenLogprob,
)
from appliance.errors import BadRequest

pytestmark = pytest.mark.model
SHA256 = bytes.fromhex("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=12)
HOT = replace(GREEDY, temperature=1.5, seed=11, max_tokens=24)


@pytest.fixture
async def engine(smollm2: Path) -> AsyncIterator[SupervisedEngine]:
    made = SupervisedEngine(
        EngineSettings(
            model_paths=(smollm2,),
            sha256=SHA256,
            size_bytes=98_362_432,
            worker_python=sys.executable,
            context_length=512,
        )
    )
    await made.start(lambda phase, fraction: None)
    yield made
    await made.stop(5.0)


_count = 1 << 32


async def ask(
    engine: SupervisedEngine, sampling: SamplingParams, question: str = "Count to ten."
) -> tuple[str, list[int], list[TokenLogprob], str]:
    global _count
    _count += 1
    job = GenerationJob(
        job_id=_count.to_bytes(16, "big"),
        prompt=(ChatMessage(role="user", content=question),),
        sampling=sampling,
        template_date="2026-12-01",
    )
    text, tokens, reason = "", b"", ""
    measured: list[TokenLogprob] = []
    async for event in engine.generate(job):
        match event:
            case PromptReady():
                pass
            case Delta():
                text, tokens = text + event.text, tokens + event.token_ids
                measured += event.logprobs
            case Finished():
                reason = event.reason
    ids = [int.from_bytes(tokens[start : start + 4], "little") for start in range(0, len(tokens), 4)]
    return text, ids, measured, reason


async def test_penalties_bias_and_min_p_change_the_answer_as_they_should(engine: SupervisedEngine) -> None:
    plain, tokens, measured, _ = await ask(engine, GREEDY)
    assert measured == []
    banned = replace(GREEDY, logit_bias=((tokens[0], -100.0),))
    assert tokens[0] not in (await ask(engine, banned))[1]
    forced = replace(GREEDY, logit_bias=((tokens[3], 100.0),), max_tokens=4)
    assert (await ask(engine, forced))[1] == [tokens[3]] * 4
    steady = replace(
        forced,
        logit_bias=((tokens[3], 15.0),),
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repeat_penalty=2.0,
        max_tokens=12,
    )
    assert len(set((await ask(engine, steady))[1])) > 1, "penalties outweigh a bias that repeats one token"
    assert (await ask(engine, replace(HOT, min_p=1.0)))[1][:4] == (await ask(engine, replace(GREEDY, max_tokens=24)))[
        1
    ][:4]
    first, again = [await ask(engine, replace(HOT, min_p=0.05, repeat_penalty=1.1)) for _ in range(2)]
    assert first == again
    assert first != await ask(engine, replace(HOT, seed=12, min_p=0.05, repeat_penalty=1.1))
    assert (await ask(engine, replace(GREEDY, deterministic=True)))[0] == plain


async def test_b116_log_probabilities_are_those_of_the_models_distribution(engine: SupervisedEngine) -> None:
    _, tokens, measured, _ = await ask(engine, replace(GREEDY, logprobs=20))
    assert len(measured) == len(tokens)
    for entry in measured:
        assert entry.token == entry.top[0][0], "greedy takes the most probable token"
        assert entry.logprob == entry.top[0][1]
        numbers = [number for _, number in entry.top]
        assert numbers == sorted(numbers, reverse=True)
        assert 0.0 < sum(math.exp(number) for number in numbers) <= 1.0 + 1e-9
    bare = (await ask(engine, replace(GREEDY, logprobs=0)))[2]
    assert [entry.logprob for entry in bare] == [entry.logprob for entry in measured]
    assert all(entry.top == () for entry in bare)
    # Sampling parameters do not change them: they describe the model, not the draw.
    _, hot_tokens, hot, _ = await ask(engine, replace(HOT, logprobs=2, logit_bias=((tokens[0], 50.0),), max_tokens=1))
    assert hot_tokens == tokens[:1]
    assert hot[0].logprob == measured[0].logprob


async def test_the_end_of_an_answer_has_no_log_probability(engine: SupervisedEngine) -> None:
    text, tokens, measured, reason = await ask(engine, replace(GREEDY, max_tokens=100, logprobs=0), "Say hello.")
    assert reason == "stop"
    assert len(measured) == len(tokens) - 1
    assert b"".join(entry.token for entry in measured).decode() == text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"repeat_penalty": 0.0}, "repeat_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"logit_bias": ((49152, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"grammar": "root ::= ("}, None),
    ],
)
async def test_b136_b153_what_native_code_could_not_take_never_reaches_it(
    engine: SupervisedEngine, change: dict[str, object], param: str | None
) -> None:
    with pytest.raises(BadRequest) as caught:
        await ask(engine, replace(GREEDY, **change))  # type: ignore[arg-type]
    assert caught.value.param == param
    assert (await ask(engine, replace(GREEDY, max_tokens=1)))[3] == "length"
    assert engine.restarts == 0


async def test_a_grammar_holds_at_every_temperature(engine: SupervisedEngine) -> None:
    grammar = 'root ::= "{" [0-9]{3} "}"'
    for sampling in (GREEDY, *(replace(HOT, seed=seed) for seed in range(4))):
        text, _, _, reason = await ask(engine, replace(sampling, grammar=grammar, max_tokens=40))
        assert (text[0], text[1:4].isdigit(), text[4:], reason) == ("{", True, "}", "stop")
