#!/usr/bin/python3.13 -IS
"""The first process of an enclave. Stands in the first ramdisk as /init, imports nothing but the standard library.

Mounts, loads the modules that the image brings, tells the parent instance that the enclave lives, gives the Nitro
Secure Module to the service's user, and starts the service without any privilege. When the service ends, so does the
enclave: one line on the console says why. There are no operator settings: an enclave has no disk to read them from.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

USER = 1000
SERVICE = ("/usr/bin/python3.13", "-I", "-m", "appliance", "serve", "--config", "/etc/appliance/enclave.toml")
ENVIRONMENT: Mapping[str, str] = MappingProxyType({"PATH": "/usr/bin", "HOME": "/run/appliance", "LC_ALL": "C.UTF-8"})
MODULES = Path("/enclave/modules")
DEVICE = Path("/dev/nsm")
# Words the kernel itself knows; any other word of the command line stops the boot, because nobody would act on it.
KNOWN_OPTIONS = frozenset(
    {
        "console",
        "i8042.dumbkbd",
        "i8042.noaux",
        "i8042.nomux",
        "i8042.nopnp",
        "init_on_free",
        "lockdown",
        "module.sig_enforce",
        "panic",
        "pci",
        "quiet",
        "random.trust_cpu",
        "rdinit",
        "reboot",
        "virtio_mmio.device",  # added by the hypervisor: where the vsock and the NSM are
    }
)
# aws-nitro-enclaves-sdk-bootstrap, init/init.c: the parent instance waits for this byte, and sends it back.
_PARENT_CID, _HEARTBEAT_PORT, _HEARTBEAT = 3, 9000, b"\xb7"
_HEARTBEAT_S = 10.0
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_MOUNTS = (
    ("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, ""),
    ("sysfs", "/sys", "sysfs", _NOSUID | _NODEV | _NOEXEC, ""),
    ("devtmpfs", "/dev", "devtmpfs", _NOSUID | _NOEXEC, "mode=0755"),
    ("tmpfs", "/dev/shm", "tmpfs", _NOSUID | _NODEV | _NOEXEC, "mode=1777,size=64m"),  # noqa: S108 - the mount itself
    ("tmpfs", "/run", "tmpfs", _NOSUID | _NODEV | _NOEXEC, "mode=0755,size=64m"),
    ("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV | _NOEXEC, "mode=1777,size=64m"),  # noqa: S108 - the mount itself
)
_SYS_FINIT_MODULE = 313  # x86-64
_PR_SET_NO_NEW_PRIVS = 38


class StopError(Exception):
    """Why the enclave ends, in one line."""


def main() -> None:
    """Never returns: as process 1 its end would be a panic. Restarting is how an enclave ends (reboot=k)."""
    try:
        mount_all()
        check_command_line(Path("/proc/cmdline").read_text(encoding="ascii"))
        load_modules(MODULES)
        send_heartbeat()
        hand_over(DEVICE)
        say(serve())
    except (StopError, OSError) as error:
        say(f"stopped: {error}")
    os.sync()
    ctypes.CDLL(None).reboot(0x01234567)  # LINUX_REBOOT_CMD_RESTART
    signal.pause()


def say(text: str) -> None:
    """One line on the console."""
    sys.stdout.write(f"enclave: {text}\n")
    sys.stdout.flush()


def mount_all() -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for source, target, kind, flags, data in _MOUNTS:
        Path(target).mkdir(exist_ok=True)
        if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def check_command_line(text: str) -> None:
    """Raises StopError naming a word unknown here: a misspelt one would be an option that is not in force."""
    unknown = [word for word in text.split() if word.partition("=")[0] not in KNOWN_OPTIONS]
    if unknown:
        raise StopError(f"unknown word on the kernel's command line: {unknown[0].partition('=')[0]}")


def load_modules(folder: Path) -> None:
    """Load what is in `folder`, in the order of the names. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            if libc.syscall(_SYS_FINIT_MODULE, file.fileno(), b"", 0) != 0:
                raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())} (module)", path.name)


def send_heartbeat() -> None:
    """Tell the parent instance that the enclave has booted. It is told nothing else. Raises StopError."""
    try:
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as channel:
            channel.settimeout(_HEARTBEAT_S)
            channel.connect((_PARENT_CID, _HEARTBEAT_PORT))
            channel.sendall(_HEARTBEAT)
            if channel.recv(1) != _HEARTBEAT:
                raise StopError("the parent instance answered the heartbeat with something else")
    except OSError as error:
        raise StopError(f"no parent instance over vsock: {error.strerror or error}") from error


def hand_over(device: Path) -> None:
    """The service's user alone may use the module. Raises StopError where there is none."""
    if not device.exists():
        raise StopError(f"no {device}: this is no enclave, or its kernel does not find the module")
    os.chown(device, USER, USER)
    device.chmod(0o600)


def serve() -> str:
    """Run the service until it ends; how it ended, in words."""
    home = Path(ENVIRONMENT["HOME"])
    home.mkdir(mode=0o700)
    os.chown(home, USER, USER)
    child = os.fork()
    if child == 0:
        become_service(SERVICE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        ended, status = os.wait()  # the service's orphans end here too
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return f"the service ended with status {code}" if code >= 0 else f"the service was ended by signal {-code}"


def become_service(command: Sequence[str]) -> None:
    """In the child: no privilege, no core dump, then the service."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.execve(command[0], list(command), ENVIRONMENT)  # noqa: S606 - a shell is what there is none of
    finally:
        os._exit(127)


if __name__ == "__main__":
    main()
