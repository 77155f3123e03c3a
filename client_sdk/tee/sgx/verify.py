"""Verify evidence of an SGX enclave: a quote and Intel's collateral."""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection, UndecidedError
from client_sdk.tee import x509
from client_sdk.tee.dcap import abi as dcap_abi
from client_sdk.tee.dcap import binding as dcap_binding
from client_sdk.tee.dcap import status as dcap_status
from client_sdk.tee.dcap import verify as dcap
from client_sdk.tee.dcap.roots import intel_root
from client_sdk.tee.evidence import Endorsements, FamilyPolicy, ForeignBinding, SessionBinding, Trust
from client_sdk.tee.sgx import abi
from client_sdk.tee.sgx.policy import SgxPolicy
from client_sdk.wire.names import MODE_PRODUCTION

_NOT_DEMANDED = "the policy does not demand it"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticSgx:
    """A quote that Intel's chain vouches for."""

    quote: abi.SgxQuote
    verdict: dcap.Verdict
    mode: str = MODE_PRODUCTION
    trust: Trust = "hardware-signed"

    @property
    def identity(self) -> bytes:
        """The platform id (PPID): one machine, whichever enclave on it."""
        return self.verdict.ppid

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        report = self.quote.report
        return (
            ("MRENCLAVE", report.mr_enclave.hex()),
            ("MRSIGNER", report.mr_signer.hex()),
            ("ISV product id", str(report.isv_prod_id)),
            ("ISV security version", str(report.isv_svn)),
            ("enclave attributes", report.attributes.hex()),
            ("report data", report.report_data.hex()),
            *dcap_status.facts(self.verdict),
        )

    def check_session(self, log: CheckLog, binding: SessionBinding) -> None:
        dcap_binding.check_session(log, self.quote.report.report_data, binding)

    def check_foreign(self, log: CheckLog, binding: ForeignBinding) -> None:
        dcap_binding.check_foreign(log, self.quote.report.report_data, binding)

    def appraise(self, log: CheckLog, policy: FamilyPolicy | None, *, now: float) -> None:
        if not isinstance(policy, SgxPolicy):
            log.reject("family policy", Rejection.FAMILY_NOT_ALLOWED, "the policy demands nothing of this family")
        dcap_status.appraise(log, policy.status, self.verdict, now=now)
        report = self.quote.report
        log.require(
            any(report.mr_enclave),
            "enclave was measured",
            Rejection.MEASUREMENT_NOT_ALLOWED,
            "MRENCLAVE is all zero",
        )
        _any_of(log, "MRENCLAVE", policy.mr_enclave, report.mr_enclave)
        _any_of(log, "MRSIGNER", policy.mr_signer, report.mr_signer)
        _any_of(log, "ISV product id", policy.isv_prod_id, report.isv_prod_id)
        if policy.min_isv_svn is None:
            log.not_checked("ISV security version", f"{report.isv_svn}; {_NOT_DEMANDED}")
        elif report.isv_svn < policy.min_isv_svn:
            log.reject(
                "ISV security version",
                Rejection.MEASUREMENT_NOT_ALLOWED,
                "the enclave is older than the policy accepts",
                expected=f"{policy.min_isv_svn} or more",
                actual=str(report.isv_svn),
            )
        else:
            log.passed("ISV security version", str(report.isv_svn))


@dataclass(frozen=True, slots=True)
class SgxEvidence:
    """A well-formed quote. `root` is Intel's pinned root unless a test brings its own."""

    quote: abi.SgxQuote
    root: x509.Certificate

    def authenticate(self, log: CheckLog, endorsements: Endorsements, *, now: float) -> AuthenticSgx:
        quote = self.quote
        certified = dcap.check_quote_signatures(log, quote.section, quote.signed, self.root, now)
        log.require(
            not quote.report.debug,
            "debug mode",
            Rejection.DEBUG_NOT_ALLOWED,
            "the host can read and write the memory of a debug enclave",
        )
        collateral = dcap.check_collateral(log, certified, endorsements, dcap_abi.TEE_SGX, now)
        verdict = dcap.judge_tcb(log, quote.trimmed, collateral, self.root, now)
        report = quote.report
        fields = {
            "attributes": report.attributes,
            "mr_enclave": report.mr_enclave,
            "mr_signer": report.mr_signer,
            "report_data": report.report_data,
        }
        dcap.check_same_report(log, verdict, fields)
        return AuthenticSgx(quote=quote, verdict=verdict)


def parse_evidence(content: bytes, root: x509.Certificate | None = None) -> SgxEvidence:
    """Parse an `sgx` item: a quote, padding tolerated. Raises WireError, UndecidedError for a version to come."""
    header = dcap_abi.parse_header(content)
    if header.tee_type == dcap_abi.TEE_SGX and dcap_abi.is_from_a_later_version(header, max(abi.VERSIONS)):
        raise UndecidedError("UNSUPPORTED_VERSION", f"unsupported version {header.version} of an SGX quote")
    return SgxEvidence(abi.parse_quote(content), root or intel_root())


def _any_of(log: CheckLog, name: str, accepted: frozenset[bytes] | frozenset[int] | None, actual: bytes | int) -> None:
    shown = actual.hex() if isinstance(actual, bytes) else str(actual)
    if accepted is None:
        log.not_checked(name, _NOT_DEMANDED)
    elif actual not in accepted:
        expected = [one.hex() if isinstance(one, bytes) else str(one) for one in accepted]
        log.reject(
            name,
            Rejection.MEASUREMENT_NOT_ALLOWED,
            f"{name} is not one the policy accepts",
            expected=" or ".join(sorted(expected)[:8]),
            actual=shown,
        )
    else:
        log.passed(name, shown)
