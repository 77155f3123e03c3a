"""From what a request asks for to the jobs the engine gets and the parameters its receipt states."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from appliance.engine.types import GenerationJob, PromptReady, SamplingParams
from appliance.errors import BadRequest, EngineFailed
from appliance.inference.request import Call, Usage
from appliance.receipts.transcript import Subject
from client_sdk.wire import cbor, names

SEEDS = 2**32 - 1
"""Seeds are 0..SEEDS-1: llama.cpp takes 2**32 - 1 for "draw one"."""
FACTS_PER_CHOICE = 30
FACTS_PER_ANSWER = 16
"""Beside those of its choices (`appliance.inference.chat_format.facts`)."""
_LIMIT_FACTS_BYTES = 24 << 10


def resolve(call: Call, *, drawn_seed: int, deterministic: bool) -> SamplingParams:
    """Defaults applied and the seed resolved: from here on nothing is left open.

    `deterministic` is the configuration's word; where it says yes, no request can say no (BadRequest).
    """
    wanted = call.wanted
    if deterministic and wanted.deterministic is False:
        raise BadRequest(
            "invalid_field",
            "Every answer is deterministic here; 'deterministic' cannot be false.",
            param="deterministic",
        )

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        temperature=given(wanted.temperature, 1.0),
        top_p=given(wanted.top_p, 1.0),
        top_k=0 if wanted.top_k is None else wanted.top_k,
        min_p=given(wanted.min_p, 0.0),
        repeat_penalty=given(wanted.repeat_penalty, 1.0),
        presence_penalty=given(wanted.presence_penalty, 0.0),
        frequency_penalty=given(wanted.frequency_penalty, 0.0),
        logit_bias=wanted.logit_bias,
        seed=drawn_seed if wanted.seed is None else wanted.seed,
        deterministic=deterministic or bool(wanted.deterministic),
        max_tokens=wanted.max_tokens,
        stop=wanted.stop,
        logprobs=wanted.logprobs,
        grammar=call.shape.grammar,
        score_prompt=call.echo and wanted.logprobs is not None,
    )


def jobs(subject: Subject, call: Call, sampling: SamplingParams, cache_scope: bytes) -> Iterator[GenerationJob]:
    """One job for each choice: choice N has a seed and an id of its own, made of the answer's and N."""
    date = datetime.datetime.fromtimestamp(subject.iat, datetime.UTC).date().isoformat()
    for index in range(len(call.prompts) * call.n):
        job_id = hashlib.sha256(subject.cti + index.to_bytes(4, "big")).digest()[:16] if index else subject.cti
        yield GenerationJob(
            job_id=job_id,
            prompt=call.prompts[index // call.n],
            sampling=replace(sampling, seed=(sampling.seed + index) % SEEDS) if index else sampling,
            template_date=date,
            cache_scope=cache_scope,
            evaluate=call.evaluate,
        )


def check_room(call: Call, ready: PromptReady) -> None:
    """Raises BadRequest `context_length_exceeded` if the answer asked for does not fit behind its prompt."""
    wanted, prompt_tokens = call.wanted.max_tokens, len(ready.token_ids) // 4
    if wanted is not None and ready.max_tokens < wanted:
        raise BadRequest(
            "context_length_exceeded",
            f"The prompt has {prompt_tokens} tokens, which leaves room for {ready.max_tokens}; "
            f"{wanted} were asked for.",
            param=call.max_tokens_field,
        )


def claim(subject: Subject, call: Call, sampling: SamplingParams, max_tokens: int) -> Mapping[str, object]:
    """The receipt's `decoding`: every parameter in its effective value, content as commitments."""

    def committed(label: str, content: object) -> bytes | None:
        return subject.commit(label, cbor.encode(content)) if content else None

    return {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": float(sampling.min_p),
        "repeat_penalty": float(sampling.repeat_penalty),
        "presence_penalty": float(sampling.presence_penalty),
        "frequency_penalty": float(sampling.frequency_penalty),
        "logit_bias": committed(names.LABEL_LOGIT_BIAS, {token: float(bias) for token, bias in sampling.logit_bias}),
        "seed": sampling.seed,
        "deterministic": sampling.deterministic,
        "max_tokens": max_tokens,
        "n": call.n,
        "prompts": len(call.prompts),
        "echo": call.echo,
        "logprobs": sampling.logprobs,
        "stop": committed(names.LABEL_STOP, list(sampling.stop)),
        "response_format": committed(names.LABEL_RESPONSE_FORMAT, call.shape.response_format),
        "tools": committed(names.LABEL_TOOLS, call.shape.tools),
        "tool_choice": call.shape.tool_choice,
        "parallel_tool_calls": call.shape.parallel,
    }


def echoed(call: Call, index: int) -> str:
    """The prompt of choice `index` where the request wants it in front of the answer."""
    prompt = call.prompts[index // call.n]
    return prompt if call.echo and isinstance(prompt, str) else ""


def usage(prompt_tokens: int, counts: Sequence[int], facts: Sequence[Mapping[str, object]], n: int) -> Usage:
    """`counts` and `facts` are of each choice. A prompt counts once, as its first choice met it."""

    def total(name: str, each: Sequence[Mapping[str, object]]) -> int:
        return sum(value for item in each if isinstance(value := item.get(name, 0), int))

    accepted = total("accepted-tokens", facts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(counts),
        cached_tokens=total("cached-prompt-tokens", facts[::n]),
        accepted_tokens=accepted,
        rejected_tokens=total("drafted-tokens", facts) - accepted,
    )


def execution(facts: Sequence[Mapping[str, object]]) -> Mapping[str, object]:
    """Facts about the paths of all choices: one where they agree, else one of each choice, named `fact/N`.

    Raises EngineFailed where an engine states more than a receipt can hold of all choices, however they disagree.
    """
    if any(len(each) > FACTS_PER_CHOICE for each in facts):
        raise EngineFailed("engine_failed", f"The engine stated more than {FACTS_PER_CHOICE} facts of one answer.")
    merged: dict[str, object] = {}
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name) for each in facts]
        if all(type(value) is type(values[0]) and value == values[0] for value in values):
            merged[name] = values[0]
        else:
            merged.update({f"{name}/{index}": value for index, value in enumerate(values)})
    if len(cbor.encode(merged)) > _LIMIT_FACTS_BYTES:
        raise EngineFailed("engine_failed", f"The facts of the answer exceed {_LIMIT_FACTS_BYTES} bytes.")
    return merged
