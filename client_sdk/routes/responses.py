"""Read an answer of /v1/responses, whole or in events. The form is closed: what could show text that nothing compares
with the receipt is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from client_sdk.errors import Rejection
from client_sdk.routes.chat import MAX_CALLS, MAX_STREAM_TEXT_CHARS, AnswerContent, FrameMeaning, JsonReader
from client_sdk.wire import responses as wire

ROUTE_RESPONSES = "/v1/responses"

_STATED = frozenset({*wire.stated({}), "temperature", "top_p"})
_RESPONSE = _STATED | {
    "id",
    "object",
    "created_at",
    "status",
    "error",
    "incomplete_details",
    "model",
    "output",
    "usage",
}
_DETAILS = {"input_tokens_details": "cached_tokens", "output_tokens_details": "reasoning_tokens"}
_USAGE = frozenset({"input_tokens", "output_tokens", "total_tokens", *_DETAILS})
_REASONING = frozenset({"id", "type", "status", "summary", "content"})
_MESSAGE = frozenset({"id", "type", "status", "role", "content"})
_CALL = frozenset({"id", "type", "status", "call_id", "name", "arguments"})
_PARTS: Mapping[str, Mapping[str, object]] = {
    "message": {"type": "output_text", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text"},
}
"""What a part of an item says beside its text."""
_ORDER = ("reasoning", "message", "function_call")
_OF_ITEM = frozenset({"item_id", "output_index"})
_OF_TEXT = _OF_ITEM | {"content_index"}
_EVENTS: Mapping[str, frozenset[str]] = {
    wire.EVENT_CREATED: frozenset({"response"}),
    wire.EVENT_IN_PROGRESS: frozenset({"response"}),
    wire.EVENT_ITEM_ADDED: frozenset({"output_index", "item"}),
    wire.EVENT_ITEM_DONE: frozenset({"output_index", "item"}),
    wire.EVENT_PART_ADDED: _OF_TEXT | {"part"},
    wire.EVENT_PART_DONE: _OF_TEXT | {"part"},
    wire.EVENT_TEXT_DELTA: _OF_TEXT | {"delta", "logprobs"},
    wire.EVENT_TEXT_DONE: _OF_TEXT | {"text", "logprobs"},
    wire.EVENT_REASONING_DELTA: _OF_TEXT | {"delta"},
    wire.EVENT_REASONING_DONE: _OF_TEXT | {"text"},
    wire.EVENT_ARGUMENTS_DELTA: _OF_ITEM | {"delta"},
    wire.EVENT_ARGUMENTS_DONE: _OF_ITEM | {"name", "arguments"},
    **{kind: frozenset({"response"}) for kind in wire.EVENT_END.values()},
}
_PADDED = frozenset({wire.EVENT_TEXT_DELTA, wire.EVENT_REASONING_DELTA, wire.EVENT_ARGUMENTS_DELTA})
_ENDS = {kind: status for status, kind in wire.EVENT_END.items()}


_ANY_END = frozenset(_ENDS)
_TEXT_GOES_ON = frozenset({wire.EVENT_TEXT_DELTA, wire.EVENT_TEXT_DONE})
_REASONING_GOES_ON = frozenset({wire.EVENT_REASONING_DELTA, wire.EVENT_REASONING_DONE})
_ARGUMENTS_GO_ON = frozenset({wire.EVENT_ARGUMENTS_DELTA, wire.EVENT_ARGUMENTS_DONE})
_NEXT: Mapping[str, frozenset[str]] = {
    wire.EVENT_CREATED: frozenset({wire.EVENT_IN_PROGRESS}),
    wire.EVENT_IN_PROGRESS: frozenset({wire.EVENT_ITEM_ADDED}),
    wire.EVENT_TEXT_DELTA: _TEXT_GOES_ON,
    wire.EVENT_TEXT_DONE: frozenset({wire.EVENT_PART_DONE}),
    wire.EVENT_REASONING_DELTA: _REASONING_GOES_ON,
    wire.EVENT_REASONING_DONE: frozenset({wire.EVENT_PART_DONE}),
    wire.EVENT_PART_DONE: frozenset({wire.EVENT_ITEM_DONE}),
    wire.EVENT_ARGUMENTS_DELTA: _ARGUMENTS_GO_ON,
    wire.EVENT_ARGUMENTS_DONE: frozenset({wire.EVENT_ITEM_DONE}),
    wire.EVENT_ITEM_DONE: frozenset({wire.EVENT_ITEM_ADDED}) | _ANY_END,
    **{kind: frozenset() for kind in wire.EVENT_END.values()},
}
"""What may follow which event. An error may come at any time; what follows the beginning of an item depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A message or reasoning (`text`, None before it has a part) or a call (`name`, `text` being its arguments)."""

    kind: str
    identifier: str
    status: str
    text: str | None
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    identifier: str
    model: str
    created_at: int
    status: str
    items: tuple[_Item, ...]
    usage: tuple[int, int] | None
    reasoning_tokens: int | None
    stated: Mapping[str, object]

    @property
    def heading(self) -> tuple[object, ...]:
        """What stays the same from event to event."""
        return self.identifier, self.model, self.created_at, self.stated

    @property
    def content(self) -> AnswerContent:
        calls = tuple((item.name, item.text or "") for item in self.items if item.name is not None)
        said = {item.kind: item.text or "" for item in self.items if item.name is None}
        finish = "length" if self.status == wire.STATUS_INCOMPLETE else "tool_calls" if calls else "stop"
        return AnswerContent(
            texts={0: said.get("message", "")},
            calls={0: calls} if calls else {},
            finishes={0: finish},
            usage=self.usage,
            response_ids=frozenset({self.identifier}),
            models=frozenset({self.model}),
            stated=self.stated,
            reasoning={0: said["reasoning"]} if "reasoning" in said else {},
            reasoning_tokens=self.reasoning_tokens,
        )


def read_response(body: bytes) -> AnswerContent:
    """Text, calls, end and counts of a successful whole answer. Raises MalformedError MALFORMED_RESPONSE."""
    reader = JsonReader(Rejection.MALFORMED_RESPONSE)
    response = _response(reader, reader.json(body))
    if response.status not in (wire.STATUS_COMPLETED, wire.STATUS_INCOMPLETE):
        reader.fail("the response has no end")
    return response.content


class ResponseCollector:
    """Collects the events of a stream, one by one, and holds each that repeats text against what came before.

    Raises MalformedError MALFORMED_STREAM.
    """

    __slots__ = ("_begun", "_chars", "_count", "_done", "_end", "_expected", "_open", "_parts", "_reader")

    def __init__(self) -> None:
        self._reader = JsonReader(Rejection.MALFORMED_STREAM)
        self._count = 0
        self._expected = frozenset({wire.EVENT_CREATED})
        self._begun: _Response | None = None
        self._end: _Response | None = None
        self._done: list[_Item] = []
        self._open: _Item | None = None
        self._parts: list[str] = []
        self._chars = 0

    def add(self, data: bytes) -> FrameMeaning:
        """Take in the payload of one frame, UTF-8 JSON."""
        reader = self._reader
        event = reader.record(reader.json(data), "event")
        kind = event.get("type")
        if type(kind) is not str or kind not in _EVENTS:
            reader.fail("an event of an unknown kind")
        if self._end is not None or kind not in self._expected | {wire.EVENT_END[wire.STATUS_FAILED]}:
            reader.fail(f"{kind} comes out of order")
        padding = {"obfuscation"} if kind in _PADDED and type(event.get("obfuscation")) is str else set()
        if event.keys() != _EVENTS[kind] | padding | {"type", "sequence_number"}:
            reader.fail(f"{kind} has other fields than it should")
        if reader.count(event, "sequence_number") != self._count:
            reader.fail("an event is out of sequence")
        self._count += 1
        self._expected = _NEXT.get(kind, self._expected)
        if "response" in event:
            return self._about_response(kind, event)
        if reader.count(event, "output_index") != len(self._done):
            reader.fail(f"{kind} is about another item")
        if "item" in event:
            self._about_item(kind, event)
        else:
            self._within_item(kind, event)
        return FrameMeaning(error=False, usage=False, finished=frozenset())

    def content(self) -> AnswerContent:
        """What was said, as far as it has come; an answer without an end has no finish reason."""
        if self._end is not None:
            return self._end.content
        if self._begun is None:
            return AnswerContent(
                texts={}, calls={}, finishes={}, usage=None, response_ids=frozenset(), models=frozenset()
            )
        return replace(replace(self._begun, items=tuple(self._done)).content, finishes={0: None})

    def _about_response(self, kind: str, event: Mapping[str, object]) -> FrameMeaning:
        reader, begun = self._reader, self._begun
        response = _response(reader, event["response"])
        if response.status != _ENDS.get(kind, wire.STATUS_IN_PROGRESS):
            reader.fail(f"{kind} has another status")
        if begun is not None and begun.heading != response.heading:
            reader.fail("the response changes on the way")
        self._begun = begun or response
        if kind not in _ENDS:
            if response.items:
                reader.fail("a response begins with output")
            return FrameMeaning(error=False, usage=False, finished=frozenset())
        self._end = response
        if response.status == wire.STATUS_FAILED:
            if response.items or response.usage is not None:
                reader.fail("a failed response has output")  # which nothing would be compared with
            return FrameMeaning(error=True, usage=False, finished=frozenset())
        if response.items != tuple(self._done):
            reader.fail("the response has other output than its events")
        return FrameMeaning(error=False, usage=True, finished=frozenset({0}))

    def _about_item(self, kind: str, event: Mapping[str, object]) -> None:
        reader = self._reader
        item = _item(reader, event["item"])
        if kind == wire.EVENT_ITEM_ADDED:
            if item.text or item.status != wire.STATUS_IN_PROGRESS:
                reader.fail("an item does not begin empty")
            self._open, self._parts = item, []
            called = item.kind == "function_call"
            self._expected = _ARGUMENTS_GO_ON if called else frozenset({wire.EVENT_PART_ADDED})
            return
        if item.status == wire.STATUS_IN_PROGRESS or replace(item, status=wire.STATUS_IN_PROGRESS) != self._so_far():
            reader.fail("an item ends other than it was")
        self._done.append(item)

    def _within_item(self, kind: str, event: Mapping[str, object]) -> None:
        reader, item = self._reader, self._open
        assert item is not None, "events within an item are expected behind its beginning alone"
        if event["item_id"] != item.identifier or event.get("content_index", 0) != 0 or event.get("logprobs", []) != []:
            reader.fail(f"{kind} is about another item")
        if kind == wire.EVENT_PART_ADDED:
            if _part(reader, event["part"], item.kind):
                reader.fail("a part does not begin empty")
            self._open = replace(item, text="")
            self._expected = _TEXT_GOES_ON if item.kind == "message" else _REASONING_GOES_ON
        elif "delta" in event:
            delta = _text(reader, event, "delta")
            self._parts.append(delta)
            self._chars += len(delta)
            if self._chars > MAX_STREAM_TEXT_CHARS:
                reader.fail("the text is too long")
        else:
            said = (
                _part(reader, event["part"], item.kind)
                if "part" in event
                else event.get("text", event.get("arguments"))
            )
            if said != self._so_far().text or event.get("name", item.name) != item.name:
                reader.fail(f"{kind} repeats other text than came before")

    def _so_far(self) -> _Item:
        assert self._open is not None
        return self._open if self._open.text is None else replace(self._open, text="".join(self._parts))


def _response(reader: JsonReader, value: object) -> _Response:
    fields = reader.record(value, "response")
    if fields.keys() != _RESPONSE:
        reader.fail("the response has other fields than it should")
    status, output = _text(reader, fields, "status"), fields["output"]
    if fields["object"] != wire.OBJECT or status not in (*wire.EVENT_END, wire.STATUS_IN_PROGRESS):
        reader.fail("no response, or of no known status")
    if (fields["error"] is not None) != (status == wire.STATUS_FAILED):
        reader.fail("an error belongs to the status failed")
    details = {"reason": wire.REASON_LENGTH} if status == wire.STATUS_INCOMPLETE else None
    if fields["incomplete_details"] != details:
        reader.fail("incomplete_details do not go with the status")
    if type(output) is not list or len(output) > MAX_CALLS:
        reader.fail(f"output is not a list of at most {MAX_CALLS}")
    items = tuple(_item(reader, item) for item in output)
    places = [_ORDER.index(item.kind) for item in items]
    if places != sorted(places) or max(places.count(0), places.count(1)) > 1:
        reader.fail("the items come in another order than they are made")
    if any(item.status != wire.STATUS_COMPLETED for item in items[:-1]):
        reader.fail("an item that is not whole, before others")
    if status == wire.STATUS_COMPLETED and not (items and items[-1].status == wire.STATUS_COMPLETED):
        reader.fail("a completed response without completed output")
    if items and items[-1].status == wire.STATUS_IN_PROGRESS:
        reader.fail("the response has an item without an end")
    cut = status == wire.STATUS_INCOMPLETE and items and items[-1].kind != "function_call"
    if cut and items[-1].status != wire.STATUS_INCOMPLETE:
        reader.fail("a response was cut behind text that was not")  # only a call can be whole all the same
    calls = [item.call_id for item in items if item.call_id is not None]
    if len(set(calls)) != len(calls):
        reader.fail("two calls have the same id")  # their results could not be told apart
    usage, reasoning_tokens = _usage(reader, fields["usage"])
    if usage is None and status in (wire.STATUS_COMPLETED, wire.STATUS_INCOMPLETE):
        reader.fail("a response that has ended states no usage")
    return _Response(
        identifier=_text(reader, fields, "id"),
        model=_text(reader, fields, "model"),
        created_at=reader.count(fields, "created_at"),
        status=status,
        items=items,
        usage=usage,
        reasoning_tokens=reasoning_tokens,
        stated={name: fields[name] for name in _STATED},
    )


def _usage(reader: JsonReader, value: object) -> tuple[tuple[int, int] | None, int | None]:
    if value is None:
        return None, None
    counts = reader.record(value, "usage")
    details = [reader.record(counts.get(name), name) for name in _DETAILS]
    if counts.keys() != _USAGE or any(one.keys() != {key} for one, key in zip(details, _DETAILS.values(), strict=True)):
        reader.fail("usage has other fields than it should")
    _, reasoning_tokens = (reader.count(one, key) for one, key in zip(details, _DETAILS.values(), strict=True))
    read, made, total = (reader.count(counts, f"{name}_tokens") for name in ("input", "output", "total"))
    if total != read + made:
        reader.fail("usage does not add up")
    return (read, made), reasoning_tokens


def _item(reader: JsonReader, value: object) -> _Item:
    fields = reader.record(value, "item")
    kind, identifier, status = (_text(reader, fields, key) for key in ("type", "id", "status"))
    if status not in (wire.STATUS_COMPLETED, wire.STATUS_INCOMPLETE, wire.STATUS_IN_PROGRESS):
        reader.fail("an item of no known status")
    if kind == "function_call" and fields.keys() == _CALL:
        name, arguments, call_id = (_text(reader, fields, key) for key in ("name", "arguments", "call_id"))
        return _Item(kind=kind, identifier=identifier, status=status, text=arguments, name=name, call_id=call_id)
    message = kind == "message" and fields.keys() == _MESSAGE and fields["role"] == "assistant"
    thought = kind == "reasoning" and fields.keys() == _REASONING and fields["summary"] == []
    if not (message or thought):
        reader.fail("an item of an unknown kind")
    content = fields["content"]
    if type(content) is not list or len(content) > 1:
        reader.fail("an item has more than one part")
    text = _part(reader, content[0], kind) if content else None
    return _Item(kind=kind, identifier=identifier, status=status, text=text)


def _part(reader: JsonReader, value: object, kind: str) -> str:
    fields = reader.record(value, "part")
    if {name: said for name, said in fields.items() if name != "text"} != _PARTS.get(kind):
        reader.fail("a part of an unknown kind")
    return _text(reader, fields, "text")


def _text(reader: JsonReader, fields: Mapping[str, object], key: str) -> str:
    text = reader.text_or_none(fields, key)
    if text is None:
        reader.fail(f"{key} is missing")
    return text
