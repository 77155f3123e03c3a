"""Compare an answer with its replay, claim by claim, then body with body. Both were made with the same salt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from appliance.engine.base import Engine
from appliance.replay.content import ContentError, Said, Unequal, content, first_unequal, said
from appliance.replay.run import Replayed
from appliance.replay.saved import SavedAnswer
from appliance.replay.tokens import Claimed, Speller, locate
from appliance.replay.verdict import CannotReproduce, Difference, Reason
from client_sdk.wire import digests, names, tools
from client_sdk.wire.receipt import OutputFacts, ReceiptClaims

_SHOWN = 60
_LOGPROBS = re.compile(r"choices\[(\d+)\]\.logprobs\.(?:\w+)\[(\d+)\]")
_VECTOR = re.compile(r"data\[(\d+)\]\.embedding\[(\d+)\]")
_DECIDED = (
    "template-date",
    "context-length",
    "evaluated",
    tools.FACT_CHAT_FORMAT,
    tools.FACT_FORMAT,
    tools.FACT_SYNTAX,
    tools.FACT_TAGS,
    tools.FACT_MARKS,
    tools.FACT_REASONING_TOKENS,
)
"""Execution facts that are decided by request, model and configuration. Others tell of the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What was found equal, in order, up to the first difference."""

    equal: tuple[str, ...]
    difference: Difference | None


async def compare(saved: SavedAnswer, replayed: Replayed, engine: Engine | None) -> Compared:
    """The first difference between the two. `engine` spells tokens. Raises CannotReproduce (damaged)."""
    claims, made = saved.claims, replayed.claims
    answer, again = _content(saved), content(replayed.body, replayed.frames)
    equal: list[str] = []
    for name, stated, difference in (
        ("status", True, _facts("status", _ending(claims), _ending(made))),
        ("prompt", claims.prompt is not None, _prompt(claims, made)),
        ("decoding", claims.decoding is not None, _facts("decoding", claims.decoding, made.decoding)),
    ):
        if difference is not None:
            return Compared(equal=tuple(equal), difference=difference)
        equal += [name] if stated else []
    found = await _outputs(saved, replayed, said(answer), engine)
    if found is None:
        equal += ["output"] if claims.output is not None else []
        found = _vectors(claims, made, answer, again)
    if found is None:
        equal += ["embedding"] if claims.embedding is not None else []
        found = _execution(claims, made)
    if found is None:
        equal += ["execution"] if claims.execution is not None else []
        unequal = first_unequal(answer, again)
        found = None if unequal is None else _of_body(unequal)
    if found is None:
        equal.append("body")
    return Compared(equal=tuple(equal), difference=found)


def _content(saved: SavedAnswer) -> dict[str, object]:
    try:
        return content(saved.response, saved.frames)
    except ContentError as error:
        raise CannotReproduce(Reason.DAMAGED, f"the saved answer cannot be used: response {error}") from None


# -- claims ------------------------------------------------------------------------------------------------------------


def _ending(claims: ReceiptClaims) -> Mapping[str, object]:
    facts = claims.response
    return {"status": facts.status, "http-status": facts.http_status, "media-type": facts.media_type}


def _facts(what: str, answer: Mapping[str, object] | None, replay: Mapping[str, object] | None) -> Difference | None:
    """The first of two maps' facts that is not the same."""
    one, other = answer or {}, replay or {}
    for name in dict.fromkeys((*one, *other)):
        here, there = one.get(name), other.get(name)
        if type(here) is not type(there) or here != there:
            return Difference(what=what, place={"fact": name}, answer=_shown(here), replay=_shown(there))
    return None


def _prompt(claims: ReceiptClaims, made: ReceiptClaims) -> Difference | None:
    return _facts(
        "prompt",
        None if claims.prompt is None else claims.prompt.to_map(),
        None if made.prompt is None else made.prompt.to_map(),
    )


