"""Layout of SEV-SNP attestation reports (AMD SEV-SNP Firmware ABI, document 56860, table "ATTESTATION_REPORT").

A report is 1184 bytes, little-endian; bytes 0..0x29F are signed, the signature is at 0x2A0 and the rest is zero.
Versions 2, 3 and 5 are known; they differ in what used to be reserved. The evidence item is the report itself.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from client_sdk.wire.errors import WireError

KIND: Final = "sev-snp"
CODE: Final = "MALFORMED_EVIDENCE"
REPORT_BYTES: Final = 1184
SIGNED_BYTES: Final = 0x2A0
KNOWN_VERSIONS: Final = frozenset({2, 3, 5})
SIGNATURE_ECDSA_P384_SHA384: Final = 1
SIGNED_BY_VCEK, SIGNED_BY_VLEK, SIGNED_BY_NONE = 0, 1, 7

_NEWEST_PLAUSIBLE_VERSION = 255
_SCALAR_BYTES = 72
_S_AT = SIGNED_BYTES + _SCALAR_BYTES
_PADDING_AT = _S_AT + _SCALAR_BYTES
_HEAD = struct.Struct("<IIQ16s16sII8sQII64s48s32s48s48s32s32s8s")
_TAIL_AT = 0x1A0
_TAIL = struct.Struct("<64s8sBBBBBBBB8sQQ")

_MAX_TABLE_ENTRIES = 32
GUIDS: Final[Mapping[str, uuid.UUID]] = {
    "VCEK": uuid.UUID("63da758d-e664-4564-adc5-f4b93be8accd"),
    "VLEK": uuid.UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"),
    "ASK": uuid.UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"),
    "ARK": uuid.UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"),
    "CRL": uuid.UUID("92f81bc3-5811-4d3d-97ff-d19f88dc67ea"),
}
# Hosts write GUIDs in either byte order.
_CERTIFICATE_GUIDS: Final = frozenset(raw for guid in GUIDS.values() for raw in (guid.bytes, guid.bytes_le))

GUEST_POLICY_BITS: Final[Mapping[str, int]] = {
    "smt": 16,
    "migration-agent": 18,
    "debug": 19,
    "single-socket": 20,
    "cxl": 21,
    "aes256-xts": 22,
    "rapl-disabled": 23,
    "ciphertext-hiding": 24,
    "page-swap-disabled": 25,
}
GUEST_POLICY_MUST_BE_ONE: Final = 1 << 17
GUEST_POLICY_KNOWN: Final = 0xFFFF | GUEST_POLICY_MUST_BE_ONE | sum(1 << bit for bit in GUEST_POLICY_BITS.values())

PLATFORM_BITS: Final[Mapping[str, int]] = {
    "smt": 0,
    "tsme": 1,
    "ecc": 2,
    "rapl-disabled": 3,
    "ciphertext-hiding": 4,
    "alias-check-complete": 5,
    "tio": 7,
}
PLATFORM_KNOWN: Final = sum(1 << bit for bit in PLATFORM_BITS.values())

MILAN, GENOA, TURIN = "Milan", "Genoa", "Turin"
PRODUCTS: Final = (MILAN, GENOA, TURIN)
_PRODUCTS_OF_VERSION_2: Final = (MILAN, GENOA)  # Turin began with version 3

KDS_HOST: Final = "kdsintf.amd.com"
"""AMD's key distribution service (AMD document 57230), whose paths are below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tcb:
    """Security patch levels of the platform's firmware, each 0..255. `fmc` exists from Turin on."""

    bootloader: int
    tee: int
    snp: int
    microcode: int
    fmc: int | None = None

    def __str__(self) -> str:
        fmc = "" if self.fmc is None else f"fmc {self.fmc}, "
        return f"{fmc}bootloader {self.bootloader}, tee {self.tee}, snp {self.snp}, microcode {self.microcode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report. TCBs are the raw 8 bytes (`parse_tcb` reads them, by product).

    `cpuid` is (family, model, stepping), None in version 2. `firmware` and `committed_firmware` are (major, minor,
    build). `mitigations` are the launch and current vectors, None before version 5. `r` and `s` are the signature.
    """

    encoded: bytes
    version: int
    guest_svn: int
    policy: int
    family_id: bytes
    image_id: bytes
    vmpl: int
    signature_algorithm: int
    current_tcb: bytes
    platform_info: int
    author_key_enabled: bool
    chip_key_masked: bool
    signing_key: int
    report_data: bytes
    measurement: bytes
    host_data: bytes
    id_key_digest: bytes
    author_key_digest: bytes
    report_id: bytes
    report_id_ma: bytes
    reported_tcb: bytes
    cpuid: tuple[int, int, int] | None
    chip_id: bytes
    committed_tcb: bytes
    firmware: tuple[int, int, int]
    committed_firmware: tuple[int, int, int]
    launch_tcb: bytes
    mitigations: tuple[int, int] | None
    r: int
    s: int

    @property
    def signed(self) -> bytes:
        return self.encoded[:SIGNED_BYTES]

    @property
    def known_version(self) -> bool:
        return self.version in KNOWN_VERSIONS

    @property
    def abi(self) -> tuple[int, int]:
        """The lowest firmware ABI (major, minor) that the guest's policy lets it run on."""
        return self.policy >> 8 & 0xFF, self.policy & 0xFF


