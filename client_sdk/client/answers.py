"""What a caller gets: answers and pieces of answers, read from verified OpenAI-shaped JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from client_sdk.appraisal.session import openai_error
from client_sdk.errors import ApplianceError, MalformedError, Rejection, RequestError
from client_sdk.receipts.verify import VerifiedReceipt

Messages: TypeAlias = str | Sequence[Mapping[str, Any]]

_LIMIT_PENDING_BYTES = 1 << 20
_LIMIT_PLACE_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A verified answer. `text` is choice 0, `texts` all choices in order, `raw` the whole JSON of the response."""

    text: str
    texts: tuple[str, ...]
    response_id: str
    receipt: VerifiedReceipt
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pending:
    """Text that has arrived and is NOT verified: to be shown as such, and taken back if the stream is rejected."""

    text: str


@dataclass(frozen=True, slots=True)
class Verified:
    """Text that is verified now; the concatenation of all of these is the answer."""

    text: str


def chat_body(prompt: Messages, *, model: str, stream: bool, params: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion request; a bare text is one user message. Raises RequestError."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(item) for item in prompt]
    body: dict[str, Any] = {"model": model, "messages": messages, **params}
    if stream:
        body["stream"] = True
    check_request(body)
    return body


def check_request(body: Mapping[str, Any]) -> None:
    """Raise RequestError for a body that has no form in JSON and UTF-8, naming the place and never the content.

    The HTTP library would raise too, but an error that holds the whole prompt.
    """
    if _problem(body) is not None:
        place, problem = _innermost(body)
        raise RequestError(f"{place}: {problem}")


def _innermost(value: object) -> tuple[str, str]:
    """(path, what is wrong there) of the first part that cannot be sent though all its parts can."""
    place = ""
    while True:
        parts: list[tuple[str, object]] = []
        if isinstance(value, Mapping):
            parts = [(f".{key}" if _plain(key) else ".(a key)", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            parts = [(f"[{index}]", item) for index, item in enumerate(value)]
        bad = next(((step, item) for step, item in parts if _problem(item) is not None), None)
        if bad is None or len(place) > _LIMIT_PLACE_CHARS:
            return place.removeprefix(".") or "the request", _problem(value) or "has no form in JSON"
        place, value = place + bad[0], bad[1]


def _problem(value: object) -> str | None:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "holds a lone surrogate, which has no form in UTF-8"
    except ValueError:
        return "a number that is not finite, or a value that contains itself, has no form in JSON"
    except TypeError:
        return "a value of this type has no form in JSON"
    except RecursionError:
        return "is nested too deep"
    return None


def _plain(key: object) -> bool:
    """Whether a key may be shown: the API's own names, not what a caller may have written into a schema."""
    return isinstance(key, str) and key.isascii() and key.isidentifier() and len(key) <= 64


def read_answer(body: bytes, receipt: VerifiedReceipt) -> Answer:
    """Read a verified chat completion. Raises MalformedError MALFORMED_RESPONSE."""
    try:
        raw = json.loads(body)
        texts = tuple(choice["message"]["content"] or "" for choice in _ordered(raw))
        response_id = raw["id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise MalformedError(Rejection.MALFORMED_RESPONSE, "the answer is not a chat completion") from None
    if not texts or not isinstance(response_id, str) or not all(isinstance(text, str) for text in texts):
        raise MalformedError(Rejection.MALFORMED_RESPONSE, "the answer is not a chat completion")
    return Answer(text=texts[0], texts=texts, response_id=response_id, receipt=receipt, raw=raw)


def refusal(status: int, body: bytes, *, verified: bool) -> ApplianceError:
    """The error an appliance answered with, as an exception to raise."""
    code, message, param = openai_error(body)
    return ApplianceError(status, code or "UNKNOWN", message or "no message", verified=verified, param=param)


class BlockReader:
    """Cuts a stream of bytes into SSE blocks and reads the text of choice 0 from each frame.

    For display only: what was verified is decided elsewhere, and this reads what it is given.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self.response_id = ""
        self.error: bytes | None = None

    def feed(self, chunk: bytes) -> str:
        """The text in the blocks completed by `chunk`. Bytes that make no sense here give none."""
        *blocks, self._buffer = (self._buffer + chunk).split(b"\n\n")
        self._buffer = self._buffer[-_LIMIT_PENDING_BYTES:]
        return "".join(self._text(block) for block in blocks)

    def _text(self, block: bytes) -> str:
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        try:
            frame = json.loads(data)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(frame, dict):
            return ""
        if frame.get("error") is not None:
            self.error = data
            return ""
        if isinstance(frame.get("id"), str):
            self.response_id = frame["id"]
        return _delta(frame)


def _delta(frame: dict[str, Any]) -> str:
    choices = frame.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            delta = choice.get("delta")
            text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
            if isinstance(text, str):
                return text
    return ""


def _ordered(raw: Any) -> list[Any]:
    return sorted(raw["choices"], key=lambda choice: choice["index"])
