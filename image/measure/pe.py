"""PE32+ executables: sections, and the Authenticode digest that firmware extends when it loads one.

Layout: Microsoft PE/COFF specification. Digest: "Windows Authenticode Portable Executable Signature Format" (2008),
section "Calculating the PE Image Hash", as UEFI firmware applies it for TCG PC Client Platform Firmware Profile 1.06,
section 10.2.3 (the file as it is on disk, without check sum, certificate table and the pointer to it).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from image.measure.errors import MeasureError

_PE32_PLUS = 0x20B
_OPTIONAL_AT = 24  # after the signature (4) and the COFF header (20)
_CHECKSUM_AT, _HEADERS_SIZE_AT, _DIRECTORY_COUNT_AT, _DIRECTORIES_AT = 64, 60, 108, 112
_SECURITY_DIRECTORY = 4
_SECTION_BYTES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """`name` without fill; `offset` and `size` in the file, `memory_size` once loaded (more than `size`: zeros)."""

    name: str
    offset: int
    size: int
    memory_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One executable. Offsets are in bytes from the start of `data`; `certificates` is the table's size, 0 without."""

    data: bytes
    sections: tuple[Section, ...]
    checksum_at: int
    security_at: int | None
    headers_size: int
    certificates: int

    def content(self, section: Section) -> bytes:
        """The section as it is in memory: cut or zero-filled to its size there."""
        taken = self.data[section.offset : section.offset + min(section.size, section.memory_size)]
        return taken.ljust(section.memory_size, b"\x00")


def parse(data: bytes, what: str) -> Image:
    """Parse a PE32+ executable; `what` names it in errors. Raises MeasureError."""
    try:
        return _parse(data)
    except struct.error:
        raise MeasureError(f"{what}: a truncated PE executable") from None
    except ValueError as error:
        raise MeasureError(f"{what}: {error}") from None


def _parse(data: bytes) -> Image:
    if data[:2] != b"MZ":
        raise ValueError("no PE executable (no MZ)")
    (header,) = struct.unpack_from("<I", data, 0x3C)
    if data[header : header + 4] != b"PE\x00\x00":
        raise ValueError("no PE executable (no PE signature)")
    (count, optional_size) = struct.unpack_from("<H12xH", data, header + 6)
    optional = header + _OPTIONAL_AT
    (magic,) = struct.unpack_from("<H", data, optional)
    if magic != _PE32_PLUS:
        raise ValueError("not PE32+")
    (headers_size,) = struct.unpack_from("<I", data, optional + _HEADERS_SIZE_AT)
    table = optional + optional_size
    if not table + count * _SECTION_BYTES <= headers_size <= len(data):
        raise ValueError("headers do not fit the size they claim")
    (directories,) = struct.unpack_from("<I", data, optional + _DIRECTORY_COUNT_AT)
    if optional_size < _DIRECTORIES_AT + 8 * directories:
        raise ValueError("an optional header that does not hold its directories")
    security_at, certificates = _security(data, optional, directories)
    return Image(
        data=data,
        sections=tuple(_section(data, table + n * _SECTION_BYTES) for n in range(count)),
        checksum_at=optional + _CHECKSUM_AT,
        security_at=security_at,
        headers_size=headers_size,
        certificates=certificates,
    )


def _security(data: bytes, optional: int, directories: int) -> tuple[int | None, int]:
    if directories <= _SECURITY_DIRECTORY:
        return None, 0
    at = optional + _DIRECTORIES_AT + 8 * _SECURITY_DIRECTORY
    offset, size = struct.unpack_from("<II", data, at)
    if size and offset + size != len(data):
        raise ValueError("the certificate table is not at the end")
    return at, size


def _section(data: bytes, at: int) -> Section:
    raw_name, memory_size, _address, size, offset = struct.unpack_from("<8sIIII", data, at)
    if size and offset + size > len(data):
        raise ValueError("a section reaches past the end")
    try:
        name = raw_name.rstrip(b"\x00").decode("ascii")
    except UnicodeDecodeError:
        raise ValueError("a section name is not ASCII") from None
    return Section(name=name, offset=offset, size=size, memory_size=memory_size)


def authenticode(image: Image, algorithm: str) -> bytes:
    """The digest, by hashlib's name of the algorithm. Raises MeasureError where sections leave gaps or overlap.

    Firmware sums the sizes of what it hashed and takes the rest of the file from there, so a gap between sections would
    make it hash some bytes twice and others never: such a file is refused rather than measured.
    """
    data, digest = image.data, hashlib.new(algorithm)
    digest.update(data[: image.checksum_at])
    if image.security_at is None:
        digest.update(data[image.checksum_at + 4 : image.headers_size])
    else:
        digest.update(data[image.checksum_at + 4 : image.security_at])
        digest.update(data[image.security_at + 8 : image.headers_size])
    end = image.headers_size
    for section in sorted((one for one in image.sections if one.size), key=lambda one: one.offset):
        if section.offset != end:
            raise MeasureError(
                f"section {section.name} does not follow what is before it: the digest would be ambiguous"
            )
        end = section.offset + section.size
        digest.update(data[section.offset : end])
    digest.update(data[end : len(data) - image.certificates])
    return digest.digest()
