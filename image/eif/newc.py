"""Write ramdisks: the cpio format "newc", uncompressed, so that a reader finds the files in it by digest.

Linux, Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from typing import BinaryIO

from image.build.errors import BuildError
from image.tree import Entry

_TRAILER = "TRAILER!!!"
_MAX_FILE_BYTES = (1 << 32) - 1
# Archives follow each other in memory; the kernel finds the next one at a multiple of four.
_BLOCK_BYTES = 512


def write(entries: Sequence[Entry], out: BinaryIO, *, epoch: int) -> None:
    """One archive, padded to blocks. Raises BuildError where a file has no room in the format."""
    at = 0
    for inode, entry in enumerate(entries, start=1):
        if entry.length > _MAX_FILE_BYTES:
            raise BuildError(f"{entry.name}: a ramdisk holds files below 4 GiB")
        at += _put(out, _header(entry, inode, epoch))
        size = sum(out.write(chunk) for chunk in entry.chunks())
        at += size + _pad(out, size, 4)
    at += _put(out, _header(Entry(name=_TRAILER, mode=0), 0, 0))
    _pad(out, at, _BLOCK_BYTES)


def _header(entry: Entry, inode: int, epoch: int) -> bytes:
    name = entry.name.encode() + b"\x00"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    numbers = (
        inode,
        entry.mode,
        entry.uid,
        entry.gid,
        links,
        epoch,
        entry.length,
        0,
        0,
        *entry.device,
        len(name),
        0,
    )
    return b"070701" + b"".join(b"%08X" % number for number in numbers) + name


def _put(out: BinaryIO, data: bytes) -> int:
    out.write(data)
    return len(data) + _pad(out, len(data), 4)


def _pad(out: BinaryIO, size: int, block: int) -> int:
    rest = -size % block
    out.write(bytes(rest))
    return rest
