#!/usr/bin/python3.13 -I
"""The first process of an enclave: stands in the first ramdisk as /init, and uses the image's own init where it can.

Mounts, loads the modules that the ramdisk brings, tells the parent instance that the enclave lives, gives the Nitro
Secure Module to the service's user, and starts the service without any privilege. When the service ends, so does the
enclave; one line on the console says why. There are no operator settings: an enclave has no disk to read them from.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from image.init import machine, service
from image.init.cmdline import FIXED, printable
from image.init.errors import Stop

CONFIG: Final = "/etc/appliance/enclave.toml"
MODULES: Final = Path("/enclave/modules")
MODELS: Final = Path("/srv/models")
STATE: Final = Path("/run/appliance")
# Beside what every image has, what an enclave's hypervisor and kernel use, by name. Any other option stops the boot,
# because nobody would act on it.
OWN_OPTIONS: Final = ("reboot=k", "pci=off", "i8042.noaux", "i8042.nomux", "i8042.nopnp", "i8042.dumbkbd")
_ADDED_BY_HYPERVISOR: Final = "virtio_mmio.device="  # where vsock and the NSM are
# aws-nitro-enclaves-sdk-bootstrap, init/init.c: the parent instance waits for this byte, and sends it back.
_PARENT_CID, _HEARTBEAT_PORT, _HEARTBEAT = 3, 9000, b"\xb7"
_HEARTBEAT_S: Final = 10.0
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
# What the image's own init finds there already.
_MOUNTS: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "/proc": ("proc", _NOSUID | _NODEV | _NOEXEC),
        "/sys": ("sysfs", _NOSUID | _NODEV | _NOEXEC),
        "/dev": ("devtmpfs", _NOSUID | _NOEXEC),
    }
)
_SYS_FINIT_MODULE: Final = 313  # x86-64
_RB_AUTOBOOT: Final = 0x01234567
_TICK_S: Final = 86400.0


def say(text: str) -> None:
    """One line on the console."""
    with Path("/dev/console").open("w", encoding="ascii", errors="replace") as console:
        console.write(f"appliance: {text}\r\n")


def mount_all() -> None:
    """Raises Stop."""
    libc = ctypes.CDLL(None, use_errno=True)
    for target, (kind, flags) in _MOUNTS.items():
        if libc.mount(kind.encode(), target.encode(), kind.encode(), flags, b"") != 0:
            raise Stop(f"{target} cannot be mounted: {os.strerror(ctypes.get_errno())}")


def check_command_line(text: str) -> None:
    """Raises Stop naming an option unknown here: a misspelt one would be an option that is not in force."""
    known = {*FIXED, *OWN_OPTIONS}
    unknown = [word for word in text.split() if word not in known and not word.startswith(_ADDED_BY_HYPERVISOR)]
    if unknown:
        raise Stop(f"unknown command line option {printable(unknown[0])!r}")


def load_modules(folder: Path) -> None:
    """Load what is in `folder`, in the order of the names. Raises Stop."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            if libc.syscall(_SYS_FINIT_MODULE, file.fileno(), b"", 0) != 0:
                raise Stop(f"the module {path.name} does not load: {os.strerror(ctypes.get_errno())}")


def send_heartbeat() -> None:
    """Tell the parent instance that the enclave has booted. It is told nothing else. Raises Stop."""
    try:
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as channel:
            channel.settimeout(_HEARTBEAT_S)
            channel.connect((_PARENT_CID, _HEARTBEAT_PORT))
            channel.sendall(_HEARTBEAT)
            if channel.recv(1) != _HEARTBEAT:
                raise Stop("the parent instance answers the heartbeat with something else")
    except OSError as error:
        raise Stop(f"no parent instance over vsock: {error.strerror or error}") from error


def command() -> list[str]:
    """The service's argument vector."""
    return [service.PYTHON, "-s", "-m", "appliance", "serve", "--config", CONFIG]


def run() -> str:
    """The life of the enclave; returns why it ends. Raises Stop, OSError."""
    mount_all()
    check_command_line(Path("/proc/cmdline").read_text(encoding="utf-8", errors="replace"))
    load_modules(MODULES)
    machine.prepare()  # from here on no module can be loaded
    machine.check_processor(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    model_bytes = sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file())
    machine.check_memory(Path("/proc/meminfo").read_text(encoding="ascii"), model_bytes)
    send_heartbeat()
    if "nsm" not in machine.hand_over(service.UID):
        raise Stop("no /dev/nsm: this is no enclave, or its kernel does not find the module")
    STATE.mkdir(mode=0o700)
    os.chown(STATE, service.UID, service.UID)
    process = service.start(command(), uid=service.UID, home=str(STATE), before=machine.unprivileged())
    watch = service.Watch(on_ready=lambda: say("ready"), on_tick=lambda: _TICK_S, tick_s=_TICK_S)
    return service.supervise(process, (), watch)


def main() -> None:
    """Never returns: restarting is how an enclave ends (reboot=k), and the end of process 1 would be a panic."""
    try:
        say(f"stopped: {run()}")
    except Stop as stop:
        say(f"stopped: {stop}")
    except OSError as error:
        say(f"stopped: {error.strerror}: {error.filename}")
    finally:
        os.sync()
        ctypes.CDLL(None).reboot(_RB_AUTOBOOT)
        signal.pause()


if __name__ == "__main__":
    main()
