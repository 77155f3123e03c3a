"""Build llama-cpp-python as the appliance runs it, or find the wheel built before; its path is the only line on stdout.

    python scripts/engine_wheel.py --log LOGFILE [--install]

With --install it is also proven on this processor (engine_proof.py) and installed: only then, and with what the proof
found beside its libraries. The environment has to have what llama_cpp imports.

The source is the one that image/lock.toml pins by its SHA-256, with native/llama_cpp linked in. All of it is
compiled for one fixed instruction set, so that a wheel serves every x86-64-v3 processor with the same bits
(docs/adr/0010); on other architectures it is llama.cpp without the kernels. Wheels are kept in
~/.cache/attested-inference/engine (XDG_CACHE_HOME), each under a digest of everything that decides what is
compiled, with a record beside it; one that is not as its record says is built again. pip's own cache knows
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
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import engine_proof
from engine_proof import ProofError
from pip_progress import Filter

ROOT = Path(__file__).resolve().parents[1]
_ENVIRON = os.environ  # noqa: TID251 - composition root
NATIVE = "native/llama_cpp"
FLAGS = (
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DGGML_LLAMAFILE=OFF",
    "-DGGML_CPU_REPACK=OFF",
    "-DGGML_NATIVE=OFF",
    "-DGGML_AVX=ON",
    "-DGGML_AVX2=ON",
    "-DGGML_BMI2=ON",
    "-DGGML_F16C=ON",
    "-DGGML_FMA=ON",
    "-DGGML_SSE42=ON",
    "-DCMAKE_C_FLAGS=-ffp-contract=off",
    "-DCMAKE_CXX_FLAGS=-ffp-contract=off",
)
NEEDED = ("avx", "avx2", "bmi2", "f16c", "fma")
_NAME = "llama-cpp-python"
_RECORD = "record.json"
PROOF = "attested-proof.json"
_LOG_LINES = 40
_ELF = {"x86_64": 62, "aarch64": 183}


class WheelError(Exception):
    """Why a wheel, or this machine, cannot be used."""


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
    """What of this machine decides which code is compiled: compiler, architecture, C library."""
    names = (_ENVIRON.get("CXX", ""), "c++", "g++", "clang++")
    compiler = next((name for name in names if name and shutil.which(name)), "c++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return {"compiler": version, "machine": platform.machine(), "libc": "-".join(platform.libc_ver())}


def check_processor(cpuinfo: str, architecture: str) -> str | None:
    """A word about an architecture without kernels. Raises WheelError for a processor that lacks what is needed."""
    if architecture != "x86_64":
        return (
            f"This project's kernels are for x86-64: on {architecture} llama.cpp computes alone, in an arithmetic of "
            "its own, and receipts say so."
        )
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    missing = [one for one in NEEDED if "flags" in told and one not in told["flags"].split()]
    if missing:
        raise WheelError(
            f"this processor ({told.get('model name', 'unknown')}) has no {', '.join(missing)}: the engine "
            "is compiled for x86-64-v3, which Intel processors have since Haswell (2013) and AMD's since "
            "Excavator (2015). In a virtual machine choose a model that passes them on (QEMU: -cpu host)"
        )
    return None


def key(source: Source, root: Path, environment: Mapping[str, str]) -> str:
    """Names a wheel: 32 hexadecimal digits over source, flags, the bytes of our kernels and `environment`."""
    files = sorted(path for path in (root / NATIVE).iterdir() if path.is_file())
    native = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    told = [source.version, source.sha256, FLAGS, native, dict(environment)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def find(folder: Path, architecture: str) -> Path | None:
    """The wheel that an earlier run left whole; None where none did. Raises WheelError for one that is damaged."""
    if not folder.exists():
        return None
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        name, digest = str(record["wheel"]), str(record["sha256"])
        content = (folder / Path(name).name).read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WheelError(f"{folder} has no wheel with its record: {error}") from error
    wheel = folder / Path(name).name
    if hashlib.sha256(content).hexdigest() != digest:
        raise WheelError(f"{wheel} is not the wheel that was built: its SHA-256 differs from its record's")
    check_wheel(wheel, architecture)
    return wheel


def check_wheel(wheel: Path, architecture: str) -> None:
    """Raises WheelError unless the archive is whole and its libraries are for `architecture`."""
    try:
        with ZipFile(wheel) as archive:
            if (bad := archive.testzip()) is not None:
                raise WheelError(f"{wheel} is damaged: {bad} does not have its checksum")
            names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1].startswith("libggml-cpu.so")]
            heads = {archive.read(name)[:20] for name in names}
    except (BadZipFile, OSError, EOFError) as error:
        raise WheelError(f"{wheel} is damaged: {error}") from error
    if not heads:
        raise WheelError(f"{wheel} holds no libggml-cpu.so")
    wanted = _ELF.get(architecture)
    for head in heads:
        found = int.from_bytes(head[18:20], "little")
        if head[:4] != b"\x7fELF" or (wanted is not None and found != wanted):
            name = next((name for name, number in _ELF.items() if number == found), f"ELF machine {found}")
            raise WheelError(f"{wheel} was built for {name}, and this machine is {architecture}")


Run = Callable[[Sequence[str], Mapping[str, str]], int]


def build(source: Source, root: Path, folder: Path, environment: Mapping[str, str], run: Run) -> Path:
    """Compile into `folder`, which appears only when the wheel is whole. Raises WheelError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as name:
        partial = Path(name)
        requirement = partial / "requirement.txt"
        requirement.write_text(f"{_NAME}=={source.version} --hash=sha256:{source.sha256}\n", encoding="utf-8")
        hook = shlex.quote(f"-DCMAKE_PROJECT_ggml_INCLUDE={root / NATIVE / 'attested.cmake'}")
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir", "--no-binary", _NAME]
        command += ["-r", str(requirement), "-w", str(partial / "out")]
        if (status := run(command, {"CMAKE_ARGS": " ".join((*FLAGS, hook))})) != 0:
            raise WheelError(f"llama.cpp could not be compiled: pip ended with status {status}")
        wheels = sorted((partial / "out").glob("llama_cpp_python-*.whl"))
        if not wheels:
            raise WheelError("pip left no wheel of llama-cpp-python")
        wheel = wheels[0]
        check_wheel(wheel, environment["machine"])
        record = {"wheel": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(), "flags": FLAGS}
        text = json.dumps({**record, **environment, "source": source.version}, indent=1, sort_keys=True)
        (partial / "out" / _RECORD).write_text(text + "\n", encoding="utf-8")
        (partial / "out").rename(folder)
    return folder / wheel.name


