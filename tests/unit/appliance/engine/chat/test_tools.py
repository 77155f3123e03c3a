"""Calls of tools come out of generated text the same whatever pieces it comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.chat.json_schema import SchemaRefused
from appliance.engine.chat.tools import Tool, ToolText, grammar
from client_sdk.wire.tools import HERMES

NAMES = st.text("abc_-9", min_size=1, max_size=6)
ARGUMENTS = st.sampled_from(
    ["{}", '{"a": "}\\\\n</tool_call>"}', '{ "b": [1, {"c": null}] }', '{"a": "<tool_call>"}', "{}\n "]
)
PLAIN = st.text("<tol_cal> \nü", max_size=20).filter(lambda text: "<tool_call>" not in text)


@given(PLAIN, st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3), st.integers(1, 7))
def test_calls_are_those_that_were_spelled(text: str, calls: list[tuple[str, str]], size: int) -> None:
    generated = HERMES.spelled(text, calls)
    parser = ToolText()
    said, heard = "", dict[int, list[str]]()
    parts = [parser.feed(generated[start : start + size]) for start in range(0, len(generated), size)]
    for plain, deltas in [*parts, parser.finish()]:
        said += plain
        for delta in deltas:
            assert (delta.name is None) == (delta.index in heard)
            heard.setdefault(delta.index, [delta.name or ""]).append(delta.arguments)
    assert said == parser.text == text
    assert [(each[0], "".join(each[1:])) for each in heard.values()] == parser.calls == calls
    assert parser.complete == bool(calls)


@given(PLAIN, st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=2), st.data())
def test_a_cut_loses_only_what_stands_between_arguments(
    text: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    generated = HERMES.spelled(text, calls)
    cut = data.draw(st.integers(0, len(generated)))
    parser = ToolText()
    parser.feed(generated[:cut])
    parser.finish()
    for whole, part in zip(calls, parser.calls, strict=False):
        assert whole[0] == part[0]
        assert (whole[1] + HERMES.after).startswith(part[1])


def test_schemas_of_arguments_are_refused_like_all_others() -> None:
    with pytest.raises(SchemaRefused):
        grammar([Tool(name="f", parameters={"type": "object", "not": {}})], optional=True, parallel=True)
    text = grammar([Tool(name="f", parameters={"type": "object"})], optional=True, parallel=True)
    assert "root ::= t0" in text
