"""What to ask Intel's Provisioning Certification Service (API version 4) or a PCCS for; no network here.

Four answers make one collateral: TCB info, QE identity, the PCK CA's revocation list and the root's. Whoever fetches
them hands them to `assemble`, which believes nothing: what comes out is verified like any other collateral.
"""

from __future__ import annotations

from client_sdk.tee import x509
from client_sdk.tee.dcap import abi
from client_sdk.tee.dcap.abi import CERT_PCK_CHAIN, SignatureSection
from client_sdk.tee.dcap.abi import INTEL_PCS as INTEL_PCS
from client_sdk.tee.dcap.abi import Answer as Answer
from client_sdk.tee.dcap.abi import CollateralUrls as CollateralUrls
from client_sdk.tee.dcap.collateral import CODE, parse_collateral, platform_of
from client_sdk.wire.errors import WireError


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
    return abi.collateral_urls(fmspc, authority, tee_type, service)


def assemble(*, tcb_info: Answer, qe_identity: Answer, pck_crl: Answer, root_crl: Answer) -> str:
    """The four answers as one collateral text, well formed and not verified. Raises WireError."""
    text = abi.assemble_collateral(tcb_info=tcb_info, qe_identity=qe_identity, pck_crl=pck_crl, root_crl=root_crl)
    parse_collateral(text)
    return text
