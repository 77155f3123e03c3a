"""Verify TPM 2.0 quotes: a restricted key signed these registers and this extra data. Measured boot, nothing more."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from client_sdk.checks import CheckLog
from client_sdk.errors import AuthenticityError, Rejection, UndecidedError
from client_sdk.tee import der, x509
from client_sdk.tee.evidence import Endorsements, FamilyPolicy, ForeignBinding, SessionBinding, Trust
from client_sdk.tee.revocation import check_revocation
from client_sdk.tee.tpm2 import abi, keys, quote_checks
from client_sdk.tee.tpm2.policy import PcrSet, Tpm2Policy
from client_sdk.tee.x509 import Certificate, Crl
from client_sdk.wire.names import MODE_PRODUCTION

OID_EXTENDED_KEY_USAGE = "2.5.29.37"
OID_ATTESTATION_KEY = "2.23.133.8.3"  # tcg-kp-AIKCertificate
_HIERARCHIES = {"owner": 0x40000001, "endorsement": 0x4000000B, "platform": 0x4000000C, "null": 0x40000007}
_NO_ENCRYPTION = "a TPM measures the boot; it neither encrypts nor isolates memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticTpm2:
    """A quote that its own attestation key signed; whether that key is one to believe is for the policy to say."""

    item: abi.Item
    certificate: Certificate | None
    pool: tuple[Certificate, ...]
    crls: tuple[Crl, ...]
    mode: str = MODE_PRODUCTION
    trust: Trust = "key-signed"

    @property
    def identity(self) -> bytes:
        return self.item.public.pin

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        attest, public = self.item.attest, self.item.public
        return (
            ("TPM protection", "measured boot, not memory encryption"),
            ("TPM attestation key", public.pin.hex()),
            ("TPM attestation key name", public.name.hex()),
            ("TPM attestation key hierarchy", _hierarchy(attest, public)),
            *quote_checks.facts("TPM", attest),
            ("TPM firmware version", f"{attest.firmware_version:016x}"),
        )

    def check_session(self, log: CheckLog, binding: SessionBinding) -> None:
        quote_checks.check_session(log, self.item.attest, binding, name="evidence binds the claims")

    def check_foreign(self, log: CheckLog, binding: ForeignBinding) -> None:
        quote_checks.check_foreign(log, self.item.attest, binding)

    def appraise(self, log: CheckLog, policy: FamilyPolicy | None, *, now: float) -> None:
        if not isinstance(policy, Tpm2Policy):
            log.reject("tpm2 policy", Rejection.FAMILY_NOT_ALLOWED, "TPM evidence needs a policy of its own")
        log.not_checked("memory encryption", _NO_ENCRYPTION)
        self._check_key(log, policy, now)
        self._check_registers(log, policy)
        self._check_clock(log, policy)

    def _check_key(self, log: CheckLog, policy: Tpm2Policy, now: float) -> None:
        pin = self.item.public.pin
        if policy.ak_pins is None:
            log.not_checked("attestation key pinned", "the policy pins roots, not keys")
        elif pin not in policy.ak_pins:
            log.reject(
                "attestation key pinned",
                Rejection.PLATFORM_NOT_ALLOWED,
                "the attestation key is not one the policy accepts",
                expected=_any_of(policy.ak_pins),
                actual=pin.hex(),
            )
        else:
            log.passed("attestation key pinned", pin.hex())
        if policy.ak_roots is None:
            log.not_checked("attestation key certified", "the policy pins the key itself")
            return
        with log.step("attestation key certified"):
            path = self._check_certificate(policy, policy.ak_roots, now)
        check_revocation(log, "attestation key revocation", path, self.crls, now)

    def _check_certificate(self, policy: Tpm2Policy, roots: frozenset[bytes], now: float) -> tuple[Certificate, ...]:
        """The path from the key's certificate to a root of the policy, both included. Raises AuthenticityError."""
        leaf = self.certificate
        if leaf is None:
            raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, "the attestation key comes without a certificate")
        anchors = [one for one in self.pool if one.fingerprint in roots]
        if not anchors:
            raise UndecidedError("ENDORSEMENTS_MISSING", "no root certificate of the policy's ak_roots was given")
        if not policy.allow_any_certified_key and not _is_for_attestation(leaf):
            raise AuthenticityError(
                Rejection.BAD_KEY, "the certificate does not say that its key is a TPM's attestation key"
            )
        failure: AuthenticityError | None = None
        for anchor in anchors:
            try:
                chain = x509.order_chain(leaf, self.pool, anchor)
                x509.check_chain(chain, anchor, now)
            except AuthenticityError as error:
                failure = error
            else:
                return (*chain, anchor)
        assert failure is not None
        raise failure

    def _check_registers(self, log: CheckLog, policy: Tpm2Policy) -> None:
        attest = self.item.attest
        if not policy.pcr_sets:
            log.not_checked("boot measurement", "the policy pins none")
            return
        if quote_checks.quotes_one_of(attest, policy.pcr_sets, self.item.signature.hash):
            log.passed("boot measurement", quote_checks.selection_text(attest))
            return
        log.reject(
            "boot measurement",
            Rejection.MEASUREMENT_NOT_ALLOWED,
            "the quoted registers are not a set the policy accepts",
            expected=" or ".join(f"{_set_text(one)} ({self._digest_text(one)})" for one in policy.pcr_sets),
            actual=f"{quote_checks.selection_text(attest)} ({attest.pcr_digest.hex()})",
        )

    def _digest_text(self, one: PcrSet) -> str:
        selection = abi.PcrSelection(bank=abi.SHA256, registers=tuple(sorted(one)))
        values = {(abi.SHA256, register): value for register, value in one.items()}
        return abi.pcr_digest(self.item.signature.hash, (selection,), values).hex()

    def _check_clock(self, log: CheckLog, policy: Tpm2Policy) -> None:
        attest = self.item.attest
        counts = (
            ("reset count", policy.reset_counts, attest.reset_count),
            ("restart count", policy.restart_counts, attest.restart_count),
        )
        for name, accepted, actual in counts:
            if accepted is None:
                log.not_checked(name, f"the policy pins none; it is {actual}")
            elif actual not in accepted:
                expected = " or ".join(str(count) for count in sorted(accepted))
                log.reject(
                    name,
                    Rejection.PLATFORM_NOT_ALLOWED,
                    "the machine was started again since the policy was made",
                    expected=expected,
                    actual=str(actual),
                )
            else:
                log.passed(name, str(actual))
        if policy.require_safe_clock:
            log.require(attest.safe, "TPM clock safe", Rejection.PLATFORM_NOT_ALLOWED, "the clock may have gone back")
        else:
            log.not_checked("TPM clock safe", f"not required; it is {'safe' if attest.safe else 'not safe'}")
        firmware = attest.firmware_version.to_bytes(8, "big")
        if policy.firmware_versions is None:
            log.not_checked("TPM firmware version", "the policy pins none")
        elif firmware not in policy.firmware_versions:
            log.reject(
                "TPM firmware version",
                Rejection.TCB_NOT_ALLOWED,
                "the TPM's firmware is not one the policy accepts",
                expected=_any_of(policy.firmware_versions),
                actual=firmware.hex(),
            )
        else:
            log.passed("TPM firmware version", firmware.hex())


