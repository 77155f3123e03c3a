"""A whole AMD chain with roots of our own: ARK, ASK, ASVK, VCEK, VLEK, revocation lists, and reports that verify.

Everything has a right value by default; a test overrides the one it is about. The roots are in the shape in which the
verifier takes AMD's, so a test hands them over as the anchors.
"""

from __future__ import annotations

import datetime
import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding

from client_sdk.tee import x509 as sdk_x509
from client_sdk.tee.snp.certificates import Anchors, ProductAnchors

NOW = 1_790_000_000.0
CHIP_ID = bytes(range(1, 65))
TURIN_CHIP_ID = bytes(range(1, 9)) + bytes(56)
CSP = "CN=test-provider.example"
MEASUREMENT = b"\x4d" * 48
CPUIDS: Mapping[str, tuple[int, int, int]] = {"Milan": (0x19, 1, 1), "Genoa": (0x19, 0x11, 1), "Turin": (0x1A, 2, 1)}

_OIDS = "1.3.6.1.4.1.3704.1."
_DAY = datetime.timedelta(days=1)
_PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA384()), salt_length=48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tcb:
    """Patch levels; `encode` knows Turin's order."""

    bootloader: int = 4
    tee: int = 1
    snp: int = 23
    microcode: int = 213
    fmc: int = 2

    def encode(self, product: str) -> bytes:
        if product == "Turin":
            return bytes((self.fmc, self.bootloader, self.tee, self.snp, 0, 0, 0, self.microcode))
        return bytes((self.bootloader, self.tee, 0, 0, 0, 0, self.snp, self.microcode))


@dataclass(frozen=True, slots=True)
class Authority:
    """The certificate authority of one product line."""

    product: str
    keys: Mapping[str, rsa.RSAPrivateKey]
    certificates: Mapping[str, x509.Certificate]

    def der(self, name: str) -> bytes:
        return self.certificates[name].public_bytes(Encoding.DER)

    @property
    def anchors(self) -> Anchors:
        ark, ask, asvk = (sdk_x509.parse_certificate(self.der(name)) for name in ("ARK", "ASK", "ASVK"))
        return {self.product: ProductAnchors(ark=ark, ask=ask, asvk=asvk)}

    def crl(self, *serials: int, issuer: str = "ARK", signer: str | None = None, from_now_s: float = -3600) -> bytes:
        """A revocation list (DER) that is current for a day from `from_now_s` after NOW on."""
        start = _time(NOW + from_now_s)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificates[issuer].subject)
            .last_update(start)
            .next_update(start + _DAY)
        )
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(start).build()
            builder = builder.add_revoked_certificate(entry)
        signed = builder.sign(self.keys[signer or issuer], hashes.SHA384(), rsa_padding=_PSS)
        return signed.public_bytes(Encoding.DER)


def authority(product: str = "Milan", generation: int = 0) -> Authority:
    """An authority named as AMD's is. Another `generation` has other keys under the same names."""
    return _authority(product, generation)


