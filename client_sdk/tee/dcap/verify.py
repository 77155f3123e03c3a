"""Authenticate a DCAP quote: every signature and window here, each its own check; then the whole by dcap-qvl.

Both have to agree. What is checked here by name gives a refusal its reason; dcap-qvl matches TCB levels, the quoting
enclave and the TDX module against what Intel signed, and is asked offline only, with the collateral at hand.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric import ec

from client_sdk.checks import CheckLog
from client_sdk.errors import AuthenticityError, Rejection, UndecidedError
from client_sdk.tee import x509
from client_sdk.tee.dcap import abi
from client_sdk.tee.dcap.collateral import Collateral, check_signed, choose, parse_collateral, platform_of, verify_p256
from client_sdk.tee.evidence import Endorsements

if TYPE_CHECKING:
    import dcap_qvl

_TCB_IDS = {abi.TEE_TDX: ("TDX", "TD_QE"), abi.TEE_SGX: ("SGX", "QE")}

# How dcap-qvl's refusals begin. One that is not listed is still a refusal, with the code of a bad signature.
_REFUSALS: tuple[tuple[str, Rejection], ...] = (
    ("TCB status is invalid", Rejection.TCB_NOT_ALLOWED),
    ("No matching TCB level", Rejection.TCB_NOT_ALLOWED),
    ("No matching QE TCB level", Rejection.TCB_NOT_ALLOWED),
    ("Debug mode", Rejection.DEBUG_NOT_ALLOWED),
    ("TD profiling", Rejection.DEBUG_NOT_ALLOWED),
    ("SEPT_VE_DISABLE", Rejection.GUEST_POLICY_NOT_ALLOWED),
    ("SERVTD_EXT", Rejection.GUEST_POLICY_NOT_ALLOWED),
    ("TD migration", Rejection.GUEST_POLICY_NOT_ALLOWED),
    ("Reserved bits", Rejection.GUEST_POLICY_NOT_ALLOWED),
    ("Invalid MR service TD", Rejection.GUEST_POLICY_NOT_ALLOWED),
    ("TDX module", Rejection.ENDORSEMENT_MISMATCH),
    ("QE ", Rejection.ENDORSEMENT_MISMATCH),
    ("Fmspc mismatch", Rejection.ENDORSEMENT_MISMATCH),
    ("PceId mismatch", Rejection.ENDORSEMENT_MISMATCH),
    ("Unsupported QE Identity", Rejection.ENDORSEMENT_MISMATCH),
    ("SGX quote with non-SGX", Rejection.ENDORSEMENT_MISMATCH),
    ("TDX quote with non-TDX", Rejection.ENDORSEMENT_MISMATCH),
    ("Failed to verify certificate chain", Rejection.CHAIN_NOT_TRUSTED),
    ("Invalid QE auth data", Rejection.MALFORMED_EVIDENCE),
    ("Failed to decode", Rejection.MALFORMED_ENDORSEMENT),
    ("Failed to parse", Rejection.MALFORMED_ENDORSEMENT),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A quote with a chain that vouches for it. `pck` is the platform's certificate, `root` the anchor."""

    pck: x509.Certificate
    issuer: x509.Certificate
    root: x509.Certificate
    fmspc: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One component's TCB level: Intel's word for it, and its date in Unix seconds."""

    status: str
    date: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What Intel's collateral says of this platform. `status` is the worst of all components.

    `dynamic_platform`, `cached_keys`, `smt` are "True", "False" or "Undefined", as the PCK certificate has them.
    `report` is the report as dcap-qvl read it.
    """

    status: str
    advisories: tuple[str, ...]
    evaluation_number: int
    platform: Level
    qe: Level
    ppid: bytes
    fmspc: bytes
    sgx_type: int
    dynamic_platform: str
    cached_keys: str
    smt: str
    report: dict[str, object]


def check_quote_signatures(
    log: CheckLog, section: abi.SignatureSection, signed: bytes, root: x509.Certificate, now: float
) -> Certified:
    """Root -> PCK -> quoting enclave -> attestation key -> quote. Needs no collateral. Raises through `log`."""
    if section.cert_type != abi.CERT_PCK_CHAIN:
        raise UndecidedError(
            "ENDORSEMENTS_MISSING", f"the quote carries no PCK chain (certification data type {section.cert_type})"
        )
    with log.step("PCK certificate chain"):
        pck, *pool = x509.parse_certificates(section.cert_data)
        chain = x509.order_chain(pck, pool, root)
        x509.check_chain(chain, root, now)
        fmspc, _ = platform_of(pck)
    with log.step("quoting enclave report signature"):
        verify_p256(pck.public_key(), section.qe_report_signature, section.qe_report_bytes, "the QE report")
    bound = hashlib.sha256(section.attestation_key + section.qe_auth_data).digest() + bytes(32)
    log.require(
        bound == section.qe_report.report_data,
        "attestation key bound by the quoting enclave",
        Rejection.BAD_KEY,
        "the quoting enclave did not report this attestation key",
    )
    log.require(
        not section.qe_report.debug,
        "quoting enclave not in debug mode",
        Rejection.DEBUG_NOT_ALLOWED,
        "a quoting enclave in debug mode signs whatever the host wants",
    )
    with log.step("quote signature"):
        verify_p256(_point(section.attestation_key), section.signature, signed, "the quote")
    return Certified(pck=pck, issuer=(*chain[1:], root)[0], root=root, fmspc=fmspc)


