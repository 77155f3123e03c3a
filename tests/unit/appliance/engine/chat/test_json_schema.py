"""Schemas become grammars, or are refused by the name of the keyword at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.chat.json_schema import (
    LIMIT_CHARACTERS,
    LIMIT_RULES,
    LIMIT_VALUES,
    Rules,
    SchemaRefused,
    any_object,
    grammar,
    literal,
)

REFUSED: list[tuple[Any, str]] = [
    ({"type": "string", "pattern": "^a$"}, "pattern"),
    ({"type": "string", "format": "date"}, "format"),
    ({"type": "string", "maxLength": 1001}, "maxLength"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength"),
    ({"type": "string", "minLength": True}, "minLength"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "prefixItems": [{}]}, "prefixItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "object", "patternProperties": {}}, "patternProperties"),
    ({"type": "object", "minProperties": 1}, "minProperties"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "number", "minimum": 1}, "minimum"),
    ({"type": "integer", "maximum": 5}, "maximum"),
    ({"type": "integer", "minimum": 5}, "minimum"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "maximum"),
    ({"type": "integer", "minimum": 0, "maximum": 10**6}, "maximum"),
    ({"type": "integer", "minimum": 0.5}, "minimum"),
    ({"oneOf": [{}]}, "oneOf"),
    ({"allOf": [{}]}, "allOf"),
    ({"not": {}}, "not"),
    ({"if": {}}, "if"),
    ({"anyOf": []}, "anyOf"),
    ({"anyOf": [{"type": "null"}], "type": "string"}, "type"),
    ({"$ref": "https://example.com/schema"}, "$ref"),
    ({"$ref": "#/$defs/missing"}, "$ref"),
    ({"$ref": "#/properties/a"}, "$ref"),
    ({"$ref": "#", "minLength": 1}, "minLength"),
    ({"$id": "x", "type": "null"}, "$id"),
    ({"enum": []}, "enum"),
    ({"enum": "x"}, "enum"),
    ({"enum": [1], "type": "string"}, "enum"),
    ({"type": "text"}, "type"),
    ({"type": []}, "type"),
    (False, "(schema)"),
    ({"type": "object", "properties": {"a": False}}, "(schema)"),
    ({"type": "object", "properties": {str(n): {"type": "null"} for n in range(LIMIT_RULES)}}, "(size)"),
    ({"enum": list(range(LIMIT_VALUES + 1))}, "(size)"),
    ({"anyOf": [{"const": number} for number in range(LIMIT_VALUES + 1)]}, "(size)"),
    ({"anyOf": [{"type": "integer", "minimum": n, "maximum": n + 999} for n in range(5)]}, "(size)"),
    ({"enum": ["a" * LIMIT_CHARACTERS]}, "(size)"),
    ({"type": "object", "properties": {"a" * LIMIT_CHARACTERS: True}}, "(size)"),
    ({"anyOf": [{"const": "a" * 1000}] * (LIMIT_CHARACTERS // 1000)}, "(size)"),
    ({"type": "integer", "minimum": None, "exclusiveMaximum": 5}, "exclusiveMaximum"),
    ({"surprise": 1}, "surprise"),
]


@pytest.mark.parametrize(("schema", "keyword"), REFUSED)
def test_b143_what_no_grammar_holds_to_is_refused_by_name(schema: Any, keyword: str) -> None:
    with pytest.raises(SchemaRefused) as caught:
        grammar(schema)
    assert caught.value.keyword == keyword


def test_schemas_together_are_bounded_as_one_is() -> None:
    """One answer that is held to any of very many values held up every other answer for as long as it took."""
    half = {"enum": list(range(LIMIT_VALUES // 2))}
    rules = Rules()
    rules.add(half)
    rules.add(half)
    with pytest.raises(SchemaRefused) as caught:
        rules.add({"const": 1})
    assert caught.value.keyword == "(size)"


def test_a_schema_may_refer_to_itself() -> None:
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert "root ::= " in grammar(tree)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYWORDS = sorted({key for schema, _ in REFUSED if isinstance(schema, dict) for key in schema} | {"items", "const"})


@given(st.dictionaries(st.sampled_from(KEYWORDS), JSON, max_size=4))
def test_any_schema_is_a_grammar_or_a_refusal_that_quotes_nothing(schema: dict[str, Any]) -> None:
    outcome = attempt(schema)
    if isinstance(outcome, SchemaRefused):
        assert outcome.keyword in ("(schema)", "type", *keys(schema))
        return
    assert "\nroot ::= " in outcome
    names = [line.partition(" ::= ")[0] for line in outcome.splitlines() if " ::= " in line]
    assert len(names) == len(set(names))


def keys(value: object) -> set[str]:
    """Of all objects in a JSON value: whatever is blamed stands in the schema, letter by letter."""
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def attempt(schema: object) -> str | SchemaRefused:
    try:
        return grammar(schema)
    except SchemaRefused as refused:
        return refused


@given(st.text())
def test_literals_are_one_line_of_ascii(text: str) -> None:
    quoted = literal(json.dumps(text, ensure_ascii=False))
    assert quoted.isascii()
    assert quoted.isprintable()


def test_an_object_of_any_kind_needs_no_schema() -> None:
    assert any_object().endswith("root ::= object\n")
