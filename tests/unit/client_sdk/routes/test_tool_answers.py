"""Calls of tools in answers: read in order or not at all, and put back into the text that the receipt commits to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from client_sdk.errors import MalformedError
from client_sdk.receipts.comparisons import _forms, _Spelling
from client_sdk.routes.chat import ROUTE_CHAT, DeltaCollector, read_whole
from client_sdk.wire.tools import FACT_MARKS, FACT_SYNTAX, HERMES, CallSyntax, marks_of, syntax_of


def frame(*calls: Any, content: str | None = None, finish: str | None = None) -> bytes:
    delta = {"content": content, "tool_calls": list(calls)} if calls else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return json.dumps({"id": "x", "model": "m", "choices": [choice]}).encode()


def part(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments} | ({"name": name} if name else {})}


def test_calls_of_a_stream_and_of_a_whole_answer_are_the_same() -> None:
    collector = DeltaCollector(ROUTE_CHAT)
    for data in (
        frame(content="Let me see."),
        frame(part(0, "", "f")),
        frame(part(0, '{"a"'), part(0, ": 1}"), part(1, "", "g")),
        frame(part(1, "{}"), finish="tool_calls"),
    ):
        collector.add(data)
    streamed = collector.content()
    assert streamed.calls == {0: (("f", '{"a": 1}'), ("g", "{}"))}
    message = {
        "content": "Let me see.",
        "tool_calls": [{"function": {"name": name, "arguments": text}} for name, text in streamed.calls[0]],
    }
    whole = {"id": "x", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    assert read_whole(ROUTE_CHAT, json.dumps(whole).encode()) == streamed


@pytest.mark.parametrize(
    "calls",
    [
        [part(0, "{}")],
        [part(1, "", "f")],
        [part(0, "", "f"), part(0, "", "f")],
        [part(0, "", "f"), part(1, "", "g"), part(0, "{}")],
        [part(True, "", "f")],
        [part(False, "", "f")],
        ["f"],
        [{"index": 0}],
        [{"index": 0, "function": {"name": 1}}],
    ],
)
def test_calls_out_of_order_or_form_are_malformed(calls: list[Any]) -> None:
    with pytest.raises(MalformedError):
        DeltaCollector(ROUTE_CHAT).add(frame(*calls))


CALLS = [("f", '{"a": 1}'), ("g", "{}")]


SHAPES = {
    "hermes": HERMES,
    "list": CallSyntax(
        start="[TOOL_CALLS] [", before='{"name": "', middle='", "arguments": ', after="}", between=", ", end="]"
    ),
    "single": CallSyntax(start="", before='{"name": "', middle='", "parameters": ', after="}", between=None, end=""),
    "fenced": CallSyntax(
        start="<calls>",
        before="<call>function<sep>",
        middle="\n```json\n",
        after="\n```</call>",
        between="\n",
        end="</calls>",
    ),
    "bare": CallSyntax(start="", before="[CALL]", middle="[ARGS]", after="", between="", end=""),
}
SHAPED = pytest.mark.parametrize("syntax", SHAPES.values(), ids=SHAPES)


def spelling(syntax: CallSyntax = HERMES, tools: Sequence[str] = ("f", "g")) -> _Spelling:
    most = 1 if syntax.between is None else 8
    return _Spelling(syntax=syntax, tools=tools, most=most, marks=[("", "")])


def spellings(text: str, calls: Sequence[tuple[str, str]], form: _Spelling, *, whole: bool) -> list[str]:
    base, rests = _forms(text, calls, form, whole=whole)
    return [base, *(base + rest[:size] for rest in rests for size in range(1, len(rest) + 1))]


def made(syntax: CallSyntax) -> list[tuple[str, str]]:
    return CALLS if syntax.between is not None else CALLS[:1]


@SHAPED
def test_whole_calls_have_one_spelling(syntax: CallSyntax) -> None:
    calls = made(syntax)
    assert list(spellings("Hm. ", calls, spelling(syntax), whole=True)) == [syntax.spelled("Hm. ", calls)]
    assert list(spellings("Hm. ", (), spelling(syntax, ()), whole=False)) == ["Hm. "]


@SHAPED
def test_every_cut_is_among_the_spellings_of_what_it_leaves(syntax: CallSyntax) -> None:
    """Whatever part of the generated text the limit left, the answer made of it leads back to it."""
    from appliance.engine.chat.tools import ToolText

    generated = syntax.spelled("Hm. ", made(syntax))
    for cut in range(len(generated)):
        parser = ToolText(syntax)
        parser.feed(generated[:cut])
        parser.finish()
        assert generated[:cut] in set(spellings(parser.text, parser.calls, spelling(syntax), whole=False)), cut


@SHAPED
def test_the_form_of_calls_comes_back_from_a_receipt(syntax: CallSyntax) -> None:
    assert syntax_of({FACT_SYNTAX: syntax.encode()}) == syntax


@pytest.mark.parametrize(
    "stated",
    [
        *("", "{}", "[]", '["","","","","",null]', '["a"]', "[" * 5000, 7, '["","","","","","x",""]'),
        *('["","","b","c",null,""]', '["","a","","c",null,""]'),  # nothing begins a call, or stands behind a name
    ],
)
def test_a_form_that_is_none_is_refused(stated: object) -> None:
    with pytest.raises((ValueError, RecursionError)):
        syntax_of({FACT_SYNTAX: stated})
    with pytest.raises((ValueError, RecursionError)):
        marks_of({FACT_MARKS: stated}, 1)
