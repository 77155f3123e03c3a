"""Files that survive a crash: a cross-process lock, and durable replacement by one rename."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700


def make_private_directory(path: Path) -> None:
    """Create `path` (and its parents) readable by its owner alone; an existing one keeps its mode. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)


def fsync_directory(path: Path) -> None:
    """Make the names in `path` durable: a rename is only on the disk once its directory is. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path` (made when missing) against every other process; waits. Raises OSError.

    The kernel drops the lock when the holder dies, so a killed process never leaves one behind (flock(2)).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the whole of `path` by `data` (mode 0600) with one rename, durably; OSError: nothing changed."""
    descriptor, staged = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(staged, path)
    except BaseException:
        os.unlink(staged)
        raise
    fsync_directory(path.parent)
