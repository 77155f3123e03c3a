"""OpenAI's JSON for the two generation routes. The bytes made here are the bytes that receipts commit to."""

from __future__ import annotations

import json
from collections.abc import Mapping

from appliance.api.schema import ChatCompletionRequest, CompletionRequest, parse
from appliance.engine.types import ChatMessage
from appliance.errors import BadRequest
from appliance.exchange import Call, Heading, Usage


def _json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _frame(document: Mapping[str, object]) -> bytes:
    """One SSE event block. JSON has no raw line break, so one `data:` line carries it."""
    return b"data: " + _json(document) + b"\n\n"


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class _Frames:
    """What the streams of both routes have in common: the chunk envelope and the closing frames."""

    prefix = ""
    chunk_object = ""

    def _envelope(self, heading: Heading, kind: str) -> dict[str, object]:
        return {
            "id": self.prefix + heading.identifier,
            "object": kind,
            "created": heading.created,
            "model": heading.model,
        }

    def _chunk(self, heading: Heading, choice: Mapping[str, object]) -> bytes:
        document = {**self._envelope(heading, self.chunk_object), "choices": [choice]}
        if heading.include_usage:
            document["usage"] = None
        return _frame(document)

    def _usage_frames(self, heading: Heading, usage: Usage) -> tuple[bytes, ...]:
        if not heading.include_usage:
            return ()
        document = {**self._envelope(heading, self.chunk_object), "choices": [], "usage": _usage(usage)}
        return (_frame(document),)


class ChatDialect(_Frames):
    """/v1/chat/completions"""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def parse(self, body: bytes) -> Call:
        request = parse(ChatCompletionRequest, body)
        if request.max_tokens is not None and request.max_completion_tokens is not None:
            raise BadRequest(
                "conflicting_fields",
                "Only one of 'max_tokens' and 'max_completion_tokens' may be given.",
                param="max_completion_tokens",
            )
        newer = request.max_completion_tokens is not None
        return _call(
            request,
            prompt=tuple(ChatMessage(role=m.role, content=m.content) for m in request.messages),
            max_tokens=request.max_completion_tokens if newer else request.max_tokens,
            max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        )

    def whole(self, heading: Heading, text: str, finish: str, usage: Usage) -> bytes:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return _json(
            {**self._envelope(heading, "chat.completion"), "choices": [choice], "usage": _usage(usage)},
        )

    def opening(self, heading: Heading) -> tuple[bytes, ...]:
        return (self._delta(heading, {"role": "assistant", "content": ""}, None),)

    def delta(self, heading: Heading, text: str) -> bytes:
        return self._delta(heading, {"content": text}, None)

    def closing(self, heading: Heading, finish: str, usage: Usage) -> tuple[bytes, ...]:
        return (self._delta(heading, {}, finish), *self._usage_frames(heading, usage))

    def _delta(self, heading: Heading, delta: Mapping[str, str], finish: str | None) -> bytes:
        return self._chunk(heading, {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish})


class CompletionDialect(_Frames):
    """/v1/completions"""

    prefix = "cmpl-"
    chunk_object = "text_completion"

    def parse(self, body: bytes) -> Call:
        request = parse(CompletionRequest, body)
        return _call(request, prompt=request.prompt, max_tokens=request.max_tokens, max_tokens_field="max_tokens")

    def whole(self, heading: Heading, text: str, finish: str, usage: Usage) -> bytes:
        choice = self._choice(text, finish)
        return _json(
            {**self._envelope(heading, self.chunk_object), "choices": [choice], "usage": _usage(usage)},
        )

    def opening(self, heading: Heading) -> tuple[bytes, ...]:
        return ()

    def delta(self, heading: Heading, text: str) -> bytes:
        return self._chunk(heading, self._choice(text, None))

    def closing(self, heading: Heading, finish: str, usage: Usage) -> tuple[bytes, ...]:
        return (self._chunk(heading, self._choice("", finish)), *self._usage_frames(heading, usage))

    @staticmethod
    def _choice(text: str, finish: str | None) -> dict[str, object]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def _call(
    request: ChatCompletionRequest | CompletionRequest,
    *,
    prompt: tuple[ChatMessage, ...] | str,
    max_tokens: int | None,
    max_tokens_field: str,
) -> Call:
    if request.stream_options is not None and not request.stream:
        raise BadRequest("conflicting_fields", "'stream_options' needs 'stream' to be true.", param="stream_options")
    return Call(
        model=request.model,
        prompt=prompt,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        stop=request.stop_sequences(),
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
    )
