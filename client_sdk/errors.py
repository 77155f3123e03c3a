"""The error tree of the SDK. Codes are API, messages are prose.

`VerificationError` derives from nothing in httpx on purpose: HTTP libraries retry and hide their own errors, and a
NO must never be retried, downgraded or swallowed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from client_sdk.wire.errors import WireError

CheckStatus = Literal["passed", "failed", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the list that every verification produces, in the order the checks ran."""

    name: str
    status: CheckStatus
    detail: str = ""


class Rejection(enum.StrEnum):
    """Why an answer is refused. docs/errors.md describes each code and what to do next."""

    # Malformed: the bytes are not what the format says
    MALFORMED_CBOR = "MALFORMED_CBOR"
    MALFORMED_COSE = "MALFORMED_COSE"
    MALFORMED_TYP = "MALFORMED_TYP"
    MALFORMED_KEY = "MALFORMED_KEY"
    MALFORMED_BASE64 = "MALFORMED_BASE64"
    MALFORMED_BUNDLE = "MALFORMED_BUNDLE"
    MALFORMED_ATTESTATION_CLAIMS = "MALFORMED_ATTESTATION_CLAIMS"
    MALFORMED_CHANNEL_PROOF = "MALFORMED_CHANNEL_PROOF"
    MALFORMED_EVIDENCE = "MALFORMED_EVIDENCE"
    MALFORMED_CERTIFICATE = "MALFORMED_CERTIFICATE"
    MALFORMED_ENDORSEMENT = "MALFORMED_ENDORSEMENT"
    MALFORMED_RECEIPT_CLAIMS = "MALFORMED_RECEIPT_CLAIMS"
    MALFORMED_CHECKPOINT = "MALFORMED_CHECKPOINT"
    MALFORMED_STREAM = "MALFORMED_STREAM"
    MALFORMED_RESPONSE = "MALFORMED_RESPONSE"
    MALFORMED_SAVED_ANSWER = "MALFORMED_SAVED_ANSWER"
    UNSUPPORTED_PROFILE = "UNSUPPORTED_PROFILE"

    # Authenticity: somebody else said it, or it was changed
    BAD_ALGORITHM = "BAD_ALGORITHM"
    BAD_KEY = "BAD_KEY"
    BAD_SIGNATURE = "BAD_SIGNATURE"
    WRONG_KEY = "WRONG_KEY"
    BAD_TLS_KEY = "BAD_TLS_KEY"
    BAD_CERTIFICATE = "BAD_CERTIFICATE"
    CERTIFICATE_NOT_VALID_NOW = "CERTIFICATE_NOT_VALID_NOW"
    CHAIN_NOT_TRUSTED = "CHAIN_NOT_TRUSTED"
    CERTIFICATE_REVOKED = "CERTIFICATE_REVOKED"
    ENDORSEMENT_MISMATCH = "ENDORSEMENT_MISMATCH"
    EVENT_LOG_MISMATCH = "EVENT_LOG_MISMATCH"
    EVIDENCE_BINDING = "EVIDENCE_BINDING"
    TLS_KEY_MISMATCH = "TLS_KEY_MISMATCH"
    BINDER_MISMATCH = "BINDER_MISMATCH"
    BINDER_MISSING = "BINDER_MISSING"
    CLAIMS_MISMATCH = "CLAIMS_MISMATCH"
    UNSOLICITED_BYTES = "UNSOLICITED_BYTES"
    CONTENT_ENCODING = "CONTENT_ENCODING"
    REDIRECT = "REDIRECT"
    FOREIGN_ORIGIN = "FOREIGN_ORIGIN"

    # Freshness
    NONCE_MISMATCH = "NONCE_MISMATCH"
    CONTINUATION_REFUSED = "CONTINUATION_REFUSED"
    CLOCK_SKEW = "CLOCK_SKEW"
    ATTESTATION_TOO_OLD = "ATTESTATION_TOO_OLD"

    # Policy: genuine, but not what the caller accepts
    FAMILY_NOT_ALLOWED = "FAMILY_NOT_ALLOWED"
    INSECURE_NOT_ALLOWED = "INSECURE_NOT_ALLOWED"
    MODE_MISMATCH = "MODE_MISMATCH"
    MEASUREMENT_NOT_ALLOWED = "MEASUREMENT_NOT_ALLOWED"
    DEBUG_NOT_ALLOWED = "DEBUG_NOT_ALLOWED"
    TCB_NOT_ALLOWED = "TCB_NOT_ALLOWED"
    GUEST_POLICY_NOT_ALLOWED = "GUEST_POLICY_NOT_ALLOWED"
    PLATFORM_NOT_ALLOWED = "PLATFORM_NOT_ALLOWED"
    MODEL_NOT_ALLOWED = "MODEL_NOT_ALLOWED"
    CONFIG_NOT_ALLOWED = "CONFIG_NOT_ALLOWED"
    DEVICE_NOT_ALLOWED = "DEVICE_NOT_ALLOWED"
    ARITHMETIC_NOT_ALLOWED = "ARITHMETIC_NOT_ALLOWED"
    REQUIRED_CLAIM_MISSING = "REQUIRED_CLAIM_MISSING"

    # Receipts
    RECEIPT_MISSING = "RECEIPT_MISSING"
    RECEIPT_ID_MISMATCH = "RECEIPT_ID_MISMATCH"
    RECEIPT_NONCE_MISMATCH = "RECEIPT_NONCE_MISMATCH"
    RECEIPT_ATTESTATION_MISMATCH = "RECEIPT_ATTESTATION_MISMATCH"
    RECEIPT_CHANNEL_MISMATCH = "RECEIPT_CHANNEL_MISMATCH"
    RECEIPT_MODE_MISMATCH = "RECEIPT_MODE_MISMATCH"
    RECEIPT_TIME = "RECEIPT_TIME"
    RECEIPT_CHAIN_GAP = "RECEIPT_CHAIN_GAP"
    REQUEST_MISMATCH = "REQUEST_MISMATCH"
    RESPONSE_MISMATCH = "RESPONSE_MISMATCH"
    OUTPUT_MISMATCH = "OUTPUT_MISMATCH"
    PARAMETER_MISMATCH = "PARAMETER_MISMATCH"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    CONFIG_MISMATCH = "CONFIG_MISMATCH"
    STATUS_MISMATCH = "STATUS_MISMATCH"

    # Streams
    STREAM_TRUNCATED = "STREAM_TRUNCATED"
    STREAM_CHECKPOINT_MISSING = "STREAM_CHECKPOINT_MISSING"
    STREAM_CHECKPOINT_MISMATCH = "STREAM_CHECKPOINT_MISMATCH"
    STREAM_CHAIN_MISMATCH = "STREAM_CHAIN_MISMATCH"
    STREAM_AFTER_RECEIPT = "STREAM_AFTER_RECEIPT"


