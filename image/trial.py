"""Start something in QEMU, without a TEE, and read on the console what it did.

TCG, because no machine has to offer more. QEMU's exit status says nothing about a boot, so it is not looked at.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from image.build.errors import BuildError

_MACHINE: Final = (
    "qemu-system-x86_64",
    *("-M", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "2048"),
    *("-nodefaults", "-display", "none", "-no-reboot"),
)
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`arguments` for QEMU; `shows` must come on the console, `never` must not. `firmware` None: QEMU's own."""

    what: str
    arguments: tuple[str | Path, ...]
    shows: bytes
    firmware: Path | None = None
    never: bytes | None = None

    def __str__(self) -> str:
        return self.what if self.firmware is None else f"{self.firmware.name}, {self.what}"


def run(trial: Trial, *, environ: Mapping[str, str], limit_s: float) -> float:
    """Seconds until the console showed what it must. Raises BuildError with the console's end where it did not."""
    with tempfile.TemporaryDirectory() as scratch:
        console = Path(scratch) / "console"
        command: Sequence[str | Path] = (
            *_MACHINE,
            *(("-bios", trial.firmware) if trial.firmware is not None else ()),
            *("-serial", f"file:{console}"),
            *trial.arguments,
        )
        started, said = time.monotonic(), b""
        try:
            machine = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL)
        except FileNotFoundError as error:
            raise BuildError(f"{command[0]} is not installed: apt-get install qemu-system-x86") from error
        try:
            while time.monotonic() - started < limit_s:
                ended = machine.poll() is not None
                said = console.read_bytes() if console.is_file() else b""
                if trial.never is not None and trial.never in said:
                    raise BuildError(f"{trial}: it was started")
                if trial.shows in said:
                    return time.monotonic() - started
                if ended:
                    break
                time.sleep(_POLL_S)
        finally:
            machine.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                machine.wait(10)
        tail = said[-400:].decode("ascii", "replace")
        raise BuildError(f"{trial}: the console never showed {trial.shows!r}; last: {tail}")
