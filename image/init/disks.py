"""The operator's settings disk, found among the machine's disks by its first line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from image.init.errors import Stop
from image.init.settings import FIRST_LINE, LIMIT_BYTES

BLOCK_BYTES: Final = 4096


def find_settings(sys_block: Path, dev: Path) -> bytes | None:
    """What the one such disk holds, None where there is none. Raises Stop where there are several."""
    found: list[bytes] = []
    for name in sorted(path.name for path in sys_block.iterdir()):
        node = dev / name
        if not node.exists():
            continue
        try:
            with node.open("rb", buffering=0) as disk:
                head = disk.read(len(FIRST_LINE))
                if head == FIRST_LINE:
                    found.append(head + _read(disk.fileno(), LIMIT_BYTES))
        except OSError:
            continue  # a drive without a medium
    if len(found) > 1:
        raise Stop("several disks hold operator settings")
    return found[0] if found else None


def _read(descriptor: int, limit: int) -> bytes:
    content = b""
    while len(content) <= limit and (chunk := os.read(descriptor, limit + 1 - len(content))):
        content += chunk
    return content
