"""Linux's configfs-tsm as a file system of our own (FUSE): the same directories, files and refusals.

A report directory fills itself on mkdir and takes its files along on rmdir; its binary files are taken over when they
are closed; every write counts into `generation`; `outblob` is made when it is read, and made anew after a write.

What it holds is in this process, where a test can change it; what mounts it is another one (tsm_mount.py).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

Make = Callable[[bytes, int], tuple[bytes, bytes]]
"""(64 bytes of report data, privilege level) -> (outblob, auxblob)"""

_PROGRAM = Path(__file__).with_name("tsm_mount.py")
_MOUNT_LIMIT_S = 30.0
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


class _Files:
    """The file system's operations, by the names that tsm_mount.py sends. They raise OSError for a refusal."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._open: dict[int, bytes] = {}
        self._handles = 0

    def answer(self, line: bytes) -> bytes:
        """One operation and its arguments in JSON; the answer likewise."""
        name, *arguments = json.loads(line)
        operations: dict[str, Callable[..., Any]] = {
            "getattr": self._getattr,
            "readdir": self._readdir,
            "mkdir": self._mkdir,
            "rmdir": self._rmdir,
            "open": self._open_file,
            "read": self._read,
            "write": self._write,
            "release": self._release,
        }
        try:
            answer = {"value": operations[name](*arguments)}
        except OSError as error:
            answer = {"errno": error.errno}
        return json.dumps(answer).encode() + b"\n"

    def _getattr(self, path: str) -> dict[str, int]:
        name, attribute = _split(path)
        if not attribute:
            if name and name not in self._machine.reports:
                raise OSError(errno.ENOENT, path)
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        known = (_READABLE | _WRITABLE) - self._machine.absent
        if name not in self._machine.reports or attribute not in known:
            raise OSError(errno.ENOENT, path)
        return {"st_mode": stat.S_IFREG | (0o444 if attribute in _READABLE else 0o200), "st_nlink": 1, "st_size": 4096}

    def _readdir(self, path: str) -> list[str]:
        name, _ = _split(path)
        return list((_READABLE | _WRITABLE) - self._machine.absent if name else self._machine.reports)

    def _mkdir(self, path: str) -> int:
        name, attribute = _split(path)
        if attribute:
            raise OSError(errno.EPERM, path)
        if not self._machine.provider:
            raise OSError(errno.ENXIO, path)
        self._machine.reports[name] = Report()
        return 0

    def _rmdir(self, path: str) -> int:
        del self._machine.reports[_split(path)[0]]
        return 0

    def _open_file(self, path: str, flags: int) -> int:
        _, attribute = _split(path)
        if (flags & os.O_ACCMODE == os.O_RDONLY) is not (attribute in _READABLE):
            raise OSError(errno.EACCES, path)
        self._handles += 1
        return self._handles

    def _read(self, path: str, size: int, offset: int, fh: int) -> str:
        name, attribute = _split(path)
        if offset == 0:
            self._open[fh] = self._content(self._machine.reports[name], attribute)
        return base64.b64encode(self._open[fh][offset : offset + size]).decode()

    def _write(self, path: str, text: str, offset: int, fh: int) -> int:
        name, attribute = _split(path)
        data = base64.b64decode(text)
        if attribute == "privlevel":
            self._set_level(self._machine.reports[name], data)
        else:
            self._open[fh] = self._open.get(fh, b"")[:offset] + data
        return len(data)

    def _release(self, path: str, fh: int) -> int:
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
            raise OSError(errno.EINVAL, "refused")
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
            raise OSError(errno.EINVAL, "refused")
        if attribute == "outblob" and machine.failures:
            raise OSError(machine.failures.pop(0), "refused")
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


@functools.cache
def why_not() -> str:
    """Why no file system of our own can be mounted here, found by trying to; "" where one can."""
    with tempfile.TemporaryDirectory() as name:
        try:
            with mounted(Machine(make=lambda _inblob, _level: (b"", b"")), Path(name)):
                return ""
        except MountError as error:
            return f"no file system of our own can be mounted here (FUSE): {error}"


class MountError(Exception):
    """Nothing was mounted; the text is what libfuse, or the import of it, said last."""


@contextlib.contextmanager
def mounted(machine: Machine, folder: Path) -> Iterator[Path]:
    """`machine` as a directory like /sys/kernel/config/tsm/report. Raises MountError."""
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as said:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(folder), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        thread = threading.Thread(target=_serve, args=(_Files(machine), ours), name="tsm", daemon=True)
        thread.start()
        try:
            _wait_for_mount(process, folder, said)
            yield folder
        finally:
            _unmount(process, folder)
            thread.join(10)


def _serve(files: _Files, channel: socket.socket) -> None:
    with channel.makefile("rwb") as stream:
        for line in stream:
            stream.write(files.answer(line))
            stream.flush()


def _wait_for_mount(process: subprocess.Popen[bytes], folder: Path, said: IO[bytes]) -> None:
    deadline = time.monotonic() + _MOUNT_LIMIT_S
    while not folder.is_mount():
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            said.seek(0)
            lines = said.read().decode("utf-8", "replace").strip().splitlines()
            raise MountError(lines[-1] if lines else f"not mounted within {_MOUNT_LIMIT_S:.0f} s")
        time.sleep(0.005)


def _unmount(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # libfuse unmounts and ends
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=True)
