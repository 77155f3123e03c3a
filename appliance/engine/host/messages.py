"""Jobs and events as worker messages, and back. Shapes are checked on arrival, by the same rules at both ends."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypeVar

from appliance.engine.batch import Exactness
from appliance.engine.chat.reasoning import Tags
from appliance.engine.host.channel import ChannelError
from appliance.engine.types import (
    Begun,
    ChatFormat,
    ChatMessage,
    Delta,
    EngineEvent,
    Finished,
    GenerationJob,
    InfillPrompt,
    MadeCall,
    PromptInput,
    PromptReady,
    SamplingParams,
    TokenLogprob,
    TokenPrompt,
    ToolChat,
)
from appliance.errors import ApplianceError, BadRequest, EngineFailed, Unavailable
from client_sdk.wire import tools as wire_tools

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
        "evaluate": job.evaluate,
        "sampling": _pack_sampling(job.sampling),
    }


def _pack_prompt(prompt: PromptInput) -> object:
    if isinstance(prompt, TokenPrompt):
        return {"tokens": struct.pack(f"<{len(prompt.tokens)}I", *prompt.tokens)}
    if isinstance(prompt, InfillPrompt):
        return {"prefix": prompt.prefix, "suffix": prompt.suffix}
    if isinstance(prompt, ToolChat):
        messages = [_pack_message(item) for item in prompt.messages]
        return {
            "messages": messages,
            "tools": prompt.tools,
            "as_text": prompt.arguments_as_text,
            "null": prompt.no_content_as_null,
        }
    return prompt if isinstance(prompt, str) else [_pack_message(item) for item in prompt]


def _pack_message(message: ChatMessage) -> list[object]:
    calls = [[call.call_id, call.name, call.arguments] for call in message.calls]
    return [message.role, message.content, message.reasoning, calls, message.call_id, message.name]


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
    if "messages" in prompt:
        return ToolChat(
            messages=tuple(_chat_message(item) for item in take(prompt, "messages", list)),
            tools=take(prompt, "tools", str),
            arguments_as_text=take(prompt, "as_text", bool),
            no_content_as_null=take(prompt, "null", bool),
        )
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
        "score_prompt": sampling.score_prompt,
    }


def unpack_job(message: Mapping[str, object]) -> GenerationJob:
    """Raises ChannelError."""
    return GenerationJob(
        job_id=take(message, "id", bytes),
        prompt=_unpack_prompt(message.get("prompt")),
        template_date=take(message, "date", str),
        cache_scope=take(message, "scope", bytes),
        evaluate=take(message, "evaluate", bool),
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
        score_prompt=take(message, "score_prompt", bool),
    )


def _bias(item: object) -> tuple[int, float]:
    if isinstance(item, list) and len(item) == 2 and type(item[0]) is int and type(item[1]) is float:
        return item[0], item[1]
    raise ChannelError("a logit bias is not a token and a number")


def _chat_message(item: object) -> ChatMessage:
    if not isinstance(item, list) or len(item) != 6:
        raise ChannelError("a chat message has not six parts")
    names = ("role", "content", "reasoning", "calls", "call_id", "name")
    parts = dict(zip(names, item, strict=True))
    return ChatMessage(
        role=take(parts, "role", str),
        content=take(parts, "content", str),
        reasoning=optional(parts, "reasoning", str),
        calls=tuple(_made_call(call) for call in take(parts, "calls", list)),
        call_id=optional(parts, "call_id", str),
        name=optional(parts, "name", str),
    )


def _made_call(item: object) -> MadeCall:
    if isinstance(item, list) and len(item) == 3 and all(isinstance(part, str) for part in item):
        return MadeCall(call_id=item[0], name=item[1], arguments=item[2])
    raise ChannelError("a call is not three texts")


def pack_chat_format(chat: ChatFormat) -> dict[str, object]:
    return {
        "takes_tools": chat.takes_tools,
        "calls": None if chat.calls is None else chat.calls.encode(),
        "as_text": chat.arguments_as_text,
        "null": chat.no_content_as_null,
        "reasoning": None if chat.reasoning is None else [chat.reasoning.start, chat.reasoning.end],
        "opens": chat.opens_reasoning,
    }


def unpack_chat_format(message: Mapping[str, object]) -> ChatFormat:
    """Raises ChannelError."""
    calls, tags = optional(message, "calls", str), optional(message, "reasoning", list)
    if tags is not None and (len(tags) != 2 or not all(isinstance(tag, str) and tag for tag in tags)):
        raise ChannelError("the tags of reasoning are not two texts")
    try:
        syntax = None if calls is None else wire_tools.syntax_of({wire_tools.FACT_SYNTAX: calls})
    except ValueError:
        raise ChannelError("the form of calls is not six texts") from None
    return ChatFormat(
        takes_tools=take(message, "takes_tools", bool),
        calls=syntax,
        arguments_as_text=take(message, "as_text", bool),
        no_content_as_null=take(message, "null", bool),
        reasoning=None if tags is None else Tags(start=tags[0], end=tags[1]),
        opens_reasoning=take(message, "opens", bool),
    )


def pack_event(job_id: bytes, event: EngineEvent | ApplianceError) -> dict[str, object]:
    """Messages `delta`, `ready`, `begun`, `end`, `error`."""
    if isinstance(event, Delta):
        message: dict[str, object] = {"t": "delta", "id": job_id, "text": event.text, "tokens": event.token_ids}
        for key, entries in (("logprobs", event.logprobs), ("prompt_logprobs", event.prompt_logprobs)):
            if entries:
                message[key] = [
                    [item.token, item.logprob, [[token, number] for token, number in item.top]] for item in entries
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
    if isinstance(event, Begun):
        return {"t": "begun", "id": job_id, "execution": dict(event.execution)}
    if isinstance(event, Finished):
        return {"t": "end", "id": job_id, "reason": event.reason, "execution": dict(event.execution)}
    return {
        "t": "error",
        "id": job_id,
        "status": event.status,
        "retry_after_s": event.retry_after_s,
        "code": event.code,
        "message": event.message,
        "param": event.param,
    }


_ERRORS: Mapping[int, type[ApplianceError]] = {error.status: error for error in (BadRequest, Unavailable)}


def unpack_event(message: Mapping[str, object]) -> EngineEvent | ApplianceError:
    """Raises ChannelError."""
    kind = take(message, "t", str)
    if kind == "delta":
        return Delta(
            text=take(message, "text", str),
            token_ids=take(message, "tokens", bytes),
            logprobs=tuple(_logprob(item) for item in optional(message, "logprobs", list) or ()),
            prompt_logprobs=tuple(_logprob(item) for item in optional(message, "prompt_logprobs", list) or ()),
        )
    if kind == "ready":
        return PromptReady(
            prompt_text=take(message, "text", str),
            token_ids=take(message, "tokens", bytes),
            max_tokens=take(message, "max_tokens", int),
            execution=take(message, "execution", dict),
        )
    if kind == "begun":
        return Begun(execution=take(message, "execution", dict))
    if kind == "end":
        return Finished(
            reason="stop" if take(message, "reason", str) == "stop" else "length",
            execution=take(message, "execution", dict),
        )
    if kind == "error":
        error = _ERRORS.get(take(message, "status", int), EngineFailed)
        return error(
            take(message, "code", str),
            take(message, "message", str),
            param=optional(message, "param", str),
            retry_after_s=optional(message, "retry_after_s", int),
        )
    raise ChannelError("unknown kind of event")


def _logprob(item: object) -> TokenLogprob:
    if isinstance(item, list) and len(item) == 3 and isinstance(item[2], list):
        if item[1] is None and isinstance(item[0], bytes) and not item[2]:
            return TokenLogprob(token=item[0], logprob=None)
        token, number = _token_number(item[:2])
        return TokenLogprob(token=token, logprob=number, top=tuple(_token_number(entry) for entry in item[2]))
    raise ChannelError("a log probability is not a token, a number and its alternatives")


def _token_number(item: object) -> tuple[bytes, float]:
    if isinstance(item, list) and len(item) == 2 and isinstance(item[0], bytes) and isinstance(item[1], float):
        return item[0], item[1]
    raise ChannelError("a log probability is not a token and a number")


def pack_exactness(exactness: Exactness | None) -> list[bool]:
    """Empty where nothing is known."""
    if exactness is None:
        return []
    return [exactness.batch, exactness.verify, exactness.chunk, exactness.rollback]


def unpack_exactness(verdicts: list[object]) -> Exactness:
    if len(verdicts) != 4 or not all(isinstance(verdict, bool) for verdict in verdicts):
        raise ChannelError("message field exactness is not four verdicts")
    batch, verify, chunk, rollback = map(bool, verdicts)
    return Exactness(batch=batch, verify=verify, chunk=chunk, rollback=rollback)


def known_exactness(message: Mapping[str, object]) -> Exactness | None:
    """What an earlier worker found, None for the first one. It depends on nothing that a restart may change."""
    verdicts = take(message, "exactness", list)
    return unpack_exactness(verdicts) if verdicts else None


def cut_short(message: Mapping[str, object], cut: list[str]) -> list[str]:
    """Measurements that came to no end, those of an earlier worker included: what it found is used again."""
    return list(dict.fromkeys([*map(str, take(message, "known_cut", list)), *cut]))


def cut_facts(cut: list[str]) -> dict[str, object]:
    """For the execution facts of receipts."""
    return {"start-cut-short": ",".join(cut)} if cut else {}
