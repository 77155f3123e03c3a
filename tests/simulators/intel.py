"""A whole DCAP infrastructure with a root of our own: PCK chain, revocation lists, TCB info, QE identity, quotes.

Everything has a right value by default; a test overrides the one it is about. The verifier takes the root as an
argument, so that what it does with Intel's it does with this one.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from client_sdk.tee import x509 as sdk_x509
from client_sdk.tee.evidence import Endorsements

NOW = 1_790_000_000.0
FMSPC = bytes.fromhex("50aabb000000")
PPID = bytes(range(1, 17))
VENDOR = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
MRTD = b"\x4d" * 48
RTMRS = (b"\xa0" * 48, b"\xa1" * 48, b"\xa2" * 48, bytes(48))
MRENCLAVE, MRSIGNER = b"\xe1" * 32, b"\x51" * 32
SGX, TDX = 0x00, 0x81

_DAY = datetime.timedelta(days=1)
_EPOCH = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
_QE_SIGNER = bytes.fromhex("dc9e2a7c6f948f17474e34a7fc43ed030f7c1563f1babddf6340c82e0e54a8c5")
_QE_ATTRIBUTES = bytes.fromhex("1500000000000000e700000000000000")
_SGX_OID = (1, 2, 840, 113741, 1, 13, 1)


@functools.cache
def key(name: str) -> ec.EllipticCurvePrivateKey:
    """One key per role and process: making them is not what the tests are about."""
    return ec.generate_private_key(ec.SECP256R1())


def raw_signature(signer: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    r, s = decode_dss_signature(signer.sign(data, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def moment(days: float) -> datetime.datetime:
    """So many days after NOW."""
    return _EPOCH + days * _DAY


def _tlv(tag: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes((size,)) if size < 128 else bytes((0x82,)) + size.to_bytes(2, "big")
    return bytes((tag,)) + length + content


def _oid(arcs: Sequence[int]) -> bytes:
    content = bytes((40 * arcs[0] + arcs[1],))
    for arc in arcs[2:]:
        groups = [arc & 0x7F]
        while arc := arc >> 7:
            groups.append(0x80 | arc & 0x7F)
        content += bytes(reversed(groups))
    return _tlv(0x06, content)


def _entry(number: Sequence[int], value: bytes) -> bytes:
    return _tlv(0x30, _oid((*_SGX_OID, *number)) + value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pck:
    """What the PCK certificate says of its platform. A flag None is left out, as on single-package platforms."""

    ppid: bytes = PPID
    cpu_svn: bytes = bytes((5,)) * 16
    pce_svn: int = 13
    pce_id: bytes = bytes(2)
    fmspc: bytes = FMSPC
    sgx_type: int = 1
    flags: tuple[bool, bool, bool] | None = (False, False, False)
    serial: int = 0x1001
    not_before: float = -30
    not_after: float = 365
    with_extension: bool = True

    def extension(self) -> bytes:
        components = b"".join(_entry((2, n + 1), _tlv(0x02, bytes((svn,)))) for n, svn in enumerate(self.cpu_svn))
        components += _entry((2, 17), _tlv(0x02, bytes((self.pce_svn,))))
        components += _entry((2, 18), _tlv(0x04, self.cpu_svn))
        fields = _entry((1,), _tlv(0x04, self.ppid)) + _entry((2,), _tlv(0x30, components))
        fields += _entry((3,), _tlv(0x04, self.pce_id)) + _entry((4,), _tlv(0x04, self.fmspc))
        fields += _entry((5,), _tlv(0x0A, bytes((self.sgx_type,))))
        if self.flags is not None:
            fields += _entry((6,), _tlv(0x04, bytes(16)))
            flags = [_entry((7, n + 1), _tlv(0x01, b"\xff" if on else b"\x00")) for n, on in enumerate(self.flags)]
            fields += _entry((7,), _tlv(0x30, b"".join(flags)))
        return _tlv(0x30, fields)


def level(status: str = "UpToDate", *, least: int = 5, date: float = -60, advisories: Sequence[str] = ()) -> dict:
    """One TCB level that platforms with security versions of at least `least` reach."""
    return {
        "tcb": {
            "sgxtcbcomponents": [{"svn": least}] * 16,
            "pcesvn": 13,
            "tdxtcbcomponents": [{"svn": 0}] * 16,
        },
        "tcbDate": f"{moment(date):%Y-%m-%dT%H:%M:%SZ}",
        "tcbStatus": status,
        **({"advisoryIDs": list(advisories)} if advisories else {}),
    }


def qe_level(status: str = "UpToDate", *, least: int = 4, date: float = -60, advisories: Sequence[str] = ()) -> dict:
    return {**level(status, date=date, advisories=advisories), "tcb": {"isvsvn": least}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Intel:
    """One infrastructure. `windows` are days from NOW: (issued, next update) of the part named."""

    tee: int = TDX
    pck: Pck = field(default_factory=Pck)
    levels: tuple[dict, ...] = field(default_factory=lambda: (level(),))
    qe_levels: tuple[dict, ...] = field(default_factory=lambda: (qe_level(),))
    module_levels: tuple[dict, ...] = field(default_factory=lambda: (qe_level(least=1),))
    windows: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    evaluation_number: int = 17
    tcb_info: Mapping[str, object] = field(default_factory=dict)
    qe_identity: Mapping[str, object] = field(default_factory=dict)
    revoked_by_root: tuple[str, ...] = ()
    revoked_by_pck_ca: tuple[int, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    ca_not_after: float = 3650
    signer_name: str = "Intel SGX TCB Signing"

    def _key(self, role: str, default: str = "") -> ec.EllipticCurvePrivateKey:
        """The key that `keys` gives for a role; else the one of `default`, else its own."""
        return key(self.keys.get(role, default or role))

    def _window(self, part: str) -> tuple[float, float]:
        return self.windows.get(part, (-1, 29))

    def certificate(self, role: str) -> x509.Certificate:
        """root, ca (of PCKs), pck, signer (of TCB info and QE identity)."""
        names = {
            "root": "Intel SGX Root CA",
            "ca": "Intel SGX PCK Platform CA",
            "pck": "Intel SGX PCK Certificate",
            "signer": self.signer_name,
        }
        issuer = {"pck": "ca"}.get(role, "root")
        serial = {"root": 1, "ca": 2, "signer": 3, "pck": self.pck.serial}[role]
        is_ca = role in ("root", "ca")
        before, after = (self.pck.not_before, self.pck.not_after) if role == "pck" else (-100, self.ca_not_after)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(names[role]))
            .issuer_name(_name(names[issuer]))
            .public_key(self._key(role).public_key())
            .serial_number(serial)
            .not_valid_before(moment(before))
            .not_valid_after(moment(after))
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key(issuer).public_key()), False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key(role).public_key()), False)
            .add_extension(_usage(is_ca), True)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), True)
        )
        if role == "pck" and self.pck.with_extension:
            oid = x509.ObjectIdentifier(".".join(map(str, _SGX_OID)))
            builder = builder.add_extension(x509.UnrecognizedExtension(oid, self.pck.extension()), False)
        return builder.sign(self._key(f"{role}-issuer", issuer), hashes.SHA256())

    def root(self) -> sdk_x509.Certificate:
        """The anchor to hand to the verifier."""
        return sdk_x509.parse_certificate(self.certificate("root").public_bytes(Encoding.DER))

    def pem(self, *roles: str) -> str:
        return "".join(self.certificate(role).public_bytes(Encoding.PEM).decode() for role in roles)

    def crl(self, issuer: str, serials: Sequence[int]) -> bytes:
        begin, end = self._window(f"{issuer}-crl")
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate(issuer).subject)
            .last_update(moment(begin))
            .next_update(moment(end))
            .add_extension(x509.CRLNumber(1), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key(issuer).public_key()), False)
        )
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(moment(begin)).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self._key(f"{issuer}-crl", issuer), hashes.SHA256()).public_bytes(Encoding.DER)

    def _dates(self, part: str) -> dict[str, str]:
        begin, end = self._window(part)
        return {"issueDate": f"{moment(begin):%Y-%m-%dT%H:%M:%SZ}", "nextUpdate": f"{moment(end):%Y-%m-%dT%H:%M:%SZ}"}

    def tcb_info_text(self) -> str:
        body: dict[str, object] = {
            "id": "TDX" if self.tee == TDX else "SGX",
            "version": 3,
            **self._dates("tcb-info"),
            "fmspc": self.pck.fmspc.hex().upper(),
            "pceId": self.pck.pce_id.hex(),
            "tcbType": 0,
            "tcbEvaluationDataNumber": self.evaluation_number,
            "tcbLevels": list(self.levels),
        }
        if self.tee == TDX:
            module = {"mrsigner": "00" * 48, "attributes": "00" * 8, "attributesMask": "FF" * 8}
            body["tdxModule"] = module
            body["tdxModuleIdentities"] = [{"id": "TDX_01", **module, "tcbLevels": list(self.module_levels)}]
        return json.dumps({**body, **self.tcb_info}, separators=(",", ":"))

    def qe_identity_text(self) -> str:
        body = {
            "id": "TD_QE" if self.tee == TDX else "QE",
            "version": 2,
            **self._dates("qe-identity"),
            "tcbEvaluationDataNumber": self.evaluation_number,
            "miscselect": "00000000",
            "miscselectMask": "FFFFFFFF",
            "attributes": "11000000000000000000000000000000",
            "attributesMask": "FBFFFFFFFFFFFFFF0000000000000000",
            "mrsigner": _QE_SIGNER.hex().upper(),
            "isvprodid": 2 if self.tee == TDX else 1,
            "tcbLevels": list(self.qe_levels),
        }
        return json.dumps({**body, **self.qe_identity}, separators=(",", ":"))

    def collateral(self, **overrides: object) -> str:
        tcb_info, qe_identity = self.tcb_info_text(), self.qe_identity_text()
        serials = [self.certificate(role).serial_number for role in self.revoked_by_root]
        parts: dict[str, object] = {
            "pck_crl_issuer_chain": self.pem("ca", "root"),
            "root_ca_crl": self.crl("root", serials).hex(),
            "pck_crl": self.crl("ca", self.revoked_by_pck_ca).hex(),
            "tcb_info_issuer_chain": self.pem("signer", "root"),
            "tcb_info": tcb_info,
            "tcb_info_signature": self._signature("tcb-info", tcb_info),
            "qe_identity_issuer_chain": self.pem("signer", "root"),
            "qe_identity": qe_identity,
            "qe_identity_signature": self._signature("qe-identity", qe_identity),
        }
        return json.dumps({**parts, **overrides})

    def _signature(self, part: str, text: str) -> str:
        return raw_signature(self._key(f"{part}-signer", "signer"), text.encode()).hex()

    def endorsements(self, **overrides: object) -> Endorsements:
        return Endorsements(collateral=(self.collateral(**overrides),))


@dataclass(frozen=True, slots=True, kw_only=True)
class TdBody:
    """A TD report. Version 5 has the TDX 1.5 fields."""

    version: int = 4
    tee_tcb_svn: bytes = bytes((1, 1)) + bytes(14)
    td_attributes: int = 1 << 28
    xfam: bytes = bytes.fromhex("e702060000000000")
    mr_seam: bytes = b"\x5e" * 48
    mr_td: bytes = MRTD
    mr_config_id: bytes = bytes(48)
    mr_owner: bytes = bytes(48)
    mr_owner_config: bytes = bytes(48)
    rtmrs: tuple[bytes, ...] = RTMRS
    report_data: bytes = bytes(range(64))
    mr_service_td: bytes = bytes(48)

    def encode(self) -> bytes:
        body = self.tee_tcb_svn + self.mr_seam + bytes(48) + bytes(8)
        body += self.td_attributes.to_bytes(8, "little") + self.xfam + self.mr_td + self.mr_config_id + self.mr_owner
        body += self.mr_owner_config + b"".join(self.rtmrs) + self.report_data
        if self.version == 5:
            body += self.tee_tcb_svn + self.mr_service_td
        return body


def enclave_body(
    *,
    attributes: bytes = bytes.fromhex("0500000000000000e700000000000000"),
    mr_enclave: bytes = MRENCLAVE,
    mr_signer: bytes = MRSIGNER,
    product: int = 1,
    svn: int = 4,
    report_data: bytes = bytes(range(64)),
) -> bytes:
    """An enclave's REPORT body: of the enclave itself, and of the quoting enclave."""
    body = bytes((5,)) * 16 + bytes(32) + attributes + mr_enclave + bytes(32) + mr_signer + bytes(96)
    return body + struct.pack("<HH", product, svn) + bytes(60) + report_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Quoting:
    """How the quoting enclave behaves. None: as it should."""

    header: Mapping[str, object] = field(default_factory=dict)
    body_type: int | None = None
    attestation_key: str = "attestation"
    bound_key: bytes | None = None
    qe_attributes: bytes = _QE_ATTRIBUTES
    qe_svn: int = 6
    qe_key: str = "pck"
    auth_data: bytes = bytes(range(32))
    cert_type: int = 5
    outer_type: int = 6
    chain: str | None = None


