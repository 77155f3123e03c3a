"""The JSON of two answers to one request, brought into one form: what may differ between them is gone.

Ids and times are the same in both, because a replay is made with those of the receipt. What may differ is how text was
cut into frames, how frames were padded, and what was reused or guessed ahead on the way.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from client_sdk.wire import responses

Document = dict[str, object]
Path = tuple[str | int, ...]

_CONTENT: Final = frozenset({"content", "reasoning_content", "arguments", "text", "delta"})
"""Text that comes in pieces: by the name of its field."""
_PADDING: Final = "obfuscation"
_ORDER: Final = "sequence_number"
_ABSENT: Final = object()


class ContentError(ValueError):
    """A body that is not the JSON of its route; the message has nothing of it."""


def content(body: bytes, frames: Sequence[bytes] | None) -> Document:
    """One document for a whole answer or for all frames of a stream. Raises ContentError."""
    if frames is None:
        return _settled(_load(body))
    events = [_load(frame) for frame in frames]
    if events and all("type" in event for event in events):
        return _merged_events(events)
    return _merged_chunks(events)


def _load(data: bytes) -> Document:
    try:
        document = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise ContentError("is not JSON") from None
    if not isinstance(document, dict):
        raise ContentError("is not a JSON object")
    return document


def _unique(pairs: list[tuple[str, object]]) -> Document:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice: nobody can say which one counts")
    return found


# -- streams -----------------------------------------------------------------------------------------------------------


def _merged_chunks(chunks: Sequence[Document]) -> Document:
    """Chunks of chat and completions: for each choice what all of them come to, beside the rest."""
    choices: dict[object, Document] = {}
    rest: Document = {}
    for chunk in chunks:
        listed = chunk.pop("choices", None)
        chunk.pop(_PADDING, None)
        _merge_into(rest, chunk)
        for choice in listed if isinstance(listed, list) else []:
            if not isinstance(choice, dict):
                raise ContentError("has a choice that is no object")
            _merge_into(choices.setdefault(repr(choice.get("index")), {}), choice)
    merged = [choices[index] for index in sorted(choices, key=lambda index: (len(str(index)), str(index)))]
    return _settled({**rest, "choices": merged})


def _merged_events(events: Sequence[Document]) -> Document:
    """Events of /v1/responses: one of each kind for each part of the output."""
    merged: dict[str, Document] = {}
    for event in events:
        event.pop(_PADDING, None)
        event.pop(_ORDER, None)
        response = event.get("response")
        if isinstance(response, dict):
            event["response"] = _settled(response)
        place = f"{event.get('type')} {event.get('output_index')} {event.get('content_index')}"
        _merge_into(merged.setdefault(place, {}), event)
    return cast(Document, merged)


def _merge_into(target: Document, more: Mapping[str, object]) -> None:
    for key, value in more.items():
        target[key] = _merge(key, target.get(key, _ABSENT), value)


def _merge(key: str, old: object, new: object) -> object:
    """`new` behind `old`. What can only be one thing and is two is kept as both, so that it is found."""
    if old is _ABSENT or old is None:
        return new
    if new is None:
        return old
    if isinstance(old, str) and isinstance(new, str) and key in _CONTENT:
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        _merge_into(old, new)
        return old
    if isinstance(old, list) and isinstance(new, list):
        if key == "tool_calls":
            return _merge_calls(old, new)
        old.extend(new)  # in place: a long stream has many
        return old
    if type(new) is type(old) and new == old:
        return old
    return {"one": old, "other": new}


def _merge_calls(old: Sequence[object], new: Sequence[object]) -> list[object]:
    calls = list(old)
    for call in new:
        index = call.get("index") if isinstance(call, dict) else None
        known = next((i for i, one in enumerate(calls) if isinstance(one, dict) and one.get("index") == index), None)
        if known is None or not isinstance(call, dict):
            calls.append(call)
        else:
            both = dict(cast(Document, calls[known]))
            _merge_into(both, call)
            calls[known] = both
    return calls


# -- what may differ ---------------------------------------------------------------------------------------------------


def _settled(document: Document) -> Document:
    """Without the counts of what was reused and guessed, and with vectors as numbers."""
    usage = document.get("usage")
    if isinstance(usage, dict):
        document["usage"] = {name: _counts(value) for name, value in usage.items()}
    data = document.get("data")
    if isinstance(data, list):
        for item in data:
            if isinstance(item, dict) and isinstance(item.get("embedding"), str):
                item["embedding"] = _numbers(item["embedding"])
    return document


def _counts(value: object) -> object:
    if not isinstance(value, dict):
        return value
    path = ("cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    return {name: count for name, count in value.items() if name not in path}


def _numbers(text: str) -> object:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text
    return list(struct.unpack(f"<{len(raw) // 4}f", raw)) if len(raw) % 4 == 0 else text


# -- comparing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """Where two documents differ first; a value that is not there at all is None."""

    path: Path
    answer: object
    replay: object

    @property
    def text(self) -> str:
        """The path as people write it."""
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path]
        return "".join(parts).removeprefix(".")


def first_unequal(answer: object, replay: object, path: Path = ()) -> Unequal | None:
    """The first place where two JSON values differ, numbers bit for bit."""
    if isinstance(answer, dict) and isinstance(replay, dict):
        for key in dict.fromkeys((*replay, *answer)):
            if key not in answer or key not in replay:
                return Unequal(path=(*path, key), answer=answer.get(key), replay=replay.get(key))
            found = first_unequal(answer[key], replay[key], (*path, key))
            if found is not None:
                return found
        return None
    if isinstance(answer, list) and isinstance(replay, list):
        for index, (one, other) in enumerate(zip(answer, replay, strict=False)):
            found = first_unequal(one, other, (*path, index))
            if found is not None:
                return found
        if len(answer) == len(replay):
            return None
        shorter = min(len(answer), len(replay))
        rest = [values[shorter] if len(values) > shorter else None for values in (answer, replay)]
        return Unequal(path=(*path, shorter), answer=rest[0], replay=rest[1])
    same = type(answer) is type(replay) and repr(answer) == repr(replay)  # 0.0 and -0.0 are two values
    return None if same else Unequal(path=path, answer=answer, replay=replay)


# -- what was said -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The parts of one choice: what leads back to the text that was generated."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = field(default=())


def said(document: Mapping[str, object]) -> dict[int, Said]:
    """What each choice says, of a document made by `content`; nothing for what has another form."""
    choices = document.get("choices")
    if isinstance(choices, list):
        return {index: _choice(choice) for index, choice in enumerate(choices) if isinstance(choice, dict)}
    ends = [document[kind] for kind in document if kind.split(" ")[0] in responses.EVENT_END.values()]
    response = ends[-1].get("response") if ends and isinstance(ends[-1], dict) else document
    output = response.get("output") if isinstance(response, dict) else None
    return {0: _items(output)} if isinstance(output, list) else {}


def _choice(choice: Mapping[str, object]) -> Said:
    message = choice.get("message", choice.get("delta"))
    if not isinstance(message, dict):
        return Said(text=_text(choice.get("text")))
    calls = message.get("tool_calls")
    made = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return Said(
        text=_text(message.get("content")),
        reasoning=_text(message.get("reasoning_content")),
        calls=tuple((_text(f.get("name")), _text(f.get("arguments"))) for f in made if isinstance(f, dict)),
    )


def _items(output: Sequence[object]) -> Said:
    text = reasoning = ""
    calls: list[tuple[str, str]] = []
    for item in output:
        if not isinstance(item, dict):
            continue
        if item.get("type") == "function_call":
            calls.append((_text(item.get("name")), _text(item.get("arguments"))))
            continue
        parts = item.get("content")
        joined = "".join(_text(part.get("text")) for part in parts or [] if isinstance(part, dict))
        if item.get("type") == "reasoning":
            reasoning += joined
        else:
            text += joined
    return Said(text=text, reasoning=reasoning, calls=tuple(calls))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
