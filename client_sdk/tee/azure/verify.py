"""Verification of Azure's SNP machines: AMD vouches for the paravisor, it for its TPM's key, that key for the boot."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from client_sdk.checks import CheckLog
from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee.azure import abi
from client_sdk.tee.azure.policy import AzurePolicy
from client_sdk.tee.evidence import Endorsements, FamilyPolicy, ForeignBinding, SessionBinding, Trust
from client_sdk.tee.snp import judge
from client_sdk.tee.snp.certificates import Anchors, pinned_anchors
from client_sdk.tee.snp.verify import AuthenticSnp, authenticate_report
from client_sdk.tee.tpm2 import abi as tpm2
from client_sdk.tee.tpm2 import quote_checks
from client_sdk.wire.names import MODE_PRODUCTION

_MIN_KEY_BITS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticAzure:
    """A quote whose key an authentic SNP report covers."""

    item: abi.Item
    snp: AuthenticSnp
    mode: str = MODE_PRODUCTION
    trust: Trust = "hardware-signed"

    @property
    def identity(self) -> bytes:
        return self.snp.identity

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        attest, runtime = self.item.attest, self.item.runtime
        return (
            *self.snp.facts,
            ("Azure machine id", runtime.vm_id or "not stated"),
            ("Azure secure boot", _state(runtime.secure_boot)),
            ("Azure console", _state(runtime.console)),
            *quote_checks.facts("vTPM", attest),
        )

    def check_session(self, log: CheckLog, binding: SessionBinding) -> None:
        quote_checks.check_session(log, self.item.attest, binding, name="quote binds the claims")

    def check_foreign(self, log: CheckLog, binding: ForeignBinding) -> None:
        quote_checks.check_foreign(log, self.item.attest, binding)

    def appraise(self, log: CheckLog, policy: FamilyPolicy | None, *, now: float) -> None:
        if not isinstance(policy, AzurePolicy):
            log.reject("azure policy", Rejection.FAMILY_NOT_ALLOWED, "Azure evidence needs a policy of its own")
        judge.appraise(log, policy.snp, self.snp.report, self.snp.vek, self.snp.revocation)
        self._check_registers(log, policy)
        self._check_machine(log, policy)

    def _check_registers(self, log: CheckLog, policy: AzurePolicy) -> None:
        attest = self.item.attest
        if not policy.pcr_sets:
            log.not_checked("boot measurement", "the policy does not demand it")
            return
        if quote_checks.quotes_one_of(attest, policy.pcr_sets, tpm2.SHA256):
            log.passed("boot measurement", quote_checks.selection_text(attest))
            return
        log.reject(
            "boot measurement",
            Rejection.MEASUREMENT_NOT_ALLOWED,
            "the quoted registers are not a set that the policy allows",
            expected=" or ".join("sha256:" + ",".join(map(str, sorted(one))) for one in policy.pcr_sets),
            actual=f"{quote_checks.selection_text(attest)} ({attest.pcr_digest.hex()})",
        )

    def _check_machine(self, log: CheckLog, policy: AzurePolicy) -> None:
        runtime = self.item.runtime
        demands = (
            ("secure boot", policy.require_secure_boot, runtime.secure_boot is True),
            ("console", policy.forbid_console, runtime.console is False),
            ("vTPM clock", policy.require_safe_clock, self.item.attest.safe),
            ("machine id", policy.vm_ids is not None, runtime.vm_id.upper() in (policy.vm_ids or ())),
        )
        for name, demanded, holds in demands:
            if not demanded:
                log.not_checked(name, "the policy does not demand it")
            else:
                log.require(holds, name, Rejection.PLATFORM_NOT_ALLOWED, f"the {name} is not as the policy demands")


@dataclass(frozen=True, slots=True)
class AzureEvidence:
    """Well-formed evidence. `anchors` are AMD's roots that the report has to lead to."""

    item: abi.Item
    anchors: Anchors

    def authenticate(self, log: CheckLog, endorsements: Endorsements, *, now: float) -> AuthenticAzure:
        """As for SEV-SNP, then the paravisor's JSON by the report data and the quote by the key in that JSON."""
        item = self.item
        snp = authenticate_report(log, item.report, endorsements, now=now, anchors=self.anchors)
        log.equal(
            "report covers the runtime JSON",
            Rejection.ENDORSEMENT_MISMATCH,
            expected=hashlib.sha256(item.runtime.encoded).digest() + bytes(32),
            actual=item.report.report_data,
        )
        with log.step("quote signature"):
            _check_quote(item)
        log.require(
            len(item.attest.pcr_digest) == hashes.SHA256.digest_size and bool(_registers(item.attest)),
            "quote covers registers",
            Rejection.MALFORMED_EVIDENCE,
            "the quote selects no register, or its digest has the wrong length",
        )
        return AuthenticAzure(item=item, snp=snp)


def parse_evidence(content: bytes, anchors: Anchors | None = None) -> AzureEvidence:
    """Parse the content of an `azure-snp-vtpm` item. `anchors` None: AMD's own. Raises WireError."""
    return AzureEvidence(abi.parse_item(content), anchors or pinned_anchors())


def _check_quote(item: abi.Item) -> None:
    runtime = item.runtime
    if runtime.modulus.bit_length() < _MIN_KEY_BITS:
        raise AuthenticityError(Rejection.BAD_KEY, f"the quoting key is shorter than {_MIN_KEY_BITS} bits")
    try:
        key = rsa.RSAPublicNumbers(runtime.exponent, runtime.modulus).public_key()
    except ValueError:
        raise AuthenticityError(Rejection.BAD_KEY, "the quoting key is no RSA key") from None
    try:
        key.verify(item.signature, item.attest.encoded, padding.PKCS1v15(), hashes.SHA256())
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "the quote's signature does not verify") from None


def _registers(attest: tpm2.Attest) -> tuple[int, ...]:
    return tuple(register for one in attest.selections for register in one.registers)


def _state(flag: bool | None) -> str:
    return "not stated" if flag is None else "on" if flag else "off"
