"""The output of one response: its items when it is whole, its events while it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.api.dialects import call_id, json_bytes, obfuscated
from appliance.engine.chat.tools import CallDelta
from appliance.inference.request import Choice, Heading, Piece
from client_sdk.wire import responses as wire


def output_items(heading: Heading, choice: Choice) -> list[dict[str, object]]:
    """Reasoning, the message where there is text or nothing else, the calls. Only the last one can have been cut."""
    calls = choice.tools.calls if choice.tools is not None else []
    thought = choice.reasoning.reasoning if choice.reasoning is not None else ""
    text, done = choice.content, wire.STATUS_COMPLETED
    items = [reasoning_item(heading, thought, done)] if thought else []
    items += [message_item(heading, text, done)] if text or not (calls or thought) else []
    items += [
        call_item(heading, index, name=name, arguments=arguments, status=done)
        for index, (name, arguments) in enumerate(calls)
    ]
    items[-1]["status"] = last_status(choice)
    return items


def last_status(choice: Choice) -> str:
    """Of the item that came last: a call may be whole though the answer was cut right behind it."""
    whole = choice.tools is not None and choice.tools.complete
    return wire.STATUS_INCOMPLETE if choice.output.finish == "length" and not whole else wire.STATUS_COMPLETED


def reasoning_item(heading: Heading, text: str | None, status: str) -> dict[str, object]:
    return {
        "id": f"rs_{heading.identifier}",
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [] if text is None else [reasoning_part(text)],
    }


def reasoning_part(text: str) -> dict[str, object]:
    return {"type": "reasoning_text", "text": text}


def message_item(heading: Heading, text: str | None, status: str) -> dict[str, object]:
    return {
        "id": f"msg_{heading.identifier}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [] if text is None else [text_part(text)],
    }


def text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(heading: Heading, index: int, *, name: str, arguments: str, status: str) -> dict[str, object]:
    return {
        "id": f"fc_{heading.identifier}_{index}",
        "type": "function_call",
        "status": status,
        "call_id": call_id(heading, 0, index),
        "name": name,
        "arguments": arguments,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What items of text differ in: the item, its part, its events, and what these say besides."""

    item: Callable[[Heading, str | None, str], dict[str, object]]
    part: Callable[[str], dict[str, object]]
    delta: str
    done: str
    besides: Mapping[str, object]


_REASONING = _Kind(
    item=reasoning_item,
    part=reasoning_part,
    delta=wire.EVENT_REASONING_DELTA,
    done=wire.EVENT_REASONING_DONE,
    besides={},
)
_MESSAGE = _Kind(
    item=message_item,
    part=text_part,
    delta=wire.EVENT_TEXT_DELTA,
    done=wire.EVENT_TEXT_DONE,
    besides={"logprobs": []},
)


class Events:
    """The events of one stream, numbered from 0. An item is closed when the next one opens, or at the end."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._sequence = 0
        self._closed = 0
        self._open: _Kind | CallDelta | None = None
        self._identifier: object = ""
        self._text = ""
        self.choice: Choice | None = None
        """The answer, once it has ended."""

    def event(self, kind: str, **fields: object) -> bytes:
        """One SSE event block. Its type is in the data alone: an `event:` line would say it twice."""
        document: Mapping[str, object] = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        if "delta" in fields and self._heading.obfuscate is not None:
            document = obfuscated(document, self._heading.obfuscate)
        return b"data: " + json_bytes(document) + b"\n\n"

    def piece(self, piece: Piece) -> tuple[bytes, ...]:
        frames: list[bytes] = []
        for kind, text in ((_REASONING, piece.reasoning), (_MESSAGE, piece.text)):
            if text:
                frames += [] if self._open is kind else self._begin(kind)
                self._text += text
                frames.append(self._of_item(kind.delta, content_index=0, delta=text, **kind.besides))
        for call in piece.calls:
            if call.name is not None:
                frames += self._begin(call)
            if call.arguments:
                self._text += call.arguments
                frames.append(self._of_item(wire.EVENT_ARGUMENTS_DELTA, delta=call.arguments))
        return tuple(frames)

    def finish(self, choice: Choice) -> tuple[bytes, ...]:
        self.choice = choice
        opened = [] if self._open is not None else self._begin(_MESSAGE)
        return (*opened, *self._close(last_status(choice)))

    def _begin(self, kind: _Kind | CallDelta) -> list[bytes]:
        frames = self._close(wire.STATUS_COMPLETED)
        self._open, self._text = kind, ""
        item = self._item(None, wire.STATUS_IN_PROGRESS)
        self._identifier = item["id"]
        frames.append(self.event(wire.EVENT_ITEM_ADDED, output_index=self._closed, item=item))
        if isinstance(kind, _Kind):
            frames.append(self._of_item(wire.EVENT_PART_ADDED, content_index=0, part=kind.part("")))
        return frames

    def _close(self, status: str) -> list[bytes]:
        kind = self._open
        if kind is None:
            return []
        if isinstance(kind, _Kind):
            frames = [
                self._of_item(kind.done, content_index=0, text=self._text, **kind.besides),
                self._of_item(wire.EVENT_PART_DONE, content_index=0, part=kind.part(self._text)),
            ]
        else:
            frames = [self._of_item(wire.EVENT_ARGUMENTS_DONE, name=kind.name, arguments=self._text)]
        item = self._item(self._text, status)
        frames.append(self.event(wire.EVENT_ITEM_DONE, output_index=self._closed, item=item))
        self._closed += 1
        return frames

    def _item(self, text: str | None, status: str) -> dict[str, object]:
        kind = self._open
        if isinstance(kind, _Kind):
            return kind.item(self._heading, text, status)
        assert kind is not None, "asked while an item is open"
        return call_item(self._heading, kind.index, name=kind.name or "", arguments=text or "", status=status)

    def _of_item(self, kind: str, **fields: object) -> bytes:
        return self.event(kind, item_id=self._identifier, output_index=self._closed, **fields)
