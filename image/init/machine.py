"""The machine below the appliance: mounts, limits, checks of processor and memory, device nodes, its end."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from image.init.errors import Stop

_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_RB_POWER_OFF: Final = 0x4321FEDC
_PR_SET_NO_NEW_PRIVS: Final = 38
CPU_FLAGS: Final = ("avx", "avx2", "bmi2", "f16c", "fma", "sse4_2")
"""What llama.cpp of this image was compiled for, by its name in /proc/cpuinfo."""
_SPARE_BYTES: Final = 384 << 20
_CHUNK_BYTES: Final = 1 << 20
_MEMORY: Final = ("MemTotal", "MemFree", "Buffers", "Cached", "SReclaimable", "AnonPages", "Shmem")
_MOUNTS: Final = (
    ("tmpfs", "/run", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=0755,size=16m"),
    ("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=1777,size=64m"),  # noqa: S108
    ("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=1777,size=64m"),  # noqa: S108
)
# These may be absent: not every kernel has them, and the appliance says what it lacks.
_OPTIONAL_MOUNTS: Final = (
    ("securityfs", "/sys/kernel/security", "securityfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, ""),
    ("configfs", "/sys/kernel/config", "configfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, ""),
)
SYSCTLS: Final = (
    ("kernel/core_pattern", "|/nonexistent"),
    ("fs/suid_dumpable", "0"),
    ("kernel/dmesg_restrict", "1"),
    ("kernel/kptr_restrict", "2"),
    ("kernel/sysrq", "0"),
    ("kernel/unprivileged_bpf_disabled", "1"),
    ("kernel/kexec_load_disabled", "1"),
    ("kernel/yama/ptrace_scope", "3"),
    ("net/ipv4/conf/all/accept_redirects", "0"),
    ("net/ipv4/conf/all/send_redirects", "0"),
    ("net/ipv6/conf/all/disable_ipv6", "1"),
    ("user/max_user_namespaces", "0"),
    ("kernel/modules_disabled", "1"),
)
NODES: Final = ("tpm0", "tpmrm0", "sev-guest", "tdx_guest", "nsm", "vsock")
_TSM_REPORTS: Final = Path("/sys/kernel/config/tsm/report")
_TSM_ENTRY: Final = (
    "attested-inference"  # the name that the appliance looks for (appliance/attestation/families/tsm.py)
)


def prepare() -> None:
    """Mounts, settings of the kernel, no core dumps, no swap. Raises Stop."""
    for entry in _MOUNTS:
        Path(entry[1]).mkdir(exist_ok=True)
        _mount(*entry)
    for entry in _OPTIONAL_MOUNTS:
        if Path(entry[1]).is_dir():
            _mount(*entry)
    for name, value in SYSCTLS:
        path = Path("/proc/sys") / name
        if path.exists():
            try:
                path.write_text(value, encoding="ascii")
            except OSError as error:
                raise Stop(f"the kernel refuses the setting {name}: {error.strerror}") from error
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    areas = Path("/proc/swaps")
    if areas.exists() and len(areas.read_text(encoding="ascii").splitlines()) > 1:
        raise Stop("swap is on")


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    if _LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()) != 0:
        raise Stop(f"{target} cannot be mounted: {os.strerror(ctypes.get_errno())}")


def check_processor(cpuinfo: str) -> None:
    """Raises Stop where a processor of /proc/cpuinfo lacks what the engine was compiled for."""
    flags = [set(line.partition(":")[2].split()) for line in cpuinfo.splitlines() if line.startswith("flags")]
    missing = [flag for flag in CPU_FLAGS if not all(flag in one for one in flags)] if flags else list(CPU_FLAGS)
    if missing:
        raise Stop(f"the processor lacks {', '.join(missing)}: this image needs x86-64-v3 (AVX2)")


def check_memory(meminfo: str, model_bytes: int) -> None:
    """Raises Stop where a copy of the model and a little for all else does not fit in what /proc/meminfo has."""
    available = meminfo_bytes(meminfo, "MemAvailable")
    needed = model_bytes + _SPARE_BYTES
    if available < needed:
        raise Stop(f"too little memory: {available >> 20} MiB available, at least {needed >> 20} MiB needed")


def meminfo_bytes(meminfo: str, name: str) -> int:
    """One value of /proc/meminfo, in bytes; 0 where it is not there."""
    for line in meminfo.splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return 0


def memory_in_use(meminfo: str) -> str:
    """What is in use and cannot be had back, in words: all but free memory and what the kernel may drop at any time.

    That is cached files and disks, less what is a file in memory alone (the sealed model), and reclaimable slabs
    (proc_meminfo(5)). MemAvailable is something else: it takes off what the kernel keeps free for itself, and up to
    half of all caches. The kernel's part is all that is neither a process's nor a file in memory.
    """
    of = {name: meminfo_bytes(meminfo, name) for name in _MEMORY}
    droppable = of["Buffers"] + of["Cached"] - of["Shmem"] + of["SReclaimable"]
    used = of["MemTotal"] - of["MemFree"] - droppable
    kernel = used - of["AnonPages"] - of["Shmem"]
    parts = (("processes", of["AnonPages"]), ("files in memory", of["Shmem"]), ("kernel", kernel))
    named = ", ".join(f"{name} {value >> 20}" for name, value in parts)
    return f"{used >> 20} of {of['MemTotal'] >> 20} MiB in use ({named}; caches {droppable >> 20} more)"


def read_whole(path: Path, size: int, what: str) -> None:
    """Read `size` bytes of a disk, so that verity checks every block. Raises Stop."""
    done = 0
    try:
        with path.open("rb", buffering=0) as disk:
            while done < size and (chunk := disk.read(min(_CHUNK_BYTES, size - done))):
                done += len(chunk)
            os.posix_fadvise(disk.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise Stop(f"the {what} disk is corrupt: {error.strerror} after {done} bytes") from error
    if done != size:
        raise Stop(f"the {what} disk is corrupt: it ends after {done} of {size} bytes")


def hand_over(
    uid: int, nodes: Iterable[str] = NODES, dev: Path = Path("/dev"), reports: Path = _TSM_REPORTS
) -> tuple[str, ...]:
    """Give the service the nodes that evidence and vsock come from; returns those that are there."""
    given = []
    for name in nodes:
        node = dev / name
        if node.exists():
            os.chown(node, uid, uid)
            node.chmod(0o600)
            given.append(name)
    if reports.is_dir() and hand_over_reports(uid, reports):
        given.append("tsm")
    return tuple(given)


def hand_over_reports(uid: int, reports: Path) -> bool:
    """Make an entry for reports and give it to the service: the kernel gives those that the service makes to root.

    False where no driver makes reports here.
    """
    entry = reports / _TSM_ENTRY
    try:
        entry.mkdir()
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    for path in (entry, *sorted(entry.iterdir())):
        os.chown(path, uid, uid)
    return True


def unprivileged() -> Callable[[], None]:
    """For the child just before it becomes the service: no privilege by executing, no core dumps, end with init."""

    def apply() -> None:
        _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return apply


def power_off() -> None:
    """End the machine; does not come back where init may do that."""
    os.sync()
    _LIBC.reboot(_RB_POWER_OFF)
