"""Collateral of Intel's Provisioning Certification Service for TDX quotes, which hosts do not hand over."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol

from cryptography import x509

from appliance.attestation.attester import Collected
from appliance.attestation.endorsements.keeper import Items, UnfitEndorsement, Wanted
from client_sdk.tee.dcap import abi as dcap
from client_sdk.tee.tdx import abi
from client_sdk.wire.attestation import EvidenceItem

ENDORSEMENT_KIND = "collateral"
_FRESH_S = 86_400.0
_USABLE_S = 7 * 86_400.0  # Intel's documents are good for about 30 days
_LIMIT_BYTES = 256 << 10  # the whole bundle may have 1 MiB
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]*-----END CERTIFICATE-----")
_FMSPC = bytes.fromhex("060a2a864886f84d010d01040406")
"""How the FMSPC begins in a PCK certificate: identifier 1.2.840.113741.1.13.1.4, OCTET STRING of 6 bytes."""
_FMSPC_BYTES = 6
_PROCESSOR_CA = b"Intel SGX PCK Processor CA"


class Document(Protocol):
    """One answer. Header names are lower case."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def body(self) -> bytes: ...


Bring = Callable[[str], Awaitable[Document]]
"""The answer at an https address, bounded in size. Raises OSError."""


def lacking(collected: Collected, *, bring: Bring, service: str = dcap.INTEL_PCS) -> Wanted | None:
    """The collateral for the platform of a quote, renewed daily; None for quotes that name no platform."""
    quote = abi.parse_quote(collected.evidence[0].content)
    pck = _PEM.search(quote.section.cert_data) if quote.section.cert_type == dcap.CERT_PCK_CHAIN else None
    if pck is None:
        return None
    try:
        certificate = x509.load_pem_x509_certificate(pck[0])
        subject, issuer = certificate.tbs_certificate_bytes, certificate.issuer.public_bytes()
    except ValueError:
        return None
    at = subject.find(_FMSPC)
    if at < 0:
        return None
    fmspc = subject[at + len(_FMSPC) :][:_FMSPC_BYTES]
    authority = "processor" if _PROCESSOR_CA in issuer else "platform"
    urls = dcap.collateral_urls(fmspc, authority, dcap.TEE_TDX, service)
    return Wanted(
        key=fmspc + authority.encode(), fetch=partial(_fetch, urls, fmspc, bring), fresh_s=_FRESH_S, usable_s=_USABLE_S
    )


async def _fetch(urls: dcap.CollateralUrls, fmspc: bytes, bring: Bring) -> Items:
    text = dcap.assemble_collateral(
        tcb_info=await _ask(bring, urls.tcb_info),
        qe_identity=await _ask(bring, urls.qe_identity),
        pck_crl=await _ask(bring, urls.pck_crl),
        root_crl=await _ask(bring, urls.root_crl),
    )
    if len(text) > _LIMIT_BYTES or not _fits(text, fmspc):
        raise UnfitEndorsement("the certification service gave no collateral for this machine's quotes")
    return (EvidenceItem(kind=ENDORSEMENT_KIND, content=text.encode()),)


async def _ask(bring: Bring, url: str) -> dcap.Answer:
    document = await bring(url)
    return dcap.Answer(headers=document.headers, body=document.body)


def _fits(collateral: str, fmspc: bytes) -> bool:
    """Whether it is of this platform and made of what it should be: beside anything else evidence is refused."""
    document = json.loads(collateral)
    try:
        tcb_info = json.loads(document["tcb_info"])
        for name in ("root_ca_crl", "pck_crl"):
            x509.load_der_x509_crl(bytes.fromhex(document[name]))
        for name in ("tcb_info_issuer_chain", "qe_identity_issuer_chain", "pck_crl_issuer_chain"):
            x509.load_pem_x509_certificates(document[name].encode())
        return bool(tcb_info["id"] == "TDX" and bytes.fromhex(tcb_info["fmspc"]) == fmspc)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
