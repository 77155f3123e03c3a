"""What one transport remembers about attestation: which question to ask, how to judge the answer, what it stood on.

No I/O here: the synchronous and the asynchronous transport post the question and hand the answer back.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from client_sdk.appraisal.verifier import AttestationResult, ChannelFacts, Prior, appraise, appraise_continued
from client_sdk.errors import ApplianceError, AuthenticityError, MalformedError, Rejection, UndecidedError
from client_sdk.policy.policy import Policy
from client_sdk.system import Surroundings
from client_sdk.tee.evidence import Endorsements
from client_sdk.wire.attestation import AttestationBundle, AttestationRequest
from client_sdk.wire.errors import WireError
from client_sdk.wire.names import MEDIA_CBOR, NONCE_BYTES

_OVERLOADED = frozenset({429, 503})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationRecord:
    """One verified attestation with everything needed to verify it again: the bytes, the nonce, the channel.

    `verified_at` is Unix time, `verified_mono` the same moment on the monotonic clock. `prior` is the full attestation
    that a continued one stands on, None for a full one.
    """

    result: AttestationResult
    bundle: bytes
    nonce: bytes
    channel: ChannelFacts
    suite: str
    verified_at: float
    verified_mono: float
    prior: AttestationRecord | None = None

    @property
    def full(self) -> AttestationRecord:
        """The attestation whose hardware evidence this one rests on."""
        return self if self.prior is None else self.prior


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationQuestion:
    """A question to post as the first request of a connection, with what is needed to judge its answer."""

    nonce: bytes
    body: bytes
    prior: AttestationRecord | None


class AttestationSession:
    """Thread-safe memory of the last full attestation that this very process verified with a nonce it drew."""

    def __init__(self, policy: Policy, surroundings: Surroundings, endorsements: Endorsements | None = None) -> None:
        self.policy = policy
        self._endorsements = endorsements
        self._surroundings = surroundings
        self._lock = threading.Lock()
        self._last_full: AttestationRecord | None = None

    def ask(self) -> AttestationQuestion:
        """A question with a fresh nonce; it offers known claims only while the policy lets them be continued."""
        prior = self._continuable()
        nonce = self._surroundings.draw(NONCE_BYTES)
        have = None if prior is None else prior.result.claims_digest
        return AttestationQuestion(nonce=nonce, body=AttestationRequest(nonce=nonce, have=have).encode(), prior=prior)

    def judge(self, question: AttestationQuestion, body: bytes, channel: ChannelFacts, suite: str) -> AttestationRecord:
        """Appraise the bundle `body` for this channel. Raises VerificationError; then nothing is remembered."""
        try:
            continued = AttestationBundle.parse(body).continued
        except WireError as error:
            raise MalformedError.of(error) from None
        mono, now = self._surroundings.monotonic(), self._surroundings.now()
        prior = question.prior if continued else None
        if prior is None:
            result = appraise(
                body,
                nonce=question.nonce,
                channel=channel,
                policy=self.policy,
                now=now,
                endorsements=self._endorsements,
            )
        else:
            result = self._continue(question, body, channel, age_s=mono - prior.verified_mono, now=now)
        record = AttestationRecord(
            result=result,
            bundle=body,
            nonce=question.nonce,
            channel=channel,
            suite=suite,
            verified_at=now,
            verified_mono=mono,
            prior=prior,
        )
        if prior is None:
            with self._lock:
                self._last_full = record
        return record

    def _continue(
        self, question: AttestationQuestion, body: bytes, channel: ChannelFacts, *, age_s: float, now: float
    ) -> AttestationResult:
        assert question.prior is not None
        try:
            return appraise_continued(
                body,
                nonce=question.nonce,
                channel=channel,
                policy=self.policy,
                now=now,
                continued_from=Prior(result=question.prior.result, age_s=age_s),
            )
        except BaseException:
            self._forget(question.prior)
            raise

    def _continuable(self) -> AttestationRecord | None:
        with self._lock:
            last = self._last_full
        if last is None or self.policy.max_continued_s <= 0:
            return None
        age_s = self._surroundings.monotonic() - last.verified_mono
        return last if 0 <= age_s < self.policy.max_continued_s else None

    def _forget(self, record: AttestationRecord) -> None:
        with self._lock:
            if self._last_full is record:
                self._last_full = None


def check_answer_head(status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Refuse what is no bundle before its bytes are parsed.

    Raises UndecidedError for an appliance that cannot attest right now, ApplianceError(verified=False) for any other
    error status, VerificationError for a redirect, a content coding or another media type. `headers` has lower-case
    names.
    """
    if status in _OVERLOADED:
        raise UndecidedError(
            "ATTESTATION_UNAVAILABLE",
            f"the appliance answered {status} to the attestation request",
            retry_after_s=retry_after_s(headers.get("retry-after")),
        )
    if 300 <= status < 400:
        raise AuthenticityError(Rejection.REDIRECT, "the attestation endpoint redirects")
    if status != 200:
        code, message, _ = openai_error(body)
        raise ApplianceError(status, code or "ATTESTATION_FAILED", message or "no attestation", verified=False)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise AuthenticityError(Rejection.CONTENT_ENCODING, "the attestation answer is content-coded")
    if media_type(headers.get("content-type")) != MEDIA_CBOR:
        raise MalformedError(Rejection.MALFORMED_RESPONSE, f"the attestation answer is not {MEDIA_CBOR}")


def media_type(content_type: str | None) -> str:
    """The media type of a Content-Type header, without parameters, in lower case; "" where there is none."""
    return (content_type or "").split(";", 1)[0].strip().lower()


def retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header in its delta form; None for anything else."""
    return float(value) if value is not None and value.isascii() and value.isdigit() and len(value) < 10 else None


def openai_error(body: bytes) -> tuple[str, str, str | None]:
    """(code, message, param) of an OpenAI-shaped error body; empty texts where it has none."""
    try:
        error = json.loads(body)["error"]
        code, message, param = error.get("code") or error.get("type"), error.get("message"), error.get("param")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "", "", None
    return (
        code if isinstance(code, str) else "",
        message if isinstance(message, str) else "",
        param if isinstance(param, str) else None,
    )
