"""Hash the bytes that are used: a model file is copied into a sealed memfd while it is hashed.

After `seal_model` returns, nobody can change those bytes, whatever happens to the file they came from (memfd_create(2),
fcntl(2) F_ADD_SEALS). No parser, ours or a native one, sees a byte before size and digest are right.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import BootError

CHUNK_BYTES = 4 * 1024 * 1024
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedModel:
    """A sealed, read-only descriptor, owned by whoever called; `sha256` and `size_bytes` of its content."""

    fd: int
    size_bytes: int
    sha256: bytes

    def close(self) -> None:
        os.close(self.fd)


def seal_model(
    paths: Sequence[Path], *, sha256: bytes, size_bytes: int, progress: Callable[[float], None]
) -> SealedModel:
    """Copy the concatenation of `paths` into a sealed memfd, hashing it in the same pass.

    `progress` gets fractions 0..1. Raises BootError when a file cannot be read, or when size or SHA-256 differ.
    """
    try:
        writable = os.memfd_create("model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise BootError(f"cannot make an in-memory file for the model: {error.strerror}") from error
    try:
        digest = _copy(paths, writable, size_bytes, progress)
        if digest != sha256:
            raise BootError(
                f"model {_names(paths)} has SHA-256 {digest.hex()}, expected {sha256.hex()}; fetch it again or correct "
                "the configured digest"
            )
        # A shared writable mapping or descriptor would survive the check: sealing WRITE fails while one exists.
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _SEALS)
        # A fresh read-only descriptor, so that not even the flags of what the worker inherits allow writing.
        readable = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)
    return SealedModel(fd=readable, size_bytes=size_bytes, sha256=digest)


def _copy(paths: Sequence[Path], target: int, size_bytes: int, progress: Callable[[float], None]) -> bytes:
    hasher = hashlib.sha256()
    copied = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for path in paths:
        source = _open(path)
        try:
            while count := os.readv(source, [buffer]):
                copied += count
                if copied > size_bytes:
                    raise BootError(f"model {_names(paths)} is longer than the expected {size_bytes} bytes")
                hasher.update(buffer[:count])
                _write_all(target, buffer[:count])
                progress(copied / size_bytes)
        except OSError as error:
            raise BootError(f"reading the model {path.name} failed: {error.strerror}") from error
        finally:
            os.close(source)
    if copied != size_bytes:
        raise BootError(f"model {_names(paths)} has {copied} bytes, expected {size_bytes}")
    return hasher.digest()


def _open(path: Path) -> int:
    try:
        # NONBLOCK: opening a FIFO put in the model's place must not hang the boot.
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BootError(f"cannot open the model {path.name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(source).st_mode):
        os.close(source)
        raise BootError(f"the model {path.name} is not a regular file")
    return source


def _write_all(target: int, data: memoryview) -> None:
    while data:
        data = data[os.write(target, data) :]


def _names(paths: Sequence[Path]) -> str:
    return " + ".join(path.name for path in paths) or "(no files)"
