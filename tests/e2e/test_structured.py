"""Answers held to JSON and to schemas, verified by the SDK, whatever the seed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from client_sdk import Appliance, Policy
from tests.e2e.programs import MODEL, Served

pytestmark = pytest.mark.model
QUESTION: list[Any] = [{"role": "user", "content": "Describe a small dog as JSON."}]
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["dog", "cat", 'a "quoted" ü']},
            "legs": {"type": "integer", "minimum": 0, "maximum": 12},
            "age": {"type": ["integer", "null"], "minimum": 0},
            "code": {"type": "string", "minLength": 2, "maxLength": 4},
            "good": {"type": "boolean"},
        },
        "required": ["kind", "legs", "age", "code", "good"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "description": "Any subset, in order.",
        "properties": {"a": {"const": 1}, "b": {"type": "null"}, "c": {"enum": [True, False]}},
        "required": ["b"],
    },
    "arrays": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "minItems": 1, "maxItems": 3},
    "references": {
        "$defs": {
            "pair": {"type": "object", "properties": {"x": {"$ref": "#/$defs/one"}}, "required": ["x"]},
            "one": {"const": [1]},
        },
        "anyOf": [{"$ref": "#/$defs/pair"}, {"$ref": "#/$defs/one"}],
    },
    "map": {"type": "object", "additionalProperties": {"enum": [1, 2]}},
}


@pytest.fixture(scope="module")
def client(server: Served, policy: Policy) -> Iterator[openai.OpenAI]:
    with Appliance(server.url, policy=policy) as appliance:
        yield appliance.openai()


def shape(schema: object, **fields: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_b143_every_complete_answer_validates(client: openai.OpenAI, name: str) -> None:
    complete = 0
    for seed in (0, 4):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_format=shape(SCHEMAS[name], strict=True),
            seed=seed,
            n=4,
            temperature=1.2,
            max_tokens=48,
        )
        for choice in answer.choices:
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS[name])
                complete += 1
    assert complete >= (1 if name == "map" else 3), "most answers end well within the limit"


def test_json_object(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        response_format={"type": "json_object"},
        stream=True,
        temperature=0,
        max_tokens=160,
        frequency_penalty=0.2,
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.startswith("{")
    if chunks[-1].choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "^secret$"}, "pattern"),
        ({"type": "object", "properties": {"secret": {"format": "email", "type": "string"}}}, "format"),
        ({"$ref": "https://example.com/secret"}, "$ref"),
        ({"allOf": [{"title": "secret"}]}, "allOf"),
    ],
)
def test_b143_b153_what_no_grammar_holds_to_is_refused_before_generation(
    client: openai.OpenAI, schema: dict[str, Any], keyword: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=shape(schema), stream=stream)
        assert caught.value.code == "unsupported_schema"
        assert repr(keyword) in caught.value.message
        assert "secret" not in caught.value.message


def test_b153_hostile_schemas_leave_the_service_running(client: openai.OpenAI) -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(40):
        deep = {"anyOf": [deep]}
    looping = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    wide = {"enum": ["x" * 40 + str(number) for number in range(1000)]}
    for schema in (deep, looping, wide):
        with contextlib.suppress(openai.BadRequestError):  # a refusal is as good as an answer
            client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=shape(schema), max_tokens=4)
        assert client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1).choices
