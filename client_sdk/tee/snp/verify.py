"""Verification of SEV-SNP reports: signature, AMD's chain, and the report against what AMD's certificate states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from client_sdk.checks import CheckLog
from client_sdk.errors import AuthenticityError, Rejection, UndecidedError
from client_sdk.tee import x509
from client_sdk.tee.evidence import Endorsements, FamilyPolicy, ForeignBinding, SessionBinding, Trust
from client_sdk.tee.snp import abi, judge
from client_sdk.tee.snp.abi import Report, Tcb
from client_sdk.tee.snp.certificates import (
    VCEK,
    VLEK,
    Anchors,
    ProductAnchors,
    Revocation,
    Vek,
    check_revocation,
    find_issuer,
    find_veks,
    pinned_anchors,
)
from client_sdk.tee.snp.policy import SnpPolicy
from client_sdk.wire import digests
from client_sdk.wire.names import MODE_PRODUCTION

_MAX_TRIED = 16  # certificates of one chip at the same patch levels; more than one is rare


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticSnp:
    """A report that AMD's hardware signed. `tcb` is what AMD's certificate and the report both state."""

    report: Report
    vek: Vek
    revocation: Revocation
    mode: str = MODE_PRODUCTION
    trust: Trust = "hardware-signed"

    @property
    def product(self) -> str:
        return self.vek.product

    @property
    def tcb(self) -> Tcb:
        return self.vek.tcb

    @property
    def identity(self) -> bytes:
        """The chip; where it is masked, the guest's own id, which lasts as long as the guest."""
        return self.report.chip_id if any(self.report.chip_id) else self.report.report_id

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        return judge.facts(self.report, self.vek)

    def check_session(self, log: CheckLog, binding: SessionBinding) -> None:
        log.equal(
            "report data binds the claims",
            Rejection.EVIDENCE_BINDING,
            expected=digests.report_data(binding.claims),
            actual=self.report.report_data,
        )

    def check_foreign(self, log: CheckLog, binding: ForeignBinding) -> None:
        check_foreign_report(log, self.report, binding)

    def appraise(self, log: CheckLog, policy: FamilyPolicy | None, *, now: float) -> None:
        if not isinstance(policy, SnpPolicy):
            log.reject("SNP policy", Rejection.FAMILY_NOT_ALLOWED, "SNP evidence needs a policy of its own")
        judge.appraise(log, policy, self.report, self.vek, self.revocation)


@dataclass(frozen=True, slots=True)
class SnpEvidence:
    """A well-formed report. `anchors` are the roots it has to lead to."""

    report: Report
    anchors: Anchors

    def authenticate(self, log: CheckLog, endorsements: Endorsements, *, now: float) -> AuthenticSnp:
        """Check signature, chain, revocation and that report and certificate agree, as of `now` (Unix seconds).

        Raises VerificationError; UndecidedError without the VCEK or VLEK, or for a newer report or product.
        """
        return authenticate_report(log, self.report, endorsements, now=now, anchors=self.anchors)


def parse_evidence(content: bytes, anchors: Anchors | None = None) -> SnpEvidence:
    """Parse the content of a `sev-snp` item. `anchors` None: AMD's own. Raises WireError."""
    return SnpEvidence(abi.parse_report(content), anchors or pinned_anchors())


def authenticate_report(
    log: CheckLog, report: Report, endorsements: Endorsements, *, now: float, anchors: Anchors
) -> AuthenticSnp:
    """See SnpEvidence.authenticate; also for reports that lie inside other evidence."""
    with log.step("report signed with ECDSA P-384"):
        _check_algorithm(report)
    with log.step("report key certificate found"):
        vek = _choose_vek(report, find_veks(endorsements.certificates))
    with log.step("report signature"):
        _check_signature(report, vek)
    _raise_unsupported(report)
    log.passed("report version", str(report.version))
    with log.step("certificate of the same product"):
        pinned = _check_product(report, vek, anchors)
    with log.step("AMD certificate chain"):
        issuer = find_issuer(vek, endorsements.certificates, pinned)
        x509.check_chain((vek.certificate, issuer), pinned.ark, now)
    with log.step("revocation lists that were given"):
        path = ((vek.certificate, issuer), (issuer, pinned.ark))
        revocation = check_revocation(path, endorsements.crls, now)
    if revocation == "absent":
        log.not_checked("revocation", "no revocation list of AMD's root was given")
    with log.step("patch levels as certified"):
        reported = abi.parse_tcb(report.reported_tcb, vek.product)
        if reported != vek.tcb:
            raise AuthenticityError(
                Rejection.ENDORSEMENT_MISMATCH,
                "the report states patch levels that its certificate does not",
                expected=str(vek.tcb),
                actual=str(reported),
            )
    return AuthenticSnp(report=report, vek=vek, revocation=revocation)


