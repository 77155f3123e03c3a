"""An appliance that lies about one claim, over real sockets: unsigned lies, signed lies, old truths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from client_sdk import Appliance, Policy, Rejection, VerificationError
from client_sdk.receipts.verify import verify_receipt
from client_sdk.transport.protocol import VerifiedAnswer
from client_sdk.wire import cbor, cose, names
from client_sdk.wire.stream import encode_base64url
from tests.e2e.glass import GlassAppliance, Sent
from tests.e2e.programs import MODEL

pytestmark = pytest.mark.model
R = Rejection
OTHER = bytes(range(32))
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "seed": 3,
    "stop": ["zzz"],
    "min_p": 0.01,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"17": -1},
    "deterministic": True,
    "logprobs": True,
}

# (claim, path inside it, the value signed in its place, the code for a whole answer, the code for a stream).
# None: the client holds nothing to compare it with. The claim is the attested appliance's word, and shown as such.
LIES: list[tuple[int, tuple[Any, ...], Any, Rejection | None, Rejection | None]] = [
    (names.CLAIM_ISS, (), "somebody else", None, None),
    (names.CLAIM_IAT, (), 1_000_000_000, R.RECEIPT_TIME, R.RECEIPT_TIME),
    (names.CLAIM_CTI, (), bytes(16), R.RECEIPT_ID_MISMATCH, R.RECEIPT_ID_MISMATCH),
    (names.CLAIM_NONCE, (), OTHER, R.RECEIPT_NONCE_MISMATCH, R.RECEIPT_NONCE_MISMATCH),
    (names.CLAIM_PROFILE, (), "tag:attested-inference,2026:receipt-v2", R.UNSUPPORTED_PROFILE, R.UNSUPPORTED_PROFILE),
    (names.CLAIM_CHAIN, (), bytes(16), None, None),
    (names.CLAIM_SEQUENCE, (), 0, R.MALFORMED_RECEIPT_CLAIMS, R.MALFORMED_RECEIPT_CLAIMS),
    (names.CLAIM_PREVIOUS, (), OTHER, R.RECEIPT_CHAIN_GAP, R.RECEIPT_CHAIN_GAP),
    (names.CLAIM_MODE, (), "production", R.RECEIPT_MODE_MISMATCH, R.RECEIPT_MODE_MISMATCH),
    (names.CLAIM_ATTESTATION, (), OTHER, R.RECEIPT_ATTESTATION_MISMATCH, R.RECEIPT_ATTESTATION_MISMATCH),
    (names.CLAIM_CHANNEL, (), OTHER, R.RECEIPT_CHANNEL_MISMATCH, R.RECEIPT_CHANNEL_MISMATCH),
    (names.CLAIM_MODEL, ("name",), "other", R.MODEL_MISMATCH, R.MODEL_MISMATCH),
    (names.CLAIM_MODEL, ("identity",), OTHER, R.MODEL_MISMATCH, R.MODEL_MISMATCH),
    (names.CLAIM_MODEL, ("tokenizer",), OTHER, None, None),
    (names.CLAIM_MODEL, ("chat-template",), OTHER, None, None),
    (names.CLAIM_MODEL, ("weights",), [[1, OTHER]], None, None),
    (names.CLAIM_MODEL, ("format",), "other", None, None),
    (names.CLAIM_CONFIG, (), OTHER, R.CONFIG_MISMATCH, R.CONFIG_MISMATCH),
    (names.CLAIM_DEVICE, ("kind",), "abacus", R.DEVICE_NOT_ALLOWED, R.DEVICE_NOT_ALLOWED),
    (names.CLAIM_DEVICE, ("digest",), OTHER, None, None),
    (names.CLAIM_DEVICE, ("gpu",), OTHER, R.DEVICE_NOT_ALLOWED, R.DEVICE_NOT_ALLOWED),
    (names.CLAIM_ENGINE, ("name",), "other", None, None),
    (names.CLAIM_ENGINE, ("version",), "0", None, None),
    (names.CLAIM_ENGINE, ("digest",), OTHER, None, None),
    (names.CLAIM_ENGINE, ("arithmetic",), "llama.cpp", R.ARITHMETIC_NOT_ALLOWED, R.ARITHMETIC_NOT_ALLOWED),
    (names.CLAIM_ENGINE, ("kernels",), "other", None, None),
    (names.CLAIM_REQUEST, ("method",), "PUT", R.REQUEST_MISMATCH, R.REQUEST_MISMATCH),
    (names.CLAIM_REQUEST, ("route",), "/v1/completions", R.REQUEST_MISMATCH, R.REQUEST_MISMATCH),
    (names.CLAIM_REQUEST, ("length",), 1, R.REQUEST_MISMATCH, R.REQUEST_MISMATCH),
    (names.CLAIM_REQUEST, ("complete",), False, R.REQUEST_MISMATCH, R.REQUEST_MISMATCH),
    (names.CLAIM_REQUEST, ("body",), OTHER, R.REQUEST_MISMATCH, R.REQUEST_MISMATCH),
    (names.CLAIM_PROMPT, ("text",), OTHER, None, None),
    (names.CLAIM_PROMPT, ("tokens",), OTHER, None, None),
    (names.CLAIM_PROMPT, ("count",), 1, R.OUTPUT_MISMATCH, R.OUTPUT_MISMATCH),
    (names.CLAIM_DECODING, ("temperature",), 1.0, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("top_p",), 1.0, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("top_k",), 0, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("seed",), 4, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("max_tokens",), 4, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("n",), 2, R.OUTPUT_MISMATCH, R.OUTPUT_MISMATCH),
    (names.CLAIM_DECODING, ("stop",), OTHER, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("min_p",), 0.0, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("repeat_penalty",), 1.0, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("presence_penalty",), 0.0, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("frequency_penalty",), 0.0, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("logit_bias",), OTHER, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("deterministic",), False, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("logprobs",), None, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("prompts",), 2, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("echo",), True, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("response_format",), OTHER, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("tools",), OTHER, R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("tool_choice",), "auto", R.PARAMETER_MISMATCH, R.PARAMETER_MISMATCH),
    (names.CLAIM_DECODING, ("parallel_tool_calls",), False, None, None),
    (names.CLAIM_RESPONSE, ("status",), "refused", R.MALFORMED_RECEIPT_CLAIMS, R.MALFORMED_RECEIPT_CLAIMS),
    (names.CLAIM_RESPONSE, ("http-status",), 201, R.STATUS_MISMATCH, R.STATUS_MISMATCH),
    (names.CLAIM_RESPONSE, ("media-type",), "text/plain", R.RESPONSE_MISMATCH, R.MALFORMED_RECEIPT_CLAIMS),
    (names.CLAIM_RESPONSE, ("length",), 1, R.RESPONSE_MISMATCH, R.MALFORMED_RECEIPT_CLAIMS),
    (names.CLAIM_RESPONSE, ("body",), OTHER, R.RESPONSE_MISMATCH, R.MALFORMED_RECEIPT_CLAIMS),
    (names.CLAIM_OUTPUT, (0, "text"), OTHER, R.OUTPUT_MISMATCH, R.OUTPUT_MISMATCH),
    (names.CLAIM_OUTPUT, (0, "tokens"), OTHER, None, None),
    (names.CLAIM_OUTPUT, (0, "count"), 2, R.OUTPUT_MISMATCH, R.OUTPUT_MISMATCH),
    (names.CLAIM_OUTPUT, (0, "finish"), "stop", R.OUTPUT_MISMATCH, R.OUTPUT_MISMATCH),
    (names.CLAIM_EXECUTION, ("threads",), 99, None, None),
]
STREAM_LIES: list[tuple[str, Any, Rejection]] = [
    ("frames", 99, R.STREAM_TRUNCATED),
    ("frames", 1, R.STREAM_CHAIN_MISMATCH),
    ("chain", OTHER, R.STREAM_CHAIN_MISMATCH),
    ("checkpoint", [1, OTHER], R.STREAM_CHECKPOINT_MISMATCH),
]
LINKED = frozenset({names.CLAIM_SEQUENCE, names.CLAIM_PREVIOUS})
_IDS = [f"{claim}-{'.'.join(map(str, path))}" for claim, path, *_ in LIES]


@pytest.fixture
def honest(glass: GlassAppliance) -> Iterator[GlassAppliance]:
    """The glass appliance; whatever lie a test sets, the next test finds it honest."""
    yield glass
    glass.tamper = None


@pytest.fixture(scope="module")
def narrow(policy: Policy) -> Policy:
    """The policy with everything pinned that it can pin."""
    return replace(policy, devices=frozenset({"cpu"}), arithmetic=frozenset({"attested-1"}))


def ask(glass: GlassAppliance, policy: Policy, *, stream: bool, linked: bool = False) -> VerifiedAnswer:
    """One answer under the tamper in force; `linked` puts an honest one before it in its chain."""
    kept: list[VerifiedAnswer] = []
    with Appliance(glass.url, policy=policy, save=kept.append) as appliance:
        if linked:
            tamper, glass.tamper = glass.tamper, None
            appliance.chat("Hello", **ASK)
            glass.tamper = tamper
        if stream:
            list(appliance.stream("Hello", stream_options={"include_usage": True}, **ASK))
        else:
            appliance.chat("Hello", **ASK)
    return kept[-1]


def rejected(
    glass: GlassAppliance, policy: Policy, tamper: Callable[[Sent], Sent], *, stream: bool, linked: bool = False
) -> Rejection:
    glass.tamper = tamper
    with pytest.raises(VerificationError) as caught:
        ask(glass, policy, stream=stream, linked=linked)
    return caught.value.code


def put(claim: int, path: tuple[Any, ...], value: Any) -> Callable[[dict[Any, Any]], None]:
    def edit(claims: dict[Any, Any]) -> None:
        place: Any = claims
        for key in (claim, *path)[:-1]:
            place = place[key]
        last = (claim, *path)[-1]
        assert last == "gpu" or place[last] != value, "this lie is no lie"
        place[last] = value

    return edit


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("lie", LIES, ids=_IDS)
def test_a_claim_changed_and_signed(honest: GlassAppliance, narrow: Policy, lie: tuple[Any, ...], stream: bool) -> None:
    claim, path, value, *codes = lie
    edit = put(claim, path, value)

    def tamper(sent: Sent) -> Sent:
        return sent.with_receipt(honest.resigned(sent.receipt, edit))

    expected = codes[stream]
    if expected is not None:
        assert rejected(honest, narrow, tamper, stream=stream, linked=claim in LINKED) == expected
        return
    honest.tamper = tamper
    shown = {fact.name: fact.trust for fact in ask(honest, narrow, stream=stream).receipt.facts}
    assert set(shown.values()) <= {"key-signed", "self-asserted"}, "nothing here may claim to be checked"


@pytest.mark.parametrize(("field", "value", "expected"), STREAM_LIES)
def test_a_stream_claim_changed_and_signed(
    honest: GlassAppliance, narrow: Policy, field: str, value: Any, expected: Rejection
) -> None:
    edit = put(names.CLAIM_STREAM, (field,), value)
    lie = lambda sent: sent.with_receipt(honest.resigned(sent.receipt, edit))  # noqa: E731
    assert rejected(honest, narrow, lie, stream=True) == expected


def test_every_claim_is_lied_about(honest: GlassAppliance, narrow: Policy) -> None:
    """A claim that is added to the receipt gets its lie here, or this fails."""
    lied = {(claim, path[:1]) for claim, path, *_ in LIES} | {(names.CLAIM_STREAM, (f,)) for f, _, _ in STREAM_LIES}
    told = {claim for claim, _ in lied}
    for stream in (False, True):
        claims = claims_of(ask(honest, narrow, stream=stream, linked=True).receipt.raw)
        assert set(claims) <= told
        for claim, value in claims.items():
            if isinstance(value, dict) and claim != names.CLAIM_EXECUTION:
                assert {(claim, (key,)) for key in value} <= lied


@pytest.mark.parametrize("claim", sorted({claim for claim, *_ in LIES}))
def test_a_claim_changed_and_not_signed(honest: GlassAppliance, narrow: Policy, claim: int) -> None:
    value = next(value for key, path, value, *_ in LIES if key == claim)
    path = next(path for key, path, *_ in LIES if key == claim)
    edit = put(claim, path, value)

    def tamper(sent: Sent) -> Sent:
        old = cose.parse_sign1(sent.receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=1 << 16)
        claims: Any = cbor.decode(old.payload, limit_bytes=1 << 16)
        edit(claims)
        return sent.with_receipt(
            cose.sign1(
                protected=old.protected, salt=old.salt, payload=cbor.encode(claims), sign=lambda _: old.signature
            )
        )

    assert rejected(honest, narrow, tamper, stream=False, linked=claim in LINKED) == R.BAD_SIGNATURE


def other_answer(glass: GlassAppliance, policy: Policy) -> bytes:
    with Appliance(glass.url, policy=policy) as appliance:
        return appliance.chat("Hello", **ASK).receipt.raw


def claims_of(receipt: bytes) -> dict[Any, Any]:
    sign1 = cose.parse_sign1(receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=1 << 16)
    value: Any = cbor.decode(sign1.payload, limit_bytes=1 << 16)
    return dict(value)


def test_the_receipt_of_another_request(honest: GlassAppliance, narrow: Policy) -> None:
    """Same connection or another one: the nonce the client drew for this request is not in it."""
    foreign = other_answer(honest, narrow)
    assert rejected(honest, narrow, lambda s: s.with_receipt(foreign), stream=False) == R.RECEIPT_NONCE_MISMATCH
    echoing = lambda s: s.with_receipt(  # noqa: E731
        honest.resigned(foreign, put(names.CLAIM_NONCE, (), claims_of(s.receipt)[names.CLAIM_NONCE]))
    )
    assert rejected(honest, narrow, echoing, stream=False) == R.RECEIPT_ID_MISMATCH


def test_the_receipt_of_another_connection(honest: GlassAppliance, narrow: Policy) -> None:
    """Everything equal but the connection it was made for: the binder, then the attestation, give it away."""
    foreign = claims_of(other_answer(honest, replace(narrow, max_continued_s=0)))
    for claim, code in (
        (names.CLAIM_CHANNEL, R.RECEIPT_CHANNEL_MISMATCH),
        (names.CLAIM_ATTESTATION, R.RECEIPT_ATTESTATION_MISMATCH),
    ):
        edit = put(claim, (), foreign[claim])
        lie = lambda s, edit=edit: s.with_receipt(honest.resigned(s.receipt, edit))  # noqa: E731
        assert rejected(honest, replace(narrow, max_continued_s=0), lie, stream=False) == code


def test_the_receipt_of_another_boot(honest: GlassAppliance, narrow: Policy, server: Any) -> None:
    """B085: a genuine receipt, signed by a key that is not in the evidence of this connection."""
    with Appliance(server.url, policy=narrow) as appliance:
        foreign = appliance.chat("Hello", **ASK).receipt.raw
    assert rejected(honest, narrow, lambda s: s.with_receipt(foreign), stream=False) == R.WRONG_KEY
    assert rejected(honest, narrow, lambda s: s.with_receipt(foreign), stream=True) == R.WRONG_KEY


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_receipt_without_its_salt(honest: GlassAppliance, narrow: Policy, stream: bool) -> None:
    """Live it is refused. On paper it still verifies, and opens nothing."""
    redact = lambda s: s.with_receipt(cose.redacted(s.receipt, limit_bytes=1 << 16))  # noqa: E731
    assert rejected(honest, narrow, redact, stream=stream) == R.REQUIRED_CLAIM_MISSING
    honest.tamper = None
    answer = ask(honest, narrow, stream=False)
    bare = cose.redacted(answer.receipt.raw, limit_bytes=1 << 16)
    verified = verify_receipt(
        bare,
        replace(answer.exchange, response_body=answer.body),
        answer.attestation.result,
        narrow,
        accept_redacted=True,
    )
    assert not verified.opened
    assert verified.digest == answer.receipt.digest
    unchecked = {check.name for check in verified.checks if check.status == "not checked"}
    assert {"request body", "response body", "output text 0"} <= unchecked


def test_no_receipt_two_receipts_and_rubbish(honest: GlassAppliance, narrow: Policy) -> None:
    name = names.HEADER_EXECUTION_RECEIPT

    def twice(sent: Sent) -> Sent:
        return sent.with_header(name, sent.header(name), sent.header(name))

    def checkpoint_type(sent: Sent) -> Sent:
        old = cose.parse_sign1(sent.receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=1 << 16)
        header = cose.protected_header(kid=old.kid, typ=names.TYP_CHECKPOINT)
        return sent.with_receipt(cose.sign1(protected=header, salt=old.salt, payload=old.payload, sign=honest.sign))

    assert rejected(honest, narrow, twice, stream=False) == R.MALFORMED_RESPONSE
    assert rejected(honest, narrow, lambda s: s.with_header(name, "!"), stream=False) == R.MALFORMED_BASE64
    assert rejected(honest, narrow, lambda s: s.with_receipt(b"\xd2\xff"), stream=False) == R.MALFORMED_CBOR
    assert rejected(honest, narrow, lambda s: s.with_receipt(b"\x00"), stream=False) == R.MALFORMED_COSE
    assert rejected(honest, narrow, checkpoint_type, stream=False) == R.MALFORMED_TYP
    without_id = lambda s: s.with_header(names.HEADER_RECEIPT_ID)  # noqa: E731
    assert rejected(honest, narrow, without_id, stream=False) == R.RECEIPT_MISSING


def test_a_receipt_that_is_fetched_later_is_the_same(honest: GlassAppliance, narrow: Policy) -> None:
    """Without its header the receipt comes from its own address, and verifies as well."""
    honest.tamper = lambda sent: sent.with_header(names.HEADER_EXECUTION_RECEIPT)
    answer = ask(honest, narrow, stream=False)
    assert honest.last is not None
    assert honest.last.header(names.HEADER_EXECUTION_RECEIPT) == encode_base64url(answer.receipt.raw).decode()


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"content":"', b'"content":"X'), (b'"finish_reason":"length"', b'"finish_reason":"stop"'), (b"{", b" {")],
)
def test_a_body_changed(honest: GlassAppliance, narrow: Policy, old: bytes, new: bytes) -> None:
    change = lambda s: replace(s, body=s.body.replace(old, new, 1))  # noqa: E731
    assert rejected(honest, narrow, change, stream=False) == R.RESPONSE_MISMATCH


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_b056_no_redirect_is_followed_wherever_it_leads(honest: GlassAppliance, narrow: Policy, status: int) -> None:
    def away(sent: Sent) -> Sent:
        return replace(sent.with_header("location", "https://127.0.0.1:1/v1/chat/completions"), status=status)

    assert rejected(honest, narrow, away, stream=False) == R.REDIRECT


def test_headers_that_change_the_meaning(honest: GlassAppliance, narrow: Policy) -> None:
    coded = lambda s: s.with_header("content-encoding", "gzip")  # noqa: E731
    assert rejected(honest, narrow, coded, stream=False) == R.CONTENT_ENCODING
    failed = lambda s: replace(s, status=500)  # noqa: E731
    assert rejected(honest, narrow, failed, stream=False) == R.STATUS_MISMATCH
