"""Read-only disks: erofs with its dm-verity hash tree behind it. A disk's first bytes say which one it is, never more.

There is no verity superblock: what it would say stands in the measured command line instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from image.build.chroot import Chroot
from image.build.errors import BuildError

BLOCK_BYTES: Final = 4096
_HASHES_IN_BLOCK: Final = BLOCK_BYTES // 32
# The disks' identifiers, by which the initrd tells them apart: kinds of disk, not versions.
ROOT_UUID: Final = "6170706c-6961-4e63-8520-726f6f740001"
MODEL_UUID: Final = "6170706c-6961-4e63-8520-6d6f64656c01"
_ROOT_HASH = re.compile(r"^Root hash:\s+([0-9a-f]{64})$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """`blocks` of data, 4096 bytes each, before the tree; `root_hash` 64 hex digits."""

    path: Path
    blocks: int
    root_hash: str


def tree_blocks(blocks: int) -> int:
    """Blocks of the hash tree over so many blocks of data, its root block included."""
    total = 0
    while True:
        blocks = -(-blocks // _HASHES_IN_BLOCK)
        total += blocks
        if blocks == 1:
            return total


def make(chroot: Chroot, archive: Path, to: Path, *, uuid: str, compress: bool) -> Disk:
    """A disk with the content of a tar archive; the same content gives the same bytes. Raises BuildError."""
    epoch = chroot.environ["SOURCE_DATE_EPOCH"]
    shell = chroot.bound(to.parent, "/build/disks")
    inside, source = f"/build/disks/{to.name}", f"/build/disks/{archive.name}"
    options = ["-zlz4hc,12", "-C65536"] if compress else []
    shell.run(["mkfs.erofs", "--quiet", f"-T{epoch}", "--all-time", f"-U{uuid}", *options, "--tar=f", inside, source])
    blocks = -(-to.stat().st_size // BLOCK_BYTES)
    with to.open("r+b") as file:
        file.truncate(blocks * BLOCK_BYTES)
    arguments = ["--no-superblock", "--data-block-size=4096", "--hash-block-size=4096", "--hash=sha256", "--salt=-"]
    arguments += [f"--data-blocks={blocks}", f"--hash-offset={blocks * BLOCK_BYTES}"]
    said = shell.run(["veritysetup", "format", *arguments, inside, inside]).decode()
    found = _ROOT_HASH.search(said)
    if found is None:
        raise BuildError("veritysetup printed no root hash")
    whole = (blocks + tree_blocks(blocks)) * BLOCK_BYTES
    if to.stat().st_size > whole:
        raise BuildError(f"{to.name} is larger than its data and hash tree")
    with to.open("r+b") as file:
        file.truncate(whole)
    return Disk(path=to, blocks=blocks, root_hash=found[1])
