"""What to ask Intel's Provisioning Certification Service (API version 4) or a PCCS for; no network here.

Four answers make one collateral: TCB info, QE identity, the PCK CA's revocation list and the root's. Whoever fetches
them hands them to `assemble`, which believes nothing: what comes out is verified like any other collateral.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from client_sdk.tee import x509
from client_sdk.tee.dcap.abi import CERT_PCK_CHAIN, TEE_TDX, SignatureSection
from client_sdk.tee.dcap.collateral import CODE, parse_collateral, platform_of
from client_sdk.wire.errors import WireError

INTEL_PCS = "https://api.trustedservices.intel.com"
INTEL_ROOT_CRL = "https://certificates.trustedservices.intel.com/IntelSGXRootCA.der"
_TCB_CHAIN = "tcb-info-issuer-chain"
_QE_CHAIN = "sgx-enclave-identity-issuer-chain"
_CRL_CHAIN = "sgx-pck-crl-issuer-chain"
_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CollateralUrls:
    """The four addresses, by what they give."""

    tcb_info: str
    qe_identity: str
    pck_crl: str
    root_crl: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One HTTP answer with status 200. Header names are lower case."""

    headers: Mapping[str, str]
    body: bytes


def collateral_urls(section: SignatureSection, tee_type: int, service: str) -> CollateralUrls:
    """The addresses for the platform that a quote's signature section names.

    `service` is INTEL_PCS or the base address of a PCCS, which has the root's list under an address of its own.
    Raises WireError where the quote carries no PCK chain.
    """
    if section.cert_type != CERT_PCK_CHAIN:
        raise WireError(CODE, f"the quote carries no PCK chain (certification data type {section.cert_type})")
    pck = x509.parse_certificates(section.cert_data)[0]
    fmspc, _ = platform_of(pck)
    authority = "processor" if "Processor" in x509.common_name(pck.issuer) else "platform"
    base = service.rstrip("/")
    kind = "tdx" if tee_type == TEE_TDX else "sgx"
    return CollateralUrls(
        tcb_info=f"{base}/{kind}/certification/v4/tcb?fmspc={fmspc.hex()}",
        qe_identity=f"{base}/{kind}/certification/v4/qe/identity",
        pck_crl=f"{base}/sgx/certification/v4/pckcrl?ca={authority}&encoding=der",
        root_crl=INTEL_ROOT_CRL if base == INTEL_PCS else f"{base}/sgx/certification/v4/rootcacrl",
    )


def assemble(*, tcb_info: Answer, qe_identity: Answer, pck_crl: Answer, root_crl: Answer) -> str:
    """The four answers as one collateral text, well formed and not verified. Raises WireError."""
    tcb_text, tcb_signature = _signed_part(tcb_info.body, "tcbInfo")
    qe_text, qe_signature = _signed_part(qe_identity.body, "enclaveIdentity")
    text = json.dumps(
        {
            "pck_crl_issuer_chain": _chain(pck_crl, _CRL_CHAIN),
            "root_ca_crl": _der(root_crl.body).hex(),
            "pck_crl": _der(pck_crl.body).hex(),
            "tcb_info_issuer_chain": _chain(tcb_info, _TCB_CHAIN),
            "tcb_info": tcb_text,
            "tcb_info_signature": tcb_signature,
            "qe_identity_issuer_chain": _chain(qe_identity, _QE_CHAIN),
            "qe_identity": qe_text,
            "qe_identity_signature": qe_signature,
        }
    )
    parse_collateral(text)
    return text


def _signed_part(body: bytes, name: str) -> tuple[str, str]:
    """(signed text, signature) of {"NAME": {...}, "signature": "hex"}: the text as sent, since it is what is signed."""
    try:
        text = body.decode() if len(body) <= _LIMIT_BYTES else ""
        document = json.loads(text)
        begin = text.index("{", text.index(f'"{name}"'))
        _, end = json.JSONDecoder().raw_decode(text, begin)
        signature = document["signature"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WireError(CODE, f"the answer is not {name} with its signature") from None
    if type(signature) is not str:
        raise WireError(CODE, f"the signature of {name} is not text")
    return text[begin:end], signature


def _chain(answer: Answer, header: str) -> str:
    value = answer.headers.get(header)
    if value is None:
        raise WireError(CODE, f"the answer has no {header}")
    return unquote(value)


def _der(body: bytes) -> bytes:
    """A PCCS gives revocation lists as hex text where Intel gives DER."""
    if body[:1] == b"\x30":
        return body
    try:
        return bytes.fromhex(body.decode("ascii"))
    except ValueError:
        raise WireError(CODE, "a revocation list is neither DER nor hex") from None