def _run_shown(log: Path) -> Run:
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
    parser.add_argument("--install", action="store_true", help="prove the engine here, and install it where it holds")
    options = parser.parse_args(arguments)
    log: Path = options.log
    log.parent.mkdir(parents=True, exist_ok=True)
    cpuinfo = Path("/proc/cpuinfo")
    try:
        here = machine()
        text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
        if (word := check_processor(text, here["machine"])) is not None:
            _say(word)
        wheel = _wheel(pinned(ROOT / "image/lock.toml"), here, log)
        if options.install:
            install(wheel, proven(wheel, here["compiler"].partition("\n")[0], text))
        print(wheel)
    except (WheelError, ProofError) as error:
        _say(f"The engine is not installed: {error}.")
        return 1
    return 0


def proven(wheel: Path, compiler: str, cpuinfo: str) -> Mapping[str, object]:
    """What the proof finds of a wheel on this processor, or found before: the record keeps it. Raises ProofError."""
    file = wheel.with_name(_RECORD)
    record = json.loads(file.read_text(encoding="utf-8"))
    golden = engine_proof.golden()
    features = next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")
    processor = engine_proof.processor_name(cpuinfo)
    place = hashlib.sha256(json.dumps([processor, features, dict(golden)], sort_keys=True).encode()).hexdigest()[:16]
    known: dict[str, object] = record.setdefault("proofs", {}).get(place)
    if known is None:
        with tempfile.TemporaryDirectory(prefix="engine-") as site:
            with ZipFile(wheel) as archive:
                archive.extractall(site)
            engine = engine_proof.Engine(site=Path(site), compiler=compiler, processor=processor)
            found = engine_proof.prove(engine, golden, _say).record()
        known = {**found, "processor": processor, "compiler": compiler}
        record["proofs"][place] = known
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        partial.replace(file)
    return known


def install(wheel: Path, proof: Mapping[str, object]) -> None:
    """Into this environment, with the proof beside the libraries that it is about. Raises WheelError."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)]
    if (status := subprocess.run(command, check=False).returncode) != 0:
        raise WheelError(f"pip could not install {wheel}: status {status}")
    (library,) = Path(sysconfig.get_path("purelib")).glob("llama_cpp/lib/libggml-cpu.so")
    told = {**proof, "library": hashlib.sha256(library.read_bytes()).hexdigest()}
    library.with_name(PROOF).write_text(json.dumps(told, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _wheel(source: Source, here: Mapping[str, str], log: Path) -> Path:
    cache = Path(_ENVIRON.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attested-inference" / "engine"
    folder = cache / key(source, ROOT, here)
    try:
        if (wheel := find(folder, here["machine"])) is not None:
            return wheel
    except WheelError as error:
        _say(f"{error}. It is removed, and compiled again.")
        shutil.rmtree(folder)
    try:
        return build(source, ROOT, folder, here, _run_shown(log))
    except WheelError:
        if log.is_file():
            _say("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]))
            _say(f"The whole log is {log}.")
        raise


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
