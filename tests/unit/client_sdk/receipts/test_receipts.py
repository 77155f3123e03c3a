"""Each rejection of a receipt, by exactly one fault; the honest twin is accepted by the same call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import PolicyError, Rejection, VerificationError
from client_sdk.receipts import comparisons
from client_sdk.receipts.verify import verify_receipt
from client_sdk.wire import cbor, cose, digests, names
from client_sdk.wire.receipt import ReceiptClaims
from tests.simulators.attested import Attested, attested, policy_for
from tests.simulators.insecure_appliance import (
    COMPLETIONS,
    MODEL,
    NOW,
    Answer,
    InsecureAppliance,
    Options,
    SigningKey,
    chat_request,
    completion_request,
    seeded,
)
from tests.vectors import honest

ASKED: dict[str, Any] = {
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 1,
    "seed": 7,
    "max_tokens": 16,
    "n": 1,
    "min_p": 0.1,
    "repeat_penalty": 1.1,
    "presence_penalty": 1,
    "frequency_penalty": -0.5,
    "logit_bias": {"17": 2, "4": -1.5},
    "deterministic": True,
    "logprobs": True,
    "top_logprobs": 3,
    "stop": ["\n", "Q:"],
    "user": "somebody",
}
OTHER = SigningKey("somebody else")
Fault = Callable[[Attested], tuple[Attested, Answer]]


def made(**options: Any) -> Fault:
    """The appliance makes a receipt with one property overridden."""
    return lambda client: (client, client.answer(Options(**options), **ASKED))


def claims(**changes: Any) -> Fault:
    return made(edit_claims=lambda value: replace(value, **changes))


def part(name: str, **changes: Any) -> Fault:
    """One field of one nested claim."""
    return made(edit_claims=lambda value: replace(value, **{name: replace(getattr(value, name), **changes)}))


def decoding(**changes: Any) -> Fault:
    return made(edit_claims=lambda value: replace(value, decoding={**(value.decoding or {}), **changes}))


def output(**changes: Any) -> Fault:
    def edit(value: ReceiptClaims) -> ReceiptClaims:
        assert value.output is not None
        return replace(value, output=(replace(value.output[0], **changes),))

    return made(edit_claims=edit)


def seen(**changes: Any) -> Fault:
    """The client saw something else than the receipt was made for."""

    def apply(client: Attested) -> tuple[Attested, Answer]:
        answer = client.answer(**ASKED)
        return client, replace(answer, exchange=replace(answer.exchange, **changes))

    return apply


def body(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Fault:
    return made(edit_body=edit)


def asked(**parameters: Any) -> Fault:
    """The client sent parameters the receipt says nothing, or something else, about."""

    def apply(client: Attested) -> tuple[Attested, Answer]:
        honest = client.answer(**ASKED)
        salt = cose.parse_sign1(
            honest.receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=names.LIMIT_RECEIPT_BYTES
        ).salt
        assert salt is not None
        sent = json.dumps(chat_request(**{**ASKED, **parameters})).encode()
        request = replace(
            honest.claims.request, length=len(sent), body=digests.commitment(salt, names.LABEL_REQUEST, sent)
        )
        receipt = client.appliance.seal(replace(honest.claims, request=request), salt)
        return client, replace(honest, receipt=receipt, exchange=replace(honest.exchange, request_body=sent))

    return apply


def under(**policy: Any) -> Fault:
    return lambda client: (
        replace(client, policy=policy_for(client.appliance, **policy)),
        client.answer(**ASKED),
    )


def without_arithmetic(client: Attested) -> tuple[Attested, Answer]:
    pinned = replace(client, policy=policy_for(client.appliance, arithmetic=frozenset({"attested-1"})))
    return part("engine", arithmetic=None, kernels=None)(pinned)


def flipped_signature(client: Attested) -> tuple[Attested, Answer]:
    answer = client.answer(**ASKED)
    return client, replace(answer, receipt=answer.receipt[:-1] + bytes((answer.receipt[-1] ^ 1,)))


def not_cose(client: Attested) -> tuple[Attested, Answer]:
    answer = client.answer(**ASKED)
    return client, replace(answer, receipt=answer.receipt[1:])


def of_another_request(client: Attested) -> tuple[Attested, Answer]:
    first, second = client.answer(**ASKED), client.answer(**ASKED)
    return client, replace(first, receipt=second.receipt)


def of_another_connection(client: Attested) -> tuple[Attested, Answer]:
    """Same boot, same claims in force, another channel: what a continued attestation on a second connection gives."""
    elsewhere = replace(client.connection, binder=seeded("another binder"))
    return client, client.appliance.answer(chat_request(**ASKED), elsewhere)


def of_another_attestation(client: Attested) -> tuple[Attested, Answer]:
    elsewhere = replace(client.connection, attestation=seeded("other claims"))
    return client, client.appliance.answer(chat_request(**ASKED), elsewhere)


def without_attestation(client: Attested) -> tuple[Attested, Answer]:
    return client, client.appliance.answer(chat_request(**ASKED), replace(client.connection, attestation=None))


def without_channel(client: Attested) -> tuple[Attested, Answer]:
    return client, client.appliance.answer(chat_request(**ASKED), replace(client.connection, binder=None))


def of_another_boot(client: Attested) -> tuple[Attested, Answer]:
    return client, InsecureAppliance("next boot").answer(chat_request(**ASKED), client.connection)


def half_read(client: Attested) -> tuple[Attested, Answer]:
    return part("request", complete=False)(client)


R = Rejection
FAULTS: list[tuple[str, Rejection, Fault]] = [
    ("not-cose", R.MALFORMED_COSE, not_cose),
    ("typ", R.MALFORMED_TYP, made(typ=names.TYP_CHECKPOINT)),
    ("algorithm", R.BAD_ALGORITHM, made(protected={names.HEADER_ALG: -7})),
    ("B085-key-not-attested", R.WRONG_KEY, made(signer=OTHER)),
    ("B085-other-boot", R.WRONG_KEY, of_another_boot),
    ("signature", R.BAD_SIGNATURE, flipped_signature),
    ("claims-cbor", R.MALFORMED_CBOR, made(edit_payload=lambda payload: payload + b"\x00")),
    ("claims-form", R.MALFORMED_RECEIPT_CLAIMS, made(edit_payload=lambda _: cbor.encode([]))),
    (
        "claims-profile",
        R.UNSUPPORTED_PROFILE,
        made(edit_payload=lambda p: p.replace(b"receipt-v1", b"receipt-v2")),
    ),
    ("salt-stripped", R.REQUIRED_CLAIM_MISSING, made(salted=False)),
    ("nonce", R.RECEIPT_NONCE_MISMATCH, claims(eat_nonce=seeded("old nonce"))),
    ("nonce-absent", R.RECEIPT_NONCE_MISMATCH, claims(eat_nonce=None)),
    ("B085-other-request", R.RECEIPT_NONCE_MISMATCH, of_another_request),
    ("receipt-id", R.RECEIPT_ID_MISMATCH, seen(receipt_id=seeded("other id", 16))),
    ("receipt-id-absent", R.RECEIPT_ID_MISMATCH, seen(receipt_id=None)),
    ("method", R.REQUEST_MISMATCH, part("request", method="PUT")),
    ("route", R.REQUEST_MISMATCH, part("request", route="/v1/completions")),
    ("request-length", R.REQUEST_MISMATCH, part("request", length=1)),
    ("B084-request-body", R.REQUEST_MISMATCH, part("request", body=seeded("other request"))),
    ("half-the-request", R.REQUEST_MISMATCH, half_read),
    ("http-status", R.STATUS_MISMATCH, part("response", http_status=201)),
    ("terminal-status", R.STATUS_MISMATCH, made(status=names.STATUS_CANCELLED)),
    ("success-behind-an-error", R.STATUS_MISMATCH, made(http_status=400)),
    ("status-out-of-range", R.STATUS_MISMATCH, made(http_status=302)),
    ("media-type", R.RESPONSE_MISMATCH, part("response", media_type="text/plain")),
    ("response-length", R.RESPONSE_MISMATCH, part("response", length=1)),
    ("B084-response-body", R.RESPONSE_MISMATCH, part("response", body=seeded("other response"))),
    ("answer-not-json", R.MALFORMED_RESPONSE, body(lambda answer: {**answer, "choices": 1})),
    ("answer-without-model", R.MALFORMED_RESPONSE, body(lambda answer: {**answer, "model": None})),
    ("answer-with-strange-usage", R.MALFORMED_RESPONSE, body(lambda answer: {**answer, "usage": {}})),
    ("answer-id", R.RECEIPT_ID_MISMATCH, body(lambda answer: {**answer, "id": "chatcmpl-" + "0" * 32})),
    ("answer-model", R.MODEL_MISMATCH, body(lambda answer: {**answer, "model": "other"})),
    (
        "B084-usage",
        R.OUTPUT_MISMATCH,
        body(lambda answer: {**answer, "usage": {**answer["usage"], "completion_tokens": 9}}),
    ),
    ("B084-output-text", R.OUTPUT_MISMATCH, output(text=seeded("other text"))),
    ("B084-finish", R.OUTPUT_MISMATCH, output(finish="length")),
    ("no-choices", R.OUTPUT_MISMATCH, body(lambda answer: {**answer, "choices": []})),
    ("B084-temperature", R.PARAMETER_MISMATCH, decoding(temperature=0.7)),
    ("B084-top-p", R.PARAMETER_MISMATCH, decoding(top_p=1.0)),
    ("B084-top-k", R.PARAMETER_MISMATCH, decoding(top_k=40)),
    ("B084-seed", R.PARAMETER_MISMATCH, decoding(seed=8)),
    ("B084-max-tokens", R.PARAMETER_MISMATCH, decoding(max_tokens=17)),
    ("B084-n", R.PARAMETER_MISMATCH, decoding(n=2)),
    ("B084-min-p", R.PARAMETER_MISMATCH, decoding(min_p=0.0)),
    ("B084-repeat-penalty", R.PARAMETER_MISMATCH, decoding(repeat_penalty=1.0)),
    ("B084-presence-penalty", R.PARAMETER_MISMATCH, decoding(presence_penalty=0.0)),
    ("B084-frequency-penalty", R.PARAMETER_MISMATCH, decoding(frequency_penalty=0.5)),
    ("B084-logit-bias", R.PARAMETER_MISMATCH, decoding(logit_bias=seeded("other bias"))),
    ("B084-logit-bias-dropped", R.PARAMETER_MISMATCH, decoding(logit_bias=None)),
    ("B084-deterministic", R.PARAMETER_MISMATCH, decoding(deterministic=False)),
    ("B084-logprobs", R.PARAMETER_MISMATCH, decoding(logprobs=2)),
    ("B084-logprobs-dropped", R.PARAMETER_MISMATCH, decoding(logprobs=None)),
    ("B084-prompts", R.PARAMETER_MISMATCH, decoding(prompts=2)),
    ("B084-echo-unasked", R.PARAMETER_MISMATCH, decoding(echo=True)),
    ("B084-format-unasked", R.PARAMETER_MISMATCH, decoding(response_format=seeded("a format"))),
    ("B084-tools-unasked", R.PARAMETER_MISMATCH, decoding(tools=seeded("tools"))),
    ("B084-tool-choice", R.PARAMETER_MISMATCH, decoding(tool_choice="auto")),
    ("B084-stop", R.PARAMETER_MISMATCH, decoding(stop=seeded("other stop"))),
    ("B084-stop-dropped", R.PARAMETER_MISMATCH, decoding(stop=None)),
    ("stop-not-asked-for", R.PARAMETER_MISMATCH, asked(stop=None)),
    ("stop-shape", R.PARAMETER_MISMATCH, asked(stop=[1])),
    ("stop-not-utf8", R.PARAMETER_MISMATCH, asked(stop="\ud800")),
    ("B087-unknown-parameter", R.PARAMETER_MISMATCH, asked(mirostat=2)),
    ("B087-penalty", R.PARAMETER_MISMATCH, asked(frequency_penalty=0.5)),
    ("max-completion-tokens", R.PARAMETER_MISMATCH, asked(max_completion_tokens=99)),
    ("temperature-true", R.PARAMETER_MISMATCH, asked(temperature=True)),
    ("temperature-huge", R.PARAMETER_MISMATCH, asked(temperature=10**400)),
    ("stream-asked-whole-came", R.PARAMETER_MISMATCH, asked(stream=True)),
    ("model-asked-for", R.MODEL_MISMATCH, asked(model="other")),
    ("attestation", R.RECEIPT_ATTESTATION_MISMATCH, of_another_attestation),
    ("attestation-null", R.RECEIPT_ATTESTATION_MISMATCH, without_attestation),
    ("channel", R.RECEIPT_CHANNEL_MISMATCH, of_another_connection),
    ("channel-null", R.RECEIPT_CHANNEL_MISMATCH, without_channel),
    ("mode", R.RECEIPT_MODE_MISMATCH, claims(mode=names.MODE_PRODUCTION)),
    ("config", R.CONFIG_MISMATCH, claims(config=seeded("other config"))),
    ("B086-identity", R.MODEL_MISMATCH, part("model", identity=seeded("smaller quantisation"))),
    ("gpu-not-attested", R.DEVICE_NOT_ALLOWED, part("device", gpu=seeded("gpu"))),
    ("policy-model", R.MODEL_NOT_ALLOWED, under(models={MODEL: frozenset({seeded("newer model")})})),
    ("policy-device", R.DEVICE_NOT_ALLOWED, under(devices=frozenset({"cuda"}))),
    ("policy-arithmetic", R.ARITHMETIC_NOT_ALLOWED, under(arithmetic=frozenset({"attested-2"}))),
    ("arithmetic-not-stated", R.ARITHMETIC_NOT_ALLOWED, without_arithmetic),
    ("policy-required-claim", R.REQUIRED_CLAIM_MISSING, under(required_claims=frozenset({"gpu"}))),
    ("policy-required-fact", R.REQUIRED_CLAIM_MISSING, under(required_claims=frozenset({"execution.speculation"}))),
    ("iat-before-sending", R.RECEIPT_TIME, claims(iat=int(NOW) - 301)),
    ("iat-after-receiving", R.RECEIPT_TIME, claims(iat=int(NOW) + 302)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "fault"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_one_fault_is_one_rejection(code: Rejection, fault: Fault) -> None:
    client = attested()
    client.verify(client.answer(**ASKED))
    faulty, answer = fault(client)
    with pytest.raises(VerificationError) as caught:
        faulty.verify(answer)
    assert caught.value.code == code
    assert caught.value.checks[-1].status == "failed"
    assert all(check.status != "failed" for check in caught.value.checks[:-1])


def test_every_parameter_sent_is_a_check_of_its_own() -> None:
    client = attested()
    receipt = client.verify(client.answer(**ASKED))
    passed = {check.name for check in receipt.checks if check.status == "passed"}
    sent = set(ASKED) - {"user", "top_logprobs"}
    assert {f"parameter {name}" for name in sent} <= passed
    assert receipt.opened
    assert receipt.digest == digests.receipt_link(cose.redacted(receipt.raw, limit_bytes=names.LIMIT_RECEIPT_BYTES))


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": None, "stop": None, "seed": None},
        {"stop": "x"},
        {"stop": ""},
        {"stop": []},
        {"temperature": 0.1},
        {"max_completion_tokens": 5},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "stream": False},
        {"metadata": {"a": "b"}},
        {"logit_bias": {}, "tools": [], "response_format": {"type": "text"}, "echo": False, "best_of": 1},
        {"logprobs": 5},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    ],
)
def test_requests_whose_effect_the_receipt_states(parameters: dict[str, Any]) -> None:
    client = attested()
    client.verify(client.answer(**parameters))


def test_plain_completions() -> None:
    client = attested()
    client.verify(client.appliance.answer(completion_request(), client.connection, route=COMPLETIONS))


def test_a_pinned_arithmetic_passes_and_a_refusal_computed_nothing() -> None:
    client = attested(arithmetic=frozenset({"attested-1", "attested-2"}))
    receipt = client.verify(client.answer())
    assert ("arithmetic", "passed") in {(check.name, check.status) for check in receipt.checks}
    shown = {fact.name: fact.value for fact in receipt.facts}
    assert (shown["arithmetic"], shown["kernels"]) == ("attested-1", "avx2")


def test_pinned_devices_and_required_claims_pass_when_present() -> None:
    client = attested(devices=frozenset({"cpu"}), required_claims=frozenset({"model", "execution.batching"}))
    passed = {check.name for check in client.verify(client.answer()).checks if check.status == "passed"}
    assert {"device kind", "claim model", "claim execution.batching"} <= passed


@pytest.mark.parametrize(
    ("execution", "enough"),
    [
        ({"exact": False}, True),
        ({"exact/0": True, "exact/1": False}, True),
        ({"exact/0": True}, False),
        ({"exact/0": True, "exact/1": None}, False),
        ({"exact/0": True, "exact/2": True}, False),
        ({"exact": None}, False),
        ({}, False),
    ],
)
def test_a_fact_the_policy_requires_may_differ_between_choices(execution: dict[str, object], enough: bool) -> None:
    claims = honest.whole_answer()
    assert claims.output is not None
    claims = replace(claims, output=claims.output[:1] * 2, execution=execution)
    if enough:
        comparisons.required_claims(CheckLog(), claims, frozenset({"execution.exact"}))
        return
    with pytest.raises(VerificationError) as caught:
        comparisons.required_claims(CheckLog(), claims, frozenset({"execution.exact"}))
    assert caught.value.code == R.REQUIRED_CLAIM_MISSING


@pytest.mark.parametrize(
    ("http_status", "status"),
    [
        (400, names.STATUS_REFUSED),
        (404, names.STATUS_REFUSED),
        (408, names.STATUS_DEADLINE),
        (500, names.STATUS_ERROR),
        (503, names.STATUS_ERROR),
        (503, names.STATUS_REFUSED),
    ],
)
def test_errors_with_a_receipt_verify(http_status: int, status: str) -> None:
    client = attested()
    receipt = client.verify(client.answer(Options(status=status, http_status=http_status, error_body=b'{"error":{}}')))
    unread = {check.name for check in receipt.checks if check.status == "not checked"}
    assert {"parameters", "output text", "model identity"} <= unread


def test_a_refusal_may_have_read_only_part_of_the_request() -> None:
    client = attested()
    answer = client.appliance.refusal(chat_request(), client.connection, http_status=413)
    salt = cose.parse_sign1(answer.receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=65536).salt
    assert salt is not None
    request = replace(
        answer.claims.request, complete=False, length=0, body=digests.commitment(salt, names.LABEL_REQUEST, b"")
    )
    receipt = client.appliance.seal(replace(answer.claims, request=request), salt)
    client.verify(replace(answer, receipt=receipt))


def test_a_request_with_a_key_given_twice_is_never_called_verified() -> None:
    client = attested()
    honest = client.answer()
    salt = cose.parse_sign1(honest.receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=65536).salt
    assert salt is not None
    sent = json.dumps(chat_request()).encode()[:-1] + b', "temperature": 0, "temperature": 1}'
    request = replace(honest.claims.request, length=len(sent), body=digests.commitment(salt, names.LABEL_REQUEST, sent))
    receipt = client.appliance.seal(replace(honest.claims, request=request), salt)
    with pytest.raises(VerificationError) as caught:
        client.verify(replace(honest, receipt=receipt, exchange=replace(honest.exchange, request_body=sent)))
    assert caught.value.code == Rejection.PARAMETER_MISMATCH


def test_redacted_receipt_verifies_offline_and_opens_nothing() -> None:
    client = attested()
    answer = client.answer(**ASKED)
    redacted = cose.redacted(answer.receipt, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    receipt = verify_receipt(redacted, answer.exchange, client.result, client.policy, accept_redacted=True)
    closed = {check.name for check in receipt.checks if check.status == "not checked"}
    assert {"request body", "response body", "stop as sent", "logit_bias as sent", "output text 0"} <= closed
    assert not receipt.opened
    assert receipt.digest == client.verify(answer).digest


def test_b174_parameter_rejection_names_field_expected_and_actual() -> None:
    client = attested()
    with pytest.raises(VerificationError) as caught:
        client.verify(decoding(seed=8)(client)[1])
    assert (caught.value.checks[-1].name, caught.value.expected, caught.value.actual) == ("parameter seed", "7", "8")


def test_rejections_never_quote_the_conversation() -> None:
    client = attested()
    canary = "CANARY-7f3a"
    options = Options(text=canary, prompt=canary, edit_body=lambda answer: {**answer, "choices": canary})
    with pytest.raises(VerificationError) as caught:
        client.verify(client.appliance.answer(chat_request(user=canary), client.connection, options=options))
    assert canary not in repr(caught.value) + str(caught.value) + str(caught.value.checks)


def test_an_exchange_without_an_answer_is_a_callers_mistake() -> None:
    client = attested()
    answer = client.answer()
    with pytest.raises(ValueError, match="exchange"):
        client.verify(replace(answer, exchange=replace(answer.exchange, response_body=None)))


def test_policy_errors_are_policy_errors() -> None:
    client = attested()
    with pytest.raises(PolicyError):
        client.verify(client.answer(), policy=policy_for(client.appliance, devices=frozenset({"cuda"})))


def test_verifying_costs_little() -> None:
    """No timed test: only that nothing quadratic or absurd crept in (a hundred times the measured cost)."""
    client = attested()
    answer = client.answer(**ASKED)
    client.verify(answer)
    started = time.perf_counter()
    client.verify(answer)
    assert time.perf_counter() - started < 0.1