class SdkError(Exception):
    """Root of everything the SDK raises on purpose."""


class PolicyFileError(SdkError):
    """The caller's own policy or reference file is unusable: a mistake to mend, found at construction."""


class RequestError(SdkError):
    """The caller's own request cannot be sent (text without a UTF-8 form, a value without one in JSON). Nothing was.

    The message names the place in the request and quotes nothing.
    """


class VerificationError(SdkError):
    """The answer is NO. Never retried, never downgraded.

    `code` says why; `checks` lists what had been checked until then, the failed check last; `expected` and `actual` are
    texts safe to show (digests in hex, names, numbers), empty where they do not apply.
    """

    def __init__(
        self,
        code: Rejection,
        message: str,
        *,
        expected: str = "",
        actual: str = "",
        checks: Sequence[Check] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.expected = expected
        self.actual = actual
        self.checks: tuple[Check, ...] = tuple(checks)

    def __str__(self) -> str:
        detail = f" (expected {self.expected}, got {self.actual})" if self.expected or self.actual else ""
        return f"{self.code}: {self.message}{detail}"


class MalformedError(VerificationError):
    """The bytes do not follow the format."""

    @classmethod
    def of(cls, error: WireError, *, checks: Sequence[Check] = ()) -> MalformedError:
        return cls(Rejection(error.code), error.detail, checks=checks)


class AuthenticityError(VerificationError):
    """A signature, a key or a binding is wrong."""


class FreshnessError(VerificationError):
    """Genuine, but not made for this question at this time."""


class PolicyError(VerificationError):
    """Genuine and fresh, but not what the caller's policy accepts."""


class UndecidedError(SdkError):
    """No verdict could be reached (endorsements unreachable, attestation overloaded). Not a yes; may be retried.

    `checks` lists what had been checked until then; the one that could not be decided is last, as not checked.
    """

    def __init__(
        self, code: str, message: str, *, retry_after_s: float | None = None, checks: Sequence[Check] = ()
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.checks: tuple[Check, ...] = tuple(checks)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class TransportError(SdkError):
    """The network failed before an answer could be judged."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class ApplianceError(SdkError):
    """The appliance answered with an error.

    `verified` is True where a receipt proves that the attested appliance said so (`status` terminal `refused`, `error`,
    ...), False for answers that carry no receipt by design (401, 429, unknown routes): those may come from anybody who
    holds the connection and are never an answer.
    """

    def __init__(self, status: int, code: str, message: str, *, verified: bool, param: str | None = None) -> None:
        super().__init__(f"HTTP {status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.verified = verified
        self.param = param
