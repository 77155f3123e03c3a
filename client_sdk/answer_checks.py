"""The single comparisons between a receipt and an exchange; `receipts.verify_receipt` says which run, and when."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from client_sdk.answer_content import AnswerContent
from client_sdk.checks import CheckLog, shown
from client_sdk.errors import Rejection
from client_sdk.wire import cbor, digests, names
from client_sdk.wire.receipt import OutputFacts, ReceiptClaims

_REDACTED = "the receipt came without its salt"

# Request fields that ask for no sampling parameter: bound by the commitment to the request, or compared elsewhere.
_NO_PARAMETER = frozenset({"model", "messages", "prompt", "stream", "stream_options", "user", "metadata", "stop"})
_FLOAT_PARAMETERS = frozenset({"temperature", "top_p"})
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n": "n",
}
# Values that ask for nothing, so that a receipt which does not mention the field hides nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}


def commitment(
    log: CheckLog, name: str, code: Rejection, salt: bytes | None, opened: tuple[str, bytes, bytes | None]
) -> None:
    """`opened` is (label, content we hold, commitment in the receipt): recompute and compare."""
    if salt is None:
        log.not_checked(name, _REDACTED)
        return
    label, content, committed = opened
    same = committed is not None and hmac.compare_digest(digests.commitment(salt, label, content), committed)
    log.require(same, name, code, f"{name} is not what the receipt commits to")


def terminal_status(log: CheckLog, status: str, http_status: int, *, streamed: bool) -> None:
    """The terminal status fits the HTTP status: no refusal hides behind a 200, no success behind an error."""
    if http_status == 200:
        failed = {names.STATUS_ERROR, names.STATUS_CANCELLED, names.STATUS_DEADLINE}
        allowed = {names.STATUS_COMPLETE} | (failed if streamed else set())
    elif http_status == 408:
        allowed = {names.STATUS_DEADLINE}
    elif 400 <= http_status < 500:
        allowed = {names.STATUS_REFUSED}
    elif http_status == 503:
        allowed = {names.STATUS_ERROR, names.STATUS_REFUSED}
    else:
        allowed = {names.STATUS_ERROR} if 500 <= http_status < 600 else set()
    if status not in allowed:
        log.reject(
            "terminal status",
            Rejection.STATUS_MISMATCH,
            f"the receipt's status does not go with HTTP {http_status}",
            expected=" or ".join(sorted(allowed)) or "no answer with this HTTP status",
            actual=status,
        )
    log.passed("terminal status", status)


def streaming(log: CheckLog, request: Mapping[str, object], *, streamed: bool) -> None:
    asked = request.get("stream")
    same = asked is True if streamed else asked is None or asked is False
    log.require(
        same, "parameter stream", Rejection.PARAMETER_MISMATCH, "the answer does not come in the form asked for"
    )


def parameters(
    log: CheckLog, request: Mapping[str, object], decoding: Mapping[str, object], salt: bytes | None
) -> None:
    """Every parameter that was sent equals its effective value. A null asks for the default, which is what came."""
    for field, sent in request.items():
        if field in _NO_PARAMETER or sent is None:
            continue
        name = f"parameter {field[:64]}"
        if field in _PARAMETERS:
            effective = decoding[_PARAMETERS[field]]
            expected = _as_float(sent) if field in _FLOAT_PARAMETERS else sent
            log.equal(name, Rejection.PARAMETER_MISMATCH, expected=expected, actual=effective)
        elif any(type(sent) is type(neutral) and sent == neutral for neutral in _NEUTRAL.get(field, ())):
            log.passed(name, "asks for nothing")
        else:
            log.reject(name, Rejection.PARAMETER_MISMATCH, "the receipt states no effective value for this parameter")
    _stop(log, request.get("stop"), decoding["stop"], salt)


def _stop(log: CheckLog, sent: object, committed: object, salt: bytes | None) -> None:
    """`stop` is a commitment to the dCBOR list of stop strings; a bare string is a list of one, none at all is null."""
    name, code = "parameter stop", Rejection.PARAMETER_MISMATCH
    if sent is None or sent == "" or sent == []:
        log.require(committed is None, name, code, "stop strings are in force that were not asked for")
        return
    stops = [sent] if type(sent) is str else sent
    if type(stops) is not list or not all(type(item) is str and _utf8(item) is not None for item in stops):
        log.reject(name, code, "stop is neither a string nor a list of strings")
    log.require(type(committed) is bytes, name, code, "no stop strings are in force, though they were asked for")
    assert type(committed) is bytes
    commitment(log, "stop strings", code, salt, (names.LABEL_STOP, cbor.encode(stops), committed))


def output(log: CheckLog, claims: ReceiptClaims, content: AnswerContent, salt: bytes | None) -> None:
    """The text of every choice, its end, the counts, the id and the model name, as the receipt has them."""
    assert claims.model is not None
    for response_id in content.response_ids:
        fits = response_id.rpartition("-")[2] == claims.cti.hex()
        log.require(fits, "response id", Rejection.RECEIPT_ID_MISMATCH, "the answer's id names another receipt")
    for model in content.models:
        log.equal("model named in the answer", Rejection.MODEL_MISMATCH, expected=claims.model.name, actual=model)
    outputs = claims.output or ()
    if claims.decoding is not None:
        asked = claims.decoding["n"]
        log.equal("number of choices", Rejection.OUTPUT_MISMATCH, expected=len(outputs), actual=asked)
    same = content.texts.keys() == set(range(len(outputs)))
    log.require(same, "choices", Rejection.OUTPUT_MISMATCH, "the answer has other choices than the receipt")
    for index, facts in enumerate(outputs):
        _choice(log, index, facts, content, salt)
    if content.usage is None:
        log.not_checked("usage", "the answer states no token counts")
    else:
        counted = (claims.prompt.count if claims.prompt else 0, sum(facts.count for facts in outputs))
        log.equal("usage", Rejection.OUTPUT_MISMATCH, expected=counted, actual=content.usage)


def _choice(log: CheckLog, index: int, facts: OutputFacts, content: AnswerContent, salt: bytes | None) -> None:
    code = Rejection.OUTPUT_MISMATCH
    log.equal(f"finish reason {index}", code, expected=facts.finish, actual=content.finishes[index])
    text = content.texts[index]
    encoded = _utf8(text)
    if encoded is None:
        log.reject(f"output text {index}", code, "the text has no UTF-8 form")
    opened = (names.label_output_text(index), encoded, facts.text)
    commitment(log, f"output text {index}", code, salt, opened)


def required_claims(log: CheckLog, claims: ReceiptClaims, required: frozenset[str]) -> None:
    present = {
        "model": claims.model is not None,
        "chat-template": claims.model is not None and claims.model.chat_template is not None,
        "prompt": claims.prompt is not None,
        "decoding": claims.decoding is not None,
        "output": claims.output is not None,
        "execution": claims.execution is not None,
        "stream": claims.stream is not None,
        "checkpoint": claims.stream is not None and claims.stream.checkpoint is not None,
        "gpu": claims.device.gpu is not None,
    }
    execution = claims.execution or {}
    for name in sorted(required):
        there = present[name] if name in present else execution.get(name.removeprefix("execution.")) is not None
        log.require(there, f"claim {name}", Rejection.REQUIRED_CLAIM_MISSING, f"the receipt lacks the claim {name}")


def issued_at(log: CheckLog, iat: int, window: tuple[float, float], *, skew_s: int) -> None:
    """`iat`, when the appliance accepted the request, lies between sending and receiving, give or take the skew.

    The host sets that clock: this is plausibility, never freshness.
    """
    sent_at, received_at = window
    earliest, latest = sent_at - skew_s, received_at + skew_s
    if not earliest <= iat <= latest:
        log.reject(
            "time of the receipt",
            Rejection.RECEIPT_TIME,
            "the receipt's time does not fit the exchange",
            expected=f"{earliest:.0f} to {latest:.0f}",
            actual=str(iat),
        )
    log.passed("time of the receipt", shown(iat))


def _as_float(value: object) -> object:
    """JSON writes 1 and 1.0 alike for a float parameter; anything that is no number stays what it is."""
    if type(value) is not int:
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _utf8(text: str) -> bytes | None:
    """None for text with lone surrogates, which JSON can write and UTF-8 cannot."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None
