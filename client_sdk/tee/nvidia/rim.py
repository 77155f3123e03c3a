"""Reference integrity manifests (TCG RIM-IM over ISO 19770-2 SWID tags): what NVIDIA says a device's firmware measures.

One manifest covers the driver, another the VBIOS. The enveloped XML signature is ECDSA with SHA-384; the signer's
certificates come inside and have to lead to the pinned root. Only what the signature covers is ever read.
Needs the extra `nvidia` (signxml): nothing else of this SDK reads XML.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509 import load_der_x509_certificate

from client_sdk.errors import AuthenticityError, Rejection, UndecidedError
from client_sdk.tee import x509
from client_sdk.tee.x509 import Certificate
from client_sdk.wire.errors import WireError

_CODE = "MALFORMED_ENDORSEMENT"
_LIMIT_BYTES = 128 << 10
_MAX_CERTIFICATES = 8
_MAX_ALTERNATIVES = 256
_DIGEST_BYTES = 48
_MAX_INDEX = 254
_SWID = "{http://standards.iso.org/iso/19770/-2/2015/schema.xsd}"
_DSIG = "{http://www.w3.org/2000/09/xmldsig#}"
_HASH = "{http://www.w3.org/2001/04/xmlenc#sha384}"
_NUMBER = re.compile(r"[0-9]{1,3}")
_VBIOS = re.compile(r"[0-9A-F]{2}(\.[0-9A-F]{2}){4}")
_DRIVER = re.compile(r"[0-9]{1,5}(\.[0-9]{1,5}){1,3}")
_PRODUCT = re.compile(r"[A-Z0-9_]{1,16}")

Component = Literal["driver", "vbios"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """An authentic manifest. `product` is as in "GH100", `version` of the component that it describes.

    `golden` maps measurement indices (from 0; the SPDM block is one more) to acceptable 48-byte values; inactive ones
    are not in it. `signers` is the verified way to the root, the signer first, without the root.
    """

    component: Component
    product: str
    version: str
    golden: Mapping[int, frozenset[bytes]]
    signers: tuple[Certificate, ...]


def authenticate(document: bytes, root: Certificate, *, now: float) -> Manifest:
    """The manifest in an XML document, its signer's chain checked up to `root` as of `now` (Unix seconds).

    Raises WireError MALFORMED_ENDORSEMENT, AuthenticityError, UndecidedError where no XML reader is installed or the
    manifest has contents that this code does not know.
    """
    signed = _verify_signature(document)
    leaf, *others = signed.certificates
    path = x509.order_chain(leaf, others, root)
    x509.check_chain(path, root, now)
    return Manifest(
        component=signed.component,
        product=signed.product,
        version=signed.version,
        golden=signed.golden,
        signers=path,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signed:
    certificates: tuple[Certificate, ...]
    component: Component
    product: str
    version: str
    golden: Mapping[int, frozenset[bytes]]


@functools.lru_cache(maxsize=32)
def _verify_signature(document: bytes) -> _Signed:
    """What the document's own first certificate signed. Whose certificate that is stays open; so does the time."""
    if len(document) > _LIMIT_BYTES:
        raise WireError(_CODE, f"a manifest larger than {_LIMIT_BYTES} bytes")
    try:
        from lxml import etree
        from signxml.algorithms import DigestAlgorithm, SignatureMethod
        from signxml.exceptions import SignXMLException
        from signxml.verifier import SignatureConfiguration, XMLVerifier
    except ImportError:
        raise UndecidedError(
            "UNSUPPORTED_ENDORSEMENT", "reading NVIDIA's manifests needs the extra: attested-inference[nvidia]"
        ) from None
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    try:
        root = etree.fromstring(document, parser=parser)
    except (etree.LxmlError, ValueError):
        raise WireError(_CODE, "a manifest that is not XML") from None
    if root.getroottree().docinfo.doctype:
        raise WireError(_CODE, "a manifest with a document type")
    certificates = _certificates(root)
    signer = certificates[0]
    try:
        configuration = SignatureConfiguration(
            location="./",
            expect_references=1,
            signature_methods=frozenset({SignatureMethod.ECDSA_SHA384}),
            digest_algorithms=frozenset({DigestAlgorithm.SHA384}),
            # Only the signature is verified here; the certificate's validity is judged with the whole chain.
            verification_time=datetime.datetime.fromtimestamp(signer.not_before, datetime.UTC),
        )
        certificate = load_der_x509_certificate(signer.der)
        result: Any = XMLVerifier().verify(document, x509_cert=certificate, parser=parser, expect_config=configuration)
    except SignXMLException:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "the manifest's signature does not verify") from None
    except (etree.LxmlError, UnsupportedAlgorithm, ValueError, TypeError, AttributeError, LookupError, OverflowError):
        raise WireError(_CODE, "the manifest's signature is not one that can be read") from None
    return _read(result.signed_xml, certificates)


