"""Linux's configfs-tsm as a file system of our own (FUSE): the same directories, files and refusals.

A report directory fills itself on mkdir and takes its files along on rmdir; its binary files are taken over when they
are closed; every write counts into `generation`; `outblob` is made when it is read, and made anew after a write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mfusepy

Make = Callable[[bytes, int], tuple[bytes, bytes]]
"""(64 bytes of report data, privilege level) -> (outblob, auxblob)"""

_INBLOB_BYTES = 64
_LEVELS = 4
_READABLE = frozenset({"outblob", "auxblob", "generation", "provider", "privlevel_floor"})
_WRITABLE = frozenset({"inblob", "privlevel"})


@dataclass(slots=True)
class Report:
    """One directory."""

    inblob: bytes = b""
    level: int = 0
    generation: int = 0
    made_for: int = -1
    made: tuple[bytes, bytes] = (b"", b"")


@dataclass(slots=True, kw_only=True)
class Machine:
    """What stands behind the files. `failures` are errors that the next reads of `outblob` give; `meddling` counts the
    next reads of `outblob` behind which somebody else writes. `absent` files are not there.
    """

    make: Make
    provider: str = "sev_guest"
    floor: int = 0
    absent: frozenset[str] = frozenset()
    failures: list[int] = field(default_factory=list)
    meddling: int = 0
    reports: dict[str, Report] = field(default_factory=dict)
    made: int = 0


class _Files(mfusepy.Operations):  # type: ignore[misc]
    use_ns = True

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._open: dict[int, bytes] = {}
        self._handles = 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        name, attribute = _split(path)
        if not attribute:
            if name and name not in self._machine.reports:
                raise mfusepy.FuseOSError(errno.ENOENT)
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        known = (_READABLE | _WRITABLE) - self._machine.absent
        if name not in self._machine.reports or attribute not in known:
            raise mfusepy.FuseOSError(errno.ENOENT)
        return {"st_mode": stat.S_IFREG | (0o444 if attribute in _READABLE else 0o200), "st_nlink": 1, "st_size": 4096}

    def readdir(self, path: str, fh: int) -> list[str]:
        name, _ = _split(path)
        inside = (_READABLE | _WRITABLE) - self._machine.absent if name else self._machine.reports
        return [".", "..", *inside]

    def mkdir(self, path: str, mode: int) -> int:
        name, attribute = _split(path)
        if attribute:
            raise mfusepy.FuseOSError(errno.EPERM)
        if not self._machine.provider:
            raise mfusepy.FuseOSError(errno.ENXIO)
        self._machine.reports[name] = Report()
        return 0

    def rmdir(self, path: str) -> int:
        del self._machine.reports[_split(path)[0]]
        return 0

    def unlink(self, path: str) -> int:
        raise mfusepy.FuseOSError(errno.EPERM)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        return 0

    def open(self, path: str, flags: int) -> int:
        _, attribute = _split(path)
        if (flags & os.O_ACCMODE == os.O_RDONLY) is not (attribute in _READABLE):
            raise mfusepy.FuseOSError(errno.EACCES)
        self._handles += 1
        return self._handles

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        name, attribute = _split(path)
        if offset == 0:
            self._open[fh] = self._content(self._machine.reports[name], attribute)
        return self._open[fh][offset : offset + size]

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        name, attribute = _split(path)
        if attribute == "privlevel":
            self._set_level(self._machine.reports[name], data)
        else:
            self._open[fh] = self._open.get(fh, b"")[:offset] + data
        return len(data)

    def release(self, path: str, fh: int) -> int:
        name, attribute = _split(path)
        data = self._open.pop(fh, b"")
        report = self._machine.reports.get(name)
        # The kernel has nobody to tell of an error here: a value that is too long changes nothing and does not count.
        if report is not None and attribute == "inblob" and 0 < len(data) <= _INBLOB_BYTES:
            report.inblob, report.generation = data, report.generation + 1
        return 0

    def _set_level(self, report: Report, data: bytes) -> None:
        level = int(data)
        if not self._machine.floor <= level < _LEVELS:
            raise mfusepy.FuseOSError(errno.EINVAL)
        report.level, report.generation = level, report.generation + 1

    def _content(self, report: Report, attribute: str) -> bytes:
        machine = self._machine
        texts = {
            "generation": str(report.generation),
            "provider": machine.provider,
            "privlevel_floor": str(machine.floor),
        }
        if attribute in texts:
            return f"{texts[attribute]}\n".encode()
        if not report.inblob:
            raise mfusepy.FuseOSError(errno.EINVAL)
        if attribute == "outblob" and machine.failures:
            raise mfusepy.FuseOSError(machine.failures.pop(0))
        if report.made_for != report.generation:
            report.made, report.made_for = machine.make(report.inblob, report.level), report.generation
            machine.made += 1
        if attribute == "outblob" and machine.meddling:
            machine.meddling -= 1
            report.generation += 1
        return report.made[attribute == "auxblob"]


def _split(path: str) -> tuple[str, str]:
    name, _, attribute = path.lstrip("/").partition("/")
    return name, attribute


def usable() -> bool:
    """Whether this machine lets us mount file systems of our own."""
    return os.access("/dev/fuse", os.R_OK | os.W_OK) and any(
        Path(folder, "fusermount3").exists() for folder in os.get_exec_path()
    )


@contextlib.contextmanager
def mounted(machine: Machine, folder: Path) -> Iterator[Path]:
    """`machine` as a directory like /sys/kernel/config/tsm/report."""

    def serve() -> None:
        mfusepy.FUSE(_Files(machine), str(folder), foreground=True, nothreads=True, direct_io=True)

    thread = threading.Thread(target=serve, name="tsm", daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not folder.is_mount():
        assert time.monotonic() < deadline, "the file system did not mount"
        time.sleep(0.005)
    try:
        yield folder
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(folder)], check=True)
        thread.join(10)
