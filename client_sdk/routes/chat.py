"""Read what was asked and what came back, as far as a receipt speaks of it: OpenAI-shaped JSON, whole or in frames."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from client_sdk.errors import MalformedError, Rejection

ROUTE_CHAT = "/v1/chat/completions"
ROUTE_COMPLETIONS = "/v1/completions"
MAX_CHOICES = 128
MAX_CALLS = 1024
MAX_STREAM_TEXT_CHARS = 64 << 20

# What is compared with the receipt, and what shows no text. Anything else would be shown by one client or another
# (`refusal`, `function_call`, `audio`, a call of the type `custom`), and is null or refused.
_CHOICE = frozenset({"index", "finish_reason", "logprobs"})
_SPOKEN = frozenset({"role", "content", "reasoning_content", "tool_calls"})
_CALL = frozenset({"index", "id", "type", "function"})
_FUNCTION = frozenset({"name", "arguments"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContent:
    """What the answer says: `texts`, `calls`, `finishes` per choice index, `usage` in (prompt, completion) tokens.

    `calls` are the calls of tools, (name, arguments), `reasoning` is what is shown apart from the text; a choice
    without any is not in them. `reasoning_tokens` is that part of the completion tokens, None where none is stated.
    `measured`: the answer has log probabilities.
    """

    texts: Mapping[int, str]
    calls: Mapping[int, tuple[tuple[str, str], ...]]
    finishes: Mapping[int, str | None]
    usage: tuple[int, int] | None
    response_ids: frozenset[str]
    models: frozenset[str]
    stated: Mapping[str, object] | None = None
    reasoning: Mapping[int, str] = field(default_factory=dict)
    reasoning_tokens: int | None = None
    measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameMeaning:
    """`error`: an error event. `usage`: carries token counts. `finished`: choices that ended with this frame."""

    error: bool
    usage: bool
    finished: frozenset[int]


class _RepeatedKeyError(ValueError):
    pass


def load_request(body: bytes) -> dict[str, object] | None:
    """The request as a JSON object, None if it is none. A key given twice is none: nobody can say which one counted."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None
    return value if type(value) is dict else None


def packed_tokens(value: object) -> bytes | None:
    """A JSON list of token ids as receipts commit to them, u32 little-endian; None for anything else."""
    if type(value) is not list or not all(type(token) is int and 0 <= token < 1 << 32 for token in value):
        return None
    return struct.pack(f"<{len(value)}I", *value)


def prompts_asked(request: Mapping[str, object]) -> int:
    """How many prompts a request has: a list of texts or of token arrays is several, all else is one."""
    prompt = request.get("prompt")
    return len(prompt) if type(prompt) is list and prompt and type(prompt[0]) is not int else 1


def choices_asked(request: Mapping[str, object]) -> int:
    """How many choices must end before the answer can; a request that does not say asks for one of each prompt."""
    each = request.get("n")
    return (each if type(each) is int and each > 0 else 1) * prompts_asked(request)


def read_whole(route: str, body: bytes) -> AnswerContent:
    """Texts, finish reasons and counts of a successful whole answer. Raises MalformedError MALFORMED_RESPONSE."""
    reader = JsonReader(Rejection.MALFORMED_RESPONSE)
    collected = _Collected()
    answer = reader.record(reader.json(body), "answer")
    for choice in reader.choices(answer):
        index = reader.index(choice)
        if index in collected.texts:
            reader.fail("a choice comes twice")
        collected.texts[index] = [reader.text_of(route, choice, "message")]
        collected.measured = collected.measured or choice.get("logprobs") is not None
        collected.add_calls(reader, index, choice.get("message"), whole=True)
        collected.add_reasoning(reader, index, choice.get("message"))
        collected.finishes[index] = reader.text_or_none(choice, "finish_reason")
    collected.add_envelope(reader, answer)
    return collected.content()


