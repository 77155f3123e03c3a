"""Reports through Linux's configfs-tsm (Documentation/ABI/testing/configfs-tsm-report): one directory per request.

The kernel counts writes to a directory in its `generation`; a report whose generation is not the number of our own
writes answers somebody else's, so it is thrown away. Directories are made with unguessable names and removed again.

The kernel gives the files of a new directory to root, whoever made it. Where the service has no such rights, whoever
started it leaves a directory behind whose files are the service's: `HANDED_OVER`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from appliance.errors import AttestationUnavailable

T = TypeVar("T")

ROOT = Path("/sys/kernel/config/tsm/report")
HANDED_OVER = "attested-inference"
INBLOB_BYTES = 64
PROVIDER_SNP, PROVIDER_TDX = "sev_guest", "tdx_guest"

_LIMIT_BLOB_BYTES = 1 << 20
_LIMIT_TEXT_BYTES = 256
# What passes by itself: another request in flight, a race between writes, a signal, a quoting service that was slow.
_PASSING = frozenset({errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EEXIST})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TsmReport:
    """`outblob` is the report or quote, `auxblob` what the host added (certificates; empty where there is none)."""

    outblob: bytes
    auxblob: bytes


class _Conflict(Exception):
    """Somebody else wrote into our directory."""


class Tsm:
    """Asks the kernel below `root`. `monotonic` is seconds; `sleep` pauses between attempts, for `timeout_s` in all.

    Reading a report blocks in the kernel for as long as the hardware takes: call it off the event loop, one at a time.
    """

    def __init__(
        self,
        root: Path,
        *,
        random_bytes: Callable[[int], bytes],
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
        timeout_s: float = 10.0,
    ) -> None:
        self._root = root
        self._random_bytes = random_bytes
        self._monotonic = monotonic
        self._sleep = sleep
        self._timeout_s = timeout_s

    def provider(self) -> str:
        """Whose reports these are: "sev_guest", "tdx_guest", ... Raises AttestationUnavailable."""
        return self._repeated(self._read_provider)

    def report(self, inblob: bytes, *, provider: str) -> TsmReport:
        """A report of `provider` over `inblob` (64 bytes). Raises AttestationUnavailable."""
        if len(inblob) != INBLOB_BYTES:
            raise ValueError(f"report data has {INBLOB_BYTES} bytes")
        return self._repeated(lambda: self._report(inblob, provider))

    def _repeated(self, attempt: Callable[[], T]) -> T:
        deadline, pause_s = self._monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except (_Conflict, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _PASSING:
                    raise _unavailable(f"the kernel makes no report ({_name(error)})") from error
                if self._monotonic() + pause_s > deadline:
                    raise _unavailable("the kernel was busy with other reports for too long") from error
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read_provider(self) -> str:
        with self._directory() as directory:
            return _read_text(directory / "provider")

    def _report(self, inblob: bytes, provider: str) -> TsmReport:
        with self._directory() as directory:
            found = _read_text(directory / "provider")
            if found != provider:
                raise _unavailable(f"the kernel makes reports of {found!r}, not of {provider!r}")
            before = _generation(directory)
            writes = _set_privilege_level(directory)
            _write(directory / "inblob", inblob)
            outblob = _read(directory / "outblob", _LIMIT_BLOB_BYTES)
            auxblob = _read_if_there(directory / "auxblob")
            if _generation(directory) != before + writes + 1:
                raise _Conflict
        return TsmReport(outblob=outblob, auxblob=auxblob)

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Path]:
        handed_over = self._root / HANDED_OVER
        if handed_over.is_dir():
            yield handed_over
            return
        directory = self._root / f"attested-inference-{self._random_bytes(16).hex()}"
        directory.mkdir()
        try:
            yield directory
        finally:
            # The files inside are the kernel's: they go with the directory and cannot be removed one by one.
            with contextlib.suppress(OSError):
                directory.rmdir()


def _generation(directory: Path) -> int:
    """How often the kernel was written to in this directory. Raises AttestationUnavailable."""
    text = _read_text(directory / "generation")
    if not text.isascii() or not text.isdecimal():
        raise _unavailable("the kernel counts no generations")
    return int(text)


def _set_privilege_level(directory: Path) -> int:
    """Ask at the lowest level that the kernel allows, where that is not 0 (under an SVSM). Returns the writes made."""
    floor = _read_if_there(directory / "privlevel_floor").strip()
    if floor in (b"", b"0"):
        return 0
    _write(directory / "privlevel", floor)
    return 1


def _write(path: Path, data: bytes) -> None:
    """In one write: the kernel takes each as the whole value and counts it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _read(path: Path, limit_bytes: int) -> bytes:
    """The whole file. With os.read, because file objects take the EWOULDBLOCK of a race for the end of the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = bytearray()
        while piece := os.read(descriptor, 65536):
            found += piece
            if len(found) > limit_bytes:
                raise _unavailable(f"{path.name} is larger than {limit_bytes} bytes")
    finally:
        os.close(descriptor)
    return bytes(found)


def _read_text(path: Path) -> str:
    return _read(path, _LIMIT_TEXT_BYTES).decode("ascii", "replace").strip()


def _read_if_there(path: Path) -> bytes:
    """Attributes that some kernels and providers do not have are empty."""
    try:
        return _read(path, _LIMIT_BLOB_BYTES)
    except FileNotFoundError:
        return b""


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown error")


def _unavailable(message: str) -> AttestationUnavailable:
    return AttestationUnavailable("evidence_failed", f"No evidence can be made: {message}.", retry_after_s=5)


def missing(root: Path, provider: str) -> str | None:
    """Why `root` gives no reports of `provider`; None where it does."""
    if not root.is_dir():
        return f"no {root} (is configfs mounted, and the guest driver loaded?)"
    try:
        found = default_client(root, _own_number, timeout_s=1.0).provider()
    except AttestationUnavailable as error:
        return error.message
    return None if found == provider else f"the kernel makes reports of {found!r} here, not of {provider!r}"


def _own_number(size: int) -> bytes:
    """Tells the probes of processes apart; nothing secret is asked for."""
    return os.getpid().to_bytes(size, "big")


def default_client(root: Path, random_bytes: Callable[[int], bytes], *, timeout_s: float = 10.0) -> Tsm:
    """A client on the system's clock."""
    return Tsm(root, random_bytes=random_bytes, monotonic=time.monotonic, sleep=time.sleep, timeout_s=timeout_s)
