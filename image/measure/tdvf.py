"""MRTD of a trust domain from its firmware file (TDVF: OVMF built for TDX).

Metadata: Intel "TDX Virtual Firmware Design Guide", section 11; found by the table of GUIDs at the end of the file,
as QEMU does. Measurement: Intel TDX Module Base Architecture Specification, TDH.MEM.PAGE.ADD and TDH.MR.EXTEND: SHA-384
over a 128-byte block with "MEM.PAGE.ADD" and the address for each page, and, where the section is measured, one with
"MR.EXTEND" and the address, followed by the content, for each 256 bytes. The host chooses the order: page by page, or a
whole section added before it is extended (`two_pass`, in earlier hosts); which one is said by the plan.

Own code, tested by format vectors. Not compared with the vendor's tool, not booted.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from dataclasses import dataclass

from image.measure.errors import MeasureError

_FOOTER = uuid.UUID("96b582de-1fb2-45f7-baea-a366c55a082d").bytes_le
_TDX_OFFSET = uuid.UUID("e47a6535-984a-4798-865e-4685a7bf8ec2").bytes_le
_FOOTER_FROM_END, _ENTRY_BYTES = 32, 18
_DESCRIPTOR, _SECTION = struct.Struct("<4sIII"), struct.Struct("<IIQQII")
_EXTEND, _AUGMENTED = 1, 2
_PAGE, _CHUNK, _BLOCK_BYTES = 4096, 256, 128
_MAX_SECTIONS, _MAX_SECTION_BYTES = 64, 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """`content` is what is at `address` at launch where that is measured; `pages` pages are added in any case."""

    address: int
    pages: int
    content: bytes | None


def sections(firmware: bytes) -> tuple[Section, ...]:
    """What the monitor adds to a trust domain before it starts. Raises MeasureError, also where the file is no TDVF."""
    at = len(firmware) - _metadata_from_end(firmware)
    try:
        signature, length, version, count = _DESCRIPTOR.unpack_from(firmware, at)
        if signature != b"TDVF" or version != 1 or not 0 < count <= _MAX_SECTIONS:
            raise MeasureError("TDX firmware: no metadata of version 1 where the table says")
        if length != _DESCRIPTOR.size + count * _SECTION.size:
            raise MeasureError("TDX firmware: metadata whose length contradicts itself")
        found = [_SECTION.unpack_from(firmware, at + _DESCRIPTOR.size + n * _SECTION.size) for n in range(count)]
    except struct.error:
        raise MeasureError("TDX firmware: truncated metadata") from None
    # Augmented memory is accepted by the guest later and is in no measurement.
    return tuple(_section(firmware, record) for record in found if not record[5] & _AUGMENTED)


def _section(firmware: bytes, record: tuple[int, ...]) -> Section:
    offset, size, address, memory, _kind, attributes = record
    if address % _PAGE or memory % _PAGE or not 0 < memory <= _MAX_SECTION_BYTES or attributes & ~_EXTEND:
        raise MeasureError("TDX firmware: a section with an impossible place, size or attribute")
    if not attributes & _EXTEND:
        return Section(address=address, pages=memory // _PAGE, content=None)
    if size != memory or offset + size > len(firmware):
        raise MeasureError("TDX firmware: a measured section that the file does not fill")
    return Section(address=address, pages=memory // _PAGE, content=firmware[offset : offset + size])


def _metadata_from_end(firmware: bytes) -> int:
    """Entries stand before their own length and name, and are read from the end backwards."""
    at = len(firmware) - _FOOTER_FROM_END - _ENTRY_BYTES
    if at < 0 or firmware[at + 2 : at + _ENTRY_BYTES] != _FOOTER:
        raise MeasureError("TDX firmware: no table of GUIDs at the end, so no OVMF")
    start = at - (int.from_bytes(firmware[at : at + 2], "little") - _ENTRY_BYTES)
    while at - _ENTRY_BYTES >= max(start, 0):
        head = at - _ENTRY_BYTES
        length = int.from_bytes(firmware[head : head + 2], "little")
        if length < _ENTRY_BYTES:
            break
        if firmware[head + 2 : at] == _TDX_OFFSET and length == _ENTRY_BYTES + 4:
            return int.from_bytes(firmware[head - 4 : head], "little")
        at -= length
    raise MeasureError("TDX firmware: the table has no TDX metadata")


def mrtd(firmware: bytes, *, two_pass: bool = False) -> bytes:
    """48 bytes. Raises MeasureError."""
    digest = hashlib.sha384()
    for section in sections(firmware):
        pages = range(section.pages)
        if two_pass:
            for page in pages:
                digest.update(_add(section, page))
            for page in pages:
                digest.update(_extend(section, page))
        else:
            for page in pages:
                digest.update(_add(section, page) + _extend(section, page))
    return digest.digest()


def _add(section: Section, page: int) -> bytes:
    return _block(b"MEM.PAGE.ADD", section.address + page * _PAGE)


def _extend(section: Section, page: int) -> bytes:
    if section.content is None:
        return b""
    places = range(page * _PAGE, (page + 1) * _PAGE, _CHUNK)
    return b"".join(
        _block(b"MR.EXTEND", section.address + place) + section.content[place : place + _CHUNK] for place in places
    )


def _block(name: bytes, address: int) -> bytes:
    return (name.ljust(16, b"\x00") + address.to_bytes(8, "little")).ljust(_BLOCK_BYTES, b"\x00")
