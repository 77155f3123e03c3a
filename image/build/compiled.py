"""Compile, in the chroot, the Python packages that come as source, llama.cpp among them for one kind of processor.

llama.cpp chooses no variant at run time: variants give other bits, so the same prompt would get another answer
on another machine. This build needs x86-64-v3 (AVX2, FMA, F16C, BMI2); the image's init refuses less. The project's
own kernels (native/llama_cpp, docs/adr/0010) are linked in: they choose instructions at run time, and
every choice gives the same bits.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final
from zipfile import BadZipFile, ZipFile

from image.build.chroot import Chroot
from image.build.errors import BuildError
from image.build.lock import Input, digest

_WORK: Final = "/build"
_NATIVE: Final = f"{_WORK}/native"
# Those of scripts/engine_wheel.py: every build of the project has one instruction set and one order of operations.
LLAMA_FLAGS: Final = (
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
    f"-DCMAKE_PROJECT_ggml_INCLUDE={_NATIVE}/attested.cmake",
)
_LIBRARY: Final = "libggml-cpu.so"
_SYMBOL: Final = b"\x00attested_arithmetic\x00"  # as its name stands in the table of dynamic symbols
_RECIPE: Final = b"1"
# Without FAPI, which is not used and would bring curl and JSON libraries: its description is kept out of sight.
_TSS: Final = ("tss2-esys", "tss2-mu", "tss2-rc", "tss2-sys", "tss2-tctildr")


def folder_name(tools: Sequence[Input], inputs: Sequence[Input], native: Mapping[str, bytes]) -> str:
    """Of what is compiled, by all that goes into it: packages, wheels, flags, and each of `native`'s bytes."""
    recipe = "\n".join((*LLAMA_FLAGS, *_TSS)).encode() + _RECIPE
    own = b"".join(hashlib.sha256(content).digest() for _, content in sorted(native.items()))
    return f"compiled-{hashlib.sha256(digest(tools) + digest(inputs) + own + recipe).hexdigest()[:16]}"


def compile_wheels(
    chroot: Chroot,
    locked: tuple[Sequence[Input], Sequence[Input]],
    native: Mapping[str, bytes],
    *,
    keep: Path,
    say: Callable[[str], None],
) -> Path:
    """A folder with the wheels, made now or kept from before under the digest of all that goes into them.

    `locked` are the chroot's packages and what is compiled with its build's wheels; `native` has the content of
    each file of native/llama_cpp. Raises BuildError, also where llama.cpp came out without them.
    """
    tools, inputs = locked
    done = keep / folder_name(tools, inputs, native)
    if done.is_dir():
        return done
    say("Compiling llama.cpp (5 to 15 minutes on two cores; kept afterwards)")
    work = chroot.root / _WORK.lstrip("/")
    shutil.rmtree(work, ignore_errors=True)
    for part in ("wheels", "out", "pkgconfig", "native"):
        (work / part).mkdir(parents=True)
    for file, content in native.items():
        (work / "native" / file).write_bytes(content)
    for one in inputs:
        if one.kind == "wheel":
            shutil.copyfile(one.cached(), work / "wheels" / one.file)
    names = sorted(f"{_WORK}/wheels/{one.file}" for one in inputs if one.kind == "wheel")
    pip = ["python3.13", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    chroot.run([*pip, "install", "-q", "--no-index", "--no-deps", "--target", f"{_WORK}/backend", *names])
    for one in inputs:
        if one.kind == "sdist":
            _build(chroot, one, work, [*pip, "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"])
    check_kernels(sorted((work / "out").glob("*.whl")))
    partial = done.with_name(f".{done.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(work / "out", partial)
    partial.rename(done)
    shutil.rmtree(work)
    return done


def check_kernels(wheels: Sequence[Path]) -> None:
    """Raises BuildError unless llama.cpp among the wheels exports, in every copy, what native/llama_cpp adds to it."""
    libraries = {}
    try:
        for wheel in wheels:
            with ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1].startswith(_LIBRARY)]
                libraries.update({name: archive.read(name) for name in names})
    except (BadZipFile, OSError) as error:
        raise BuildError(f"a compiled wheel cannot be read: {error}") from error
    without = sorted(name for name, content in libraries.items() if _SYMBOL not in content)
    if without or not libraries:
        raise BuildError(f"the kernels of native/llama_cpp are not in {', '.join(without) or _LIBRARY}")


def _build(chroot: Chroot, one: Input, work: Path, pip: Sequence[str]) -> None:
    _unpack(one.cached(), work / "src" / one.name)
    for pc in _TSS:
        found = chroot.root / "usr/lib/x86_64-linux-gnu/pkgconfig" / f"{pc}.pc"
        if not found.is_file():
            raise BuildError(f"the tools chroot has no {found.name}")
        shutil.copyfile(found, work / "pkgconfig" / found.name)
    extra = {
        "PYTHONPATH": f"{_WORK}/backend",
        "PATH": f"{_WORK}/backend/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "PKG_CONFIG_LIBDIR": f"{_WORK}/pkgconfig",
        "CMAKE_ARGS": " ".join(LLAMA_FLAGS),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
        "SETUPTOOLS_SCM_PRETEND_VERSION": one.version,
    }
    # The folder in which cmake works is embedded in what it makes: a fixed one, not a temporary one.
    settings = [f"--config-settings=build-dir={_WORK}/cmake"] if one.name == "llama-cpp-python" else []
    chroot.run([*pip, *settings, "-w", f"{_WORK}/out", f"{_WORK}/src/{one.name}"], extra=extra)


def _unpack(archive: Path, to: Path) -> None:
    """The one folder that a source archive has, as `to`."""
    to.parent.mkdir(parents=True, exist_ok=True)
    scratch = to.with_name(f".{to.name}.unpacked")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    (only,) = list(scratch.iterdir())
    only.rename(to)
    scratch.rmdir()
