"""The single comparisons between a receipt and an exchange; `receipts.verify_receipt` says which run, and when."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from client_sdk.checks import CheckLog, shown
from client_sdk.errors import Rejection
from client_sdk.routes.chat import MAX_CALLS, AnswerContent, prompts_asked
from client_sdk.routes.commitment import REDACTED, commitment
from client_sdk.wire import cbor, digests, names
from client_sdk.wire import tools as wire_tools
from client_sdk.wire.receipt import OutputFacts, ReceiptClaims

# Request fields that ask for no sampling parameter: bound by the commitment to the request, or compared elsewhere.
_NO_PARAMETER = frozenset(
    {"model", "messages", "prompt", "suffix", "stream", "stream_options", "user", "metadata", "prompt_cache_key"}
)
# Compared whether they were sent or not: see `_content` and `_derived`.
_OWN_RULES = frozenset({"stop", "logit_bias", "response_format", "tools", "tool_choice", "logprobs", "top_logprobs"})
_FLOAT_PARAMETERS = frozenset(
    {"temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"}
)
_PARAMETERS = {
    **{name: name for name in _FLOAT_PARAMETERS},
    "top_k": "top_k",
    "seed": "seed",
    "deterministic": "deterministic",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n": "n",
    "echo": "echo",
    "parallel_tool_calls": "parallel_tool_calls",
}
# Values that ask for nothing, so that a receipt which does not mention the field hides nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "store": (False,),
}
_PLAIN_TEXT = ({"type": "text"}, {"type": "text", "json_schema": None})


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
    """Every parameter that was sent equals its effective value, and no content is in force that was not sent.

    A null asks for the default, which is what came.
    """
    for field, sent in request.items():
        if field in _NO_PARAMETER or field in _OWN_RULES or sent is None:
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
    _derived(log, request, decoding)
    _content(log, request, decoding, salt)


def _derived(log: CheckLog, request: Mapping[str, object], decoding: Mapping[str, object]) -> None:
    """Parameters whose effective value follows from more than one field, or from the shape of one."""
    logprobs = request.get("logprobs")
    if type(logprobs) is bool:  # chat says whether and how many in two fields, plain completions in one
        logprobs = (request.get("top_logprobs") or 0) if logprobs else None
    expected = {"logprobs": logprobs, "prompts": prompts_asked(request), "tool_choice": _tool_choice(request)}
    for field, value in expected.items():
        log.equal(f"parameter {field}", Rejection.PARAMETER_MISMATCH, expected=value, actual=decoding[field])
    if request.get("echo") is None:
        log.require(decoding["echo"] is False, "parameter echo", Rejection.PARAMETER_MISMATCH, "nobody asked for echo")


def _tool_choice(request: Mapping[str, object]) -> object:
    choice = request.get("tool_choice")
    if not request.get("tools"):
        return "none"
    if isinstance(choice, dict):
        function = choice.get("function")
        return f"function:{function.get('name')}" if isinstance(function, dict) else choice
    return "auto" if choice is None else choice


def _content(log: CheckLog, request: Mapping[str, object], decoding: Mapping[str, object], salt: bytes | None) -> None:
    """Parameters that are content, which the receipt commits to (docs/receipt-format.md, section 5)."""
    stop, biases, shape = request.get("stop"), request.get("logit_bias"), request.get("response_format")
    wanted: dict[str, tuple[str, object]] = {
        "stop": (names.LABEL_STOP, [stop] if type(stop) is str and stop else stop),
        "logit_bias": (names.LABEL_LOGIT_BIAS, _biases(log, biases)),
        "response_format": (names.LABEL_RESPONSE_FORMAT, None if shape in _PLAIN_TEXT else shape),
        "tools": (names.LABEL_TOOLS, request.get("tools")),
    }
    for field, (label, sent) in wanted.items():
        name, code = f"parameter {field}", Rejection.PARAMETER_MISMATCH
        committed = decoding[field]
        if not sent:
            log.require(committed is None, name, code, f"{field} is in force, though nobody asked for it")
            continue
        log.require(type(committed) is bytes, name, code, f"{field} is not in force, though it was asked for")
        try:
            content = cbor.encode(sent)
        except (TypeError, ValueError):
            log.reject(name, code, f"{field} has no deterministic encoding")
        assert type(committed) is bytes
        commitment(log, f"{field} as sent", code, salt, (label, content, committed))


def _biases(log: CheckLog, sent: object) -> object:
    """JSON writes token ids as text and a bias of 1.0 as 1."""
    if not isinstance(sent, dict):
        return sent
    try:
        return {int(token): float(bias) for token, bias in sent.items()}
    except (TypeError, ValueError, OverflowError):
        log.reject(
            "parameter logit_bias", Rejection.PARAMETER_MISMATCH, "logit_bias is no map from token ids to numbers"
        )


def output(
    log: CheckLog, claims: ReceiptClaims, content: AnswerContent, request: Mapping[str, object], salt: bytes | None
) -> None:
    """The text of every choice, its end, the counts, the id and the model name, as the receipt has them."""
    assert claims.model is not None
    for response_id in content.response_ids:
        fits = names.receipt_part(response_id) == claims.cti.hex()
        log.require(fits, "response id", Rejection.RECEIPT_ID_MISMATCH, "the answer's id names another receipt")
    for model in content.models:
        log.equal("model named in the answer", Rejection.MODEL_MISMATCH, expected=claims.model.name, actual=model)
    outputs = claims.output or ()
    if claims.decoding is not None:
        each, prompts = claims.decoding["n"], claims.decoding["prompts"]
        assert type(each) is int
        assert type(prompts) is int
        log.equal("number of choices", Rejection.OUTPUT_MISMATCH, expected=len(outputs), actual=each * prompts)
    same = content.texts.keys() == set(range(len(outputs)))
    log.require(same, "choices", Rejection.OUTPUT_MISMATCH, "the answer has other choices than the receipt")
    if claims.decoding is not None and claims.decoding["echo"]:
        content = replace(content, texts=_without_echo(log, request, content, claims.decoding["n"]))
    asked = claims.decoding is not None and claims.decoding["logprobs"] is not None
    log.require(asked or not content.measured, "log probabilities", Rejection.OUTPUT_MISMATCH, "nobody asked for them")
    spelling = _spelling(log, claims, request)
    for index, facts in enumerate(outputs):
        _choice(log, (index, facts), content, spelling, salt)
    if content.usage is None:
        log.not_checked("usage", "the answer states no token counts")
    else:
        counted = (claims.prompt.count if claims.prompt else 0, sum(facts.count for facts in outputs))
        log.equal("usage", Rejection.OUTPUT_MISMATCH, expected=counted, actual=content.usage)
    if content.reasoning_tokens is not None:
        stated = (claims.execution or {}).get(wire_tools.FACT_REASONING_TOKENS, 0)
        log.equal("reasoning tokens", Rejection.OUTPUT_MISMATCH, expected=stated, actual=content.reasoning_tokens)


def _without_echo(
    log: CheckLog, request: Mapping[str, object], content: AnswerContent, each: object
) -> Mapping[int, str]:
    """What was generated behind the prompts as they were sent."""
    sent = request.get("prompt")
    prompts = sent if isinstance(sent, list) else [sent]
    texts = {}
    for index, text in content.texts.items():
        prompt = prompts[index // each] if type(each) is int else None
        same = type(prompt) is str and text.startswith(prompt)
        log.require(same, f"echo {index}", Rejection.OUTPUT_MISMATCH, "the echo is not the prompt that was sent")
        texts[index] = text[len(prompt) :] if type(prompt) is str else text
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spelling:
    """How generated text spells what answers carry in parts: the form of calls, the names that may be called and how
    many calls there may be, and for each choice what stands before and behind its reasoning."""

    syntax: wire_tools.CallSyntax
    tools: Sequence[str]
    most: int
    marks: Sequence[tuple[str, str]]


def _spelling(log: CheckLog, claims: ReceiptClaims, request: Mapping[str, object]) -> _Spelling:
    execution, choices = claims.execution or {}, len(claims.output or ())
    decoding = claims.decoding or {"tool_choice": "none", "parallel_tool_calls": True}
    try:
        syntax = wire_tools.syntax_of(execution)
        return _Spelling(
            syntax=syntax,
            tools=_callable_names(request, str(decoding["tool_choice"])),
            most=1 if syntax.between is None or decoding["parallel_tool_calls"] is False else MAX_CALLS,
            marks=wire_tools.marks_of(execution, choices),
        )
    except (ValueError, RecursionError):
        log.reject("form of the output", Rejection.OUTPUT_MISMATCH, "the receipt's form of calls or reasoning is none")


def _choice(
    log: CheckLog, output: tuple[int, OutputFacts], content: AnswerContent, spelling: _Spelling, salt: bytes | None
) -> None:
    code = Rejection.OUTPUT_MISMATCH
    index, facts = output
    log.equal(f"finish reason {index}", code, expected=facts.finish, actual=content.finishes[index])
    text, calls = content.texts[index], content.calls.get(index, ())
    allowed = len(calls) <= spelling.most and all(name in spelling.tools for name, _ in calls)
    log.require(allowed, f"tool calls {index}", code, "other tools, or more of them, are called than could be")
    whole = facts.finish == "tool_calls"
    # What stands between two calls must not pass for a part of the arguments of one.
    made = not whole or (bool(calls) and all(_is_object(arguments) for _, arguments in calls))
    log.require(
        made, f"arguments {index}", code, "a call that is said to be whole has no JSON object for its arguments"
    )
    thought, (opened, closed) = content.reasoning.get(index, ""), spelling.marks[index]
    # Without this, any answer could be shown in part as reasoning, where few look.
    ended = bool(closed) or not (opened or thought) or not (text or calls)
    log.require(ended, f"reasoning {index}", code, "nothing was generated that ends the reasoning before the answer")
    base, rests = _forms(text, calls, spelling, whole=whole)
    name, encoded = f"output text {index}", _utf8(f"{opened}{thought}{closed}{base}")
    tails = [_utf8(rest) for rest in rests]
    if encoded is None or None in tails:
        log.reject(name, code, "the text has no UTF-8 form")
    if salt is None:
        log.not_checked(name, REDACTED)
        return
    begun = hmac.new(digests.inner_key(salt, names.label_output_text(index)), encoded, "sha256")
    same = any(hmac.compare_digest(made, facts.text) for made in _commitments(begun, rests))
    log.require(same, name, code, f"{name} is not what the receipt commits to")


def _is_object(text: str) -> bool:
    try:
        return type(json.loads(text)) is dict
    except (ValueError, RecursionError):
        return False


def _commitments(begun: hmac.HMAC, rests: Sequence[str]) -> Iterator[bytes]:
    """Of a text, and of it followed by each beginning of each rest; the text, which may be long, is read once."""
    yield begun.digest()
    for rest in rests:
        grown = begun.copy()
        for sign in rest:
            grown.update(sign.encode())
            yield grown.digest()


def _forms(
    text: str, calls: Sequence[tuple[str, str]], spelling: _Spelling, *, whole: bool
) -> tuple[str, Sequence[str]]:
    """What was generated for this text and these calls, and what else may have followed it, in part or as a whole.

    Nothing else may, unless the answer was cut where a call was being made: what stands between arguments belongs to
    no part of the answer, and may have come in part.
    """
    syntax, tools = spelling.syntax, spelling.tools
    if whole or not tools:
        return syntax.spelled(text, calls), ()
    if not calls:
        return text, [syntax.opening + name + syntax.middle for name in tools]
    rests = [syntax.after + syntax.end]
    if len(calls) < spelling.most:
        rests += [syntax.next + name + syntax.middle for name in tools]
    return syntax.spelled(text, calls).removesuffix(syntax.after + syntax.end), rests


def _callable_names(request: Mapping[str, object], tool_choice: str) -> Sequence[str]:
    """The functions that the request lets the model call."""
    listed = request.get("tools") if tool_choice != "none" else None
    functions = [tool.get("function") for tool in listed if isinstance(tool, dict)] if isinstance(listed, list) else []
    called = [str(function.get("name")) for function in functions if isinstance(function, dict)]
    chosen = tool_choice.removeprefix("function:")
    return called if chosen == tool_choice else [name for name in called if name == chosen]


def required_claims(log: CheckLog, claims: ReceiptClaims, required: frozenset[str]) -> None:
    present = {
        "model": claims.model is not None,
        "chat-template": claims.model is not None and claims.model.chat_template is not None,
        "prompt": claims.prompt is not None,
        # Of vectors, whose receipts have neither, `embedding` says what these say of text.
        "decoding": claims.decoding is not None or claims.embedding is not None,
        "output": claims.output is not None or claims.embedding is not None,
        "embedding": claims.embedding is not None,
        "execution": claims.execution is not None,
        "stream": claims.stream is not None,
        "checkpoint": claims.stream is not None and claims.stream.checkpoint is not None,
        "gpu": claims.device.gpu is not None,
    }
    for name in sorted(required):
        there = present[name] if name in present else _stated(claims, name.removeprefix("execution."))
        log.require(there, f"claim {name}", Rejection.REQUIRED_CLAIM_MISSING, f"the receipt lacks the claim {name}")


def _stated(claims: ReceiptClaims, fact: str) -> bool:
    """Whether an execution fact is there: once, or once for each choice where these disagree on it."""
    execution, choices = claims.execution or {}, len(claims.output or ())
    each = [execution.get(f"{fact}/{index}") for index in range(choices)]
    return execution.get(fact) is not None or (bool(each) and None not in each)


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
