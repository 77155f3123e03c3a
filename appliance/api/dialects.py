"""OpenAI's JSON for the two generation routes. The bytes made here are the bytes that receipts commit to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from appliance.api import conversation, logprobs, structured
from appliance.api.schema import MAX_CHOICES, ChatCompletionRequest, CompletionRequest, parse
from appliance.engine.chat.tools import CallDelta
from appliance.engine.types import InfillPrompt, PromptInput, TokenPrompt
from appliance.errors import ApplianceError, BadRequest
from appliance.inference.request import Call, Choice, Heading, Piece, Usage, Wanted
from client_sdk.wire.stream import encode_base64url

OBFUSCATION_BYTES = 128


def json_bytes(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _frame(document: Mapping[str, object]) -> bytes:
    """One SSE event block. JSON has no raw line break, so one `data:` line carries it."""
    return b"data: " + json_bytes(document) + b"\n\n"


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.rejected_tokens,
        },
    }


def obfuscated(document: Mapping[str, object], random_bytes: Callable[[int], bytes]) -> Mapping[str, object]:
    """With random text in a field of its own, such that frames have a multiple of OBFUSCATION_BYTES."""
    missing = -len(_frame({**document, "obfuscation": ""})) % OBFUSCATION_BYTES
    return {**document, "obfuscation": encode_base64url(random_bytes(missing))[:missing].decode()}


class _Frames:
    """What both routes have in common: the chunk envelope, the closing frames, and errors in the names of requests."""

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
        return _frame(document if heading.obfuscate is None else obfuscated(document, heading.obfuscate))

    def closing(self, heading: Heading, usage: Usage) -> tuple[bytes, ...]:
        if not heading.include_usage:
            return ()
        document = {**self._envelope(heading, self.chunk_object), "choices": [], "usage": _usage(usage)}
        return (_frame(document),)

    def explain(self, error: ApplianceError) -> ApplianceError:
        return error

    def failure(self, heading: Heading, error: ApplianceError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


class ChatDialect(_Frames):
    """/v1/chat/completions"""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def parse(self, body: bytes) -> Call:
        return replace(chat_call(parse(ChatCompletionRequest, body)), split_reasoning=True)

    def whole(self, heading: Heading, choices: Sequence[Choice], usage: Usage) -> bytes:
        documents = [
            {
                "index": choice.index,
                "message": _message(heading, choice),
                "logprobs": None if choice.measured is None else logprobs.chat(choice.measured),
                "finish_reason": choice.output.finish,
            }
            for choice in choices
        ]
        envelope = self._envelope(heading, "chat.completion")
        return json_bytes({**envelope, "choices": documents, "usage": _usage(usage)})

    def opening(self, heading: Heading, choices: Sequence[Choice]) -> tuple[bytes, ...]:
        start = {"role": "assistant", "content": ""}
        return tuple(self._delta(heading, choice.index, start, None) for choice in choices)

    def delta(self, heading: Heading, choice: Choice, piece: Piece) -> tuple[bytes, ...]:
        measured = None if choice.measured is None else logprobs.chat((piece,))
        delta: dict[str, object] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [_call_delta(heading, choice.index, call) for call in piece.calls]
        return (self._delta(heading, choice.index, delta, None, measured),)

    def finish(self, heading: Heading, choice: Choice) -> tuple[bytes, ...]:
        return (self._delta(heading, choice.index, {}, choice.output.finish),)

    def _delta(
        self, heading: Heading, index: int, delta: Mapping[str, object], finish: str | None, measured: object = None
    ) -> bytes:
        return self._chunk(heading, {"index": index, "delta": delta, "logprobs": measured, "finish_reason": finish})


def chat_call(request: ChatCompletionRequest) -> Call:
    """What a chat request asks for. Raises BadRequest."""
    newer, older = request.max_completion_tokens, request.max_tokens
    if older is not None and newer is not None:
        raise _conflict("max_completion_tokens", "Only one of 'max_tokens' and 'max_completion_tokens' may be given.")
    if request.top_logprobs is not None and not request.logprobs:
        raise _conflict("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    shape = structured.shape(request)
    told = (request.tools or []) if shape.tool_choice != "none" else []
    call = _call(
        request,
        prompts=(conversation.rendered(request.messages, told),),
        max_tokens=older if newer is None else newer,
        max_tokens_field="max_tokens" if newer is None else "max_completion_tokens",
        top=(request.top_logprobs or 0) if request.logprobs else None,
    )
    return replace(call, shape=shape)


def _message(heading: Heading, choice: Choice) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning is not None and choice.reasoning.reasoning:
        message["reasoning_content"] = choice.reasoning.reasoning
    if choice.tools is not None:
        calls = choice.tools.calls
        message["content"] = choice.content or (None if calls else "")
        if calls:
            message["tool_calls"] = [
                {"id": call_id(heading, choice.index, index), "type": "function", "function": _function(*call)}
                for index, call in enumerate(calls)
            ]
    return message


def _call_delta(heading: Heading, choice: int, call: CallDelta) -> dict[str, object]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call_id(heading, choice, call.index),
        "type": "function",
        "function": _function(call.name, call.arguments),
    }


def _function(name: str, arguments: str) -> dict[str, str]:
    return {"name": name, "arguments": arguments}


def call_id(heading: Heading, choice: int, index: int) -> str:
    return f"call_{heading.identifier[:24]}_{choice}_{index}"


class CompletionDialect(_Frames):
    """/v1/completions"""

    prefix = "cmpl-"
    chunk_object = "text_completion"

    def parse(self, body: bytes) -> Call:
        request = parse(CompletionRequest, body)
        prompts = _prompts(request)
        if len(prompts) > 1 and request.max_tokens is None:
            # The room behind each prompt differs, and a receipt states one effective limit.
            raise BadRequest("missing_field", "Several prompts need 'max_tokens'.", param="max_tokens")
        if request.echo and not all(isinstance(prompt, str) for prompt in prompts):
            raise _conflict("echo", "'echo' needs prompts that are text, without 'suffix'.")
        call = _call(
            request,
            prompts=prompts,
            max_tokens=request.max_tokens,
            max_tokens_field="max_tokens",
            top=request.logprobs,
        )
        return replace(call, echo=bool(request.echo))

    def whole(self, heading: Heading, choices: Sequence[Choice], usage: Usage) -> bytes:
        documents = [
            self._choice(choice, choice.echoed + choice.output.text, choice.measured, choice.output.finish)
            for choice in choices
        ]
        envelope = self._envelope(heading, self.chunk_object)
        return json_bytes({**envelope, "choices": documents, "usage": _usage(usage)})

    def opening(self, heading: Heading, choices: Sequence[Choice]) -> tuple[bytes, ...]:
        return tuple(
            self._chunk(heading, self._choice(choice, choice.echoed, None, None))
            for choice in choices
            if choice.echoed and choice.measured is None  # else the echo comes when it has been measured
        )

    def delta(self, heading: Heading, choice: Choice, piece: Piece) -> tuple[bytes, ...]:
        measured = None if choice.measured is None else (piece,)
        return (self._chunk(heading, self._choice(choice, piece.echo + piece.text, measured, None)),)

    def finish(self, heading: Heading, choice: Choice) -> tuple[bytes, ...]:
        return (self._chunk(heading, self._choice(choice, "", None, choice.output.finish)),)

    @staticmethod
    def _choice(choice: Choice, text: str, measured: Sequence[Piece] | None, finish: str | None) -> dict[str, object]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None if measured is None else logprobs.text(measured),
            "finish_reason": finish,
        }


def _conflict(param: str, message: str) -> BadRequest:
    return BadRequest("conflicting_fields", message, param=param)


def _prompts(request: CompletionRequest) -> tuple[PromptInput, ...]:
    given = request.prompt
    if isinstance(given, str):
        texts: list[str] = [given]
    elif isinstance(given[0], int):
        texts, given = [], [given]
    else:
        texts = [prompt for prompt in given if isinstance(prompt, str)]
    if not request.suffix:
        tokens = (TokenPrompt(tokens=tuple(prompt)) for prompt in given if isinstance(prompt, list))
        return tuple(texts) if texts else tuple(tokens)
    if not texts:
        raise _conflict("suffix", "'suffix' needs prompts that are text.")
    return tuple(InfillPrompt(prefix=text, suffix=request.suffix) for text in texts)


def _call(
    request: ChatCompletionRequest | CompletionRequest,
    *,
    prompts: tuple[PromptInput, ...],
    max_tokens: int | None,
    max_tokens_field: str,
    top: int | None,
) -> Call:
    options = request.stream_options
    if options is not None and not request.stream:
        raise _conflict("stream_options", "'stream_options' needs 'stream' to be true.")
    biases, n = request.logit_bias or {}, request.n or 1
    if n * len(prompts) > MAX_CHOICES:
        raise _conflict("n", f"At most {MAX_CHOICES} choices are made for one request, all prompts together.")
    return Call(
        model=request.model,
        prompts=prompts,
        wanted=Wanted(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            repeat_penalty=request.repeat_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=tuple(sorted((int(token), float(bias)) for token, bias in biases.items())),
            seed=request.seed,
            deterministic=request.deterministic,
            max_tokens=max_tokens,
            stop=request.stop_sequences(),
            logprobs=top,
        ),
        max_tokens_field=max_tokens_field,
        n=n,
        cache_key=request.prompt_cache_key or "",
        stream=bool(request.stream),
        include_usage=options is not None and options.include_usage,
        include_obfuscation=options is not None and bool(options.include_obfuscation),
    )
