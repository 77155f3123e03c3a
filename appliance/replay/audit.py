"""Replay one saved answer: what must hold before, the evaluation, the comparison, the verdict."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.api.routes import DIALECTS
from appliance.boot import identities as appliance_facts
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.types import EngineInfo
from appliance.errors import BootError
from appliance.receipts.claims import Served
from appliance.replay import saved as saving
from appliance.replay.compare import compare
from appliance.replay.means import Prepared, Wanted, is_portable, prepare, shapes_are_free
from appliance.replay.run import Replayed, evaluate
from appliance.replay.saved import SavedAnswer
from appliance.replay.verdict import CannotReproduce, Difference, Outcome, Reason, Verdict
from client_sdk.wire import names
from client_sdk.wire.receipt import ReceiptClaims

_GRACE_S = 5.0
_NOT_FOUND = "model_not_found"
_CONFIGURED = frozenset(
    {
        "context_length_exceeded",
        "invalid_field",
        "model_does_not_embed",
        "model_does_not_generate",
        "prompt_too_large",
        "tools_not_supported",
    }
)
"""Refusals that a configuration can be the reason for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Clock and randomness of whoever replays, and what is told while weights are read and loaded."""

    monotonic: Callable[[], float]
    random_bytes: Callable[[int], bytes]
    progress: Callable[[str, float], None]


async def replay(directory: Path, wanted: Wanted, around: Around) -> Verdict:
    """The verdict on the saved answer in `directory`. Every way in which it cannot be had is one of its reasons."""
    facts: dict[str, object] = {}
    try:
        saved = saving.load(directory)
        facts["receipt"] = _receipt_facts(saved.claims)
        check_reproducible(saved.claims)
        if saved.claims.model is None:
            return await _unopened(saved, around, facts)
        prepared = prepare(saved, wanted)
        async with started(prepared, around) as engine:
            facts["engine"] = _engine_facts(engine.info)
            return await judge(saved, prepared, wanted, around, facts)
    except CannotReproduce as error:
        return Verdict(outcome=Outcome.CANNOT, reason=error.reason, message=error.message, facts=facts)


def check_reproducible(claims: ReceiptClaims) -> None:
    """What the receipt itself says against it. Raises CannotReproduce: interrupted, failed, not-exact, unsupported."""
    status = claims.response.status
    if status in (names.STATUS_DEADLINE, names.STATUS_CANCELLED):
        message = f"the answer ended with the status {status!r}: when it did is a fact of that moment"
        raise CannotReproduce(Reason.INTERRUPTED, message)
    if status == names.STATUS_ERROR:
        message = "the answer ended with an error of the appliance, which nobody can have again by asking again"
        raise CannotReproduce(Reason.FAILED, message)
    if claims.request.route not in DIALECTS or claims.request.method != "POST":
        raise CannotReproduce(Reason.UNSUPPORTED, f"answers of {claims.request.route} cannot be made again")
    if claims.device.kind != "cpu":
        message = f"the answer was computed on a device of the kind {claims.device.kind!r}; replays compute on a cpu"
        raise CannotReproduce(Reason.UNSUPPORTED, message)
    execution = claims.execution or {}
    exact = [value for fact, value in execution.items() if fact == "exact" or fact.startswith("exact/")]
    evaluated = claims.prompt is not None and execution.get("evaluated") is not False
    if evaluated and not (exact and all(value is True for value in exact)):
        message = "the receipt says that the answer is not exact: the same request need not give the same bits"
        raise CannotReproduce(Reason.NOT_EXACT, message)


# -- a refusal that no model was asked about ---------------------------------------------------------------------------


async def _unopened(saved: SavedAnswer, around: Around, facts: Mapping[str, object]) -> Verdict:
    """The receipt names no model: the request has no form, or names a model that is not served."""
    replayed = await evaluate(saved, None, monotonic=around.monotonic, random_bytes=around.random_bytes)
    if _error(saved.response).get("code") == _NOT_FOUND:
        asked = _model_asked(saved.request)
        if asked in saved.attested.models:
            difference = Difference(what="refusal", answer=_NOT_FOUND, replay="the attested claims list this model")
            return _differs(difference, (), facts)
    found = await compare(saved, replayed, None)
    if found.difference is not None:
        return _differs(found.difference, found.equal, facts)
    return _reproduced(found.equal, facts)


def _model_asked(request: bytes) -> str | None:
    try:
        document = json.loads(request)
    except (ValueError, RecursionError):
        return None
    asked = document.get("model") if isinstance(document, dict) else None
    return asked if isinstance(asked, str) else None


def _error(body: bytes) -> Mapping[str, object]:
    """The error that a whole answer is, empty where it is none."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}


# -- everything else ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def started(prepared: Prepared, around: Around) -> AsyncIterator[SupervisedEngine]:
    """The engine while it runs. Raises CannotReproduce (engine)."""
    engine = prepared.engine
    try:
        await engine.start(around.progress)
    except BootError as error:
        raise CannotReproduce(Reason.ENGINE, f"the model cannot be run here: {error}") from None
    try:
        yield engine
    finally:
        await engine.stop(_GRACE_S)