def check_foreign_report(log: CheckLog, report: Report, binding: ForeignBinding) -> None:
    """Compare the report data with what the caller expects; a report has no nonce field of its own."""
    if binding.nonce is not None:
        log.reject("nonce", Rejection.NONCE_MISMATCH, "an SNP report has no nonce field: expect report data instead")
    if binding.report_data is None:
        log.not_checked("report data", "no expected report data was given")
        return
    size = len(report.report_data)
    log.equal(
        "report data",
        Rejection.EVIDENCE_BINDING,
        expected=binding.report_data.ljust(size, b"\x00"),
        actual=report.report_data,
    )


def _check_algorithm(report: Report) -> None:
    if report.signing_key == abi.SIGNED_BY_NONE:
        raise AuthenticityError(Rejection.BAD_KEY, "the host has masked the chip's key: nothing signs this report")
    if report.signing_key not in (abi.SIGNED_BY_VCEK, abi.SIGNED_BY_VLEK):
        raise AuthenticityError(Rejection.BAD_KEY, f"the report names an unknown signing key {report.signing_key}")
    if report.signature_algorithm != abi.SIGNATURE_ECDSA_P384_SHA384:
        raise AuthenticityError(
            Rejection.BAD_ALGORITHM, f"the report's signature algorithm is {report.signature_algorithm}, not 1"
        )


def _choose_vek(report: Report, veks: Sequence[Vek]) -> Vek:
    """The certificate that fits the report best: kind and chip must fit, patch levels and signature decide."""
    kind = VLEK if report.signing_key == abi.SIGNED_BY_VLEK else VCEK
    if not veks:
        _raise_unsupported(report)
        raise UndecidedError("ENDORSEMENTS_MISSING", f"no {kind} certificate came for this report")
    fitting = [vek for vek in veks if vek.kind == kind]
    if not fitting:
        raise AuthenticityError(Rejection.ENDORSEMENT_MISMATCH, f"the report is signed by a {kind}; none came")
    if kind == VCEK:
        fitting = [vek for vek in fitting if vek.chip_id == report.chip_id and any(report.chip_id)]
        if not fitting:
            raise AuthenticityError(
                Rejection.ENDORSEMENT_MISMATCH,
                "the certificates given are for other chips",
                expected=report.chip_id.hex(),
                actual=", ".join((vek.chip_id or b"").hex() for vek in veks[:2]),
            )
    same_levels = [vek for vek in fitting if _states_levels(report, vek)]
    if len(same_levels) > 1:
        return next((vek for vek in same_levels[:_MAX_TRIED] if _verifies(report, vek)), same_levels[0])
    return (same_levels or fitting)[0]


def _states_levels(report: Report, vek: Vek) -> bool:
    return report.reported_tcb == abi.encode_tcb(vek.tcb)


def _verifies(report: Report, vek: Vek) -> bool:
    key = vek.certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise AuthenticityError(Rejection.BAD_KEY, "the report key is not on the curve P-384")
    try:
        key.verify(encode_dss_signature(report.r, report.s), report.signed, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True


def _check_signature(report: Report, vek: Vek) -> None:
    if not _verifies(report, vek):
        version = "" if report.known_version else f" (and version {report.version} is an unsupported version)"
        raise AuthenticityError(Rejection.BAD_SIGNATURE, f"the report's signature does not verify{version}")


def _raise_unsupported(report: Report) -> None:
    """Raises UndecidedError for a report or a processor newer than this code."""
    if not report.known_version:
        raise UndecidedError("UNSUPPORTED_VERSION", f"SNP report of unsupported version {report.version}")
    if report.cpuid is not None and abi.product_of(report.cpuid) is None:
        family, model, stepping = report.cpuid
        raise UndecidedError(
            "UNSUPPORTED_VERSION", f"unsupported processor: family {family:#x} model {model:#x} stepping {stepping:#x}"
        )


def _check_product(report: Report, vek: Vek, anchors: Anchors) -> ProductAnchors:
    product = vek.product if report.cpuid is None else abi.product_of(report.cpuid)
    if product != vek.product:
        raise AuthenticityError(
            Rejection.ENDORSEMENT_MISMATCH,
            "the report is of another product than its certificate",
            expected=vek.product,
            actual=str(product),
        )
    if product not in anchors:
        raise UndecidedError("UNSUPPORTED_VERSION", f"no root is known for the unsupported product {product}")
    return anchors[product]
