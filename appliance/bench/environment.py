"""Where a measurement took place: without it no number of a measurement means anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import appliance

_GIT_LIMIT_S = 10.0


def describe() -> dict[str, object]:
    """The machine, the software and the source, in plain values."""
    return {
        "cpu": _cpu_model(Path("/proc/cpuinfo")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "version": importlib.metadata.version("attested-inference"),
        "source": source_revision(Path(appliance.__file__).parent),
        "load": round(os.getloadavg()[0], 2),
    }


def source_revision(directory: Path) -> str:
    """The commit checked out there, with "-dirty" where files that git follows were changed; "" outside a checkout."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model(path: Path) -> str:
    """As the kernel names it (proc_cpuinfo(5)); the architecture where it names none."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.machine()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