def _certificates(root: Any) -> tuple[Certificate, ...]:
    found = root.findall(f"./{_DSIG}Signature/{_DSIG}KeyInfo/{_DSIG}X509Data/{_DSIG}X509Certificate")
    if not 1 <= len(found) <= _MAX_CERTIFICATES:
        raise WireError(_CODE, f"a manifest without 1 to {_MAX_CERTIFICATES} certificates of its signer")
    try:
        blocks = [base64.b64decode("".join((element.text or "").split()), validate=True) for element in found]
    except (binascii.Error, ValueError):
        raise WireError(_CODE, "a manifest with a certificate in bad base64") from None
    return tuple(x509.parse_certificate(block) for block in blocks)


def _read(root: Any, certificates: tuple[Certificate, ...]) -> _Signed:
    if root is None or root.tag != f"{_SWID}SoftwareIdentity":
        raise WireError(_CODE, "what is signed is not a whole manifest")
    metas, payloads = root.findall(f"{_SWID}Meta"), root.findall(f"{_SWID}Payload")
    if len(metas) != 1 or len(payloads) != 1:
        raise WireError(_CODE, "a manifest needs one Meta and one Payload")
    version, product = metas[0].get("colloquialVersion", "").upper(), metas[0].get("product", "")
    if _PRODUCT.fullmatch(product) is None:
        raise WireError(_CODE, "a manifest without a product")
    component: Component
    if _VBIOS.fullmatch(version):
        component = "vbios"
    elif _DRIVER.fullmatch(version):
        component = "driver"
    else:
        raise UndecidedError("UNSUPPORTED_VERSION", f"unsupported version {version[:64]!r} of a manifest's component")
    golden: dict[int, frozenset[bytes]] = {}
    seen: set[int] = set()
    for resource in payloads[0].iterchildren(tag="*"):
        index, values = _resource(resource)
        if index in seen:
            raise WireError(_CODE, f"a manifest with two measurements of index {index}")
        seen.add(index)
        if values is not None:
            golden[index] = values
    if not golden:
        raise WireError(_CODE, "a manifest without active measurements")
    return _Signed(
        certificates=certificates,
        component=component,
        product=product,
        version=version,
        golden=MappingProxyType(golden),
    )


def _resource(element: Any) -> tuple[int, frozenset[bytes] | None]:
    """(index, acceptable values), the values None for an inactive one."""
    if element.tag != f"{_SWID}Resource" or element.get("type") != "Measurement":
        raise UndecidedError(
            "UNSUPPORTED_VERSION", "unsupported version of a manifest: it holds more than measurements"
        )
    active = {"True": True, "False": False}.get(element.get("active", ""))
    if active is None:
        raise WireError(_CODE, "a measurement that is neither active nor inactive")
    index = _number(element.get("index"), "index", _MAX_INDEX)
    count = _number(element.get("alternatives"), "alternatives", _MAX_ALTERNATIVES)
    if not active:
        return index, None
    if _number(element.get("size"), "size", _DIGEST_BYTES) != _DIGEST_BYTES or not count:
        raise WireError(_CODE, f"measurement {index} without {_DIGEST_BYTES}-byte values")
    values = set()
    for number in range(count):
        try:
            value = bytes.fromhex(element.get(f"{_HASH}Hash{number}", ""))
        except ValueError:
            value = b""
        if len(value) != _DIGEST_BYTES:
            raise WireError(_CODE, f"value {number} of measurement {index} is not {_DIGEST_BYTES} bytes of hex")
        values.add(value)
    return index, frozenset(values)


def _number(text: str | None, what: str, most: int) -> int:
    if text is None or _NUMBER.fullmatch(text) is None or int(text) > most:
        raise WireError(_CODE, f"{what} of a measurement is not a number up to {most}")
    return int(text)
