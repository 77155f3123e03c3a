"""A maker of NVIDIA-shaped devices under roots of our own: chains, reports, manifests, OCSP answers, tokens.

`Maker(...)` is a vendor; `Device` and `Maker.evidence(...)` take one override per property, so that every check of the
verifier meets evidence in which nothing else is wrong.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from client_sdk.tee.nvidia import abi, nras
from client_sdk.tee.nvidia.anchors import Anchors
from client_sdk.tee.x509 import parse_certificate

NOW = 1_800_000_000
NONCE = bytes(range(1, 33))
BEFORE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
AFTER = datetime.datetime(2036, 1, 1, tzinfo=datetime.UTC)
FWID = hashlib.sha384(b"firmware").digest()
_OID_SHA384 = bytes.fromhex("0609608648016503040202")
_SWID = "http://standards.iso.org/iso/19770/-2/2015/schema.xsd"
_SHA384_NS = "http://www.w3.org/2001/04/xmlenc#sha384"

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, kw_only=True)
class Issued:
    certificate: x509.Certificate
    key: Key

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)


def issue(
    name: str,
    issuer: Issued | None,
    *,
    ca: bool = True,
    extensions: Sequence[tuple[str, bytes]] = (),
    window: tuple[datetime.datetime, datetime.datetime] = (BEFORE, AFTER),
    curve: ec.EllipticCurve | None = None,
    serial_number: str | None = None,
    answers: bool = False,
) -> Issued:
    key = ec.generate_private_key(curve or ec.SECP384R1())
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if serial_number is not None:
        attributes.append(x509.NameAttribute(NameOID.SERIAL_NUMBER, serial_number))
    subject = x509.Name(attributes)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(window[0])
        .not_valid_after(window[1])
    )
    if ca:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    if answers:
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.OCSP_SIGNING]), critical=False)
    for oid, value in extensions:
        builder = builder.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value), critical=False)
    signer = key if issuer is None else issuer.key
    return Issued(certificate=builder.sign(signer, hashes.SHA384()), key=key)


def der(tag: int, *content: bytes) -> bytes:
    body = b"".join(content)
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    length = bytes([len(body)]) if len(body) < 128 else bytes([0x80 | len(size)]) + size
    return bytes([tag]) + length + body


def fwid(digest: bytes, algorithm: bytes = _OID_SHA384) -> bytes:
    return der(0x30, algorithm, der(0x04, digest))


def composite_device_id(digest: bytes) -> tuple[str, bytes]:
    return "2.23.133.5.4.1", der(0x30, b"\x02\x01\x01", der(0x30, b"\x05\x00"), fwid(digest))


def tcb_info(digest: bytes) -> tuple[str, bytes]:
    other = fwid(bytes(48))
    return "2.23.133.5.4.1.1", der(0x30, der(0x80, b"NVIDIA"), der(0xA6, fwid(digest), other))


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What distinguishes products: names in certificates, and how the leaf carries its firmware id."""

    device: str
    product: str
    fields: Mapping[int, bytes]
    extension: Any = composite_device_id
    blocks: int = 64


HOPPER = Chip(
    device="GH100 A01 GSP BROM",
    product="GH100",
    fields={
        abi.VBIOS_VERSION: bytes.fromhex("0074009620000000"),
        abi.BOARD_ID: bytes.fromhex("a1040000"),
        abi.CHIP_SKU: b"862\x00",
        abi.PROJECT: b"1010\x00",
        abi.PROJECT_SKU: b"0205\x00",
        abi.DRIVER_VERSION: b"580.159.03\x00",
        abi.NVDEC0_STATUS: b"\x55",
        abi.FWID: FWID,
        abi.PROTECTED_PCIE: b"\x55",
        abi.OPAQUE_VERSION: b"\x01\x00",
        abi.FEATURE_FLAG: b"\x00\x00",
    },
)
BLACKWELL = Chip(
    device="GB100 A01 GSP BROM",
    product="GB100",
    fields={**HOPPER.fields, abi.DRIVER_VERSION: b"575.32\x00"},
    extension=tcb_info,
)
SWITCH = Chip(
    device="LS_10 A01 FSP BROM",
    product="LS10",
    fields={abi.VBIOS_VERSION: b"96.10.55.00.01", abi.SWITCH_PDI: bytes(range(8))},
    blocks=31,
)
RUBIN = Chip(device="GR100 A01 GSP BROM", product="GR100", fields=HOPPER.fields)


@dataclass(frozen=True, kw_only=True)
class Report:
    """One override per property of a report. `fields` None: the chip's; `measurements` map SPDM blocks to values."""

    nonce: bytes = NONCE
    request: bytes | None = None
    code: int = 0x60
    version: int = 0x11
    fields: Mapping[int, bytes] | None = None
    raw_opaque: bytes | None = None
    measurements: Mapping[int, bytes] = field(default_factory=dict)
    raw_record: bytes | None = None
    blocks: int | None = None
    signer: Key | None = None
    spoil: bool = False


