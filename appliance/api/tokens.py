"""/v1/tokenize and /v1/detokenize: what the model sees of a prompt, and what tokens say. Nothing is evaluated.

Prompts go the way of all prompts: a chat is rendered with the model's template, text never becomes a control token.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field, StringConstraints

from appliance.api.dialects import chat_call, json_bytes
from appliance.api.schema import (
    MAX_TOOLS,
    ChatCompletionRequest,
    Closed,
    Message,
    PromptText,
    PromptTokens,
    Tool,
    as_sent,
    parse,
    validated,
)
from appliance.engine.types import PromptInput, PromptReady, TokenPrompt
from appliance.errors import ApplianceError, BadRequest
from appliance.inference.request import Call, Choice, Heading, Piece, Usage, Wanted

_ModelName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_NOTHING = Wanted(max_tokens=0, seed=0)


class TokenizeRequest(Closed):
    """`prompt`, or `messages` and the tools they are told about."""

    model: _ModelName
    prompt: PromptText | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


class DetokenizeRequest(Closed):
    model: _ModelName
    tokens: PromptTokens


class _Whole(ABC):
    """What the two routes have in common: whole answers, about a prompt."""

    prefix = ""
    kind = ""

    def whole(self, heading: Heading, choices: Sequence[Choice], usage: Usage) -> bytes:
        prompt = choices[0].prompt
        assert prompt is not None, "the call was not to be evaluated"
        document = {
            "id": f"{self.prefix}{heading.identifier}",
            "object": self.kind,
            "created": heading.created,
            "model": heading.model,
            "count": len(prompt.token_ids) // 4,
            "max_model_len": prompt.execution["context-length"],
        }
        return json_bytes({**document, **self._about(prompt)})

    @abstractmethod
    def _about(self, prompt: PromptReady) -> Mapping[str, object]:
        """What this route tells of the prompt."""

    def opening(self, heading: Heading, choices: Sequence[Choice]) -> tuple[bytes, ...]:
        return ()

    def delta(self, heading: Heading, choice: Choice, piece: Piece) -> tuple[bytes, ...]:
        return ()

    def finish(self, heading: Heading, choice: Choice) -> tuple[bytes, ...]:
        return ()

    def closing(self, heading: Heading, usage: Usage) -> tuple[bytes, ...]:
        return ()

    def failure(self, heading: Heading, error: ApplianceError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


class TokenizeDialect(_Whole):
    """/v1/tokenize"""

    prefix = "tok-"
    kind = "tokenization"

    def parse(self, body: bytes) -> Call:
        request = parse(TokenizeRequest, body)
        if (request.prompt is None) == (request.messages is None):
            raise BadRequest("conflicting_fields", "One of 'prompt' and 'messages' is required.", param="prompt")
        if request.prompt is not None:
            if request.tools is not None:
                raise BadRequest("conflicting_fields", "'tools' belong to 'messages'.", param="tools")
            return _call(request.model, request.prompt)
        given = {name: value for name, value in as_sent(request).items() if value is not None}
        chat = chat_call(validated(ChatCompletionRequest, given))
        return replace(chat, wanted=_NOTHING, evaluate=False)

    def _about(self, prompt: PromptReady) -> Mapping[str, object]:
        ids = prompt.token_ids
        return {"tokens": list(struct.unpack(f"<{len(ids) // 4}I", ids))}

    def explain(self, error: ApplianceError) -> ApplianceError:
        return error


class DetokenizeDialect(_Whole):
    """/v1/detokenize"""

    prefix = "detok-"
    kind = "detokenization"

    def parse(self, body: bytes) -> Call:
        request = parse(DetokenizeRequest, body)
        return _call(request.model, TokenPrompt(tokens=tuple(request.tokens)))

    def _about(self, prompt: PromptReady) -> Mapping[str, object]:
        return {"prompt": prompt.prompt_text}

    def explain(self, error: ApplianceError) -> ApplianceError:
        if error.param != "prompt":
            return error
        return type(error)(error.code, error.message, param="tokens", retry_after_s=error.retry_after_s)


def _call(model: str, prompt: PromptInput) -> Call:
    return Call(
        model=model,
        prompts=(prompt,),
        wanted=_NOTHING,
        max_tokens_field="max_tokens",
        n=1,
        stream=False,
        include_usage=False,
        evaluate=False,
    )
