"""AMD's certificates: roots (ARK), intermediates (ASK, ASVK) and the keys that sign reports (VCEK, VLEK).

VCEK <- ASK <- ARK, one key per chip and patch level; VLEK <- ASVK <- ARK, one key per cloud provider and patch level
(AMD document 57230). Roots are pinned; intermediates are shipped, so that a report with its VCEK or VLEK verifies
without anything else.
"""

from __future__ import annotations

import functools
import hmac
import importlib.resources
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee import der, x509
from client_sdk.tee.snp import abi
from client_sdk.tee.snp.abi import Tcb
from client_sdk.tee.x509 import Certificate, Crl
from client_sdk.wire.errors import WireError

VCEK, VLEK = "VCEK", "VLEK"

_OIDS = "1.3.6.1.4.1.3704.1."
_OID_PRODUCT = _OIDS + "2"
_OID_HWID = _OIDS + "4"
_OID_CSP = _OIDS + "5"
_OID_BOOTLOADER, _OID_TEE, _OID_SNP = _OIDS + "3.1", _OIDS + "3.2", _OIDS + "3.3"
_OID_MICROCODE, _OID_FMC = _OIDS + "3.8", _OIDS + "3.9"
_OIDS_RESERVED = tuple(f"{_OIDS}3.{number}" for number in (4, 5, 6, 7))
_CHIP_ID_BYTES = 64
_HWID_BYTES = {abi.MILAN: 64, abi.GENOA: 64, abi.TURIN: 8}
_LEAF_NAMES = {"SEV-VCEK": VCEK, "SEV-VLEK": VLEK}

