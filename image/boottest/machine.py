"""An emulated machine: QEMU without KVM, OVMF, a TPM in software, a serial console that is read as it is written."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from image.boottest.errors import BootTestError, EmulatorCrash

FIRMWARE: Final = Path("/usr/share/OVMF/OVMF_CODE_4M.fd")
VARIABLES: Final = Path("/usr/share/OVMF/OVMF_VARS_4M.fd")
GUEST_PORT: Final = 8443
_START_LIMIT_S: Final = 20.0
_POLL_S: Final = 0.2
_TAIL_LINES: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a machine has. `disks` come in this order, after the one it boots from; `smbios` as for -smbios type=11."""

    boot: Path
    disks: Sequence[Path]
    memory_mib: int = 2048
    cpus: int = 2
    cpu_model: str = "max"
    smbios: str | None = None
    network: bool = True


@dataclass(slots=True)
class Machine:
    """A running machine. `port` on loopback leads to the guest's port; `console` is what it wrote so far."""

    process: subprocess.Popen[bytes]
    folder: Path
    port: int
    started: float = field(default_factory=time.monotonic)

    @property
    def console(self) -> str:
        path = self.folder / "console"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    @property
    def cpu_s(self) -> float:
        """Processor seconds that the emulator took: what an idle machine would at most need, whoever else runs here."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_for(self, text: str, limit_s: float) -> float:
        """Seconds from the start until the console has `text`. Raises BootTestError where it ends or takes too long."""
        while text not in self.console:
            if self.process.poll() is not None and text not in self.console:
                self.check_started()
                raise BootTestError(f"expected {text!r}, but the machine ended:\n{self.tail()}")
            if time.monotonic() - self.started > limit_s:
                raise BootTestError(f"expected {text!r} within {limit_s:.0f} s:\n{self.tail()}")
            time.sleep(_POLL_S)
        return time.monotonic() - self.started

    def wait_end(self, limit_s: float) -> None:
        """Wait until the machine is off. Raises BootTestError."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise BootTestError(f"the machine is still on after {limit_s:.0f} s:\n{self.tail()}") from None

    def check_started(self) -> None:
        """Raises EmulatorCrash where the kernel crashed before the initrd's first line."""
        if "appliance: " not in self.console and "Kernel panic - not syncing" in self.console:
            raise EmulatorCrash("the kernel crashed in the emulator before anything of the image ran")

    def press_power(self) -> None:
        """The power button, by QEMU's control socket (QMP)."""
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(self.folder / "qmp"))
            with control.makefile("rwb", buffering=0) as stream:
                stream.readline()
                for command in ("qmp_capabilities", "system_powerdown"):
                    stream.write(json.dumps({"execute": command}).encode() + b"\n")
                    stream.readline()

    def tail(self) -> str:
        return "\n".join(self.console.splitlines()[-_TAIL_LINES:])


@contextlib.contextmanager
def software_tpm(state: Path, folder: Path) -> Iterator[Path]:
    """A TPM for one machine: its seeds are in `state`, so it is the same one next time. Yields its control socket."""
    state.mkdir(parents=True, exist_ok=True)
    control = folder / "tpm"
    command = [
        "swtpm",
        "socket",
        "--tpm2",
        "--tpmstate",
        f"dir={state.resolve()}",
        "--ctrl",
        f"type=unixio,path={control}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_LIMIT_S
        while not control.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise BootTestError("swtpm does not start")
            time.sleep(0.02)
        yield control
    finally:
        process.terminate()
        process.wait(_START_LIMIT_S)


@contextlib.contextmanager
def boot(shape: Shape, *, tpm_state: Path, folder: Path) -> Iterator[Machine]:
    """A machine that was just switched on; it is off afterwards, whatever happens. `folder` is new, and its own."""
    folder.mkdir(parents=True)
    folder = folder.resolve()
    variables = folder / "variables.fd"
    shutil.copyfile(VARIABLES, variables)
    port = free_port()
    with software_tpm(tpm_state, folder) as tpm:
        command = _command(shape, folder, tpm, port)
        with (folder / "emulator").open("wb") as said:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            yield Machine(process=process, folder=folder, port=port)
        finally:
            process.kill()
            process.wait()


def _command(shape: Shape, folder: Path, tpm: Path, port: int) -> list[str]:
    command = [
        "qemu-system-x86_64",
        "-M",
        "q35,smm=off",
        "-accel",
        "tcg",
        "-cpu",
        shape.cpu_model,
        "-smp",
        str(shape.cpus),
    ]
    command += ["-m", str(shape.memory_mib), "-nodefaults", "-display", "none", "-no-reboot"]
    command += ["-serial", f"file:{folder}/console", "-qmp", f"unix:{folder}/qmp,server=on,wait=off"]
    command += ["-drive", f"if=pflash,format=raw,unit=0,readonly=on,file={FIRMWARE}"]
    command += ["-drive", f"if=pflash,format=raw,unit=1,file={folder}/variables.fd"]
    command += ["-chardev", f"socket,id=tpm,path={tpm}", "-tpmdev", "emulator,id=tpm0,chardev=tpm"]
    command += ["-device", "tpm-tis,tpmdev=tpm0"]
    for number, disk in enumerate((shape.boot, *shape.disks)):
        command += ["-drive", f"file={disk.resolve()},if=none,id=d{number},format=raw,readonly=on"]
        command += ["-device", f"virtio-blk-pci,drive=d{number}" + (",bootindex=1" if number == 0 else "")]
    if shape.network:
        command += ["-netdev", f"user,id=n,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:{GUEST_PORT}"]
        command += ["-device", "virtio-net-pci,netdev=n,romfile="]
    if shape.smbios is not None:
        command += ["-smbios", f"type=11,value={shape.smbios}"]
    return command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
