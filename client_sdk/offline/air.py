"""Verify AIR receipts in the order of the draft (-02, section 6): structure, signature, claims, policy.

The result is **AIR-local**: the receipt is well formed, signed by the key given, and fits what was asked. Whether that
key lives in a TEE is another question, for which somebody must verify the document behind `attestation_doc_hash`.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from client_sdk.errors import Check
from client_sdk.wire import cose
from client_sdk.wire.air import AirClaims, AirError, Envelope, parse_claims, parse_envelope

ASSURANCE = "AIR-local"
DEFAULT_SKEW_S = 60
KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AirPolicy:
    """What the verifier demands; None: not demanded. `max_age_s` and `skew_s` in seconds.

    `required_registers` are names (pcr3, ...) that must be there beyond the profile's own; `seen` tells whether a `cti`
    came before (replay).
    """

    nonce: bytes | None = None
    model_hash: bytes | None = None
    model_id: str | None = None
    request_hash: bytes | None = None
    response_hash: bytes | None = None
    attestation_doc_hash: bytes | None = None
    platform: str | None = None
    required_registers: frozenset[str] = frozenset()
    max_age_s: int | None = None
    skew_s: int = DEFAULT_SKEW_S
    allow_evaluation: bool = False
    seen: Callable[[bytes], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AirResult:
    """A verified receipt. `freshness` is "nonce", "recentness" (age alone) or "not checked"."""

    claims: AirClaims
    checks: tuple[Check, ...]
    freshness: str
    assurance: str = ASSURANCE


class AirRejected(Exception):
    """The receipt is refused. `layer`, `check` and `code` as the draft's reference verifier names them."""

    def __init__(self, error: AirError, checks: tuple[Check, ...]) -> None:
        super().__init__(str(error))
        self.layer = error.layer
        self.code = error.code
        self.detail = error.detail
        self.checks = (*checks, Check(name=error.check, status="failed", detail=error.detail))


def verify_air(receipt: bytes, *, key: bytes, policy: AirPolicy, now: float) -> AirResult:
    """Verify one receipt under `key`, a raw 32-byte Ed25519 key. `now` is Unix seconds. Raises AirRejected."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key is {KEY_BYTES} bytes")
    checks: list[Check] = []
    try:
        envelope = parse_envelope(receipt)
        checks += _passed("SIZE", "COSE", "UNPROTECTED", "ALG", "CONTENT_TYPE", "PAYLOAD")
        check_signature(envelope, key)
        checks += _passed("SIG")
        claims = parse_claims(envelope.payload)
        checks += _passed("CLAIMS_DECODE", "EAT_PROFILE", "CTI", "MHASH_PRESENT", "MEAS", "MTYPE", "MHASH_SCHEME")
        checks += _passed("SECURITY_MODE")
        _check_policy(checks, claims, policy, now)
    except AirError as error:
        raise AirRejected(error, tuple(checks)) from None
    freshness = "nonce" if policy.nonce is not None else "recentness" if policy.max_age_s is not None else "not checked"
    return AirResult(claims=claims, checks=tuple(checks), freshness=freshness)


def check_signature(envelope: Envelope, key: bytes) -> None:
    """Layer 2: S below L, neither A nor R of small order, and the cofactorless equation. Raises AirError SIG_FAILED.

    OpenSSL alone accepts a small-order key whose equation happens to hold.
    """
    if cose.has_small_order(key):
        raise _signature("the public key is a point of small order")
    if cose.has_small_order(envelope.signature[:32]):
        raise _signature("R is a point of small order")
    if not cose.scalar_in_range(envelope.signature):
        raise _signature("S is not below the group order")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(envelope.signature, envelope.signed_bytes())
    except InvalidSignature:
        raise _signature("the signature does not verify") from None


def _check_policy(checks: list[Check], claims: AirClaims, policy: AirPolicy, now: float) -> None:
    _check_fresh(checks, claims, policy, now)
    _check_nonce(checks, claims, policy)
    hashes = (
        ("MHASH", "MODEL_HASH_MISMATCH", policy.model_hash, claims.model_hash),
        ("RHASH", "REQUEST_HASH_MISMATCH", policy.request_hash, claims.request_hash),
        ("OHASH", "RESPONSE_HASH_MISMATCH", policy.response_hash, claims.response_hash),
        ("ADHASH", "ATTESTATION_DOC_HASH_MISMATCH", policy.attestation_doc_hash, claims.attestation_doc_hash),
    )
    for check, code, wanted, found in hashes:
        _require(checks, check, code, None if wanted is None else hmac.compare_digest(wanted, found))
    model = None if policy.model_id is None else policy.model_id == claims.model_id
    _require(checks, "MODEL", "MODEL_ID_MISMATCH", model)
    evaluated = claims.security_mode == "production" or policy.allow_evaluation
    _require(checks, "SECURITY_MODE_POLICY", "EVALUATION_MODE_REJECTED", evaluated)
    measured = claims.enclave_measurements
    platform = None if policy.platform is None else policy.platform == measured.measurement_type
    _require(checks, "PLATFORM", "PLATFORM_MISMATCH", platform)
    for name in sorted(policy.required_registers):
        _require(checks, "MEAS", f"MISSING_CLAIM:{name}", name in measured.registers)
    _require(checks, "REPLAY", "REPLAY_CTI", None if policy.seen is None else not policy.seen(claims.cti))


def _check_fresh(checks: list[Check], claims: AirClaims, policy: AirPolicy, now: float) -> None:
    if policy.max_age_s is None:
        checks.append(Check(name="FRESH", status="not checked", detail="no maximum age was given"))
        return
    if claims.iat > now + policy.skew_s:
        raise AirError(4, "FRESH", "TIMESTAMP_FUTURE", f"iat {claims.iat} is in the future")
    if claims.iat < now - policy.max_age_s:
        raise AirError(4, "FRESH", "TIMESTAMP_STALE", f"iat {claims.iat} is older than {policy.max_age_s} s")
    checks += _passed("FRESH")


def _check_nonce(checks: list[Check], claims: AirClaims, policy: AirPolicy) -> None:
    if policy.nonce is None:
        checks.append(Check(name="NONCE", status="not checked", detail="no nonce was given"))
        return
    if claims.eat_nonce is None:
        raise AirError(4, "NONCE", "NONCE_MISSING", "the receipt carries no nonce")
    _require(checks, "NONCE", "NONCE_MISMATCH", hmac.compare_digest(policy.nonce, claims.eat_nonce))


def _require(checks: list[Check], check: str, code: str, holds: bool | None) -> None:
    """A demand that holds, does not, or (None) was not made."""
    if holds is None:
        checks.append(Check(name=check, status="not checked", detail="not demanded"))
    elif holds:
        checks += _passed(check)
    else:
        raise AirError(4, check, code, "differs from what was demanded")


def _passed(*names: str) -> list[Check]:
    return [Check(name=name, status="passed") for name in names]


def _signature(detail: str) -> AirError:
    return AirError(2, "SIG", "SIG_FAILED", detail)
