"""The output of one response: its items when it is whole, its events while it grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from appliance.api.dialects import call_id, json_bytes, obfuscated
from appliance.engine.tools import CallDelta
from appliance.exchange import Choice, Heading, Piece
from client_sdk.wire import responses as wire


def output_items(heading: Heading, choice: Choice) -> list[dict[str, object]]:
    """The message, where there is text or nothing else, then the calls. Only the last one can have been cut."""
    calls = choice.tools.calls if choice.tools is not None else []
    text = choice.content
    items = [message_item(heading, text, wire.STATUS_COMPLETED)] if text or not calls else []
    items += [
        call_item(heading, index, name=name, arguments=arguments, status=wire.STATUS_COMPLETED)
        for index, (name, arguments) in enumerate(calls)
    ]
    items[-1]["status"] = last_status(choice)
    return items


def last_status(choice: Choice) -> str:
    """Of the item that came last: a call may be whole though the answer was cut right behind it."""
    whole = choice.tools is not None and choice.tools.complete
    return wire.STATUS_INCOMPLETE if choice.output.finish == "length" and not whole else wire.STATUS_COMPLETED


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


class Events:
    """The events of one stream, numbered from 0. An item is closed when the next one opens, or at the end."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._sequence = 0
        self._closed = 0
        self._text: str | None = None
        self._call: CallDelta | None = None
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
        if piece.text:
            frames += self._open_message()
            assert self._text is not None
            self._text += piece.text
            frames.append(self._of_text(wire.EVENT_TEXT_DELTA, delta=piece.text, logprobs=[]))
        for call in piece.calls:
            if call.name is not None:
                frames += self._close(wire.STATUS_COMPLETED)
                frames += self._open_call(call.index, call.name)
            if call.arguments:
                assert self._call is not None, "a call begins with its name"
                self._call = replace(self._call, arguments=self._call.arguments + call.arguments)
                frames.append(self._of_item(wire.EVENT_ARGUMENTS_DELTA, delta=call.arguments))
        return tuple(frames)

    def finish(self, choice: Choice) -> tuple[bytes, ...]:
        self.choice = choice
        opened = [] if self._call is not None or self._text is not None else self._open_message()
        return (*opened, *self._close(last_status(choice)))

    def _open_message(self) -> list[bytes]:
        if self._text is not None:
            return []
        self._text = ""
        item = message_item(self._heading, None, wire.STATUS_IN_PROGRESS)
        return [
            self.event(wire.EVENT_ITEM_ADDED, output_index=self._closed, item=item),
            self._of_text(wire.EVENT_PART_ADDED, part=text_part("")),
        ]

    def _open_call(self, index: int, name: str) -> list[bytes]:
        self._call = CallDelta(index=index, name=name, arguments="")
        item = call_item(self._heading, index, name=name, arguments="", status=wire.STATUS_IN_PROGRESS)
        return [self.event(wire.EVENT_ITEM_ADDED, output_index=self._closed, item=item)]

    def _close(self, status: str) -> list[bytes]:
        if self._call is not None:
            name, arguments = self._call.name or "", self._call.arguments
            frames = [self._of_item(wire.EVENT_ARGUMENTS_DONE, name=name, arguments=arguments)]
            item = call_item(self._heading, self._call.index, name=name, arguments=arguments, status=status)
        elif self._text is not None:
            frames = [
                self._of_text(wire.EVENT_TEXT_DONE, text=self._text, logprobs=[]),
                self._of_text(wire.EVENT_PART_DONE, part=text_part(self._text)),
            ]
            item = message_item(self._heading, self._text, status)
        else:
            return []
        frames.append(self.event(wire.EVENT_ITEM_DONE, output_index=self._closed, item=item))
        self._call = self._text = None
        self._closed += 1
        return frames

    def _of_text(self, kind: str, **fields: object) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: object) -> bytes:
        call = self._call
        item = f"msg_{self._heading.identifier}" if call is None else f"fc_{self._heading.identifier}_{call.index}"
        return self.event(kind, item_id=item, output_index=self._closed, **fields)
