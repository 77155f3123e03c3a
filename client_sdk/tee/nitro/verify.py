"""Verify Nitro attestation documents: chain to the pinned AWS root, signature, registers, what the document binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from client_sdk.checks import CheckLog, shown
from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee import x509
from client_sdk.tee.anchors import load_anchor
from client_sdk.tee.evidence import Endorsements, FamilyPolicy, ForeignBinding, SessionBinding, Trust
from client_sdk.tee.nitro import abi
from client_sdk.tee.nitro.policy import NitroPolicy, PcrSet
from client_sdk.tee.revocation import check_revocation
from client_sdk.tee.x509 import Certificate
from client_sdk.wire import digests
from client_sdk.wire.names import MODE_PRODUCTION

ROOT_FILE = "aws_nitro_root_g1.pem"
ROOT_FINGERPRINT = "641a0321a3e244efe456463195d606317ed7cdcc3c1756e09893f3c68f79bb5b"

_MAX_CLOCK_SKEW_S = 300
_LAUNCH_REGISTERS = (0, 1, 2)
_HALF = abi.SIGNATURE_BYTES // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticNitro:
    """A document signed by the Nitro hypervisor under the pinned root."""

    document: abi.Document
    region: str
    mode: str = MODE_PRODUCTION
    trust: Trust = "hardware-signed"

    @property
    def identity(self) -> bytes:
        return self.document.module_id.encode()

    @property
    def instance(self) -> str:
        """The EC2 instance in the module id: what stays the same when an enclave is started again."""
        return _instance_of(self.document.module_id)

    @property
    def debug(self) -> bool:
        """Enclaves in debug mode have zeros where measurements would be; no other enclave has any."""
        return self.document.kind == abi.ENCLAVE and not all(
            any(self.document.pcrs.get(register, b"")) for register in _LAUNCH_REGISTERS
        )

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        document = self.document
        return (
            ("Nitro document", document.kind),
            ("Nitro module id", document.module_id),
            ("Nitro region", self.region),
            ("Nitro timestamp", f"{document.timestamp_ms / 1000:.3f}"),
            ("Nitro debug mode", "yes" if self.debug else "no"),
            *((f"PCR{register}", value.hex()) for register, value in sorted(document.pcrs.items()) if any(value)),
        )

    def check_session(self, log: CheckLog, binding: SessionBinding) -> None:
        document = self.document
        log.equal(
            "evidence binds the claims",
            Rejection.EVIDENCE_BINDING,
            expected=digests.report_data(binding.claims),
            actual=document.user_data,
        )
        log.equal("nonce in the document", Rejection.NONCE_MISMATCH, expected=binding.nonce, actual=document.nonce)
        log.equal(
            "TLS key in the document", Rejection.EVIDENCE_BINDING, expected=binding.spki, actual=document.public_key
        )

    def check_foreign(self, log: CheckLog, binding: ForeignBinding) -> None:
        document = self.document
        if binding.report_data is None:
            log.not_checked("user data", "no expected value was given")
        else:
            actual = document.user_data
            padded = binding.report_data.ljust(len(actual or b""), b"\x00")
            log.equal("user data", Rejection.EVIDENCE_BINDING, expected=padded, actual=actual)
        if binding.nonce is None:
            log.not_checked("nonce in the document", "no expected value was given")
        else:
            log.equal("nonce in the document", Rejection.NONCE_MISMATCH, expected=binding.nonce, actual=document.nonce)
        log.not_checked("public key in the document", "what it should be is not known outside our own protocol")

    def appraise(self, log: CheckLog, policy: FamilyPolicy | None, *, now: float) -> None:
        if not isinstance(policy, NitroPolicy):
            log.reject("nitro policy", Rejection.FAMILY_NOT_ALLOWED, "Nitro evidence needs a policy of its own")
        self._check_age(log, policy, now)
        if self.debug and not policy.allow_debug:
            log.reject(
                "debug mode", Rejection.DEBUG_NOT_ALLOWED, "PCR0 to PCR2 are zero: the enclave runs in debug mode"
            )
        if self.debug:
            log.passed("debug mode", "a debug enclave, which the policy allows")
            log.not_checked("launch measurement", "an enclave in debug mode has none")
        else:
            log.passed("debug mode", "off" if self.document.kind == abi.ENCLAVE else "NitroTPM has none")
            self._check_measurement(log, policy)
        self._check_module(log, policy)

    def _check_age(self, log: CheckLog, policy: NitroPolicy, now: float) -> None:
        age_s = now - self.document.timestamp_ms / 1000
        if age_s < -_MAX_CLOCK_SKEW_S:
            log.reject(
                "age of the document",
                Rejection.CLOCK_SKEW,
                "the document was made in the future",
                expected=f"at most {_MAX_CLOCK_SKEW_S} s ahead",
                actual=f"{-age_s:.0f} s ahead",
            )
        if age_s > policy.max_document_age_s:
            log.reject(
                "age of the document",
                Rejection.ATTESTATION_TOO_OLD,
                "the document is older than the policy allows",
                expected=f"at most {policy.max_document_age_s} s",
                actual=f"{age_s:.0f} s",
            )
        log.passed("age of the document", f"{max(age_s, 0.0):.0f} s")

    def _check_measurement(self, log: CheckLog, policy: NitroPolicy) -> None:
        document = self.document
        sets = policy.enclave if document.kind == abi.ENCLAVE else policy.nitrotpm
        if not sets:
            if not policy.report_only:
                log.reject(
                    "launch measurement",
                    Rejection.MEASUREMENT_NOT_ALLOWED,
                    f"the policy pins no registers of {document.kind} documents",
                )
            log.not_checked("launch measurement", "the policy pins none")
            return
        if not any(_matches(document, one) for one in sets):
            registers = sorted({register for one in sets for register in one})
            log.reject(
                "launch measurement",
                Rejection.MEASUREMENT_NOT_ALLOWED,
                "the registers are not a set the policy accepts",
                expected=" or ".join(_registers_text(one) for one in sets),
                actual=_registers_text({r: document.pcrs[r] for r in registers if r in document.pcrs}),
            )
        log.passed("launch measurement", document.kind)

    def _check_module(self, log: CheckLog, policy: NitroPolicy) -> None:
        if policy.module_ids is None:
            log.not_checked("module id", "the policy pins none")
            return
        if not policy.module_ids & {self.document.module_id, self.instance}:
            log.reject(
                "module id",
                Rejection.PLATFORM_NOT_ALLOWED,
                "the instance is not one the policy accepts",
                expected=" or ".join(sorted(policy.module_ids)),
                actual=self.document.module_id,
            )
        log.passed("module id", self.document.module_id)


@dataclass(frozen=True, slots=True)
class NitroEvidence:
    """A well-formed document. `anchor` is the root it must lead to: the pinned AWS root, or a simulator's."""

    document: abi.Document
    anchor: Certificate

    def authenticate(self, log: CheckLog, endorsements: Endorsements, *, now: float) -> AuthenticNitro:
        """Chain, validity at `now`, signature, time of signing; revocation where `endorsements` has lists."""
        document = self.document
        with log.step("Nitro certificates well formed"):
            leaf = x509.parse_certificate(document.certificate)
            bundle = tuple(x509.parse_certificate(der) for der in document.cabundle)
        with log.step("Nitro certificate chain"):
            self._check_chain(leaf, bundle, now)
        with log.step("Nitro document signature"):
            _check_signature(document, leaf)
        made = document.timestamp_ms / 1000
        log.require(
            leaf.not_before <= made <= leaf.not_after,
            "time of signing",
            Rejection.CERTIFICATE_NOT_VALID_NOW,
            "the document's time lies outside the validity of the certificate that signed it",
        )
        path = (leaf, *reversed(bundle))
        check_revocation(log, "Nitro certificate revocation", path, endorsements.crls, now)
        return AuthenticNitro(document=document, region=_region(leaf))

    def _check_chain(self, leaf: Certificate, bundle: Sequence[Certificate], now: float) -> None:
        """Root first, each certificate signed by the one before it, in that very order."""
        if bundle[0].der != self.anchor.der:
            raise AuthenticityError(
                Rejection.CHAIN_NOT_TRUSTED,
                "the bundle does not begin with the pinned AWS root",
                expected=shown(self.anchor.fingerprint),
                actual=shown(bundle[0].fingerprint),
            )
        if leaf.is_ca:
            raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, "the signer's certificate is one of an authority")
        x509.check_chain((leaf, *reversed(bundle)), self.anchor, now)