# SHA-256 of the whole certificates, ARK first; the files are checked against them when they are loaded.
_FINGERPRINTS: Mapping[str, tuple[str, str, str]] = {
    abi.MILAN: (
        "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd",
        "67d303bd3905fd38db8b20e0793699870e7fa612eaad5dec358293fd8c0bac1b",
        "c5e081f59b7efab1fe2f8b505e159704e72f29cab7ef7cf628a05a42439082f5",
    ),
    abi.GENOA: (
        "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1",
        "5464738c1546aed5f2cecf1dc98c5c960a92e8913238a61711bc90ec6e828521",
        "197e610743a917d6b9bb982a5a9226ccc0a15b611be0619e626aca9151457372",
    ),
    abi.TURIN: (
        "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a",
        "5b77ef5fe7a7a004fd9032668fba9d0fda22f88c4442069a479636a6ae3b3185",
        "104e10a8bd060a3c20a434261a57d0588fd65a88915b4f65b08bdecaf8df1a3c",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductAnchors:
    """The pinned root of one product line, and the intermediates that are used when none are given."""

    ark: Certificate
    ask: Certificate
    asvk: Certificate


Anchors = Mapping[str, ProductAnchors]
_ASVK_NAME = "SEV-VLEK-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vek:
    """A certificate of a report-signing key, with what AMD states in its extensions.

    `chip_id` is padded to the 64 bytes that reports have, None in a VLEK; `csp` names the cloud provider of a VLEK.
    """

    certificate: Certificate
    kind: str
    product: str
    tcb: Tcb
    chip_id: bytes | None
    csp: str | None


@functools.lru_cache(maxsize=1)
def pinned_anchors() -> Anchors:
    """AMD's own roots, by product name. Raises AuthenticityError where a shipped file is not the pinned one."""
    folder = importlib.resources.files("client_sdk.tee") / "trust_anchors"
    anchors = {}
    for product, fingerprints in _FINGERPRINTS.items():
        given = x509.parse_certificates((folder / f"amd_{product.lower()}.pem").read_bytes())
        ark, ask, asvk = (_pinned(given, bytes.fromhex(fingerprint), product) for fingerprint in fingerprints)
        anchors[product] = ProductAnchors(ark=ark, ask=ask, asvk=asvk)
    return MappingProxyType(anchors)


def _pinned(given: Sequence[Certificate], fingerprint: bytes, product: str) -> Certificate:
    for certificate in given:
        if hmac.compare_digest(certificate.fingerprint, fingerprint):
            return certificate
    raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, f"the shipped certificates for {product} are not AMD's")


def find_veks(certificates: Iterable[Certificate]) -> tuple[Vek, ...]:
    """Those of `certificates` that, by their name, sign reports of products known here. Raises WireError."""
    found = []
    for certificate in certificates:
        kind = _LEAF_NAMES.get(certificate.common_name())
        product = None if kind is None else _product(certificate)
        if kind is not None and product is not None:
            found.append(_parse_vek(certificate, kind, product))
    return tuple(found)


def _parse_vek(certificate: Certificate, kind: str, product: str) -> Vek:
    for oid in _OIDS_RESERVED:
        if certificate.extension(oid) is not None and _level(certificate, oid):
            raise WireError(der.CODE, f"the {kind} states a reserved patch level")
    fmc = _level(certificate, _OID_FMC) if product == abi.TURIN else None
    tcb = Tcb(
        bootloader=_level(certificate, _OID_BOOTLOADER),
        tee=_level(certificate, _OID_TEE),
        snp=_level(certificate, _OID_SNP),
        microcode=_level(certificate, _OID_MICROCODE),
        fmc=fmc,
    )
    hwid, csp = certificate.extension(_OID_HWID), certificate.extension(_OID_CSP)
    if (hwid is None) is (kind == VCEK) or (csp is None) is (kind == VLEK):
        raise WireError(der.CODE, "a VCEK names a chip and a VLEK a provider, and this certificate does otherwise")
    return Vek(
        certificate=certificate,
        kind=kind,
        product=product,
        tcb=tcb,
        chip_id=None if hwid is None else _chip_id(hwid, product),
        csp=None if csp is None else _text(csp, "provider"),
    )


def _product(certificate: Certificate) -> str | None:
    """From "Milan-B0" and "Genoa" alike: the stepping does not count. None: a product that came later."""
    value = certificate.extension(_OID_PRODUCT)
    if value is None:
        raise WireError(der.CODE, "the certificate names no product")
    name = _text(value, "product").partition("-")[0]
    return name if name in abi.PRODUCTS else None


def _chip_id(hwid: bytes, product: str) -> bytes:
    """AMD's service writes the bare bytes where its specification has an OCTET STRING: both are read."""
    size = _HWID_BYTES[product]
    if hwid[:2] == bytes((der.OCTET_STRING, size)):
        hwid = hwid[2:]
    if len(hwid) != size:
        raise WireError(der.CODE, f"the chip id has {len(hwid)} bytes instead of {size}")
    return hwid.ljust(_CHIP_ID_BYTES, b"\x00")


def _level(certificate: Certificate, oid: str) -> int:
    value = certificate.extension(oid)
    if value is None:
        raise WireError(der.CODE, f"the certificate lacks the patch level {oid}")
    level = der.integer(der.read_one(value), "patch level")
    if not 0 <= level <= 255:
        raise WireError(der.CODE, "a patch level is not one byte")
    return level


def _text(value: bytes, what: str) -> str:
    element = der.read_one(value)
    if element.tag not in (der.IA5_STRING, der.UTF8_STRING, der.PRINTABLE_STRING):
        raise WireError(der.CODE, f"the {what} is not text")
    text = element.content.decode("utf-8", "replace")
    if not text or len(text) > 256 or not text.isprintable():
        raise WireError(der.CODE, f"the {what} is not printable text")
    return text


def find_issuer(vek: Vek, given: Sequence[Certificate], anchors: ProductAnchors) -> Certificate:
    """The intermediate for `vek`: from `given` where AMD intermediates are in it, else the shipped one.

    What is given has to fit: a root that is not the pinned one, or intermediates of other products alone, are refused
    even though the shipped ones would do. By names, of several of one name by signature; all is verified later. Raises
    AuthenticityError.
    """
    named = [(certificate.common_name(), certificate) for certificate in given]
    roots = [certificate for name, certificate in named if name.startswith("ARK-")]
    if roots:
        same_name = [root for root in roots if root.subject == anchors.ark.subject]
        if not same_name or any(root.der != anchors.ark.der for root in same_name):
            raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, "the root given is not AMD's root of this product")
    intermediates = [certificate for name, certificate in named if name.startswith("SEV-") and name not in _LEAF_NAMES]
    of_kind = [one for one in intermediates if one.common_name().startswith(_ASVK_NAME) is (vek.kind == VLEK)]
    fitting = [certificate for certificate in of_kind if certificate.subject == vek.certificate.issuer]
    if intermediates and not fitting:
        raise AuthenticityError(
            Rejection.CHAIN_NOT_TRUSTED, f"the intermediate certificates given are not those of this {vek.kind}"
        )
    if not fitting:
        return anchors.ask if vek.kind == VCEK else anchors.asvk
    return fitting[0] if len(fitting) == 1 else x509.signer_of(vek.certificate, fitting)


Revocation = Literal["current", "absent"]


def check_revocation(path: Sequence[tuple[Certificate, Certificate]], crls: Sequence[Crl], now: float) -> Revocation:
    """`path` is (certificate, its issuer) pairs; "current" when the root's list, valid now, covers its child.

    A certificate that any properly signed list names is revoked, however old that list is. A list that is out of date
    and not replaced by a current one is refused: it was given to be relied on. Raises AuthenticityError.
    """
    state: Revocation = "absent"
    for certificate, issuer in path:
        own = [crl for crl in crls if crl.issuer == issuer.subject]
        for crl in own:
            x509.check_signature(crl, issuer)
            if certificate.serial in crl.revoked:
                name = certificate.common_name()
                raise AuthenticityError(Rejection.CERTIFICATE_REVOKED, f"certificate {name!r} is revoked by its issuer")
        current = [crl for crl in own if crl.this_update <= now < (crl.next_update or now + 1)]
        if own and not current:
            x509.check_not_revoked(certificate, own[0], issuer, now)
        if current and (certificate, issuer) == path[-1]:
            state = "current"
    return state
