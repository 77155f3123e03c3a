"""Which files are models at all. Looked at only after the digest was right, so a stranger's bytes are never parsed."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from appliance.models.errors import PickleRefused, UnsupportedFormat

_PICKLE_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib", ".npz", ".npy")
_PICKLE_STARTS: Final = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_GGUF_VERSIONS: Final = (2, 3)


def refuse_pickle_name(name: str) -> None:
    """Raise PickleRefused for names of pickle checkpoints, which run code even as "weights only" (CVE-2025-32434)."""
    if name.lower().endswith(_PICKLE_SUFFIXES):
        raise PickleRefused(
            f"{name} is named as a pickle checkpoint; loading one can run any code. Convert it to GGUF."
        )


def check_gguf(path: Path, name: str) -> None:
    """Raise PickleRefused or UnsupportedFormat unless `path` starts as GGUF version 2 or 3, little-endian, does."""
    with path.open("rb") as stream:
        head = stream.read(8)
    if head.startswith(_PICKLE_STARTS):
        raise PickleRefused(
            f"model {name!r} is a pickle or zip checkpoint; loading one can run any code. Convert it to GGUF."
        )
    if len(head) < 8 or head[:4] != b"GGUF":
        raise UnsupportedFormat(f"model {name!r} is not a GGUF file (its first bytes are not 'GGUF')")
    (version,) = struct.unpack("<I", head[4:])
    if version not in _GGUF_VERSIONS:
        raise UnsupportedFormat(f"model {name!r} is GGUF version {version}; versions 2 and 3 are read")