def parse_evidence(content: bytes, anchor: Certificate | None = None) -> NitroEvidence:
    """Parse the content of a `nitro` item: the document as the NSM returned it. Raises WireError."""
    return NitroEvidence(abi.parse_document(content), anchor or load_anchor(ROOT_FILE, ROOT_FINGERPRINT))


def _check_signature(document: abi.Document, leaf: Certificate) -> None:
    key = leaf.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise AuthenticityError(Rejection.BAD_KEY, "the signer's key is not P-384")
    r, s = (int.from_bytes(half, "big") for half in (document.signature[:_HALF], document.signature[_HALF:]))
    try:
        key.verify(encode_dss_signature(r, s), document.signed, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "the document's signature does not verify") from None


def _matches(document: abi.Document, one: PcrSet) -> bool:
    return all(document.pcrs.get(register) == value for register, value in one.items())


def _registers_text(registers: PcrSet) -> str:
    return " ".join(f"PCR{register}={value.hex()}" for register, value in sorted(registers.items())) or "none"


def _instance_of(module_id: str) -> str:
    """`i-0123456789abcdef0` of `i-0123456789abcdef0-enc0123456789abcdef`."""
    return module_id.rpartition("-")[0] or module_id


def _region(leaf: Certificate) -> str:
    """The region in the signer's name, `<module id>.<region>.aws`."""
    parts = leaf.common_name().split(".")
    return parts[1] if len(parts) == 3 and parts[2] == "aws" else "unknown"