def parse_report(data: bytes) -> Report:
    """Parse one report. Raises WireError.

    A version that this code does not know is parsed by what all versions share and must not be accepted by callers.
    """
    if len(data) != REPORT_BYTES:
        raise WireError(CODE, f"an SNP report has {REPORT_BYTES} bytes, not {len(data)}")
    head = _HEAD.unpack_from(data)
    version, flags = head[0], head[9]
    if not min(KNOWN_VERSIONS) <= version <= _NEWEST_PLAUSIBLE_VERSION:
        raise WireError(CODE, f"SNP report of unsupported version {version}")
    if any(data[_PADDING_AT:]):
        raise WireError(CODE, "the bytes after the signature, which nothing signs, are not zero")
    if version in KNOWN_VERSIONS:
        _check_reserved(data, version, flags, head[10])
    tail = _TAIL.unpack_from(data, _TAIL_AT)
    return Report(
        encoded=bytes(data),
        version=version,
        guest_svn=head[1],
        policy=head[2],
        family_id=head[3],
        image_id=head[4],
        vmpl=head[5],
        signature_algorithm=head[6],
        current_tcb=head[7],
        platform_info=head[8],
        author_key_enabled=bool(flags & 1),
        chip_key_masked=bool(flags & 2),
        signing_key=flags >> 2 & 7,
        report_data=head[11],
        measurement=head[12],
        host_data=head[13],
        id_key_digest=head[14],
        author_key_digest=head[15],
        report_id=head[16],
        report_id_ma=head[17],
        reported_tcb=head[18],
        cpuid=None if version == 2 else (data[0x188], data[0x189], data[0x18A]),
        chip_id=tail[0],
        committed_tcb=tail[1],
        firmware=(tail[4], tail[3], tail[2]),
        committed_firmware=(tail[8], tail[7], tail[6]),
        launch_tcb=tail[10],
        mitigations=(tail[11], tail[12]) if version >= 5 else None,
        r=int.from_bytes(data[SIGNED_BYTES:_S_AT], "little"),
        s=int.from_bytes(data[_S_AT:_PADDING_AT], "little"),
    )


def _check_reserved(data: bytes, version: int, flags: int, reserved: int) -> None:
    """What a version reserves is zero: a set bit there means something this code does not know."""
    spans = [(0x188 if version == 2 else 0x18B, 0x1A0), (0x1EB, 0x1EC), (0x1EF, 0x1F0)]
    spans.append((0x208 if version >= 5 else 0x1F8, SIGNED_BYTES))
    for start, end in spans:
        if any(data[start:end]):
            raise WireError(CODE, f"reserved bytes {start:#x}..{end - 1:#x} of a version {version} report are not zero")
    if reserved or flags >> 5:
        raise WireError(CODE, "reserved bits of the report's key information are not zero")


def parse_tcb(raw: bytes, product: str) -> Tcb:
    """The patch levels in 8 raw bytes, whose order depends on the product. Raises WireError."""
    if product == TURIN:
        tcb = Tcb(fmc=raw[0], bootloader=raw[1], tee=raw[2], snp=raw[3], microcode=raw[7])
        reserved = raw[4:7]
    else:
        tcb = Tcb(bootloader=raw[0], tee=raw[1], snp=raw[6], microcode=raw[7])
        reserved = raw[2:6]
    if any(reserved):
        raise WireError(CODE, "reserved bytes of a TCB version are not zero")
    return tcb


def encode_tcb(tcb: Tcb) -> bytes:
    """The 8 raw bytes of patch levels; those with an FMC in Turin's order."""
    if tcb.fmc is not None:
        return bytes((tcb.fmc, tcb.bootloader, tcb.tee, tcb.snp, 0, 0, 0, tcb.microcode))
    return bytes((tcb.bootloader, tcb.tee, 0, 0, 0, 0, tcb.snp, tcb.microcode))


def product_of(cpuid: tuple[int, int, int]) -> str | None:
    """The product line of a processor (family, model, stepping); None for one this code does not know.

    Bergamo and Siena are Genoa to AMD's key service and so here.
    """
    family, model, _ = cpuid
    if family == 0x19 and model <= 0x0F:
        return MILAN
    if family == 0x19 and (0x10 <= model <= 0x1F or 0xA0 <= model <= 0xAF):
        return GENOA
    if family == 0x1A and model <= 0x1F:
        return TURIN
    return None


def possible_products(report: Report) -> tuple[str, ...]:
    """The product lines that this report may be of: version 2 does not name one. Empty: one this code does not know."""
    if report.cpuid is None:
        return _PRODUCTS_OF_VERSION_2
    name = product_of(report.cpuid)
    return () if name is None else (name,)


def vcek_path(report: Report, product: str) -> str:
    """Path and query at KDS_HOST of the VCEK for this report's chip and reported patch levels. Raises WireError.

    A VLEK cannot be fetched so: the cloud provider hands it to its guests.
    """
    tcb = parse_tcb(report.reported_tcb, product)
    chip_id = report.chip_id[:8] if product == TURIN else report.chip_id
    levels = [] if tcb.fmc is None else [f"fmcSPL={tcb.fmc:02}"]
    levels += [f"blSPL={tcb.bootloader:02}", f"teeSPL={tcb.tee:02}", f"snpSPL={tcb.snp:02}"]
    levels += [f"ucodeSPL={tcb.microcode:02}"]
    return f"/vcek/v1/{product}/{chip_id.hex()}?{'&'.join(levels)}"


def chain_path(product: str) -> str:
    """Path at KDS_HOST of the product's ASK and ARK, in PEM."""
    return f"/vcek/v1/{product}/cert_chain"


def crl_path(product: str) -> str:
    """Path at KDS_HOST of the revocation list of the product's root."""
    return f"/vcek/v1/{product}/crl"


def names_of(bits: int, table: Mapping[str, int]) -> frozenset[str]:
    """The names of the set bits in `table`."""
    return frozenset(name for name, bit in table.items() if bits >> bit & 1)


def parse_certificate_table(data: bytes) -> tuple[bytes, ...]:
    """The certificates in a table that the host gives (AMD document 56421, "SNP Extended Guest Request"), in order.

    Entries of {GUID (16 bytes), offset u32 from the table's start, length u32} end with an all-zero one. Raises
    WireError.
    """
    found: list[bytes] = []
    for at in range(0, 24 * _MAX_TABLE_ENTRIES, 24):
        entry = data[at : at + 24]
        if len(entry) < 24:
            raise WireError("MALFORMED_ENDORSEMENT", "the certificate table has no end")
        if not any(entry):
            return tuple(found)
        offset, length = struct.unpack_from("<II", entry, 16)
        if length == 0 or offset + length > len(data):
            raise WireError("MALFORMED_ENDORSEMENT", "the certificate table points beyond its end")
        if entry[:16] in _CERTIFICATE_GUIDS:
            found.append(bytes(data[offset : offset + length]))
    raise WireError("MALFORMED_ENDORSEMENT", f"the certificate table has more than {_MAX_TABLE_ENTRIES} entries")
