"""Verify evidence inside a certificate: it binds the certificate's key, and nothing about this moment.

What comes out is `binding=key, fresh=false`: whoever holds the key could be anywhere, and may have copied evidence and
key long ago (a relay: CVE-2026-33697). It can never start a session; it is for reading what other stacks publish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection, VerificationError
from client_sdk.tee import endorsements as given
from client_sdk.tee import x509
from client_sdk.tee.certificate import carriers, formats
from client_sdk.tee.certificate.carriers import Carried
from client_sdk.tee.certificate.policy import CertificatePolicy
from client_sdk.tee.evidence import AuthenticEvidence, Endorsements, FamilyPolicy, ForeignBinding, ParsedEvidence
from client_sdk.tee.families import FAMILIES
from client_sdk.tee.x509 import Certificate

_REPORT_DATA_BYTES = 64
_KNOWN_CRITICAL = frozenset({x509.OID_BASIC_CONSTRAINTS, x509.OID_KEY_USAGE, x509.OID_SUBJECT_ALT_NAME, "2.5.29.37"})
_NOT_OURS = {carriers.OID_SGX_SAMPLE: "SGX sample quote", carriers.OID_DSTACK_EVENTS: "dstack event log"}


def _parse_evidence(family: str, content: bytes) -> ParsedEvidence:
    return FAMILIES[family].parse_evidence(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the caller asks about foreign evidence.

    `policies` are the admitted families' demands, `endorsements` what the caller gave, `now` Unix seconds. `parse`
    reads a family's evidence, with the vendors' pinned roots unless the caller has others.
    """

    policies: Mapping[str, FamilyPolicy]
    endorsements: Endorsements
    binding: ForeignBinding
    now: float
    certificate: CertificatePolicy = field(default_factory=CertificatePolicy)
    parse: Callable[[str, bytes], ParsedEvidence] = _parse_evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedCertificate:
    """A certificate whose key is bound by the evidence in it. `asserted` is what its holder wrote besides."""

    certificate: Certificate
    schemes: tuple[str, ...]
    evidence: tuple[AuthenticEvidence, ...]
    asserted: tuple[tuple[str, str], ...]


def verify_certificate(data: bytes, log: CheckLog, question: Question) -> AttestedCertificate:
    """Judge the first certificate of a PEM or DER file. Raises VerificationError, UndecidedError."""
    with log.step("certificate well formed"):
        certificate, *others = x509.parse_certificates(data)
    with log.step("certificate valid now"):  # before any work on evidence
        x509.check_validity(certificate, question.now, "the certificate")
    _check_critical(log, certificate)
    _check_issuer(log, certificate, others)
    with log.step("evidence in the certificate well formed"):
        found = carriers.find(certificate)
    log.require(bool(found), "evidence present", Rejection.MALFORMED_EVIDENCE, "the certificate carries no evidence")
    evidence = tuple(_verify_carried(log, carried, question) for carried in found)
    _check_age(log, certificate, question)
    with log.step("certificate's names readable"):
        asserted = _asserted(certificate)
    log.not_checked("freshness", "the evidence binds the certificate's key; it can be of any time in its life")
    return AttestedCertificate(
        certificate=certificate,
        schemes=tuple(carried.scheme for carried in found),
        evidence=evidence,
        asserted=asserted,
    )


def _check_critical(log: CheckLog, certificate: Certificate) -> None:
    known = _KNOWN_CRITICAL | carriers.evidence_oids()
    unknown = [e.oid for e in certificate.extensions if e.critical and e.oid not in known]
    log.require(
        not unknown,
        "critical extensions",
        Rejection.BAD_CERTIFICATE,
        f"unknown critical extension {', '.join(unknown)[:200]}",
    )


def _check_issuer(log: CheckLog, certificate: Certificate, others: list[Certificate]) -> None:
    """A self-signed certificate is signed by its key; one of an authority says nothing more for the evidence."""
    if certificate.issuer == certificate.subject:
        with log.step("certificate signed by its own key"):
            x509.verify(certificate.public_key(), certificate.signed)
        return
    issuers = [other for other in others if other.subject == certificate.issuer]
    if issuers:
        with log.step("certificate signed by the next one"):
            x509.check_signature(certificate, issuers[0])
    log.not_checked("certificate's issuer", "no authority for names is asked here; the evidence binds the key")