def check_collateral(
    log: CheckLog, certified: Certified, endorsements: Endorsements, tee_type: int, now: float
) -> Collateral:
    """Collateral for this platform, signed, in its window, revoking none of the certificates. Raises through `log`."""
    if not endorsements.collateral:
        raise UndecidedError("ENDORSEMENTS_MISSING", f"no DCAP collateral for FMSPC {certified.fmspc.hex()}")
    tcb_id, qe_id = _TCB_IDS[tee_type]
    with log.step("collateral well formed"):
        candidates = [parse_collateral(text) for text in endorsements.collateral]
    collateral = choose(candidates, certified.fmspc, tcb_id, now)
    if collateral is None:
        log.reject(
            "collateral for this platform",
            Rejection.ENDORSEMENT_MISMATCH,
            "the collateral given is for another platform or another kind of TEE",
            expected=f"{tcb_id} {certified.fmspc.hex()}",
            actual=", ".join(f"{one.tcb_info.id} {one.fmspc.hex()}" for one in candidates[:8]),
        )
    log.passed("collateral for this platform", f"{tcb_id} {certified.fmspc.hex()}")
    log.equal(
        "QE identity for this kind of TEE",
        Rejection.ENDORSEMENT_MISMATCH,
        expected=qe_id,
        actual=collateral.qe_identity.id,
    )
    with log.step("PCE of the TCB info"):
        _, pce_id = platform_of(certified.pck)
        if pce_id != collateral.pce_id:
            raise AuthenticityError(Rejection.ENDORSEMENT_MISMATCH, "the TCB info is for another PCE")
    signers = []
    for document in (collateral.tcb_info, collateral.qe_identity):
        with log.step(f"{document.name} signature and window"):
            signers.append(check_signed(document, certified.root, now))
    _check_revocation(log, certified, collateral, signers, now)
    return collateral


def _check_revocation(
    log: CheckLog, certified: Certified, collateral: Collateral, signers: list[x509.Certificate], now: float
) -> None:
    with log.step("PCK certificate not revoked"):
        x509.check_not_revoked(certified.pck, collateral.pck_crl, certified.issuer, now)
    with log.step("issuers not revoked"):
        for certificate in (certified.issuer, *signers):
            x509.check_not_revoked(certificate, collateral.root_crl, certified.root, now)


def judge_tcb(log: CheckLog, quote: bytes, collateral: Collateral, root: x509.Certificate, now: float) -> Verdict:
    """The whole quote by dcap-qvl, and what it found. `quote` is trimmed. Raises through `log`."""
    import dcap_qvl

    name = "DCAP verification"
    moment = int(now)
    try:
        claims = dcap_qvl.QuoteVerifier(root.der).verify_with_policy(
            quote, _native(collateral), moment, dcap_qvl.QuotePolicy.claims_only(moment)
        )
    except ValueError as error:
        text = str(error).removeprefix("Verification failed: ").partition("\n")[0][:200]
        log.reject(name, refusal_code(text), f"dcap-qvl: {text}")
    with log.step(name):
        return read_claims(claims.to_json())


def refusal_code(text: str) -> Rejection:
    """The code for one of dcap-qvl's refusals, by how it begins."""
    return next((code for start, code in _REFUSALS if text.startswith(start)), Rejection.BAD_SIGNATURE)


def read_claims(text: str) -> Verdict:
    """The claims of dcap-qvl (claims version 1) as a frozen value. Raises AuthenticityError: unread is unproven."""
    try:
        return _read_claims(json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AuthenticityError(
            Rejection.BAD_SIGNATURE, f"dcap-qvl reports what this version cannot read: {error!r}"[:200]
        ) from None


def _read_claims(document: Any) -> Verdict:
    if document["claims_version"] != 1:
        raise ValueError(f"claims version {document['claims_version']}")
    tcb, platform, qe, pck = document["tcb"], document["platform"], document["qe"], document["platform"]["pck"]
    (report,) = document["report"].values()
    return Verdict(
        status=str(tcb["status"]),
        advisories=tuple(str(one) for one in tcb["advisory_ids"]),
        evaluation_number=min(int(tcb["eval_data_number"]), int(qe["tcb_eval_data_number"])),
        platform=Level(status=str(platform["tcb_level"]["tcbStatus"]), date=float(platform["tcb_date_tag"])),
        qe=Level(status=str(qe["tcb_level"]["tcbStatus"]), date=_date(qe["tcb_level"]["tcbDate"])),
        ppid=bytes(pck["ppid"]),
        fmspc=bytes(pck["fmspc"]),
        sgx_type=int(pck["sgx_type"]),
        dynamic_platform=str(pck["dynamic_platform"]),
        cached_keys=str(pck["cached_keys"]),
        smt=str(pck["smt_enabled"]),
        report={**report.get("base", {}), **report},
    )


def check_same_report(log: CheckLog, verdict: Verdict, fields: dict[str, bytes]) -> None:
    """What is judged here is what dcap-qvl verified. `fields` are ours, by dcap-qvl's names."""
    differing = [name for name, value in fields.items() if verdict.report.get(name) != value.hex()]
    log.require(
        not differing,
        "report read alike by both",
        Rejection.MALFORMED_EVIDENCE,
        f"dcap-qvl read other values for {', '.join(differing)}",
    )


def _native(collateral: Collateral) -> dcap_qvl.QuoteCollateralV3:
    import dcap_qvl

    return dcap_qvl.QuoteCollateralV3(**dict(collateral.parts))


def _date(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def _point(key: bytes) -> ec.EllipticCurvePublicKey:
    """The key with the coordinates x || y. Raises AuthenticityError BAD_KEY where that is no point of P-256."""
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), b"\x04" + key)
    except ValueError:
        raise AuthenticityError(Rejection.BAD_KEY, "the attestation key is not a point of P-256") from None
