"""Compile, in the chroot, the Python packages that come as source, llama.cpp among them for one kind of processor.

llama.cpp chooses no variant at run time: variants give other bits, so the same prompt would get another answer
on another machine. This build needs x86-64-v3 (AVX2, FMA, F16C, BMI2); the image's init refuses less.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from image.build.chroot import Chroot
from image.build.errors import BuildError
from image.build.lock import Input, digest

# llamafile's kernels are off as in every build of the project: more batch shapes then give bit-equal results.
LLAMA_FLAGS: Final = (
    "-DLLAVA_BUILD=OFF",
    "-DGGML_LLAMAFILE=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DGGML_NATIVE=OFF",
    "-DGGML_AVX=ON",
    "-DGGML_AVX2=ON",
    "-DGGML_BMI2=ON",
    "-DGGML_F16C=ON",
    "-DGGML_FMA=ON",
    "-DGGML_SSE42=ON",
)
_RECIPE: Final = b"1"
_WORK: Final = "/build"
# Without FAPI, which is not used and would bring curl and JSON libraries: its description is kept out of sight.
_TSS: Final = ("tss2-esys", "tss2-mu", "tss2-rc", "tss2-sys", "tss2-tctildr")


def compile_wheels(
    chroot: Chroot, tools: Sequence[Input], inputs: Sequence[Input], *, keep: Path, say: Callable[[str], None]
) -> Path:
    """A folder with the wheels, made now or kept from before under the digest of all that goes into them."""
    recipe = "\n".join((*LLAMA_FLAGS, *_TSS)).encode() + _RECIPE
    name = hashlib.sha256(digest(tools) + digest(inputs) + recipe).hexdigest()[:16]
    done = keep / f"compiled-{name}"
    if done.is_dir():
        return done
    say("Compiling llama.cpp (5 to 15 minutes on two cores; kept afterwards)")
    work = chroot.root / _WORK.lstrip("/")
    shutil.rmtree(work, ignore_errors=True)
    for part in ("wheels", "out", "pkgconfig"):
        (work / part).mkdir(parents=True)
    for one in inputs:
        if one.kind == "wheel":
            shutil.copyfile(one.cached(), work / "wheels" / one.file)
    names = sorted(f"{_WORK}/wheels/{one.file}" for one in inputs if one.kind == "wheel")
    pip = ["python3.13", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    chroot.run([*pip, "install", "-q", "--no-index", "--no-deps", "--target", f"{_WORK}/backend", *names])
    for one in inputs:
        if one.kind == "sdist":
            _build(chroot, one, work, [*pip, "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"])
    partial = done.with_name(f".{done.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(work / "out", partial)
    partial.rename(done)
    shutil.rmtree(work)
    return done


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
