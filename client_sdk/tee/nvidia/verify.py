"""Verify NVIDIA device evidence: device chain, SPDM signature, firmware id; then manifests, revocation, tokens."""

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
from client_sdk.tee.nvidia import abi, nras, ocsp, product, rim
from client_sdk.tee.nvidia.anchors import Anchors, pinned
from client_sdk.tee.nvidia.appraisal import appraise
from client_sdk.tee.nvidia.policy import NvidiaPolicy
from client_sdk.tee.x509 import Certificate
from client_sdk.wire import digests
from client_sdk.wire.names import MODE_PRODUCTION

_DEVICE_CHAIN = 4  # firmware leaf, device, provisioner, product; then the root


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouched:
    """What was said for a device by others and verified: manifests, revocation answers, the service's verdicts.

    `not_revoked` holds fingerprints of certificates that an OCSP answer calls good; `verdicts` is None where a token
    came without a key set.
    """

    manifests: tuple[rim.Manifest, ...]
    not_revoked: frozenset[bytes]
    verdicts: tuple[nras.Verdict, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticNvidia:
    """A report signed by a device of NVIDIA's. `path` is its verified chain, leaf first, without the root."""

    report: abi.Report
    path: tuple[Certificate, ...]
    product: product.Product
    firmware: bytes | None
    vouched: Vouched
    mode: str = MODE_PRODUCTION
    trust: Trust = "hardware-signed"

    @property
    def identity(self) -> bytes:
        """SHA-256 of the device certificate's key: the leaf below it changes with the firmware, the device not."""
        return digests.sha256(self.path[1].spki)

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        report = self.report
        sku = [report.text(number, "SKU") for number in (abi.PROJECT, abi.PROJECT_SKU, abi.CHIP_SKU)]
        named = (
            ("kind", self.product.kind),
            ("architecture", self.product.architecture),
            ("chip", self.product.chip),
            ("device serial number", product.serial_number(self.path[1])),
            ("device id", self.identity.hex()),
            ("driver version", report.driver_version),
            ("VBIOS version", report.vbios_version),
            ("board id", _hex(report.opaque.get(abi.BOARD_ID))),
            ("project and chip SKU", " ".join(filter(None, sku))),
            ("firmware id", _hex(self.firmware)),
            ("mode", report.mode),
            ("protected PCIe", {None: None, True: "on", False: "off"}[report.protected_pcie]),
            ("switch ids", " ".join(entry.hex() for entry in report.switch_ids)),
        )
        return tuple((name, value) for name, value in named if value)

    def check_session(self, log: CheckLog, binding: SessionBinding) -> None:
        """The device signed the nonce that follows from the caller's nonce and this connection."""
        expected = digests.gpu_nonce(binding.nonce, binding.binder)
        log.equal("device nonce", Rejection.EVIDENCE_BINDING, expected=expected, actual=self.report.nonce)

    def check_foreign(self, log: CheckLog, binding: ForeignBinding) -> None:
        if binding.report_data is not None:
            log.reject("report data", Rejection.EVIDENCE_BINDING, "NVIDIA devices sign a nonce, no report data")
        if binding.nonce is None:
            log.not_checked("device nonce", "no nonce was given to compare it with")
        else:
            log.equal("device nonce", Rejection.NONCE_MISMATCH, expected=binding.nonce, actual=self.report.nonce)

    def appraise(self, log: CheckLog, policy: FamilyPolicy | None, *, now: float) -> None:
        """Judge by an NvidiaPolicy. Raises VerificationError through `log`; UndecidedError for what is missing."""
        if not isinstance(policy, NvidiaPolicy):
            log.reject("device policy", Rejection.FAMILY_NOT_ALLOWED, "no policy for NVIDIA devices")
        appraise(self, log, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaEvidence:
    """A well-formed report and the certificates that came with it, the leaf first."""

    report: abi.Report
    chain: tuple[Certificate, ...]
    anchors: Anchors

    def authenticate(self, log: CheckLog, endorsements: Endorsements, *, now: float) -> AuthenticNvidia:
        """Check the device's chain, revocation, signature and firmware id, and all that vouches for it, as of `now`.

        Raises VerificationError through `log`; UndecidedError for a product or version unknown here.
        """
        with log.step("device certificate chain"):
            path = self._path()
            x509.check_chain(path, self.anchors.device, now)
        _check_crls(log, path, self.anchors.device, endorsements, now)
        with log.step("report signature"):
            _check_signature(self.report, path[0])
        with log.step("device product"):
            made = product.of(path[1])
        firmware = _check_firmware(log, self.report, path[0])
        device = AuthenticNvidia(
            report=self.report,
            path=path,
            product=made,
            firmware=firmware,
            vouched=_vouch(log, path, endorsements, self.anchors, now),
        )
        with log.step("device fields"):
            _read_fields(device)
        return device

    def _path(self) -> tuple[Certificate, ...]:
        root, (leaf, *pool) = self.anchors.device, self.chain
        if leaf.der == root.der:
            raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, "the chain has no device certificate")
        path = x509.order_chain(leaf, pool, root)
        if len(path) != _DEVICE_CHAIN:
            raise AuthenticityError(
                Rejection.CHAIN_NOT_TRUSTED,
                "the chain has another depth than a device's",
                expected=str(_DEVICE_CHAIN),
                actual=str(len(path)),
            )
        return path


def parse_evidence(content: bytes, anchors: Anchors | None = None) -> NvidiaEvidence:
    """Parse the content of an `nvidia` item; `anchors` None are NVIDIA's own, pinned.

    Raises WireError; UndecidedError for an unknown version.
    """
    item = abi.parse_item(content)
    chain = tuple(x509.parse_certificate(encoded) for encoded in item.chain)
    try:
        report = abi.parse_report(item.request, item.response)
    except abi.UnsupportedReport as error:
        raise UndecidedError("UNSUPPORTED_VERSION", str(error)) from None
    return NvidiaEvidence(report=report, chain=chain, anchors=anchors or pinned())


def _check_signature(report: abi.Report, leaf: Certificate) -> None:
    key = leaf.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise AuthenticityError(Rejection.BAD_KEY, "the device's key is not on P-384")
    half = abi.SIGNATURE_BYTES // 2
    r, s = int.from_bytes(report.signature[:half], "big"), int.from_bytes(report.signature[half:], "big")
    try:
        key.verify(encode_dss_signature(r, s), report.signed, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "the report's signature does not verify") from None


def _check_crls(
    log: CheckLog, path: Sequence[Certificate], root: Certificate, endorsements: Endorsements, now: float
) -> None:
    name = "device revocation lists"
    if not _lists_about(path, root, endorsements):
        log.not_checked(name, "none of this chain's issuers was given")
        return
    with log.step(name):
        _check_lists(path, root, endorsements, now)


def _check_lists(path: Sequence[Certificate], root: Certificate, endorsements: Endorsements, now: float) -> None:
    for certificate, issuer, crl in _lists_about(path, root, endorsements):
        x509.check_not_revoked(certificate, crl, issuer, now)


def _lists_about(
    path: Sequence[Certificate], root: Certificate, endorsements: Endorsements
) -> list[tuple[Certificate, Certificate, x509.Crl]]:
    """(certificate, its issuer, a list of that issuer), by name."""
    return [
        (certificate, issuer, crl)
        for certificate, issuer in zip(path, (*path[1:], root), strict=True)
        for crl in endorsements.crls
        if crl.issuer == issuer.subject
    ]


def _check_firmware(log: CheckLog, report: abi.Report, leaf: Certificate) -> bytes | None:
    with log.step("firmware id well formed"):
        certified = product.firmware_id(leaf)
    reported = report.opaque.get(abi.FWID)
    if reported is None:
        log.not_checked("firmware id", "the report does not repeat it")
    else:
        log.equal("firmware id", Rejection.ENDORSEMENT_MISMATCH, expected=certified, actual=reported)
    return certified


def _vouch(
    log: CheckLog, path: Sequence[Certificate], endorsements: Endorsements, anchors: Anchors, now: float
) -> Vouched:
    manifests = []
    for number, document in enumerate(endorsements.rims, 1):
        with log.step(f"reference manifest {number} authentic"):
            manifest = rim.authenticate(document, anchors.rim, now=now)
            _check_lists(manifest.signers, anchors.rim, endorsements, now)
            manifests.append(manifest)
    good: frozenset[bytes] = frozenset()
    if endorsements.ocsp:
        with log.step("OCSP answers given"):
            answers = tuple(answer for data in endorsements.ocsp for answer in ocsp.parse(data))
            good = ocsp.good(path, anchors.device, answers, now=now)
            for manifest in manifests:
                good |= ocsp.good(manifest.signers, anchors.rim, answers, now=now)
    verdicts: list[nras.Verdict] | None = []
    for token in endorsements.tokens:
        try:
            with log.step("attestation service's token authentic"):
                found = nras.authenticate(token, endorsements.jwks, now=now)
        except UndecidedError:  # for the policy to say whether the token is needed
            verdicts = None
        else:
            verdicts = None if verdicts is None else [*verdicts, *found]
    return Vouched(manifests=tuple(manifests), not_revoked=good, verdicts=None if verdicts is None else tuple(verdicts))


def _read_fields(device: AuthenticNvidia) -> None:
    """Read every field once, so that a malformed one is found here and not where it is shown."""
    try:
        _ = device.facts
    except abi.UnsupportedReport as error:
        raise UndecidedError("UNSUPPORTED_VERSION", str(error)) from None


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()
