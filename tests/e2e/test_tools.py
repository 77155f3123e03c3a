"""Tools through the stock client, verified: chosen, forced, forbidden, streamed, cut short, and answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from client_sdk import Appliance, Policy
from tests.e2e.programs import MODEL, Served

pytestmark = pytest.mark.model
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
BASE: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "temperature": 0.7, "max_tokens": 60}
WEATHER = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def appliance(server: Served, policy: Policy) -> Iterator[Appliance]:
    with Appliance(server.url, policy=policy) as appliance:
        yield appliance


def test_b121_a_forced_call_validates_and_its_answer_can_be_sent_back(appliance: Appliance) -> None:
    client = appliance.openai()
    for seed in range(3):
        answer = client.chat.completions.create(
            **BASE,
            seed=seed,
            tool_choice=WEATHER,
            parallel_tool_calls=False,  # type: ignore[call-overload]
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.message.content) == ("get_weather", None)
        jsonschema.validate(json.loads(call.function.arguments), CITY)
        decoding = appliance.receipt_for(answer.id).claims.decoding or {}
        assert (decoding["tool_choice"], decoding["parallel_tool_calls"]) == ("function:get_weather", False)
    again: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        *QUESTION,
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=again, max_tokens=8)
    assert reply.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", "auto", "none"])
def test_streams_carry_the_calls_that_whole_answers_do(appliance: Appliance, choice: str) -> None:
    client = appliance.openai()
    whole = client.chat.completions.create(**BASE, seed=4, tool_choice=choice)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**BASE, seed=4, tool_choice=choice, stream=True))  # type: ignore[call-overload]
    message = whole.choices[0].message
    text, calls = "", list[list[str]]()
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for part in delta.tool_calls or ():
            if part.function.name is not None:
                assert part.index == len(calls)
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments
    assert text == (message.content or "")
    assert calls == [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    if choice == "none":
        assert not calls
    if choice == "required":
        assert calls


@pytest.mark.parametrize("limit", [1, 4, 9, 14, 20])
def test_a_call_that_is_cut_short_verifies(appliance: Appliance, limit: int) -> None:
    client = appliance.openai()
    fields = {**BASE, "max_tokens": limit, "tool_choice": "required", "seed": 1}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].finish_reason in ("length", "tool_calls")
    list(client.chat.completions.create(**fields, stream=True))
