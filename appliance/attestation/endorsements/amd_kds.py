"""Certificates of AMD's key distribution service for SNP reports that come without one (AMD document 57230)."""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable
from functools import partial

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from appliance.attestation.attester import Collected
from appliance.attestation.endorsements.keeper import Items, UnfitEndorsement, Wanted
from appliance.attestation.families.snp import ENDORSEMENT_KIND
from client_sdk.tee.snp import abi
from client_sdk.wire.attestation import EvidenceItem

SERVICE = f"https://{abi.KDS_HOST}"
_MAX_CHAIN = 4
_SALT_BYTES = 48
_POINT_BYTES = 97
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]*)-----END CERTIFICATE-----")
_P384_KEY = bytes.fromhex("3076301006072a8648ce3d020106052b81040022036200")
"""How the SubjectPublicKeyInfo of a P-384 key begins, up to its uncompressed point (RFC 5480)."""

Bring = Callable[[str], Awaitable[bytes]]
"""The document at an https address, bounded in size. Raises OSError."""


def lacking(collected: Collected, *, bring: Bring, service: str = SERVICE) -> Wanted | None:
    """The VCEK, ASK and ARK for a report whose host handed over no certificate that fits its signature.

    None for reports that no certificate can be asked for: signed by a provider's key (VLEK), of a masked chip, of a
    product that this code does not know.
    """
    report = abi.parse_report(collected.evidence[0].content)
    products = abi.possible_products(report)
    if report.signing_key != abi.SIGNED_BY_VCEK or not any(report.chip_id) or not products:
        return None
    if any(_signs(found, report) for item in collected.endorsements for found in _certificates(item.content)):
        return None
    key = b"".join((report.chip_id, report.reported_tcb, *(name.encode() for name in products)))
    return Wanted(key=key, fetch=partial(_fetch, report, products, bring, service.rstrip("/")))


async def _fetch(report: abi.Report, products: tuple[str, ...], bring: Bring, service: str) -> Items:
    product, given = await _first_vcek(report, products, bring, service)
    (vcek,) = _certificates(given)[:1] or (b"",)
    if not _signs(vcek, report):
        raise UnfitEndorsement("the key service gave no certificate for this machine's reports")
    chain = _path(vcek, _certificates(await bring(service + abi.chain_path(product))))
    return tuple(EvidenceItem(kind=ENDORSEMENT_KIND, content=certificate) for certificate in (vcek, *chain))


async def _first_vcek(report: abi.Report, products: tuple[str, ...], bring: Bring, service: str) -> tuple[str, bytes]:
    """Reports of version 2 do not name the product: then each is asked for, and one has this chip."""
    *before, last = products
    for product in before:
        try:
            return product, await bring(service + abi.vcek_path(report, product))
        except OSError:
            continue
    return last, await bring(service + abi.vcek_path(report, last))


def _path(vcek: bytes, chain: list[bytes]) -> tuple[bytes, bytes]:
    """(ASK, ARK) of `chain`: the verifier would refuse what does not fit. Raises UnfitEndorsement."""
    given = chain[:_MAX_CHAIN]
    ask = next((one for one in given if _issued(vcek, one)), None)
    ark = None if ask is None else next((one for one in given if _issued(ask, one) and _issued(one, one)), None)
    if ask is None or ark is None:
        raise UnfitEndorsement("the key service gave a chain that does not lead to its certificate")
    return ask, ark


def _certificates(data: bytes) -> list[bytes]:
    """Certificates, DER, of one in DER or of some in PEM; what is neither is nothing that fits."""
    try:
        return [base64.b64decode(text) for text in _PEM.findall(data)] if data[:1] == b"-" else [data]
    except ValueError:
        return []


def _signs(certificate: bytes, report: abi.Report) -> bool:
    """Whether the certificate's P-384 key signed the report.

    Found by its encoding, of which there is one: some VCEKs have the serial number 0, which parsers refuse.
    """
    at = certificate.find(_P384_KEY) + len(_P384_KEY)
    point = certificate[at : at + _POINT_BYTES]
    try:
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), point)
        key.verify(encode_dss_signature(report.r, report.s), report.signed, ec.ECDSA(hashes.SHA384()))
    except (ValueError, InvalidSignature):
        return False
    return True


def _issued(certificate: bytes, issuer: bytes) -> bool:
    """Whether the issuer's RSA key signed the certificate, as AMD signs: PSS with SHA-384 and 48 bytes of salt."""
    try:
        signed, signature = _signed_parts(certificate)
        key = x509.load_der_x509_certificate(issuer).public_key()
        if not isinstance(key, rsa.RSAPublicKey):
            return False
        key.verify(signature, signed, padding.PSS(padding.MGF1(hashes.SHA384()), _SALT_BYTES), hashes.SHA384())
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def _signed_parts(certificate: bytes) -> tuple[bytes, bytes]:
    """(TBSCertificate, signature) of Certificate ::= SEQUENCE {tbs, algorithm, BIT STRING}. Raises ValueError."""
    tbs_at, _ = _element(certificate, 0)
    _, algorithm_at = _element(certificate, tbs_at)
    _, signature_at = _element(certificate, algorithm_at)
    start, end = _element(certificate, signature_at)
    return certificate[tbs_at:algorithm_at], certificate[start + 1 : end]


def _element(data: bytes, at: int) -> tuple[int, int]:
    """Where the content of the DER element at `at` begins and ends. Raises ValueError."""
    start, size = at + 2, int.from_bytes(data[at + 1 : at + 2], "big")
    if size & 0x80:
        start, size = start + (size & 0x7F), int.from_bytes(data[start : start + (size & 0x7F)], "big")
    if start + size > len(data):
        raise ValueError("an element is longer than the certificate")
    return start, start + size
