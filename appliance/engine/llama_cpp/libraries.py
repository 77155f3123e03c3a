"""Which build of llama.cpp is loaded in this process."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp

from appliance.engine.host.deaths import Build, processor_name
from appliance.engine.settings import VARIANTS
from appliance.engine.weights.tensor_types import LLAMA_CPP

PROOF = "attested-proof.json"
"""Beside the libraries, written by scripts/engine_wheel.py."""
_SYMBOLS = ("attested_arithmetic", "attested_variant", "attested_variant_available", "attested_use_variant")


def mapped() -> tuple[Path, ...]:
    """llama-cpp-python's native libraries in this process, sorted by name."""
    root = Path(llama_cpp.__file__).resolve().parent
    paths = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{root}/") and ".so" in fields[5]:
            paths.add(Path(fields[5]))
    return tuple(sorted(paths, key=lambda path: path.name))


def digests() -> tuple[tuple[str, bytes], ...]:
    """Sorted (basename, SHA-256) of `mapped`: what a receipt's engine digest is made of."""
    return tuple((path.name, hashlib.sha256(path.read_bytes()).digest()) for path in mapped())


def kernels() -> ctypes.CDLL | None:
    """The library with this project's kernels (native/llama_cpp, docs/adr/0010); None in a build without them.

    It is the mapped one: other names of the same file would load a second copy. Raises RuntimeError for a library that
    has some of the kernels' symbols and not all of them.
    """
    for path in mapped():
        if path.name.startswith("libggml-cpu"):
            library = ctypes.CDLL(str(path))
            missing = [name for name in _SYMBOLS if not hasattr(library, name)]
            if len(missing) == len(_SYMBOLS):
                return None
            if missing:
                raise RuntimeError(
                    f"{path.name} is of another version of this project: it lacks {', '.join(missing)}; build it again"
                )
            library.attested_arithmetic.restype = library.attested_variant.restype = ctypes.c_char_p
            library.attested_variant_available.restype = library.attested_use_variant.restype = ctypes.c_bool
            return library
    return None


def recorded_proof() -> Mapping[str, Any]:
    """What `make venv` found when it proved the mapped library on this processor; empty where it did not.

    `limit` is the largest variant that may be used, `died` the one that ended its process, None where none did.
    """
    path = next((path for path in mapped() if path.name.startswith("libggml-cpu")), None)
    if path is None:
        return {}
    try:
        found: Mapping[str, Any] = json.loads(path.with_name(PROOF).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    same = found.get("library") == hashlib.sha256(path.read_bytes()).hexdigest()
    return found if same and found.get("processor") == processor_name() else {}


def choose(name: str) -> Build:
    """Compute with the variant `name` from now on, with the best one where it is empty; what computes then.

    The best one is the largest that the processor has, and no larger than the recorded proof allows.

    Raises RuntimeError where this build or this processor does not have it.
    """
    library = kernels()
    path = next((str(path) for path in mapped() if path.name.startswith("libggml-cpu")), "llama.cpp's library")
    if library is None:
        if name:
            raise RuntimeError(f"engine.kernels is {name!r}, and {path} has none of this project's kernels")
        return Build(library=path, version=version(), kernels=None, variants=())
    variants = tuple(each for each in VARIANTS if library.attested_variant_available(each.encode()))
    if name and (name not in variants or not library.attested_use_variant(name.encode())):
        raise RuntimeError(f"engine.kernels is {name!r}, and this processor has {', '.join(variants)}")
    limit = recorded_proof().get("limit")
    if not name and limit in variants and library.attested_use_variant(limit.encode()):
        variants = variants[: variants.index(limit) + 1]
    return Build(library=path, version=version(), kernels=variant(), variants=variants)


def passed_over() -> dict[str, object]:
    """For the execution facts of receipts: the variant that the recorded proof switched off; nothing without one."""
    died = recorded_proof().get("died")
    return {"kernels-passed-over": str(died)} if died and died != variant() else {}


def arithmetic() -> str:
    """What fixes the bits that these libraries compute, as receipts name it."""
    library = kernels()
    return LLAMA_CPP if library is None else str(library.attested_arithmetic().decode())


def variant() -> str | None:
    """The variant of this project's kernels in use; None in a build without them."""
    library = kernels()
    return None if library is None else str(library.attested_variant().decode())


def version() -> str:
    """llama-cpp-python's version, and the name of this project's arithmetic where the build has its kernels."""
    library = kernels()
    if library is None:
        return str(llama_cpp.__version__)
    return f"{llama_cpp.__version__}+{library.attested_arithmetic().decode()}"
