"""Start the firmware in QEMU, without a TEE, and read on the console what it starts and what it refuses.

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
    *("-M", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "1024"),
    *("-nodefaults", "-display", "none", "-no-reboot"),
)
REFUSED: Final = b"No kernel whose digest was measured: nothing is started."
_LINUX: Final = b"Linux version"
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`arguments` for QEMU beside the firmware; `shows` must come on the console, `never` must not."""

    what: str
    firmware: Path
    arguments: tuple[str | Path, ...]
    shows: bytes
    never: bytes | None = None


def trials(firmware: Path, image: Path) -> tuple[Trial, ...]:
    """What is tried with the firmware in one folder and the image in the other."""
    amd, tdx = firmware / "AMDSEV.fd", firmware / "INTELTDX.fd"
    kernel = ("-kernel", image / "vmlinuz", "-initrd", image / "initrd.img", "-append", "console=ttyS0")
    disk = ("-drive", f"file={image / 'boot-auto.img'},if=none,id=d0,format=raw,readonly=on")
    return (
        Trial(what="nothing to start", firmware=amd, arguments=(), shows=REFUSED, never=_LINUX),
        Trial(
            what="a kernel whose digest was not measured", firmware=amd, arguments=kernel, shows=REFUSED, never=_LINUX
        ),
        Trial(
            what="the boot disk",
            firmware=tdx,
            arguments=(*disk, "-device", "virtio-blk-pci,drive=d0,bootindex=1"),
            shows=b"appliance: initrd after",
        ),
    )


def run(trial: Trial, *, environ: Mapping[str, str], limit_s: float) -> float:
    """Seconds until the console showed what it must. Raises BuildError with the console's end where it did not."""
    with tempfile.TemporaryDirectory() as scratch:
        console = Path(scratch) / "console"
        command: Sequence[str | Path] = (
            *_MACHINE,
            *("-bios", trial.firmware, "-serial", f"file:{console}"),
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
                    raise BuildError(f"{trial.firmware.name} started {trial.what}")
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
        raise BuildError(f"{trial.firmware.name}, {trial.what}: the console never showed {trial.shows!r}; last: {tail}")
