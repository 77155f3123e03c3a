"""Jobs and events as worker messages, and back. Shapes are checked on arrival, by the same rules at both ends."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypeVar

from appliance.engine.channel import ChannelError
from appliance.engine.types import (
    ChatMessage,
    Delta,
    EngineEvent,
    Finished,
    GenerationJob,
    InfillPrompt,
    PromptInput,
    PromptReady,
    SamplingParams,
    TokenLogprob,
    TokenPrompt,
)
from appliance.errors import ApplianceError, BadRequest, EngineFailed

T = TypeVar("T")


def take(message: Mapping[str, object], key: str, kind: type[T]) -> T:
    """A field of exactly that type. Raises ChannelError."""
    value = message.get(key)
    if type(value) is not kind:
        raise ChannelError(f"message field {key} is not {kind.__name__}")
    return value


def optional(message: Mapping[str, object], key: str, kind: type[T]) -> T | None:
    """As `take`, null allowed."""
    return None if message.get(key) is None else take(message, key, kind)


def pack_job(job: GenerationJob) -> dict[str, object]:
    """Message `submit`."""
    return {
        "t": "submit",
        "id": job.job_id,
        "prompt": _pack_prompt(job.prompt),
        "date": job.template_date,
        "scope": job.cache_scope,
        "sampling": _pack_sampling(job.sampling),
    }


def _pack_prompt(prompt: PromptInput) -> object:
    if isinstance(prompt, TokenPrompt):
        return {"tokens": struct.pack(f"<{len(prompt.tokens)}I", *prompt.tokens)}
    if isinstance(prompt, InfillPrompt):
        return {"prefix": prompt.prefix, "suffix": prompt.suffix}
    return prompt if isinstance(prompt, str) else [[item.role, item.content] for item in prompt]


def _unpack_prompt(prompt: object) -> PromptInput:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return tuple(_chat_message(item) for item in prompt)
    if not isinstance(prompt, dict):
        raise ChannelError("a prompt is neither text nor a list nor a map")
    if "tokens" in prompt:
        packed = take(prompt, "tokens", bytes)
        if len(packed) % 4:
            raise ChannelError("token ids are cut short")
        return TokenPrompt(tokens=struct.unpack(f"<{len(packed) // 4}I", packed))
    return InfillPrompt(prefix=take(prompt, "prefix", str), suffix=take(prompt, "suffix", str))


def _pack_sampling(sampling: SamplingParams) -> dict[str, object]:
    return {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": float(sampling.min_p),
        "repeat_penalty": float(sampling.repeat_penalty),
        "presence_penalty": float(sampling.presence_penalty),
        "frequency_penalty": float(sampling.frequency_penalty),
        "logit_bias": [[token, float(bias)] for token, bias in sampling.logit_bias],
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "logprobs": sampling.logprobs,
        "grammar": sampling.grammar,
        "deterministic": sampling.deterministic,
    }


def unpack_job(message: Mapping[str, object]) -> GenerationJob:
    """Raises ChannelError."""
    return GenerationJob(
        job_id=take(message, "id", bytes),
        prompt=_unpack_prompt(message.get("prompt")),
        template_date=take(message, "date", str),
        cache_scope=take(message, "scope", bytes),
        sampling=_unpack_sampling(take(message, "sampling", dict)),
    )


def _unpack_sampling(message: Mapping[str, object]) -> SamplingParams:
    stops = take(message, "stop", list)
    if not all(isinstance(stop, str) for stop in stops):
        raise ChannelError("message field stop is not a list of text")
    return SamplingParams(
        temperature=take(message, "temperature", float),
        top_p=take(message, "top_p", float),
        top_k=take(message, "top_k", int),
        min_p=take(message, "min_p", float),
        repeat_penalty=take(message, "repeat_penalty", float),
        presence_penalty=take(message, "presence_penalty", float),
        frequency_penalty=take(message, "frequency_penalty", float),
        logit_bias=tuple(_bias(item) for item in take(message, "logit_bias", list)),
        seed=take(message, "seed", int),
        max_tokens=optional(message, "max_tokens", int),
        stop=tuple(stops),
        logprobs=optional(message, "logprobs", int),
        grammar=optional(message, "grammar", str),
        deterministic=take(message, "deterministic", bool),
    )


def _bias(item: object) -> tuple[int, float]:
    if isinstance(item, list) and len(item) == 2 and type(item[0]) is int and type(item[1]) is float:
        return item[0], item[1]
    raise ChannelError("a logit bias is not a token and a number")


def _chat_message(item: object) -> ChatMessage:
    if isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], str):
        return ChatMessage(role=item[0], content=item[1])
    raise ChannelError("a chat message is not a pair of texts")


def pack_event(job_id: bytes, event: EngineEvent | ApplianceError) -> dict[str, object]:
    """Messages `delta`, `ready`, `end`, `error`."""
    if isinstance(event, Delta):
        message: dict[str, object] = {"t": "delta", "id": job_id, "text": event.text, "tokens": event.token_ids}
        if event.logprobs:
            message["logprobs"] = [
                [item.token, item.logprob, [[token, number] for token, number in item.top]] for item in event.logprobs
            ]
        return message
    if isinstance(event, PromptReady):
        return {
            "t": "ready",
            "id": job_id,
            "text": event.prompt_text,
            "tokens": event.token_ids,
            "max_tokens": event.max_tokens,
            "execution": dict(event.execution),
        }
    if isinstance(event, Finished):
        return {"t": "end", "id": job_id, "reason": event.reason, "execution": dict(event.execution)}
    return {
        "t": "error",
        "id": job_id,
        "refused": isinstance(event, BadRequest),
        "code": event.code,
        "message": event.message,
        "param": event.param,
    }


def unpack_event(message: Mapping[str, object]) -> EngineEvent | ApplianceError:
    """Raises ChannelError."""
    kind = take(message, "t", str)
    if kind == "delta":
        return Delta(
            text=take(message, "text", str),
            token_ids=take(message, "tokens", bytes),
            logprobs=tuple(_logprob(item) for item in optional(message, "logprobs", list) or ()),
        )
    if kind == "ready":
        return PromptReady(
            prompt_text=take(message, "text", str),
            token_ids=take(message, "tokens", bytes),
            max_tokens=take(message, "max_tokens", int),
            execution=take(message, "execution", dict),
        )
    if kind == "end":
        return Finished(
            reason="stop" if take(message, "reason", str) == "stop" else "length",
            execution=take(message, "execution", dict),
        )
    if kind == "error":
        error = BadRequest if take(message, "refused", bool) else EngineFailed
        return error(take(message, "code", str), take(message, "message", str), param=optional(message, "param", str))
    raise ChannelError("unknown kind of event")


def _logprob(item: object) -> TokenLogprob:
    if isinstance(item, list) and len(item) == 3 and isinstance(item[2], list):
        token, number = _token_number(item[:2])
        return TokenLogprob(token=token, logprob=number, top=tuple(_token_number(entry) for entry in item[2]))
    raise ChannelError("a log probability is not a token, a number and its alternatives")


def _token_number(item: object) -> tuple[bytes, float]:
    if isinstance(item, list) and len(item) == 2 and isinstance(item[0], bytes) and isinstance(item[1], float):
        return item[0], item[1]
    raise ChannelError("a log probability is not a token and a number")
