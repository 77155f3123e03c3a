"""Where a measurement took place: without it no number of a measurement means anything."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import appliance
from appliance.bench.served import interpreter, of_another_python
from appliance.errors import BootError

_GIT_LIMIT_S = 10.0
_IMPORT_LIMIT_S = 60.0


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


def describe_installation(python: Path, environ: Mapping[str, str]) -> dict[str, object]:
    """What `describe` says in another installation. Raises BootError where there is none of this project."""
    program = "import json\nfrom appliance.bench.environment import describe\nprint(json.dumps(describe()))"
    command = [*interpreter(python), "-c", program]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=of_another_python(environ),
            timeout=_IMPORT_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BootError(f"{python} cannot be run: {type(error).__name__}") from error
    try:
        described = json.loads(done.stdout) if done.returncode == 0 else None
    except ValueError:
        described = None
    if not isinstance(described, dict):
        raise BootError(f"{python} has no installation of the appliance that could be measured")
    return described


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