class DeltaCollector:
    """Collects the deltas of a stream, frame by frame. Raises MalformedError MALFORMED_STREAM."""

    __slots__ = ("_chars", "_collected", "_reader", "_route")

    def __init__(self, route: str) -> None:
        self._route = route
        self._reader = JsonReader(Rejection.MALFORMED_STREAM)
        self._collected = _Collected()
        self._chars = 0

    def add(self, data: bytes) -> FrameMeaning:
        """Take in the payload of one frame, UTF-8 JSON."""
        reader, collected = self._reader, self._collected
        frame = reader.record(reader.json(data), "frame")
        if frame.get("error") is not None:
            # Clients take a frame with an empty error, or one that has more than an error, for a piece of the answer.
            error = reader.record(frame["error"], "error")
            if frame.keys() != {"error"} or not reader.text_or_none(error, "message"):
                reader.fail("an error frame is more, or less, than an error")
            return FrameMeaning(error=True, usage=False, finished=frozenset())
        finished = set()
        spoken: set[int] = set()
        for choice in reader.choices(frame):
            index = reader.index(choice)
            if index in spoken:
                reader.fail("a choice comes twice in one frame")
            spoken.add(index)
            text = reader.text_of(self._route, choice, "delta")
            collected.texts.setdefault(index, []).append(text)
            collected.measured = collected.measured or choice.get("logprobs") is not None
            self._chars += len(text) + collected.add_calls(reader, index, choice.get("delta"), whole=False)
            self._chars += collected.add_reasoning(reader, index, choice.get("delta"))
            if self._chars > MAX_STREAM_TEXT_CHARS:
                reader.fail("the text is too long")
            finish = reader.text_or_none(choice, "finish_reason")
            if finish is not None:
                if collected.finishes.get(index) is not None:
                    reader.fail("a choice ends twice")
                finished.add(index)
            collected.finishes[index] = finish or collected.finishes.get(index)
        collected.add_envelope(reader, frame)
        return FrameMeaning(error=False, usage=frame.get("usage") is not None, finished=frozenset(finished))

    def content(self) -> AnswerContent:
        return self._collected.content()


@dataclass(slots=True)
class _Collected:
    texts: dict[int, list[str]] = field(default_factory=dict)
    calls: dict[int, list[tuple[str, list[str]]]] = field(default_factory=dict)
    reasoning: dict[int, list[str]] = field(default_factory=dict)
    finishes: dict[int, str | None] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    reasoning_tokens: int | None = None
    response_ids: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    measured: bool = False
    call_ids: set[str] = field(default_factory=set)

    def add_envelope(self, reader: JsonReader, answer: Mapping[str, object]) -> None:
        """`id`, `model`, `usage`, which whole answers and frames carry alike; of two ids neither could be trusted."""
        for key, seen in (("id", self.response_ids), ("model", self.models)):
            text = reader.text_or_none(answer, key)
            if text is None:
                reader.fail(f"{key} is missing")
            seen.add(text)
            if len(seen) > 1:
                reader.fail(f"{key} changes on the way")
        usage = answer.get("usage")
        if usage is not None:
            counts = reader.record(usage, "usage")
            self.usage = (reader.count(counts, "prompt_tokens"), reader.count(counts, "completion_tokens"))
            details = reader.record(counts.get("completion_tokens_details") or {}, "completion_tokens_details")
            stated = details.get("reasoning_tokens") is not None
            self.reasoning_tokens = reader.count(details, "reasoning_tokens") if stated else None

    def add_calls(self, reader: JsonReader, index: int, holder: object, *, whole: bool) -> int:
        """Take in `tool_calls` of a message or a delta; the number of characters in them."""
        listed = holder.get("tool_calls") if isinstance(holder, dict) else None
        if listed is None:
            return 0
        if type(listed) is not list:
            reader.fail("tool_calls is not a list")
        size = 0
        for place, item in enumerate(listed):
            call = reader.record(item, "tool call")
            function = reader.record(call.get("function"), "function")
            reader.nothing_else(call, _CALL, "a tool call")
            reader.nothing_else(function, _FUNCTION, "a function")
            if call.get("type") not in (None, "function"):
                reader.fail("a tool call is of an unknown type")
            name, arguments = (reader.text_or_none(function, key) for key in ("name", "arguments"))
            calls = self.calls.setdefault(index, [])
            number = place if whole else call.get("index")
            if type(number) is not int:
                reader.fail("a tool call has no usable index")
            if name is not None and number == len(calls) < MAX_CALLS:
                calls.append((name, []))
                self._identify(reader, call)
            elif name is not None or not calls or number != len(calls) - 1:
                reader.fail("a tool call comes out of order")
            calls[-1][1].append(arguments or "")
            size += len(name or "") + len(arguments or "")
        return size

    def _identify(self, reader: JsonReader, call: Mapping[str, object]) -> None:
        """Results of two calls with the same id could not be told apart."""
        identifier = reader.text_or_none(call, "id")
        if identifier in self.call_ids:
            reader.fail("two calls have the same id")
        if identifier is not None:
            self.call_ids.add(identifier)

    def add_reasoning(self, reader: JsonReader, index: int, holder: object) -> int:
        """Take in `reasoning_content` of a message or a delta; the number of characters in it."""
        text = reader.text_or_none(holder, "reasoning_content") if isinstance(holder, dict) else None
        if text:
            self.reasoning.setdefault(index, []).append(text)
        return len(text or "")

    def content(self) -> AnswerContent:
        return AnswerContent(
            texts={index: "".join(parts) for index, parts in self.texts.items()},
            calls={
                index: tuple((name, "".join(parts)) for name, parts in calls)
                for index, calls in self.calls.items()
                if calls
            },
            finishes=dict(self.finishes),
            usage=self.usage,
            response_ids=frozenset(self.response_ids),
            models=frozenset(self.models),
            reasoning={index: "".join(parts) for index, parts in self.reasoning.items()},
            reasoning_tokens=self.reasoning_tokens,
            measured=self.measured,
        )


