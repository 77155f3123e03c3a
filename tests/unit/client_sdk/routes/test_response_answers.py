"""What the SDK makes of answers of /v1/responses, made by the dialect that the appliance makes them with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.api.responses import ResponsesDialect
from appliance.engine.chat.tools import CallDelta
from appliance.inference.request import Choice, Heading, Piece, Usage
from client_sdk import MalformedError, Rejection
from client_sdk.routes.chat import AnswerContent
from client_sdk.routes.responses import ResponseCollector, read_response
from client_sdk.wire import responses as wire

HEADING = Heading(identifier="0f" * 16, created=1_700_000_000, model="m")
USAGE = Usage(prompt_tokens=7, completion_tokens=5)
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


class Thought:
    """Stands for what takes reasoning out of generated text: its result is given."""

    def __init__(self, reasoning: str) -> None:
        self.reasoning = reasoning


class Parts:
    """Stands for what takes calls out of generated text: its result is given."""

    def __init__(self, text: str, calls: list[tuple[str, str]], *, complete: bool) -> None:
        self.text, self.calls, self.complete = text, calls, complete


def dialect(**fields: Any) -> ResponsesDialect:
    made = ResponsesDialect()
    made.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())
    return made


def told(pieces: list[Piece], finish: str, **fields: Any) -> tuple[bytes, list[dict[str, Any]]]:
    """The whole answer, and the events of the stream, for the same pieces."""
    choice = Choice(0, measured=False)
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        choice.output.add(piece.text, b"\1\0\0\0")
        for call in piece.calls:
            if call.name is not None:
                calls.append((call.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    if fields.get("tools"):
        given: Any = Parts(choice.output.text, calls, complete=finish == "tool_calls")
        choice.tools = given
    thought: Any = Thought("".join(piece.reasoning for piece in pieces))
    if thought.reasoning:
        choice.reasoning = thought
        choice._said = [piece.text for piece in pieces]
    choice.output.finish = finish
    one = dialect(stream=True, **fields)
    frames = [*one.opening(HEADING, [choice])]
    for piece in pieces:
        frames += one.delta(HEADING, choice, piece)
    frames += [*one.finish(HEADING, choice), *one.closing(HEADING, USAGE)]
    whole = dialect(**fields).whole(HEADING, [choice], USAGE)
    return whole, [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def collect(events: list[dict[str, Any]]) -> AnswerContent:
    collector = ResponseCollector()
    for event in events:
        collector.add(json.dumps(event).encode())
    return collector.content()


TEXT = [Piece(text="Hel"), Piece(text="lo ü")]
CALLS = [
    Piece(text="Wait. "),
    Piece(text="", calls=(CallDelta(index=0, name="f", arguments=""), CallDelta(index=0, name=None, arguments='{"a"'))),
    Piece(text="", calls=(CallDelta(index=0, name=None, arguments=":1}"),)),
    Piece(text="", calls=(CallDelta(index=1, name="f", arguments=""), CallDelta(index=1, name=None, arguments="{}"))),
]
CASES: dict[str, tuple[list[Piece], str, dict[str, Any]]] = {
    "text": (TEXT, "stop", {}),
    "nothing": ([], "stop", {}),
    "cut": (TEXT, "length", {"max_output_tokens": 2, "instructions": "Be brief.", "metadata": {"a": "b"}}),
    "calls": (CALLS, "tool_calls", {"tools": [FUNCTION]}),
    "calls only": (CALLS[1:], "tool_calls", {"tools": [FUNCTION], "tool_choice": "required"}),
    "cut call": (CALLS[:2], "length", {"tools": [FUNCTION]}),
    "reasoning": ([Piece(text="", reasoning="hm "), Piece(text="Yes", reasoning="hm"), Piece(text="!")], "stop", {}),
    "cut reasoning": ([Piece(text="", reasoning="hm")], "length", {}),
    "reasoning and calls": ([Piece(text="", reasoning="hm"), *CALLS], "tool_calls", {"tools": [FUNCTION]}),
    "text beside tools": (TEXT, "stop", {"tools": [FUNCTION]}),
}


@pytest.mark.parametrize("name", CASES)
def test_stream_and_whole_answer_say_the_same(name: str) -> None:
    pieces, finish, fields = CASES[name]
    whole, events = told(pieces, finish, **fields)
    content = read_response(whole)
    assert collect(events) == content
    collector = ResponseCollector()
    finished = [collector.add(json.dumps(event).encode()).finished for event in events]
    assert finished == [frozenset()] * (len(events) - 1) + [frozenset({0})]
    assert content.finishes == {0: finish}
    assert content.texts == {0: "".join(piece.text for piece in pieces)}
    assert content.reasoning.get(0, "") == "".join(piece.reasoning for piece in pieces)
    assert content.usage == (7, 5)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == json.loads(whole)


def test_the_names_of_events_and_their_order() -> None:
    _, events = told(*CASES["calls"][:2], tools=[FUNCTION])
    kinds = [event["type"].removeprefix("response.") for event in events]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call[:2],
        *call[1:],
        *call,
        "completed",
    ]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [leaf for key, item in items for leaf in leaves(item, (*path, key))]
    yield from inner or [path]


def changed(document: Any, path: tuple[Any, ...]) -> Any:
    """A copy with another value of the same type at the path."""
    document = copy.deepcopy(document)
    holder = document
    for step in path[:-1]:
        holder = holder[step]
    value = holder[path[-1]]
    if isinstance(value, bool) or value is None:
        holder[path[-1]] = {True: False, False: True, None: "x"}[value]
    elif isinstance(value, int | float):
        holder[path[-1]] = value + 1
    elif isinstance(value, str):
        holder[path[-1]] = value + "x"
    else:
        holder[path[-1]] = [*value, "x"] if isinstance(value, list) else {**value, "x": "x"}
    return document


def told_by(read: Callable[[], AnswerContent]) -> AnswerContent | Rejection:
    """What comes out, or the code of the rejection."""
    try:
        return read()
    except MalformedError as error:
        return error.code


# What chat answers say without a receipt that could contradict them, too.
FREE = {("usage", "input_tokens_details", "cached_tokens"), ("created_at",)}


@pytest.mark.parametrize(
    "name", ["text", "cut", "calls", "cut call", "reasoning", "cut reasoning", "reasoning and calls"]
)
def test_no_value_of_a_whole_answer_can_change_unseen(name: str) -> None:
    pieces, finish, fields = CASES[name]
    whole, _ = told(pieces, finish, **fields)
    content, document = read_response(whole), json.loads(whole)
    unseen = set()
    for path in leaves(document):
        if told_by(lambda path=path: read_response(json.dumps(changed(document, path)).encode())) == content:
            unseen.add(path)
    ids = {("output", index, key) for index in range(4) for key in ("id", "call_id")}
    assert unseen <= FREE | ids
    if finish == "length":
        assert not {path for path in unseen if path[-1] == "status"}


@pytest.mark.parametrize(
    "name", ["text", "cut", "calls", "cut call", "reasoning", "cut reasoning", "reasoning and calls"]
)
def test_no_value_of_an_event_can_change_unseen(name: str) -> None:
    pieces, finish, fields = CASES[name]
    _, events = told(pieces, finish, **fields)
    content = collect(events)
    for index, event in enumerate(events):
        for path in leaves(event):
            if path[-2:] == ("input_tokens_details", "cached_tokens"):
                continue
            lie = [*events[:index], changed(event, path), *events[index + 1 :]]
            assert told_by(lambda lie=lie: collect(lie)) != content, (index, path)


@pytest.mark.parametrize("name", CASES)
def test_events_can_neither_be_left_out_nor_repeated_nor_swapped(name: str) -> None:
    pieces, finish, fields = CASES[name]
    _, events = told(pieces, finish, **fields)
    for index in range(len(events)):
        others = [events[:index] + events[index + 1 :]] if index < len(events) - 1 else []
        others += [[*events[: index + 1], *events[index:]]]
        others += [[*events[:index], events[index + 1], events[index], *events[index + 2 :]]] if others[1:] else []
        for lie in others:
            renumbered = [{**event, "sequence_number": number} for number, event in enumerate(lie)]
            for told_so in (lie, renumbered):
                assert told_by(lambda told_so=told_so: collect(told_so)) != collect(events)


def test_a_failed_stream_ends_with_an_error_and_nothing_else() -> None:
    from appliance.errors import EngineFailed

    one = dialect(stream=True)
    choice = Choice(0, measured=False)
    frames = [*one.opening(HEADING, [choice]), *one.delta(HEADING, choice, Piece(text="Hel"))]
    frames.append(one.failure(HEADING, EngineFailed("engine_failed", "the engine stopped")))
    collector = ResponseCollector()
    meanings = [collector.add(frame.removeprefix(b"data: ")) for frame in frames]
    assert [meaning.error for meaning in meanings] == [False] * (len(frames) - 1) + [True]
    last = json.loads(frames[-1].removeprefix(b"data: "))
    assert last["response"]["error"] == {
        "message": "the engine stopped",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    with pytest.raises(MalformedError):
        collector.add(frames[-1].removeprefix(b"data: "))


@pytest.mark.parametrize("field", ["output", "usage"])
def test_a_failed_response_shows_nothing_that_nobody_compares(field: str) -> None:
    from appliance.errors import EngineFailed

    whole, events = told(TEXT, "stop")
    one = dialect(stream=True)
    one.opening(HEADING, [Choice(0, measured=False)])
    frame = one.failure(HEADING, EngineFailed("engine_failed", "the engine stopped"))
    failed = json.loads(frame.removeprefix(b"data: "))
    collect([*events[:2], failed])
    failed["response"][field] = json.loads(whole)[field]
    with pytest.raises(MalformedError):
        collect([*events[:2], failed])


@pytest.mark.parametrize(
    "change",
    [
        lambda response: response["output"][2].update(call_id=response["output"][1]["call_id"]),
        lambda response: response.update(usage=None),
        lambda response: response["usage"].update(note="Five."),
        lambda response: response["usage"]["input_tokens_details"].update(note="Five."),
        lambda response: response["usage"]["input_tokens_details"].update(cached_tokens="Five."),
        lambda response: response["usage"]["output_tokens_details"].update(note="Five."),
        lambda response: response["usage"].pop("input_tokens_details"),
    ],
)
def test_calls_are_told_apart_and_usage_says_nothing_else(change: Callable[[dict[str, Any]], object]) -> None:
    whole, events = told(*CASES["calls"][:2], tools=[FUNCTION])
    response = json.loads(whole)
    change(response)
    with pytest.raises(MalformedError):
        read_response(json.dumps(response).encode())
    with pytest.raises(MalformedError):
        collect([*events[:-1], {**events[-1], "response": response}])


@pytest.mark.parametrize("name", ["cut", "cut reasoning"])
def test_text_that_was_cut_is_not_shown_as_whole(name: str) -> None:
    pieces, finish, fields = CASES[name]
    whole, _ = told(pieces, finish, **fields)
    document = json.loads(whole)
    document["output"][-1]["status"] = "completed"
    with pytest.raises(MalformedError):
        read_response(json.dumps(document).encode())


@pytest.mark.parametrize(
    "body",
    [b"{}", b"[]", b"null", b"\xff", b'{"type":"response.created"}', b'{"type":7}', b'{"error":{"message":"x"}}'],
)
def test_what_is_no_response_is_malformed(body: bytes) -> None:
    for read in (read_response, ResponseCollector().add):
        with pytest.raises(MalformedError):
            read(body)


def test_the_chat_form() -> None:
    """Receipts speak of it: fields renamed, items as messages, and nothing unknown left out."""
    request = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": "well"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
        ],
        "max_output_tokens": 5,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "f"},
        "store": False,
        "truncation": None,
        "seed": 7,
        "unknown": 1,
    }
    function = {"name": "f", "arguments": "{}"}
    assert wire.chat_form(request) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "ab"},
            {
                "role": "assistant",
                "content": "well",
                "tool_calls": [{"id": number, "type": "function", "function": function} for number in ("1", "2")],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "3", "type": "function", "function": function}],
            },
        ],
        "max_completion_tokens": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "seed": 7,
        "unknown": 1,
    }
    assert wire.chat_form({"model": "m", "input": "x", "store": True})["store"] is True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "type", "text"]), inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_whatever_stands_in_an_answer_it_is_read_or_malformed(name: str, data: st.DataObject) -> None:
    pieces, finish, fields = CASES[name]
    whole, events = told(pieces, finish, **fields)
    index = data.draw(st.integers(0, len(events)))
    document = json.loads(whole) if index == len(events) else events[index]
    path = data.draw(st.sampled_from(sorted(leaves(document), key=str)))
    cut = data.draw(st.integers(1, len(path)))
    holder: Any = document
    for step in path[: cut - 1]:
        holder = holder[step]
    holder[path[cut - 1]] = data.draw(JSON)
    if index == len(events):
        told_by(lambda: read_response(json.dumps(document).encode()))
    else:
        told_by(lambda: collect(events))
