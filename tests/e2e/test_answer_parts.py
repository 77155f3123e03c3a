"""A model whose template takes tools in a form of its own and opens reasoning, through the stock client.

On the verifying transport, and on the plain listener as any other client meets it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from client_sdk import Appliance, Policy
from tests.e2e.programs import MODEL, Served, free_port, make_policy

pytestmark = pytest.mark.model
# Prompts end with "<think>"; that a sentence ends it is configured, as the model at hand knows no end tag.
TEMPLATE = Path(__file__).parents[1] / "templates" / "fenced.jinja"
CONFIG = """
[server]
unsafe_plain_http_listen = ["127.0.0.1:{port}"]

[attestation]
attester = "insecure"

[[models]]
name = "{model}"
chat_template_file = "{template}"
reasoning_tags = ["<think>", "."]
"""
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
BASE: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0.7, "max_tokens": 120}


@pytest.fixture(scope="module")
def plain_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def configured(workspace: Path, plain_port: int) -> tuple[str, ...]:
    file = workspace / "parts.toml"
    file.write_text(CONFIG.format(port=plain_port, model=MODEL, template=TEMPLATE))
    return ("--config", str(file))


@pytest.fixture(scope="module")
def thinking(workspace: Path, configured: tuple[str, ...]) -> Iterator[Served]:
    with Served(workspace / "parts", arguments=configured) as served:
        yield served


@pytest.fixture(scope="module")
def appliance(thinking: Served, workspace: Path, configured: tuple[str, ...]) -> Iterator[Appliance]:
    policy = Policy.load(make_policy(workspace / "parts-policy", configured))
    with Appliance(thinking.url, policy=policy) as appliance:
        yield appliance


@pytest.fixture(scope="module", params=["attested", "plain"])
def client(request: pytest.FixtureRequest, appliance: Appliance, plain_port: int) -> Iterator[openai.OpenAI]:
    if request.param == "attested":
        yield appliance.openai()
        return
    with httpx.Client(trust_env=False) as http:
        options: Any = {"http_client": http}
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{plain_port}/v1", api_key="none", **options)


class Joined:
    """The parts of choice 0 of a stream."""

    def __init__(self, chunks: list[Any]) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[str]] = []
        self.tokens: list[bytes] = []
        for chunk in chunks:
            for choice in chunk.choices:
                delta = choice.delta
                self.content += delta.content or ""
                self.reasoning += getattr(delta, "reasoning_content", None) or ""
                self.tokens += [bytes(entry.bytes) for entry in (choice.logprobs.content if choice.logprobs else [])]
                for part in delta.tool_calls or ():
                    if part.function.name is not None:
                        assert part.index == len(self.calls)
                        self.calls.append([part.function.name, ""])
                    self.calls[part.index][1] += part.function.arguments
        self.finish = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]


def test_reasoning_comes_apart_and_is_counted(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(**BASE, seed=3)
    message = answer.choices[0].message
    reasoning = message.reasoning_content
    assert reasoning
    assert "." not in reasoning
    assert message.content
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    options: Any = {"include_usage": True, "include_obfuscation": True}
    chunks: list[Any] = list(client.chat.completions.create(**BASE, seed=3, stream=True, stream_options=options))
    joined = Joined(chunks)
    assert (joined.reasoning, joined.content) == (reasoning, message.content)
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == details.reasoning_tokens
    assert all(chunk.obfuscation is not None for chunk in chunks[:-1])
    again = [*QUESTION, message.model_dump(), {"role": "user", "content": [{"type": "text", "text": "And in Rome?"}]}]
    reply = client.chat.completions.create(**{**BASE, "messages": again, "max_tokens": 4})
    assert reply.choices[0].finish_reason == "length"


def test_b107_usage_comes_once_and_last_where_it_was_asked_for(client: openai.OpenAI) -> None:
    fields: Any = {**BASE, "max_tokens": 3, "stream": True}
    choices: list[Any] = [None, {"include_usage": False}, {"include_usage": True}]
    for options in choices:
        chunks: list[Any] = list(client.chat.completions.create(**fields, stream_options=options))
        wanted = bool(options and options["include_usage"])
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [wanted]
        assert bool(chunks[-1].choices) is not wanted
        if wanted:
            assert chunks[-1].usage.completion_tokens == 3
            assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 3


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "get_weather"}}])
def test_calls_come_in_the_templates_form_behind_the_reasoning(client: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {**BASE, "tools": TOOLS, "tool_choice": choice, "seed": 5, "logprobs": True}
    answer: Any = client.chat.completions.create(**fields)
    message, finish = answer.choices[0].message, answer.choices[0].finish_reason
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    if choice != "auto" and finish == "tool_calls":
        assert calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), CITY if name == "get_weather" else {"type": "object"})
    joined = Joined(list(client.chat.completions.create(**fields, stream=True)))
    assert (joined.content, joined.calls, joined.finish) == (message.content or "", calls, [finish])
    assert joined.reasoning == message.reasoning_content
    generated = b"".join(bytes(entry.bytes) for entry in answer.choices[0].logprobs.content)
    assert b"".join(joined.tokens) == generated
    assert generated.decode().startswith(joined.reasoning)
    if calls:
        assert b"<calls><call>function<sep>" + calls[0][0].encode() + b"\n```json\n" in generated
        again: list[Any] = [*QUESTION, message.model_dump()]
        again += [{"role": "tool", "tool_call_id": call.id, "content": "20"} for call in message.tool_calls or ()]
        reply = client.chat.completions.create(**{**BASE, "messages": again, "tools": TOOLS, "max_tokens": 4})
        assert reply.choices


def test_receipts_say_how_the_template_took_them(appliance: Appliance) -> None:
    client = appliance.openai()
    answer: Any = client.chat.completions.create(**BASE, tools=TOOLS, tool_choice="required", seed=1)
    execution = appliance.receipt_for(answer.id).claims.execution or {}
    assert execution["tool-format"] == "template"
    assert json.loads(str(execution["tool-syntax"]))[:2] == ["<calls>", "<call>function<sep>"]
    assert execution["reasoning-tokens"] == answer.usage.completion_tokens_details.reasoning_tokens
    assert json.loads(str(execution["reasoning-marks"]))[0][1].startswith(".")
    plain: Any = client.chat.completions.create(**{**BASE, "max_tokens": 4})
    assert "tool-format" not in (appliance.receipt_for(plain.id).claims.execution or {})


@pytest.mark.parametrize("limit", range(1, 60, 12))
def test_answers_cut_anywhere_verify(appliance: Appliance, limit: int) -> None:
    fields: Any = {**BASE, "tools": TOOLS, "tool_choice": "required", "seed": 2, "max_tokens": limit}
    answer: Any = appliance.openai().chat.completions.create(**fields)
    joined = Joined(list(appliance.openai().chat.completions.create(**fields, stream=True)))
    assert joined.content == (answer.choices[0].message.content or "")


def test_a_schema_holds_for_what_follows_the_reasoning(client: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer: Any = client.chat.completions.create(**BASE, response_format=shape, seed=4)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.reasoning_content
    jsonschema.validate(json.loads(choice.message.content or ""), CITY)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_probabilities(client: openai.OpenAI, stream: bool) -> None:
    prompt = "The capital of France is Paris"
    answer: Any = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=2, max_tokens=3, temperature=0, stream=stream
    )
    choices = [choice for part in (list(answer) if stream else [answer]) for choice in part.choices]
    lists = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for each in lists for token in each.tokens]
    numbers = [number for each in lists for number in each.token_logprobs]
    offsets = [offset for each in lists for offset in each.text_offset]
    assert "".join(choice.text for choice in choices).startswith(prompt)
    assert "".join(tokens) == "".join(choice.text for choice in choices)
    assert numbers[0] is None
    assert all(number < 0 for number in numbers[1:])
    assert offsets == [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    if not stream:
        scored: Any = client.completions.create(model=MODEL, prompt=prompt, logprobs=2, max_tokens=3, temperature=0)
        assert scored.choices[0].logprobs.token_logprobs == numbers[-3:]