class JsonReader:
    """Typed access to JSON that may have any shape. Messages never quote content."""

    __slots__ = ("_code",)

    def __init__(self, code: Rejection) -> None:
        self._code = code

    def fail(self, message: str) -> NoReturn:
        raise MalformedError(self._code, message)

    def json(self, data: bytes) -> object:
        try:
            return json.loads(data.decode(), object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            self.fail("not JSON with distinct keys")

    def record(self, value: object, name: str) -> Mapping[str, object]:
        if type(value) is not dict:
            self.fail(f"{name} is not an object")
        return value

    def choices(self, answer: Mapping[str, object]) -> list[Mapping[str, object]]:
        choices = answer.get("choices")
        if type(choices) is not list or len(choices) > MAX_CHOICES:
            self.fail(f"choices is not a list of at most {MAX_CHOICES}")
        return [self.record(choice, "choice") for choice in choices]

    def index(self, choice: Mapping[str, object]) -> int:
        index = choice.get("index")
        if type(index) is not int or not 0 <= index < MAX_CHOICES:
            self.fail("a choice has no usable index")
        return index

    def text_of(self, route: str, choice: Mapping[str, object], chat_key: str) -> str:
        """Generated text of a choice; `chat_key` is where chat answers keep it (message or delta)."""
        if route == ROUTE_CHAT:
            spoken = self.record(choice.get(chat_key), chat_key)
            self.nothing_else(choice, _CHOICE | {chat_key}, "a choice")
            self.nothing_else(spoken, _SPOKEN, chat_key)
            if spoken.get("role") not in (None, "assistant"):
                self.fail("somebody else than the assistant speaks")
            return self.text_or_none(spoken, "content") or ""
        if route != ROUTE_COMPLETIONS:
            self.fail("answers of this route cannot be read")
        self.nothing_else(choice, _CHOICE | {"text"}, "a choice")
        return self.text_or_none(choice, "text") or ""

    def nothing_else(self, value: Mapping[str, object], known: frozenset[str], name: str) -> None:
        """Whatever is not `known` says nothing: it is null."""
        if any(item is not None for key, item in value.items() if key not in known):
            self.fail(f"{name} has more than is compared with the receipt")

    def text_or_none(self, value: Mapping[str, object], key: str) -> str | None:
        text = value.get(key)
        if text is not None and type(text) is not str:
            self.fail(f"{key} is not text")
        return text

    def count(self, value: Mapping[str, object], key: str) -> int:
        number = value.get(key)
        if type(number) is not int or number < 0:
            self.fail(f"usage.{key} is not a count")
        return number


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _RepeatedKeyError("a key comes twice")
    return result