def measured(index: int) -> bytes:
    return hashlib.sha384(f"block {index}".encode()).digest()


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device with its certificates, leaf first: leaf, device, provisioner, product."""

    chip: Chip
    chain: tuple[Issued, ...]

    def exchange(self, report: Report | None = None) -> tuple[bytes, bytes]:
        asked = report or Report()
        request = bytes([0x11, 0xE0, 1, 0xFF]) + asked.nonce + b"\x00" if asked.request is None else asked.request
        values = {index: measured(index) for index in range(1, self.chip.blocks + 1)} | dict(asked.measurements)
        record = b"".join(block(index, value) for index, value in values.items())
        record = record if asked.raw_record is None else asked.raw_record
        opaque = opaque_fields(self.chip.fields if asked.fields is None else asked.fields)
        opaque = opaque if asked.raw_opaque is None else asked.raw_opaque
        count = len(values) if asked.blocks is None else asked.blocks
        head = bytes([asked.version, asked.code, 0, 0, count]) + len(record).to_bytes(3, "little")
        response = head + record + bytes(32) + len(opaque).to_bytes(2, "little") + opaque
        signature = raw_signature(asked.signer or self.chain[0].key, request + response)
        return request, response + (bytes([signature[0] ^ 1]) + signature[1:] if asked.spoil else signature)

    def item(self, report: Report | None = None, chain: Sequence[bytes] | None = None) -> bytes:
        request, response = self.exchange(report)
        encoded = tuple(entry.der for entry in self.chain) if chain is None else tuple(chain)
        return abi.encode_item(abi.NvidiaItem(request=request, response=response, chain=encoded))

    def pem(self) -> bytes:
        return b"".join(entry.certificate.public_bytes(Encoding.PEM) for entry in self.chain)


def block(index: int, value: bytes, kind: int = 1) -> bytes:
    return struct.pack("<BBHBH", index, 1, len(value) + 3, kind, len(value)) + value


def opaque_fields(fields: Mapping[int, bytes]) -> bytes:
    return b"".join(struct.pack("<HH", number, len(value)) + value for number, value in fields.items())


def raw_signature(key: Key, data: bytes) -> bytes:
    size = (key.key_size + 7) // 8
    r, s = decode_dss_signature(key.sign(data, ec.ECDSA(hashes.SHA384())))
    raw = r.to_bytes(size, "big") + s.to_bytes(size, "big")
    return raw.rjust(abi.SIGNATURE_BYTES, b"\x00")


class Maker:
    """A vendor: roots for devices and manifests, and everything below them."""

    def __init__(self) -> None:
        self.device_root = issue("Test Device Identity CA", None)
        self.rim_root = issue("Test CoRIM signing Root CA", None)
        self.product = issue("Test Product Identity", self.device_root)
        self.provisioner = issue("Test Provisioner ICA", self.product)
        self.rim_ca = issue("Test Reference Value CA", self.rim_root)
        self.rim_signer = issue("Test RIM Signer", self.rim_ca, ca=False)
        self.service_key = ec.generate_private_key(ec.SECP384R1())

    @property
    def anchors(self) -> Anchors:
        return Anchors(device=parse_certificate(self.device_root.der), rim=parse_certificate(self.rim_root.der))

    def device(self, chip: Chip = HOPPER, **leaf: Any) -> Device:
        """`leaf` overrides how the leaf is issued."""
        rom = issue(chip.device, self.provisioner, serial_number="41E23D711E1C4FBFAC")
        options = {"ca": False, "extensions": (chip.extension(FWID),), **leaf}
        own = issue(f"{chip.product} A01 GSP FMC LF", rom, **options)
        return Device(chip=chip, chain=(own, rom, self.provisioner, self.product))

    def manifest(
        self,
        *,
        component: str = "driver",
        version: str | None = None,
        product: str = "GH100",
        golden: Mapping[int, Sequence[bytes]] | None = None,
        signer: Issued | None = None,
        resources: str = "",
        chain: Sequence[Issued] | None = None,
    ) -> bytes:
        """A signed manifest; `golden` maps indices (from 0) to values, `resources` is more XML for the payload."""
        chosen = version or {"driver": "580.159.03", "vbios": "96.00.74.00.20"}[component]
        indices = {"driver": range(20, 40), "vbios": range(12)}[component]
        values = {index: [measured(index + 1)] for index in indices} if golden is None else golden
        lines = "".join(resource(index, alternatives) for index, alternatives in values.items())
        text = (
            f'<SoftwareIdentity xmlns="{_SWID}" xmlns:ns2="{_SHA384_NS}" name="{product}" tagId="1" version="1.0">'
            f'<Meta colloquialVersion="{chosen}" product="{product}"/><Payload>{lines}{resources}</Payload>'
            "</SoftwareIdentity>"
        )
        return self.sign_xml(text, signer=signer, chain=chain)

    def sign_xml(self, text: str, *, signer: Issued | None = None, chain: Sequence[Issued] | None = None) -> bytes:
        from lxml import etree
        from signxml import CanonicalizationMethod, DigestAlgorithm, SignatureMethod, XMLSigner

        own = signer or self.rim_signer
        certificates = (own, self.rim_ca, self.rim_root) if chain is None else chain
        pem = own.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        xml_signer = XMLSigner(
            signature_algorithm=SignatureMethod.ECDSA_SHA384,
            digest_algorithm=DigestAlgorithm.SHA384,
            c14n_algorithm=CanonicalizationMethod.CANONICAL_XML_1_1,
        )
        signed = xml_signer.sign(
            etree.fromstring(text.encode()), key=pem, cert=[entry.certificate for entry in certificates]
        )
        return bytes(etree.tostring(signed))

    def ocsp_answers(
        self,
        path: Sequence[Issued],
        *,
        status: ocsp.OCSPCertStatus = ocsp.OCSPCertStatus.GOOD,
        reason: x509.ReasonFlags | None = None,
        responder: Issued | None = None,
        window: tuple[int, int] = (NOW - 3600, NOW + 3600),
        algorithm: hashes.HashAlgorithm | None = None,
    ) -> tuple[bytes, ...]:
        """One answer for each of `path` but the last, which is the issuer of the one before it."""
        start, end = (datetime.datetime.fromtimestamp(moment, datetime.UTC) for moment in window)
        found = []
        for child, parent in itertools.pairwise(path):
            signer = responder or parent
            builder = ocsp.OCSPResponseBuilder().add_response(
                cert=child.certificate,
                issuer=parent.certificate,
                algorithm=hashes.SHA256(),
                cert_status=status,
                this_update=start,
                next_update=end,
                revocation_time=start if status is ocsp.OCSPCertStatus.REVOKED else None,
                revocation_reason=reason,
            )
            builder = builder.responder_id(ocsp.OCSPResponderEncoding.HASH, signer.certificate)
            builder = builder.certificates([signer.certificate])
            found.append(builder.sign(signer.key, algorithm or hashes.SHA384()).public_bytes(Encoding.DER))
        return tuple(found)

    def token(self, devices: Sequence[Device], **overrides: Any) -> bytes:
        """A detached EAT. `claims` changes the devices' claims, `overall` the overall ones, `header` both headers."""
        common = {"iss": nras.ISSUER, "nbf": NOW - 60, "exp": NOW + 3600, "eat_nonce": NONCE.hex()}
        tokens = {}
        for number, device in enumerate(devices):
            claims = {
                **common,
                "ueid": str(device.chain[0].certificate.serial_number),
                "measres": "success",
                "secboot": True,
                "dbgstat": "disabled",
                **overrides.get("claims", {}),
            }
            tokens[f"GPU-{number}"] = self.jwt(claims, overrides.get("header", {}))
        submods = {
            name: ["DIGEST", ["SHA-256", hashlib.sha256(text.encode()).hexdigest()]] for name, text in tokens.items()
        }
        overall = {**common, "x-nvidia-overall-att-result": True, "submods": submods, **overrides.get("overall", {})}
        return json.dumps([["JWT", self.jwt(overall, overrides.get("header", {}))], tokens]).encode()

    def jwt(self, claims: Mapping[str, Any], header: Mapping[str, Any]) -> str:
        parts = ({"kid": "service", "alg": "ES384", **header}, claims)
        signed = ".".join(base64url(json.dumps(part).encode()) for part in parts)
        return f"{signed}.{base64url(raw_signature(self.service_key, signed.encode()))}"

    def jwks(self, **changes: Any) -> bytes:
        point = self.service_key.public_key().public_numbers()
        x, y = (base64url(number.to_bytes(48, "big")) for number in (point.x, point.y))
        key = {"kty": "EC", "crv": "P-384", "kid": "service", "x": x, "y": y, **changes}
        return json.dumps({"keys": [{"kty": "RSA", "kid": "other"}, key]}).encode()


def resource(index: int, values: Sequence[bytes], *, active: str = "True", size: int = 48) -> str:
    hashed = " ".join(f'ns2:Hash{number}="{value.hex()}"' for number, value in enumerate(values))
    return (
        f'<Resource type="Measurement" index="{index}" active="{active}" alternatives="{len(values)}" {hashed} '
        f'name="Measurement_{index}" size="{size}"/>'
    )


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
