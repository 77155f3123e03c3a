"""One place of a workload or of a suite, asked through the verifying client: a sample, and the receipt it is of."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from appliance.bench.runs import Sample
from appliance.bench.scoring import Score, chosen, score_choice, score_text
from appliance.bench.suite import Kind, Question, Suite
from appliance.bench.workload import Workload, messages, parameters
from client_sdk import AsyncAppliance
from client_sdk.client.answers import Pending, Verified, refusal
from client_sdk.client.streams import sdk_errors
from client_sdk.errors import MalformedError, Rejection
from client_sdk.receipts.verify import VerifiedReceipt

Taken = tuple[Sample, VerifiedReceipt]
_COMPLETIONS_ROUTE = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds from the request, as in Sample."""

    first: float
    verified: float
    last: float
    total: float


async def ask(client: AsyncAppliance, model: str, place: int, workload: Workload, suite: Suite | None) -> Taken:
    """What stands at `place`, of the suite where there is one. Raises SdkError."""
    if suite is None:
        text, taken = await _ask_chat(client, model, messages(place), parameters(place, workload))
        return taken
    question = suite.questions[place]
    if question.kind is Kind.CHOICE:
        return await _ask_choice(client, model, question, place)
    system = [{"role": "system", "content": question.system}] if question.system else []
    asked = [*system, {"role": "user", "content": question.prompt}]
    text, (sample, receipt) = await _ask_chat(client, model, asked, _greedy(question.tokens, place))
    return _with_score(sample, score_text(question, text)), receipt


async def _ask_chat(
    client: AsyncAppliance, model: str, asked: Sequence[Mapping[str, str]], chosen_parameters: Mapping[str, object]
) -> tuple[str, Taken]:
    """A streamed answer, and its text."""
    first = verified = last = 0.0
    start = time.perf_counter()
    stream = client.stream(asked, model=model, pending=True, **chosen_parameters)
    async for piece in stream:
        now = time.perf_counter() - start
        match piece:
            case Pending():
                first, last = first or now, now
            case Verified():
                verified = verified or now
    total = time.perf_counter() - start
    times = Times(first=first or total, verified=verified or total, last=last or total, total=total)
    output = stream.receipt.claims.output
    assert output is not None
    content = f"{output[0].finish}\0{stream.text}"
    sample = _sample(stream.receipt, content, times)
    return stream.text, (replace(sample, truncated=output[0].finish == "length"), stream.receipt)


async def _ask_choice(client: AsyncAppliance, model: str, question: Question, place: int) -> Taken:
    """All continuations in one request, as prompts that are echoed with their log probabilities.

    Its output is the choice: what is generated behind the prompts, a token each, nobody asked for.
    """
    prompts = [f"{question.prompt} {choice}" for choice in question.choices]
    body = {"model": model, "prompt": prompts, "echo": True, "logprobs": 0, **_greedy(1, place)}
    start = time.perf_counter()
    with sdk_errors():
        response = await client.http.post(_COMPLETIONS_ROUTE, json=body)
    if response.status_code != 200:
        raise refusal(response.status_code, response.content, verified=response.extensions["verified"])
    total = time.perf_counter() - start
    receipt: VerifiedReceipt = response.extensions["verified_receipt"]
    sums = log_probabilities(response.json(), question)
    times = Times(first=total, verified=total, last=total, total=total)
    sample = _sample(receipt, f"choice\0{chosen(sums)}", times)
    return _with_score(sample, score_choice(question, sums)), receipt


def log_probabilities(body: Any, question: Question) -> list[float]:
    """Of each choice, from a completion that echoes the prompt and the choice. Raises MalformedError.

    A token that has the prompt's end and the choice's beginning in it counts for the choice.
    """
    try:
        ordered = sorted(body["choices"], key=lambda entry: entry["index"])
        return [
            _of_choice(entry["logprobs"], question, len(choice))
            for entry, choice in zip(ordered, question.choices, strict=True)
        ]
    except (ValueError, TypeError, KeyError):
        why = f"no log probabilities of the choices of question {question.id}"
        raise MalformedError(Rejection.MALFORMED_RESPONSE, why) from None


def _of_choice(measured: Mapping[str, Any], question: Question, length: int) -> float:
    starts = measured["text_offset"]
    prompt_ends = len(question.prompt)
    choice_ends = prompt_ends + 1 + length
    ends = [*starts[1:], choice_ends]
    return math.fsum(
        number
        for start, end, number in zip(starts, ends, measured["token_logprobs"], strict=True)
        if end > prompt_ends and start < choice_ends
    )


def _greedy(tokens: int, place: int) -> dict[str, object]:
    return {"max_tokens": tokens, "temperature": 0, "seed": place}


def _with_score(sample: Sample, score: Score) -> Sample:
    return replace(sample, strict=score.strict, relaxed=score.relaxed)


def _sample(receipt: VerifiedReceipt, content: str, times: Times) -> Sample:
    """`content` is what counts as the output."""
    claims = receipt.claims
    assert claims.output is not None
    assert claims.prompt is not None
    assert claims.execution is not None
    facts, choices = claims.execution, len(claims.output)
    return Sample(
        digest=hashlib.sha256(content.encode()).digest(),
        first_s=times.first,
        verified_s=times.verified,
        last_s=times.last,
        total_s=times.total,
        prompt_tokens=claims.prompt.count,
        cached_tokens=_total(facts, "cached-prompt-tokens", choices),
        tokens=sum(output.count for output in claims.output),
        passes=_total(facts, "target-passes", choices),
        drafted=_total(facts, "drafted-tokens", choices),
        accepted=_total(facts, "accepted-tokens", choices),
        truncated=False,
        exact=facts.get("exact") is True,
    )


def _total(facts: Mapping[str, object], name: str, choices: int) -> int:
    """A fact of all choices together: it is there once where they agree on it, else as `name/N`."""
    counts = [facts.get(f"{name}/{number}", facts.get(name, 0)) for number in range(choices)]
    return sum(count for count in counts if type(count) is int)
