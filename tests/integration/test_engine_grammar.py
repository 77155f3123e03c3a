"""Grammars ask about one token first: what comes out is what asking about all of them would give."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from appliance.engine.batch import Segment
from appliance.engine.chat import json_schema
from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions
from appliance.engine.types import SamplingParams

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=7, max_tokens=60)
ANY_OBJECT = json_schema.grammar({"type": "object"})
PROMPTS = (
    "Describe a cat named Tom as a JSON object:",
    "The capital of France is",  # the model would rather go on in prose: nearly every token is refused first
)


@pytest.fixture(scope="module")
def runtime(smollm2: Path) -> Iterator[LlamaRuntime]:
    fd = os.open(smollm2, os.O_RDONLY)
    options = RuntimeOptions(fd=fd, kv_tokens=256, n_batch=63, n_sequences=1, threads=1)
    yield LlamaRuntime(options, progress=lambda _: None)
    os.close(fd)


class AllFirst:
    """llama.cpp's own chain for greedy answers, which asks the grammar about the whole vocabulary for every token."""

    logprobs = ()

    def __init__(self, runtime: LlamaRuntime, params: SamplingParams) -> None:
        self._context = runtime._context
        vocabulary = runtime._vocab
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        biases = (llama_cpp.llama_logit_bias * max(1, len(params.logit_bias)))(
            *(llama_cpp.llama_logit_bias(token, bias) for token, bias in params.logit_bias)
        )
        samplers = [llama_cpp.llama_sampler_init_logit_bias(runtime.vocabulary_size, len(params.logit_bias), biases)]
        if params.repeat_penalty != 1.0:
            samplers.append(
                llama_cpp.llama_sampler_init_penalties(runtime.vocabulary_size, 256, params.repeat_penalty, 0.0, 0.0)
            )
        assert params.grammar is not None
        samplers.append(llama_cpp.llama_sampler_init_grammar(vocabulary, params.grammar.encode(), b"root"))
        samplers.append(llama_cpp.llama_sampler_init_greedy())
        for sampler in samplers:
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def sample(self, row: int) -> int:
        return int(llama_cpp.llama_sampler_sample(self._chain, self._context, row))

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._chain)


def prompt(runtime: LlamaRuntime, text: str) -> int:
    """Evaluate `text` from an empty context; returns its last row."""
    runtime.forget(0)
    tokens = runtime.tokenize(text, parse_special=False)
    runtime.decode([Segment(sequence=0, position=0, tokens=tokens, outputs=1)])
    return len(tokens) - 1


def answer(runtime: LlamaRuntime, text: str, sampler: Any) -> list[int]:
    row = prompt(runtime, text)
    position, made = row + 1, list[int]()
    while len(made) < 60:
        made.append(sampler.sample(row))
        if runtime.is_end(made[-1]):
            break
        runtime.decode([Segment(sequence=0, position=position, tokens=made[-1:], outputs=1)])
        row, position = 0, position + 1
    sampler.close()
    return made


@pytest.mark.parametrize("text", PROMPTS)
@pytest.mark.parametrize(
    "change", [{}, {"repeat_penalty": 1.3, "logit_bias": ((28, -5.0), (198, 3.0))}], ids=["plain", "adjusted"]
)
def test_greedy_answers_are_those_of_asking_about_all_tokens_first(
    runtime: LlamaRuntime, text: str, change: dict[str, Any]
) -> None:
    params = replace(GREEDY, grammar=ANY_OBJECT, **change)
    assert answer(runtime, text, runtime.sampler(params)) == answer(runtime, text, AllFirst(runtime, params))


@pytest.mark.parametrize("change", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}])
def test_drawn_answers_keep_to_the_grammar_and_to_the_seed(runtime: LlamaRuntime, change: dict[str, Any]) -> None:
    params = replace(GREEDY, grammar='root ::= "{" [0-9]{3} "}"', **change)
    for seed in range(5):
        made = [answer(runtime, PROMPTS[1], runtime.sampler(replace(params, seed=seed))) for _ in range(2)]
        assert made[0] == made[1]
        text = b"".join(map(runtime.piece, made[0])).decode()
        assert (text[0], text[1:4].isdigit(), text[4:]) == ("{", True, "}")


def test_a_draw_has_the_distribution_of_the_allowed_tokens(runtime: LlamaRuntime) -> None:
    words = (" the", " a", " not", " in", " now")
    grammar = "root ::= " + " | ".join(f'"{word}"' for word in words)
    pieces = [runtime.piece(token).decode("utf-8", "replace") for token in range(runtime.vocabulary_size)]
    allowed = [token for token, piece in enumerate(pieces) if piece and any(word.startswith(piece) for word in words)]
    row = prompt(runtime, PROMPTS[1])
    logits = runtime.logits(row).astype(float)[allowed]
    weights = np.exp(logits - logits.max())
    params, draws = replace(GREEDY, temperature=1.0, grammar=grammar), 1500
    counts = dict.fromkeys(allowed, 0)
    for seed in range(draws):
        sampler = runtime.sampler(replace(params, seed=seed))
        counts[sampler.sample(row)] += 1
        sampler.close()
    for token, share in zip(allowed, weights / weights.sum(), strict=True):
        deviation = math.sqrt(share * (1 - share) / draws)
        assert abs(counts[token] / draws - share) < 4 * deviation + 2 / draws