def _verify_carried(log: CheckLog, carried: Carried, question: Question) -> AuthenticEvidence:
    demanded = question.policies.get(carried.family)
    if demanded is None:
        log.reject(
            "evidence family",
            Rejection.FAMILY_NOT_ALLOWED,
            "the policy does not accept this family of evidence",
            expected=", ".join(sorted(question.policies)),
            actual=carried.family[:64],
        )
    log.passed("evidence family", f"{carried.family} ({carried.scheme})")
    _check_carried_key(log, carried)
    with log.step("evidence well formed"):
        parsed = question.parse(carried.family, carried.content)
    endorsements = given.merge([question.endorsements, carried.endorsements])
    evidence = parsed.authenticate(log, endorsements, now=question.now)
    _check_key(log, carried, evidence)
    _check_asked(log, carried, evidence, question.binding)
    evidence.appraise(log, demanded, now=question.now)
    return evidence


def _check_carried_key(log: CheckLog, carried: Carried) -> None:
    """Evidence that does not even claim to bind the key is refused before endorsements are missed."""
    with log.step("report data readable"):
        report_data = formats.carried_report_data(carried.family, carried.content)
    padded = {value.ljust(_REPORT_DATA_BYTES, b"\x00") for value in carried.expected}
    if report_data is not None and report_data not in padded:
        _refuse_key(log, carried, report_data)


def _check_key(log: CheckLog, carried: Carried, evidence: AuthenticEvidence) -> None:
    """The authentic evidence carries one of the values that bind the certificate's key."""
    for expected in carried.expected:
        attempt = CheckLog()
        try:
            evidence.check_foreign(attempt, ForeignBinding(report_data=expected))
        except VerificationError:
            continue
        log.passed("evidence binds the certificate's key", carried.scheme)
        return
    _refuse_key(log, carried, formats.carried_report_data(carried.family, carried.content))


def _refuse_key(log: CheckLog, carried: Carried, report_data: bytes | None) -> NoReturn:
    log.reject(
        "evidence binds the certificate's key",
        Rejection.EVIDENCE_BINDING,
        f"the {carried.scheme} evidence was made for another key",
        expected=" or ".join(value[:64].hex() for value in carried.expected) or "the hash of this key in the claims",
        actual="" if report_data is None else report_data.hex(),
    )


def _check_asked(log: CheckLog, carried: Carried, evidence: AuthenticEvidence, binding: ForeignBinding) -> None:
    """What the caller expects beyond the key, where the caller expects anything."""
    if binding.nonce is not None and carried.nonce is not None:
        log.equal("nonce", Rejection.NONCE_MISMATCH, expected=binding.nonce, actual=carried.nonce)
        binding = ForeignBinding(report_data=binding.report_data)
    if binding.nonce is not None or binding.report_data is not None:
        evidence.check_foreign(log, binding)


def _check_age(log: CheckLog, certificate: Certificate, question: Question) -> None:
    age, limit = question.now - certificate.not_before, question.certificate.max_evidence_age_s
    if age > limit:
        log.reject(
            "age of the evidence",
            Rejection.ATTESTATION_TOO_OLD,
            "the certificate was made too long ago, whatever its end of validity",
            expected=f"at most {limit} s",
            actual=f"{age:.0f} s",
        )
    log.passed("age of the evidence", f"{age:.0f} s since notBefore")


def _asserted(certificate: Certificate) -> tuple[tuple[str, str], ...]:
    """What the holder of the key wrote into the certificate; no evidence covers it."""
    facts = [("certificate subject", certificate.common_name()), ("certificate SHA-256", certificate.fingerprint.hex())]
    seen = carriers.evidence_oids() - {carriers.OID_DSTACK_EVENTS}
    for extension in certificate.extensions:
        if extension.oid not in seen:
            name = _NOT_OURS.get(extension.oid, "extension")
            facts.append((f"{name} {extension.oid}", extension.value[:64].hex()))
    return tuple(facts)