async def judge(
    saved: SavedAnswer, prepared: Prepared, wanted: Wanted, around: Around, facts: Mapping[str, object]
) -> Verdict:
    """The verdict on an answer of a model whose engine has started. Raises CannotReproduce."""
    claims = saved.claims
    assert claims.model is not None
    means = prepared.means(claims.model, claims.execution or {})
    evaluated = claims.prompt is not None and (claims.execution or {}).get("evaluated") is not False
    if evaluated:
        _check_arithmetic(claims, means.served)
    replayed = await evaluate(saved, means, monotonic=around.monotonic, random_bytes=around.random_bytes)
    _check_answered(replayed)
    found = await compare(saved, replayed, prepared.engine)
    if found.difference is None:
        return _reproduced(found.equal, facts)
    doubt = _doubt(claims, means.served, prepared.engine.info) if evaluated else None
    if claims.response.status == names.STATUS_REFUSED and wanted.config is None:
        doubt = _configured_refusal(saved)
    if doubt is not None:
        reason, message = doubt
        return Verdict(
            outcome=Outcome.CANNOT,
            reason=reason,
            message=message,
            difference=found.difference,
            compared=found.equal,
            facts=facts,
        )
    return _differs(found.difference, found.equal, facts)


def _check_arithmetic(claims: ReceiptClaims, served: Served) -> None:
    """Raises CannotReproduce where this build computes other bits, or nobody can say that it computes the same."""
    theirs, ours = claims.engine.arithmetic, served.engine.arithmetic
    if theirs != ours:
        message = (
            f"the answer was computed in the arithmetic {theirs or 'of its build'}, this build has {ours or 'its own'}"
        )
        raise CannotReproduce(Reason.OTHER_ARITHMETIC, message)
    if not is_portable(theirs) and claims.engine.digest != served.engine.digest:
        message = (
            "the answer was computed by other native libraries, in an arithmetic that is that build's own: "
            f"{claims.engine.digest.hex()}, here {served.engine.digest.hex()}"
        )
        raise CannotReproduce(Reason.OTHER_ARITHMETIC, message)


def _check_answered(replayed: Replayed) -> None:
    """Raises CannotReproduce where the replay itself failed: that says nothing about the answer."""
    status = replayed.claims.response.status
    if status not in (names.STATUS_COMPLETE, names.STATUS_REFUSED):
        detail = _error(replayed.body).get("message", f"it ended with the status {status!r}")
        raise CannotReproduce(Reason.ENGINE, f"the answer could not be made again here: {detail}")


def _doubt(claims: ReceiptClaims, served: Served, info: EngineInfo) -> tuple[Reason, str] | None:
    """Why a difference proves nothing; None where it does."""
    exactness = info.exactness
    if not shapes_are_free(claims.execution or {}):
        return Reason.NOT_EXACT, "the answers differ, but this one was exact in its own shapes of evaluation only"
    if claims.embedding is None and not (exactness.batch and exactness.chunk):
        return Reason.ENGINE, "the answers differ, but the engine is not exact on this model here"
    if claims.engine.version != served.engine.version:
        message = (
            f"the answers differ, but the engine is another release: {claims.engine.name} {claims.engine.version}, "
            f"here {served.engine.version}"
        )
        return Reason.UNCERTAIN, message
    device = appliance_facts.device_facts()
    if not is_portable(claims.engine.arithmetic) and claims.device.digest != device.digest:
        return Reason.UNCERTAIN, "the answers differ, but it was computed on another processor, in bits of its own"
    return None


def _configured_refusal(saved: SavedAnswer) -> tuple[Reason, str] | None:
    code = _error(saved.response).get("code")
    if code not in _CONFIGURED:
        return None
    message = f"the refusal {code!r} may come from the appliance's configuration: give it with --config"
    return Reason.CONFIGURATION_UNKNOWN, message


# -- verdicts ----------------------------------------------------------------------------------------------------------


def _reproduced(equal: tuple[str, ...], facts: Mapping[str, object]) -> Verdict:
    message = "evaluated again, the request gives this very answer"
    return Verdict(outcome=Outcome.REPRODUCED, message=message, compared=equal, facts=facts)


def _differs(difference: Difference, equal: tuple[str, ...], facts: Mapping[str, object]) -> Verdict:
    message = "evaluated again, the request gives another answer than the one that was signed"
    return Verdict(outcome=Outcome.DIFFERS, message=message, difference=difference, compared=equal, facts=facts)


def _receipt_facts(claims: ReceiptClaims) -> dict[str, object]:
    execution, decoding = claims.execution or {}, claims.decoding or {}
    return {
        "id": claims.cti.hex(),
        "route": claims.request.route,
        "status": claims.response.status,
        "streamed": claims.stream is not None,
        "issued_at": claims.iat,
        "model": None if claims.model is None else claims.model.name,
        "choices": None if claims.output is None else len(claims.output),
        "tokens": None if claims.output is None else sum(choice.count for choice in claims.output),
        "seed": decoding.get("seed"),
        "template_date": execution.get("template-date"),
        "engine": f"{claims.engine.name} {claims.engine.version}",
        "arithmetic": claims.engine.arithmetic,
    }


def _engine_facts(info: EngineInfo) -> dict[str, object]:
    stated = appliance_facts.engine_facts(info)
    return {
        "name": stated.name,
        "version": stated.version,
        "digest": stated.digest.hex(),
        "arithmetic": stated.arithmetic,
        "kernels": stated.kernels,
        "threads": info.threads,
    }
