"""Digests of the files in a ramdisk: the cpio format "newc" that Linux unpacks.

Linux, Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from image.measure.errors import MeasureError

_MAGIC = b"070701"
_HEADER_BYTES = 110
_TRAILER = "TRAILER!!!"
_REGULAR, _TYPE_MASK = 0o100000, 0o170000
_MAX_NAME_BYTES = 4096


def file_digests(archive: bytes) -> Mapping[str, bytes]:
    """SHA-256 of each regular file by name, of one uncompressed archive. Raises MeasureError.

    A name that comes twice is refused: Linux would keep the last, a reader might look at the first.
    """
    view, found, at = memoryview(archive), dict[str, bytes](), 0
    while True:
        mode, size, name, data_at = _entry(archive, at)
        if name == _TRAILER:
            if any(view[data_at:]):
                raise MeasureError("ramdisk: something follows the archive")
            return found
        if name in found:
            raise MeasureError(f"ramdisk: {name!r} comes twice")
        if data_at + size > len(archive):
            raise MeasureError("ramdisk: truncated")
        if mode & _TYPE_MASK == _REGULAR:
            found[name] = hashlib.sha256(view[data_at : data_at + size]).digest()
        at = data_at + _padded(size)


def _entry(archive: bytes, at: int) -> tuple[int, int, str, int]:
    """Mode, size, name and where the data begins."""
    header = archive[at : at + _HEADER_BYTES]
    if len(header) < _HEADER_BYTES or header[:6] != _MAGIC:
        raise MeasureError("ramdisk: no uncompressed newc archive")
    try:
        fields = [int(header[n : n + 8], 16) for n in range(6, _HEADER_BYTES, 8)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        if not 1 < name_size <= _MAX_NAME_BYTES:
            raise MeasureError("ramdisk: an impossible name")
        raw = archive[at + _HEADER_BYTES : at + _HEADER_BYTES + name_size]
        name = raw.removesuffix(b"\x00").decode()
    except ValueError:
        raise MeasureError("ramdisk: a malformed header") from None
    return mode, size, name, at + _padded(_HEADER_BYTES + name_size)


def _padded(size: int) -> int:
    return (size + 3) & ~3