def _public(name: str) -> bytes:
    return key(name).public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]


def quote(intel: Intel, body: TdBody | bytes, quoting: Quoting | None = None) -> bytes:
    """A quote of a trust domain (`TdBody`) or of an enclave (its REPORT body)."""
    quoting = quoting or Quoting()
    version = body.version if isinstance(body, TdBody) else 3
    fields = {"version": version, "key_type": 2, "tee": intel.tee, "vendor": VENDOR, **quoting.header}
    signed = struct.pack(
        "<HHI4x16s20s", fields["version"], fields["key_type"], fields["tee"], fields["vendor"], bytes(20)
    )
    encoded = body.encode() if isinstance(body, TdBody) else body
    if quoting.body_type == 2:
        encoded = encoded[:584]
    if version == 5:
        signed += struct.pack("<HI", 3 if quoting.body_type is None else quoting.body_type, len(encoded))
    signed += encoded
    public = _public(quoting.attestation_key)
    bound = hashlib.sha256((quoting.bound_key or public) + quoting.auth_data).digest()
    report = enclave_body(
        attributes=quoting.qe_attributes,
        mr_signer=_QE_SIGNER,
        product=2 if intel.tee == TDX else 1,
        svn=quoting.qe_svn,
        report_data=bound + bytes(32),
    )
    chain = (intel.pem("pck", "ca", "root") if quoting.chain is None else quoting.chain).encode() + b"\x00"
    inner = report + raw_signature(key(quoting.qe_key), report)
    inner += struct.pack("<H", len(quoting.auth_data)) + quoting.auth_data
    inner += struct.pack("<HI", quoting.cert_type, len(chain)) + chain
    if version >= 4:
        inner = struct.pack("<HI", quoting.outer_type, len(inner)) + inner
    section = raw_signature(key(quoting.attestation_key), signed) + public + inner
    return signed + struct.pack("<I", len(section)) + section


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _usage(is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=not is_ca,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )
