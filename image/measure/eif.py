"""Enclave image files of AWS Nitro: write, read, and PCR0 to 2.

Format: aws-nitro-enclaves-image-format, src/defs/mod.rs, version 4; big-endian. A header of 548 bytes (magic, version,
flags, memory, vCPUs, offsets and sizes of at most 32 sections, CRC-32 of everything but itself), then sections of 12
bytes of header and their data. PCRn = SHA-384(48 zero bytes || SHA-384(data)): 0 over kernel, command line and all
ramdisks; 1 over kernel, command line and the first ramdisk; 2 over the others. Metadata and headers are in none.

Own code, tested by format vectors. Not compared with the vendor's tool, not booted.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

from image.measure.errors import MeasureError

MAGIC = b".eif"
VERSION = 4
HEADER_BYTES, SECTION_HEADER_BYTES = 548, 12
PCR_BYTES = 48
FLAG_ARM64 = 1
KERNEL, CMDLINE, RAMDISK, SIGNATURE, METADATA = 1, 2, 3, 4, 5
MAX_SECTIONS = 32
_HEAD = struct.Struct(">4sHHQQHH32Q32QI")
_SECTION = struct.Struct(">HHQ")
_DEFAULT_MEMORY_BYTES, _DEFAULT_VCPUS = 1 << 30, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Eif:
    """`ramdisks`: the first boots, the others hold the application. `cmdline` without a NUL, `metadata` JSON.

    Raises MeasureError where it could not boot.
    """

    kernel: bytes
    cmdline: str
    ramdisks: tuple[bytes, ...]
    metadata: bytes
    default_memory_bytes: int = _DEFAULT_MEMORY_BYTES
    default_vcpus: int = _DEFAULT_VCPUS

    def __post_init__(self) -> None:
        if not self.kernel or not self.ramdisks or not all(self.ramdisks):
            raise MeasureError("enclave image file: a kernel and at least one ramdisk are needed")
        if len(self.ramdisks) > MAX_SECTIONS - 3:
            raise MeasureError("enclave image file: too many ramdisks")
        if not self.cmdline or not self.cmdline.isascii() or not self.cmdline.isprintable():
            raise MeasureError("enclave image file: the command line is printable ASCII")

    def pcrs(self) -> tuple[bytes, bytes, bytes]:
        """PCR0, PCR1, PCR2, 48 bytes each."""
        boot = (self.kernel, self.cmdline.encode("ascii"), *self.ramdisks[:1])
        return _register((*boot, *self.ramdisks[1:])), _register(boot), _register(self.ramdisks[1:])


def make_metadata(name: str, version: str, kernel_version: str, built: str) -> bytes:
    """The metadata section: same inputs, same bytes. `built` is text such as the source's date, no clock's."""
    build = {
        "BuildTime": built,
        "BuildTool": "attested-inference",
        "BuildToolVersion": version,
        "OperatingSystem": "Linux",
        "KernelVersion": kernel_version,
    }
    fields = {
        "ImageName": name,
        "ImageVersion": version,
        "BuildMetadata": build,
        "DockerInfo": {},
        "CustomMetadata": {},
    }
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode()


def write(eif: Eif) -> bytes:
    """The file, for x86-64 and unsigned."""
    out = io.BytesIO()
    write_to(eif, out)
    return out.getvalue()


def write_to(eif: Eif, file: BinaryIO) -> None:
    """Write the file without another copy of the ramdisks in memory."""
    sections = [(KERNEL, eif.kernel), (CMDLINE, eif.cmdline.encode("ascii")), (METADATA, eif.metadata)]
    sections += [(RAMDISK, ramdisk) for ramdisk in eif.ramdisks]
    offsets, sizes, at = [0] * MAX_SECTIONS, [0] * MAX_SECTIONS, HEADER_BYTES
    for number, (_, data) in enumerate(sections):
        offsets[number], sizes[number] = at, len(data)
        at += SECTION_HEADER_BYTES + len(data)
    head = _HEAD.pack(
        MAGIC, VERSION, 0, eif.default_memory_bytes, eif.default_vcpus, 0, len(sections), *offsets, *sizes, 0
    )
    body = [part for kind, data in sections for part in (_SECTION.pack(kind, 0, len(data)), data)]
    check_sum = zlib.crc32(head)
    for part in body:
        check_sum = zlib.crc32(part, check_sum)
    file.writelines((head, check_sum.to_bytes(4, "big"), *body))


def read(data: bytes) -> Eif:
    """Parse a file. Raises MeasureError: other versions, architectures, signed files, and whatever does not add up."""
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        raise MeasureError("no enclave image file")
    _, version, flags, memory, vcpus, reserved, count, *rest = _HEAD.unpack_from(data)
    offsets, sizes, unused = rest[:MAX_SECTIONS], rest[MAX_SECTIONS : 2 * MAX_SECTIONS], rest[-1]
    if version != VERSION or flags or reserved or unused:
        raise MeasureError(
            f"enclave image file: version {version}, flags {flags:#x}; only version {VERSION} without flags"
        )
    if zlib.crc32(data[HEADER_BYTES:], zlib.crc32(data[: HEADER_BYTES - 4])) != int.from_bytes(
        data[HEADER_BYTES - 4 : HEADER_BYTES], "big"
    ):
        raise MeasureError("enclave image file: the check sum is wrong")
    if not 0 < count <= MAX_SECTIONS or any(offsets[count:]) or any(sizes[count:]):
        raise MeasureError("enclave image file: an impossible number of sections")
    sections = _sections(data, offsets[:count], sizes[:count])
    return _assemble(sections, memory, vcpus)


def _sections(data: bytes, offsets: list[int], sizes: list[int]) -> list[tuple[int, bytes]]:
    found, at = [], HEADER_BYTES
    for offset, size in zip(offsets, sizes, strict=True):
        end = at + SECTION_HEADER_BYTES + size
        if offset != at or end > len(data):
            raise MeasureError("enclave image file: sections do not follow each other")
        kind, flags, claimed = _SECTION.unpack_from(data, at)
        if claimed != size or flags:
            raise MeasureError("enclave image file: a section and the header disagree")
        found.append((kind, data[at + SECTION_HEADER_BYTES : end]))
        at = end
    if at != len(data):
        raise MeasureError("enclave image file: bytes after the last section")
    return found


def _assemble(sections: list[tuple[int, bytes]], memory: int, vcpus: int) -> Eif:
    kinds = [kind for kind, _ in sections]
    if kinds[:2] != [KERNEL, CMDLINE] or any(kind not in (RAMDISK, METADATA) for kind in kinds[2:]):
        raise MeasureError("enclave image file: kernel, command line, then ramdisks and metadata are needed, unsigned")
    if kinds.count(METADATA) != 1:
        raise MeasureError("enclave image file: exactly one metadata section is needed")
    try:
        cmdline = sections[1][1].decode("ascii")
    except UnicodeDecodeError:
        raise MeasureError("enclave image file: the command line is not ASCII") from None
    return Eif(
        kernel=sections[0][1],
        cmdline=cmdline,
        ramdisks=tuple(data for kind, data in sections if kind == RAMDISK),
        metadata=next(data for kind, data in sections if kind == METADATA),
        default_memory_bytes=memory,
        default_vcpus=vcpus,
    )


def _register(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha384()
    for part in parts:
        digest.update(part)
    return hashlib.sha384(bytes(PCR_BYTES) + digest.digest()).digest()