def _execution(claims: ReceiptClaims, made: ReceiptClaims) -> Difference | None:
    """Facts of older appliances, which do not state all of them, are compared as far as they go."""
    stated = {name: value for name, value in (claims.execution or {}).items() if name in _DECIDED}
    return _facts("execution", stated, {name: (made.execution or {}).get(name) for name in stated})


async def _outputs(
    saved: SavedAnswer, replayed: Replayed, parts: Mapping[int, Said], engine: Engine | None
) -> Difference | None:
    claimed, made = saved.claims.output or (), replayed.claims.output or ()
    if len(claimed) != len(made):
        return Difference(what="choices", answer=len(claimed), replay=len(made))
    for index, (one, other) in enumerate(zip(claimed, made, strict=True)):
        if (one.tokens, one.count) != (other.tokens, other.count) and engine is not None:
            job = replayed.jobs[index]
            text = _generated(saved, index, one, parts.get(index, Said()), job.prompt)
            return await locate(_claimed(saved, index, one, text), job, Speller(engine))
        for name in ("finish", "text"):
            here, there = one.to_map()[name], other.to_map()[name]
            if here != there:
                place = {"choice": index}
                return Difference(what=name, place=place, answer=_shown(here), replay=_shown(there))
    return None


def _claimed(saved: SavedAnswer, index: int, facts: OutputFacts, text: str | None) -> Claimed:
    key = digests.inner_key(saved.salt, names.label_output_tokens(index))
    return Claimed(choice=index, commitment=facts.tokens, count=facts.count, key=key, text=text)


def _generated(saved: SavedAnswer, index: int, facts: OutputFacts, parts: Said, prompt: str) -> str | None:
    """The text that was generated, put together again of the answer's parts; None unless the receipt commits to it."""
    execution = saved.claims.execution or {}
    try:
        syntax = tools.syntax_of(execution)
        opened, closed = tools.marks_of(execution, len(saved.claims.output or ()))[index]
    except (ValueError, RecursionError):
        return None
    decoding = saved.claims.decoding or {}
    text = parts.text.removeprefix(prompt) if decoding.get("echo") is True else parts.text
    whole = f"{opened}{parts.reasoning}{closed}{syntax.spelled(text, parts.calls)}"
    try:
        encoded = whole.encode()
    except UnicodeEncodeError:
        return None
    return whole if saved.commit(names.label_output_text(index), encoded) == facts.text else None


# -- bodies ------------------------------------------------------------------------------------------------------------


def _vectors(claims: ReceiptClaims, made: ReceiptClaims, answer: object, again: object) -> Difference | None:
    one, other = claims.embedding, made.embedding
    maps = (None if facts is None else facts.to_map() for facts in (one, other))
    difference = _facts("embedding", *maps)
    if difference is None:
        return None
    unequal = first_unequal(answer, again)
    return _of_body(unequal) if unequal is not None and _VECTOR.match(unequal.text) else difference


def _of_body(unequal: Unequal) -> Difference:
    path = unequal.text
    measured, vector = _LOGPROBS.match(path), _VECTOR.match(path)
    answer, replay = unequal.answer, unequal.replay
    place: dict[str, int | str] = {"path": path}
    what = "body"
    if measured is not None:
        what, place = "log probability", {"choice": int(measured[1]), "token": int(measured[2]), "path": path}
    elif vector is not None:
        what, place = "vector", {"input": int(vector[1]), "dimension": int(vector[2])}
    elif isinstance(answer, str) and isinstance(replay, str):
        pairs = enumerate(zip(answer, replay, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(answer), len(replay)))
        place["character"] = at
        answer, replay = answer[at : at + _SHOWN], replay[at : at + _SHOWN]
    return Difference(what=what, place=place, answer=_shown(answer), replay=_shown(replay))


def _shown(value: object) -> object:
    """As JSON has it: bytes in hex, and of what is large its kind alone."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str):
        return value if len(value) <= 4 * _SHOWN else value[: 4 * _SHOWN] + "..."
    if isinstance(value, dict | list):
        return f"{len(value)} {'fields' if isinstance(value, dict) else 'entries'}"
    return value
