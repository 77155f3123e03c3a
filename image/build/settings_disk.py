"""The operator's settings as a disk: the file, checked by init's own rules, padded to whole sectors."""

from __future__ import annotations

from pathlib import Path

from image.build.errors import BuildError
from image.init import settings
from image.init.errors import Stop

_SECTOR_BYTES = 512


def write(file: Path, disk: Path) -> None:
    """Raises BuildError naming what a boot would stop at; then nothing is written."""
    content = file.read_bytes()
    try:
        settings.parse(content)
    except Stop as stop:
        raise BuildError(f"{file}: {stop}") from stop
    disk.write_bytes(content + bytes(-len(content) % _SECTOR_BYTES))
