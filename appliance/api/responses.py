"""/v1/responses: the stateless part of OpenAI's Responses API, on the same path as chat.

A request becomes its chat form (client_sdk/wire/responses.py) and goes on as that; only the JSON around the answer, and
the names of fields in errors, are this route's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from appliance.api.dialects import chat_call, json_bytes
from appliance.api.responses_events import Events, output_items
from appliance.api.responses_schema import ResponsesRequest, check_items
from appliance.api.schema import ChatCompletionRequest, as_sent, parse, validated
from appliance.errors import ApplianceError, BadRequest
from appliance.inference.request import Call, Choice, Heading, Piece, Usage
from client_sdk.wire import responses as wire

PREFIX = "resp_"
LIMIT_STATED_BYTES = 256 << 10  # every third frame of a short stream carries it, and clients bound frames
_MESSAGE_PATH = re.compile(r"messages\[([0-9]{1,5})\](.*)", re.DOTALL)
_FIELDS: tuple[tuple[str, str], ...] = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages", "input"),
)
_TOOL_FUNCTION = re.compile(r"(tools\[[0-9]+\]|tool_choice)\.function\b")


class ResponsesDialect:
    """One request: remembers it, because its answer repeats it, and counts the events of its stream."""

    def __init__(self) -> None:
        self._request: Mapping[str, object] = {}
        self._paths: list[str] | None = None
        self._events: Events | None = None

    def parse(self, body: bytes) -> Call:
        request = parse(ResponsesRequest, body)
        if isinstance(request.input, list):
            check_items(request.input)
        self._request = as_sent(request)
        if len(json_bytes(wire.stated(self._request))) > LIMIT_STATED_BYTES:
            raise BadRequest(
                "invalid_field",
                f"What the answer repeats of its request (instructions, tools, text, ...) exceeds {LIMIT_STATED_BYTES} "
                "bytes.",
                param="instructions",
            )
        self._paths = [path for _, path in wire.conversation(self._request)]
        call = chat_call(validated(ChatCompletionRequest, wire.chat_form(self._request)))
        return replace(call, split_reasoning=True)

    def whole(self, heading: Heading, choices: Sequence[Choice], usage: Usage) -> bytes:
        status = _status(choices[0])
        return json_bytes(self._response(heading, status, output=output_items(heading, choices[0]), usage=usage))

    def opening(self, heading: Heading, choices: Sequence[Choice]) -> tuple[bytes, ...]:
        self._events = Events(heading)
        begun = self._response(heading, wire.STATUS_IN_PROGRESS)
        return tuple(self._events.event(kind, response=begun) for kind in (wire.EVENT_CREATED, wire.EVENT_IN_PROGRESS))

    def delta(self, heading: Heading, choice: Choice, piece: Piece) -> tuple[bytes, ...]:
        assert self._events is not None, "opened before"
        return self._events.piece(piece)

    def finish(self, heading: Heading, choice: Choice) -> tuple[bytes, ...]:
        """Ends the last item. What the whole answer was comes with `closing`, which knows the usage."""
        assert self._events is not None, "opened before"
        return self._events.finish(choice)

    def closing(self, heading: Heading, usage: Usage) -> tuple[bytes, ...]:
        assert self._events is not None, "opened before"
        choice = self._events.choice
        assert choice is not None, "finished before"
        status = _status(choice)
        response = self._response(heading, status, output=output_items(heading, choice), usage=usage)
        return (self._events.event(wire.EVENT_END[status], response=response),)

    def failure(self, heading: Heading, error: ApplianceError) -> bytes:
        events = self._events or Events(heading)
        response = self._response(heading, wire.STATUS_FAILED, error=error)
        return events.event(wire.EVENT_END[wire.STATUS_FAILED], response=response)

    def explain(self, error: ApplianceError) -> ApplianceError:
        """An error of the chat form in the names of the request; what was refused before it had one is as it is."""
        param = error.param
        if self._paths is None or param is None:
            return error
        renamed = self._renamed(param, self._paths)
        if renamed == param:
            return error
        message = error.message.replace(param, renamed)
        return type(error)(error.code, message, param=renamed, retry_after_s=error.retry_after_s)

    @staticmethod
    def _renamed(param: str, paths: Sequence[str]) -> str:
        found = _MESSAGE_PATH.fullmatch(param)
        if found is not None and int(found[1]) < len(paths):
            path, rest = paths[int(found[1])], found[2]
            if rest == ".tool_call_id":
                return f"{path}.call_id"
            return path if path in ("input", "instructions") or rest != ".content" else f"{path}.content"
        for chat, own in _FIELDS:
            if param == chat or param.startswith((f"{chat}.", f"{chat}[")):
                return own + param[len(chat) :]
        return _TOOL_FUNCTION.sub(r"\1", param)

    def _response(
        self,
        heading: Heading,
        status: str,
        *,
        output: Sequence[object] = (),
        usage: Usage | None = None,
        error: ApplianceError | None = None,
    ) -> dict[str, object]:
        cut = status == wire.STATUS_INCOMPLETE
        return {
            "id": PREFIX + heading.identifier,
            "object": wire.OBJECT,
            "created_at": heading.created,
            "status": status,
            "error": None if error is None else json.loads(error.body())["error"],
            "incomplete_details": {"reason": wire.REASON_LENGTH} if cut else None,
            "model": heading.model,
            "output": list(output),
            **wire.stated(self._request),
            "temperature": float(_given(self._request.get("temperature"))),
            "top_p": float(_given(self._request.get("top_p"))),
            "usage": None if usage is None else _usage(usage),
        }


def _given(value: object) -> float:
    return value if isinstance(value, int | float) else 1.0


def _status(choice: Choice) -> str:
    return wire.STATUS_INCOMPLETE if choice.output.finish == "length" else wire.STATUS_COMPLETED


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