@functools.cache
def _authority(product: str, generation: int) -> Authority:
    keys = {name: rsa.generate_private_key(public_exponent=65537, key_size=2048) for name in ("ARK", "ASK", "ASVK")}
    names = {"ARK": f"ARK-{product}", "ASK": f"SEV-{product}", "ASVK": f"SEV-VLEK-{product}"}
    certificates = {
        name: _ca(_name(subject), keys[name], _name(names["ARK"]), keys["ARK"], serial + 100)
        for serial, (name, subject) in enumerate(names.items())
    }
    return Authority(product, keys, certificates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vek:
    """A VCEK or VLEK to issue. `extensions` overrides AMD extensions by the end of their OID (None: left out)."""

    kind: str = "VCEK"
    product: str = "Milan"
    tcb: Tcb = Tcb()
    chip_id: bytes = CHIP_ID
    csp: str = CSP
    serial: int = 7
    issuer: str | None = None
    subject: str | None = None
    not_before: float = NOW - 86_400
    not_after: float = NOW + 86_400
    extensions: Mapping[str, bytes | None] = field(default_factory=dict)

    def issue(self, ca: Authority, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
        """The certificate, DER."""
        issuer = self.issuer or ("ASK" if self.kind == "VCEK" else "ASVK")
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(self.subject or f"SEV-{self.kind}"))
            .issuer_name(ca.certificates[issuer].subject)
            .public_key(key.public_key())
            .serial_number(self.serial)
            .not_valid_before(_time(self.not_before))
            .not_valid_after(_time(self.not_after))
        )
        for oid, value in (self._stated() | dict(self.extensions)).items():
            if value is not None:
                unrecognised = x509.UnrecognizedExtension(x509.ObjectIdentifier(_OIDS + oid), value)
                builder = builder.add_extension(unrecognised, critical=False)
        return builder.sign(ca.keys[issuer], hashes.SHA384(), rsa_padding=_PSS).public_bytes(Encoding.DER)

    def _stated(self) -> dict[str, bytes | None]:
        levels = {"3.1": self.tcb.bootloader, "3.2": self.tcb.tee, "3.3": self.tcb.snp, "3.8": self.tcb.microcode}
        if self.product == "Turin":
            levels["3.9"] = self.tcb.fmc
        stated: dict[str, bytes | None] = {oid: integer(level) for oid, level in levels.items()}
        stated |= {"1": integer(0), "2": ia5(self.product), "3.4": integer(0)}
        if self.kind == "VCEK":
            stated["4"] = self.chip_id[:8] if self.product == "Turin" else self.chip_id
        else:
            stated["5"] = ia5(self.csp)
        return stated


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report to sign. `raw` overrides bytes by offset before signing, `after` behind it."""

    version: int = 3
    guest_svn: int = 5
    policy: int = 0x30000
    family_id: bytes = b"\xfa" * 16
    image_id: bytes = b"\x1a" * 16
    vmpl: int = 0
    algorithm: int = 1
    platform_info: int = 0x25
    flags: int = 0
    report_data: bytes = bytes(64)
    measurement: bytes = MEASUREMENT
    host_data: bytes = b"\x4d" * 32
    id_key_digest: bytes = b"\x1d" * 48
    author_key_digest: bytes = b"\xa0" * 48
    chip_id: bytes = CHIP_ID
    product: str = "Milan"
    tcb: Tcb = Tcb()
    raw: Mapping[int, bytes] = field(default_factory=dict)
    after: Mapping[int, bytes] = field(default_factory=dict)

    def sign(self, key: ec.EllipticCurvePrivateKey) -> bytes:
        """The 1184 bytes."""
        signed = bytes(_patched(self._body(), self.raw))
        r, s = decode_dss_signature(key.sign(signed, ec.ECDSA(hashes.SHA384())))
        whole = bytearray(signed + r.to_bytes(72, "little") + s.to_bytes(72, "little"))
        whole += bytes(1184 - len(whole))
        return bytes(_patched(whole, self.after))

    def _body(self) -> bytearray:
        tcb = self.tcb.encode(self.product)
        body = bytearray(0x2A0)
        struct.pack_into(
            "<IIQ16s16sII8sQII64s48s32s48s48s32s32s8s",
            body,
            0,
            self.version,
            self.guest_svn,
            self.policy,
            self.family_id,
            self.image_id,
            self.vmpl,
            self.algorithm,
            tcb,
            self.platform_info,
            self.flags,
            0,
            self.report_data,
            self.measurement,
            self.host_data,
            self.id_key_digest,
            self.author_key_digest,
            b"\x1e" * 32,
            b"\xff" * 32,
            tcb,
        )
        if self.version > 2:
            body[0x188:0x18B] = bytes(CPUIDS[self.product])
        firmware = bytes((7, 55, 1, 0))
        body[0x1A0:0x1F8] = self.chip_id + tcb + firmware + firmware + tcb
        if self.version >= 5:
            struct.pack_into("<QQ", body, 0x1F8, 3, 7)
        return body


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip: its authority, its key and the certificate of it (DER)."""

    authority: Authority
    key: ec.EllipticCurvePrivateKey
    certificate: bytes

    @property
    def anchors(self) -> Anchors:
        return self.authority.anchors


def chip(vek: Vek | None = None, *, generation: int = 0) -> Chip:
    """A chip with the key that `vek` describes."""
    described = vek or Vek()
    ca, key = authority(described.product, generation), report_key()
    return Chip(ca, key, described.issue(ca, key))


@functools.cache
def report_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def certificate_table(entries: Mapping[bytes, bytes]) -> bytes:
    """What the host hands over with an extended report: GUIDs and certificates."""
    at, heads, bodies = 24 * (len(entries) + 1), b"", b""
    for guid, body in entries.items():
        heads += guid + struct.pack("<II", at + len(bodies), len(body))
        bodies += body
    return heads + bytes(24) + bodies


def integer(value: int) -> bytes:
    return b"\x02\x01" + bytes((value,)) if value < 128 else b"\x02\x02\x00" + bytes((value,))


def ia5(text: str) -> bytes:
    return b"\x16" + bytes((len(text),)) + text.encode()


def _patched(data: bytearray, patches: Mapping[int, bytes]) -> bytearray:
    for offset, patch in patches.items():
        data[offset : offset + len(patch)] = patch
    return data


def _ca(
    subject: x509.Name, key: rsa.RSAPrivateKey, issuer: x509.Name, signer: rsa.RSAPrivateKey, serial: int
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(_time(NOW) - 1000 * _DAY)
        .not_valid_after(_time(NOW) + 1000 * _DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(signer, hashes.SHA384(), rsa_padding=_PSS)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "Test Micro Devices"),
            x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name),
        ]
    )


def _time(moment: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC)