@dataclass(frozen=True, slots=True)
class Tpm2Evidence:
    item: abi.Item

    def authenticate(self, log: CheckLog, endorsements: Endorsements, *, now: float) -> AuthenticTpm2:
        """The key is fit to sign quotes, the signature verifies, a certificate that came along is of this key.

        `now` plays no part here: whether the key is one to believe, and its certificate valid, the policy decides.
        """
        item = self.item
        with log.step("attestation key restricted to the TPM"):
            keys.check_attributes(item.public)
        with log.step("attestation key usable"):
            key = keys.load(item.public)
        with log.step("signature scheme"):
            keys.check_scheme(item.public, item.signature)
        with log.step("quote signature"):
            keys.verify(key, item.signature, item.attest.encoded)
        size = hashlib.new(abi.HASHES[item.signature.hash]).digest_size
        log.require(
            len(item.attest.pcr_digest) == size and any(one.registers for one in item.attest.selections),
            "quote covers registers",
            Rejection.MALFORMED_EVIDENCE,
            "the quote selects no register, or its digest has the wrong length",
        )
        certificate = None
        if item.certificate is not None:
            with log.step("certificate of the attestation key"):
                certificate = x509.parse_certificate(item.certificate)
                spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
                if spki != key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo):
                    raise AuthenticityError(Rejection.ENDORSEMENT_MISMATCH, "the certificate is of another key")
        return AuthenticTpm2(item=item, certificate=certificate, pool=endorsements.certificates, crls=endorsements.crls)


def parse_evidence(content: bytes) -> Tpm2Evidence:
    """Parse the content of a `tpm2` item. Raises WireError."""
    return Tpm2Evidence(abi.parse_item(content))


def _is_for_attestation(certificate: Certificate) -> bool:
    """Extended key usage names attestation keys (TCG EK Credential Profile): no TLS key of the same root will do."""
    value = certificate.extension(OID_EXTENDED_KEY_USAGE)
    if value is None:
        return False
    purposes = der.read_one(value).expect(der.SEQUENCE, "extended key usage").children(limit=32)
    return any(der.oid(purpose, "key purpose") == OID_ATTESTATION_KEY for purpose in purposes)


def _hierarchy(attest: abi.Attest, public: abi.Public) -> str:
    """Where the signer is a primary key: the qualified name of one hashes its hierarchy and its name."""
    for name, handle in _HIERARCHIES.items():
        hashed = hashlib.new(abi.HASHES[public.name_hash], handle.to_bytes(4, "big") + public.name).digest()
        if public.name_hash.to_bytes(2, "big") + hashed == attest.qualified_signer:
            return name
    return "not a primary key of its own public area"


def _set_text(one: PcrSet) -> str:
    return "sha256:" + ",".join(str(register) for register in sorted(one))


def _any_of(pins: frozenset[bytes]) -> str:
    return " or ".join(pin.hex() for pin in sorted(pins))
