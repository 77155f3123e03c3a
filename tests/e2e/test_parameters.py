"""Every parameter of generation through the stock client and the verifying transport, on the real model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from client_sdk import Appliance, Policy
from tests.e2e.evidence import Collected
from tests.e2e.programs import MODEL, Served

pytestmark = pytest.mark.model
QUESTION: list[Any] = [{"role": "user", "content": "Name a colour."}]
BASE: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0.9, "seed": 5}
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def appliance(server: Served, policy: Policy, collected: Collected) -> Iterator[Appliance]:
    with Appliance(server.url, policy=policy, save=collected) as appliance:
        yield appliance


def texts(answer: Any, *, stream: bool) -> dict[int, str]:
    """Text by choice, of a chat answer or of plain completions."""
    found: dict[int, str] = defaultdict(str)
    for part in answer if stream else [answer]:
        for choice in part.choices:
            if hasattr(choice, "text"):
                found[choice.index] += choice.text
            else:
                found[choice.index] += (choice.delta if stream else choice.message).content or ""
    return dict(found)


@BOTH
def test_every_sampling_field_is_in_the_receipt_as_asked(appliance: Appliance, stream: bool) -> None:
    fields = {"top_k": 30, "min_p": 0.02, "repeat_penalty": 1.1, "deterministic": True}
    asked = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "top_p": 0.9, "logit_bias": {"1000": -5, "17": 1.5}}
    answer: Any = appliance.openai().chat.completions.create(
        messages=QUESTION, stream=stream, extra_body=fields, **BASE, **asked
    )
    identifier = list(answer)[-1].id if stream else answer.id
    decoding = appliance.receipt_for(identifier).claims.decoding or {}
    for name, value in {**fields, **asked, "logit_bias": decoding["logit_bias"], "n": 1, "logprobs": None}.items():
        assert decoding[name] == value, name
    assert isinstance(decoding["logit_bias"], bytes)


@BOTH
def test_b115_b116_chat_logprobs(appliance: Appliance, stream: bool) -> None:
    answer: Any = appliance.openai().chat.completions.create(
        messages=QUESTION, stream=stream, logprobs=True, top_logprobs=3, **BASE
    )
    parts = list(answer) if stream else [answer]
    choices = [choice for part in parts for choice in part.choices if choice.logprobs is not None]
    entries = [entry for choice in choices for entry in choice.logprobs.content]
    text = "".join(texts(parts, stream=True).values()) if stream else answer.choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert all(other.logprob <= 0 for other in (entry, *entry.top_logprobs))
    assert (appliance.receipt_for(parts[0].id).claims.decoding or {})["logprobs"] == 3


@BOTH
def test_b115_b116_completion_logprobs(appliance: Appliance, stream: bool) -> None:
    answer: Any = appliance.openai().completions.create(prompt="Blue, red,", stream=stream, logprobs=2, **BASE)
    choices = [choice for part in (list(answer) if stream else [answer]) for choice in part.choices]
    text = "".join(choice.text for choice in choices)
    lists = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for each in lists for token in each.tokens]
    offsets = [offset for each in lists for offset in each.text_offset]
    assert "".join(tokens) == text
    assert offsets == [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    for each in lists:
        for token, number, top in zip(each.tokens, each.token_logprobs, each.top_logprobs, strict=True):
            assert top[token] == number
            assert 2 <= len(top) <= 3
            assert sum(math.exp(value) for value in top.values()) <= 1 + 1e-9


@BOTH
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_choices_are_those_of_their_seeds(appliance: Appliance, stream: bool, chat: bool) -> None:
    client = appliance.openai()
    alike = {**BASE, "extra_body": {"deterministic": True}}  # else they may share a batch, which some models can tell

    def ask(**fields: Any) -> Any:
        if chat:
            return client.chat.completions.create(messages=QUESTION, **{**alike, **fields})
        return client.completions.create(prompt="A colour:", **{**alike, **fields})

    answer = ask(n=3, stream=stream)
    parts = list(answer) if stream else [answer]
    together = texts(parts, stream=True) if stream else texts(answer, stream=False)
    alone = {index: texts(ask(seed=5 + index), stream=False)[0] for index in range(3)}
    assert together == alone
    assert len(set(alone.values())) == 3
    receipt = appliance.receipt_for(parts[0].id)
    assert [len(facts.text) for facts in receipt.claims.output or ()] == [32] * 3
    if not stream:
        assert answer.usage.completion_tokens == sum(facts.count for facts in receipt.claims.output or ())


@BOTH
@pytest.mark.parametrize("echo", [False, True])
def test_lists_of_prompts_and_echo(appliance: Appliance, stream: bool, echo: bool) -> None:
    client, prompts = appliance.openai(), ["One, two, three,", "A, B, C, D,"]
    greedy = {**BASE, "temperature": 0}
    answer: Any = client.completions.create(prompt=prompts, n=2, echo=echo, stream=stream, **greedy)
    parts = list(answer) if stream else [answer]
    together = texts(parts, stream=True) if stream else texts(answer, stream=False)
    alone = [texts(client.completions.create(prompt=prompt, **greedy), stream=False)[0] for prompt in prompts]
    assert together == {index: (prompts[index // 2] if echo else "") + alone[index // 2] for index in range(4)}
    claims = appliance.receipt_for(parts[0].id).claims
    decoding = claims.decoding or {}
    assert (decoding["prompts"], decoding["n"], decoding["echo"]) == (2, 2, echo)
    if not stream:
        assert claims.prompt is not None
        assert answer.usage.prompt_tokens == claims.prompt.count


def test_token_arrays_ask_for_the_same_as_their_text(appliance: Appliance) -> None:
    client = appliance.openai()
    tokens = [3725, 28, 827, 28, 1296, 28]
    by_tokens = client.completions.create(prompt=tokens, **{**BASE, "temperature": 0})
    pair = client.completions.create(prompt=[tokens, tokens[:3]], **{**BASE, "temperature": 0})
    assert by_tokens.usage is not None
    assert by_tokens.usage.prompt_tokens == len(tokens)
    assert pair.choices[0].text == by_tokens.choices[0].text
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=[49152], **BASE)
    assert caught.value.code == "invalid_token"


def test_what_cannot_be_honoured_is_refused_by_name(appliance: Appliance) -> None:
    client = appliance.openai()
    for fields, name in (
        ({"n": 9}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"extra_body": {"mirostat": 2}}, "mirostat"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=QUESTION, **BASE, **fields)
        assert caught.value.param == name
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="def f(", suffix="return x", **BASE)
    assert caught.value.code == "suffix_not_supported"
