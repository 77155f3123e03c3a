"""Appraise attestation bundles: the numbered steps, written once, for live connections and saved files alike."""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk import signatures
from client_sdk.appraisal.channel import ChannelFacts as ChannelFacts
from client_sdk.appraisal.channel import authenticate_proof, check_binder, check_tls_key
from client_sdk.appraisal.policy_checks import (
    appraise_devices,
    check_devices,
    check_family,
    check_issued_at,
    check_policy,
)
from client_sdk.checks import CheckLog
from client_sdk.errors import Check, Rejection
from client_sdk.policy.policy import FAMILY_INSECURE, Policy
from client_sdk.tee.endorsements import stapled
from client_sdk.tee.evidence import (
    AuthenticEvidence,
    Endorsements,
    ParsedEvidence,
    SessionBinding,
    Trust,
)
from client_sdk.tee.families import FAMILIES
from client_sdk.wire import cose, digests
from client_sdk.wire.attestation import AttestationBundle, AttestationClaims, ChannelProof, EvidenceItem
from client_sdk.wire.names import (
    CURVE_ED25519,
    CURVE_X25519,
    EXPORTER_BYTES,
    MODE_INSECURE,
    NONCE_BYTES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something to show, with who stands behind it."""

    name: str
    value: str
    trust: Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationResult:
    """Proof that a bundle was appraised and accepted; made by this module alone.

    Keys are raw 32-byte Ed25519 publics. `verified_at` is Unix seconds, `evidence_age_s` the age of the evidence
    (0: made for this very connection). `binder` is the one in force on this connection.
    """

    claims: AttestationClaims
    claims_digest: bytes
    binder: bytes | None
    family: str
    receipt_key: bytes
    receipt_kid: bytes
    channel_key: bytes
    verified_at: float
    evidence_age_s: float
    holder_asserted: bool
    checks: tuple[Check, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What a continued attestation rests on.

    `result` is for the claims named in `have`; `age_s` counts on the caller's monotonic clock from the moment their
    full evidence was verified.
    """

    result: AttestationResult
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What the caller asked and knows by itself: the side of every comparison that no server can choose."""

    nonce: bytes
    channel: ChannelFacts | None
    policy: Policy
    now: float
    holder_asserted: bool

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES or not any(self.nonce):
            raise ValueError("the nonce is 32 bytes drawn by the caller")
        if self.channel is not None and len(self.channel.exported) != EXPORTER_BYTES:
            raise ValueError("the exporter output is 32 bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsed:
    claims: AttestationClaims
    claims_digest: bytes
    receipt_key: bytes
    channel_key: bytes
    evidence: ParsedEvidence
    devices: tuple[tuple[str, ParsedEvidence], ...]
    endorsements: Endorsements


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accepted:
    """All that decides a result, once every step has passed."""

    claims: AttestationClaims
    claims_digest: bytes
    binder: bytes | None
    family: str
    receipt_key: bytes
    channel_key: bytes
    evidence_trust: Trust
    evidence_facts: tuple[Fact, ...]
    evidence_age_s: float


def appraise(
    bundle: bytes,
    *,
    nonce: bytes,
    channel: ChannelFacts | None,
    policy: Policy,
    now: float,
    endorsements: Endorsements | None = None,
) -> AttestationResult:
    """Appraise a full bundle: fresh evidence for this nonce on this channel (docs/attestation.md).

    `nonce` is the 32 bytes the caller drew, `channel` its own view of the connection (None only where there is no TLS),
    `now` Unix seconds; `endorsements` are the caller's own, used beside those stapled to the bundle. Raises
    VerificationError, its `checks` ending with the failed one; UndecidedError where an endorsement is missing.
    """
    log = CheckLog()
    holder = channel is not None and channel.holder_asserted
    question = _Question(nonce=nonce, channel=channel, policy=policy, now=now, holder_asserted=holder)
    # (1) decode
    with log.step("bundle well formed"):
        decoded = AttestationBundle.parse(bundle)
    if decoded.claims is None:
        log.reject(
            "full evidence", Rejection.CONTINUATION_REFUSED, "only a channel proof came where evidence is needed"
        )
    # (2) choose the family
    family = decoded.evidence[0].kind
    check_family(log, family, policy)
    # (3) parse
    parsed = _parse(log, decoded, decoded.claims, endorsements or Endorsements())
    # (4) authenticate
    evidence = parsed.evidence.authenticate(log, parsed.endorsements, now=now)
    devices = [(kind, item.authenticate(log, parsed.endorsements, now=now)) for kind, item in parsed.devices]
    # (5) binding: evidence -> claims -> key and channel of this connection
    binder, proof = _check_binding(log, decoded, parsed, (evidence, *(device for _, device in devices)), question)
    # (6) freshness
    log.equal("nonce", Rejection.NONCE_MISMATCH, expected=nonce, actual=parsed.claims.nonce)
    log.equal("nonce in the channel proof", Rejection.NONCE_MISMATCH, expected=nonce, actual=proof.nonce)
    check_issued_at(log, parsed.claims, now, max_clock_skew_s=policy.max_clock_skew_s)
    # (7) policy
    check_policy(log, parsed.claims, policy, evidence.mode)
    evidence.appraise(log, policy.families.get(family), now=now)
    appraise_devices(log, devices, policy, now)
    # (8) result
    accepted = _Accepted(
        claims=parsed.claims,
        claims_digest=parsed.claims_digest,
        binder=binder,
        family=family,
        receipt_key=parsed.receipt_key,
        channel_key=parsed.channel_key,
        evidence_trust=evidence.trust,
        evidence_facts=_evidence_facts([evidence, *(device for _, device in devices)]),
        evidence_age_s=0.0,
    )
    return _result(log, accepted, question)


def appraise_continued(
    bundle: bytes,
    *,
    nonce: bytes,
    channel: ChannelFacts | None,
    policy: Policy,
    now: float,
    continued_from: Prior,
) -> AttestationResult:
    """Appraise a continued bundle: the channel key of evidence verified some seconds ago answers on this channel.

    The key's possession is fresh, the evidence is not: the result says so. Raises VerificationError.
    """
    log = CheckLog()
    prior, age_s = continued_from.result, continued_from.age_s
    question = _Question(nonce=nonce, channel=channel, policy=policy, now=now, holder_asserted=prior.holder_asserted)
    # (1) decode
    with log.step("bundle well formed"):
        decoded = AttestationBundle.parse(bundle)
    if not decoded.continued:
        log.reject("continued form", Rejection.CONTINUATION_REFUSED, "full evidence came; appraise it as such")
    # (2) the family and (3), (4) the evidence are those of the prior result, within its window
    check_family(log, prior.family, policy)
    if not 0 <= age_s < policy.max_continued_s:
        log.reject(
            "age of the evidence",
            Rejection.CONTINUATION_REFUSED,
            "the evidence is older than the policy lets a connection continue from",
            expected=f"below {policy.max_continued_s} s",
            actual=f"{age_s:.1f} s",
        )
    log.passed("age of the evidence", f"{age_s:.1f} s")
    # (5) binding
    proof = authenticate_proof(log, decoded.channel_proof, prior.channel_key, prior.claims_digest)
    binder = check_binder(log, "binder in the channel proof", proof.binder, channel)
    # (6) freshness
    log.equal("nonce in the channel proof", Rejection.NONCE_MISMATCH, expected=nonce, actual=proof.nonce)
    log.not_checked("fresh hardware evidence", f"key possession is fresh; the evidence is {age_s:.0f} s old")
    # (7) policy
    mode = MODE_INSECURE if prior.family == FAMILY_INSECURE else prior.claims.mode
    check_policy(log, prior.claims, policy, mode)
    # (8) result
    accepted = _Accepted(
        claims=prior.claims,
        claims_digest=prior.claims_digest,
        binder=binder,
        family=prior.family,
        receipt_key=prior.receipt_key,
        channel_key=prior.channel_key,
        evidence_trust=_claims_trust(prior),
        evidence_facts=(),
        evidence_age_s=age_s,
    )
    return _result(log, accepted, question)


def _parse(log: CheckLog, bundle: AttestationBundle, claims_bytes: bytes, own: Endorsements) -> _Parsed:
    with log.step("claims well formed"):
        claims = AttestationClaims.parse(claims_bytes)
    with log.step("keys well formed"):
        receipt_key = cose.parse_okp_key(claims.receipt_key, curve=CURVE_ED25519)
        channel_key = cose.parse_okp_key(claims.channel_key, curve=CURVE_ED25519)
        if claims.sealing_key is not None:
            cose.parse_okp_key(claims.sealing_key, curve=CURVE_X25519)
        if claims.air_key is not None:
            signatures.check_public_key(cose.parse_okp_key(claims.air_key, curve=CURVE_ED25519))
        signatures.check_public_key(receipt_key)
        signatures.check_public_key(channel_key)
    with log.step("evidence well formed"):
        evidence, *devices = (_parse_item(log, item) for item in bundle.evidence)
    with log.step("endorsements well formed"):
        endorsements = stapled(bundle.endorsements, bundle.event_logs, own)
    return _Parsed(
        claims=claims,
        claims_digest=digests.sha256(claims_bytes),
        receipt_key=receipt_key,
        channel_key=channel_key,
        evidence=evidence,
        devices=tuple((item.kind, device) for item, device in zip(bundle.evidence[1:], devices, strict=True)),
        endorsements=endorsements,
    )


def _parse_item(log: CheckLog, item: EvidenceItem) -> ParsedEvidence:
    family = FAMILIES.get(item.kind)
    if family is None:
        log.reject("device evidence", Rejection.FAMILY_NOT_ALLOWED, f"evidence of kind {item.kind[:64]!r} is unknown")
    return family.parse_evidence(item.content)


def _check_binding(
    log: CheckLog,
    bundle: AttestationBundle,
    parsed: _Parsed,
    evidence: tuple[AuthenticEvidence, ...],
    question: _Question,
) -> tuple[bytes | None, ChannelProof]:
    """Evidence -> claims -> key, exporter and channel key of this connection; returns its binder and the proof."""
    assert bundle.claims is not None
    channel, claims = question.channel, parsed.claims
    spki = None if channel is None else channel.spki
    bound = SessionBinding(claims=bundle.claims, nonce=question.nonce, binder=claims.binder, spki=spki)
    first, *devices = evidence
    first.check_session(log, bound)
    check_devices(log, bundle, claims)
    for device in devices:
        device.check_session(log, bound)
    check_tls_key(log, claims, channel)
    binder = check_binder(log, "binder", claims.binder, channel)
    proof = authenticate_proof(log, bundle.channel_proof, parsed.channel_key, parsed.claims_digest)
    check_binder(log, "binder in the channel proof", proof.binder, channel)
    return binder, proof


def _evidence_facts(evidence: list[AuthenticEvidence]) -> tuple[Fact, ...]:
    return tuple(Fact(name=name, value=value, trust=one.trust) for one in evidence for name, value in one.facts)


def _claims_trust(prior: AttestationResult) -> Trust:
    """Who stood behind the claims when their evidence was verified: a TPM's key is no hardware vendor's."""
    return next(fact.trust for fact in prior.facts if fact.name == "family")


def _result(log: CheckLog, accepted: _Accepted, question: _Question) -> AttestationResult:
    return AttestationResult(
        claims=accepted.claims,
        claims_digest=accepted.claims_digest,
        binder=accepted.binder,
        family=accepted.family,
        receipt_key=accepted.receipt_key,
        receipt_kid=cose.key_id(accepted.claims.receipt_key),
        channel_key=accepted.channel_key,
        verified_at=question.now,
        evidence_age_s=accepted.evidence_age_s,
        holder_asserted=question.holder_asserted,
        checks=log.checks,
        facts=_facts(accepted, question),
    )


def _facts(accepted: _Accepted, question: _Question) -> tuple[Fact, ...]:
    claims, trust = accepted.claims, accepted.evidence_trust
    rows: list[tuple[str, str, Trust]] = [
        ("family", accepted.family, trust),
        ("mode", claims.mode, trust),
        ("claims digest", accepted.claims_digest.hex(), trust),
        ("instance", claims.instance.hex(), trust),
        ("configuration", claims.config.hex(), trust),
        *((f"model {name}", identity.hex(), trust) for name, identity in sorted(claims.models.items())),
        ("receipt key id", cose.key_id(claims.receipt_key).hex(), trust),
        ("channel key id", cose.key_id(claims.channel_key).hex(), trust),
        ("issued at", str(claims.issued_at), "self-asserted"),
        ("evidence age", f"{accepted.evidence_age_s:.0f} s", "holder-asserted" if question.holder_asserted else trust),
    ]
    if accepted.binder is not None:
        channel_trust: Trust = "holder-asserted" if question.holder_asserted else "key-signed"
        rows.append(("channel binder", accepted.binder.hex(), channel_trust))
    return tuple(Fact(name=name, value=value, trust=mark) for name, value, mark in rows) + accepted.evidence_facts
