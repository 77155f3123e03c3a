"""The functions that this project carries instead of the C library's: how far off they are, and that all are in use."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("llama_cpp")

import llama_cpp

from appliance.engine.llama_cpp import libraries
from appliance.engine.llama_cpp.sampler import _largest

LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
LIBM = "/lib/x86_64-linux-gnu/libm.so.6"
EXACT = {
    *(
        "ceil",
        "copysign",
        "fabs",
        "floor",
        "fma",
        "fmax",
        "fmin",
        "fmod",
        "frexp",
        "ldexp",
        "llrint",
        "llround",
        "lrint",
    ),
    *("lround", "modf", "nearbyint", "remainder", "rint", "round", "scalbn", "sqrt", "trunc"),
}
SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 2.0**-126, 3.4e38, -3.4e38, 88.72284,
           2.0**31, 88.72283, -103.97, -103.98, 0.5, 2.0, 3.0, -2.0, -3.0, 709.0, 1e-8, -87.3)  # fmt: skip
Array = npt.NDArray[np.floating]

kernels = libraries.kernels()
pytestmark = pytest.mark.skipif(
    not hasattr(kernels, "attested_function_of_floats"), reason="this build has none of this project's kernels"
)


def compute(name: str, x: Array, y: Array | None = None) -> Array:
    kind = "floats" if x.dtype == np.float32 else "doubles"
    function = getattr(kernels, f"attested_function_of_{kind}")
    function.restype = ctypes.c_bool
    x = np.ascontiguousarray(x)
    y = x if y is None else np.ascontiguousarray(y, dtype=x.dtype)
    out = np.empty_like(x)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, y, out)]
    assert function(name.encode(), ctypes.c_int64(len(x)), *pointers)
    return out


def units(got: Array, true: npt.NDArray[np.longdouble]) -> float:
    """The largest distance in units in the last place; infinite where one is special and the other is not the same."""
    with np.errstate(all="ignore"):
        rounded = true.astype(got.dtype)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        finite = np.isfinite(got) & np.isfinite(rounded)
        off = np.abs(got.astype(np.longdouble) - true) / np.spacing(np.abs(rounded)).astype(np.longdouble)
    return float(np.where(finite, off, np.where(same, 0.0, np.inf)).max())


def arguments(kind: type[np.floating], count: int = 200_000) -> list[Array]:
    """Every kind of number, the usual ones, those near 1 and below 2**31, and the special ones."""
    rng = np.random.default_rng(11)
    parts: list[Array] = [np.frombuffer(rng.bytes(count * np.dtype(kind).itemsize), dtype=kind)]
    parts += [rng.normal(0, 20, count), rng.uniform(-1, 1, count), rng.uniform(0.9, 1.1, count)]
    parts += [rng.uniform(-(2.0**31), 2.0**31, count), np.array(SPECIAL)]
    return [part.astype(kind) for part in parts]


FLOATS: dict[str, Callable[..., Array]] = {
    "expf": np.exp, "exp2f": np.exp2, "expm1f": np.expm1, "logf": np.log, "log2f": np.log2, "log1pf": np.log1p,
    "sinf": np.sin, "cosf": np.cos, "tanhf": np.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
def test_functions_of_floats_are_rounded_once(name: str) -> None:
    with np.errstate(all="ignore"):
        for x in arguments(np.float32):
            assert units(compute(name, x), FLOATS[name](x.astype(np.longdouble))) < 0.51


def test_the_error_function() -> None:
    for x in (np.linspace(-5, 5, 100_001), np.geomspace(1e-40, 5, 20_000), np.array(SPECIAL)):
        x = x.astype(np.float32)
        true = np.array([math.erf(float(value)) for value in x], dtype=np.longdouble)
        assert units(compute("erff", x), true) < 0.51


@pytest.mark.parametrize("name", ["exp", "exp2", "log", "log2"])
def test_functions_of_doubles(name: str) -> None:
    with np.errstate(all="ignore"):
        for x in arguments(np.float64):
            assert units(compute(name, x), getattr(np, name)(x.astype(np.longdouble))) < 2
    powers = np.ldexp(1.0, np.arange(-1074, 1024))
    assert (compute("log2", powers) == np.arange(-1074, 1024)).all()


@pytest.mark.parametrize(("name", "kind", "bound"), [("powf", np.float32, 0.51), ("pow", np.float64, 16.0)])
def test_powers(name: str, kind: type[np.floating], bound: float) -> None:
    rng = np.random.default_rng(12)
    first = np.abs(arguments(kind)[0])
    pairs = [(first, rng.normal(0, 5, len(first))), (rng.uniform(0, 3, 200_000), rng.uniform(-100, 100, 200_000))]
    pairs.append((np.repeat(SPECIAL, len(SPECIAL)), np.tile(SPECIAL, len(SPECIAL))))
    with np.errstate(all="ignore"):
        for x, y in pairs:
            x, y = x.astype(kind), y.astype(kind)
            true = np.power(x.astype(np.longdouble), y.astype(np.longdouble))
            assert units(compute(name, x, y), true) < bound
    assert (compute(name, np.full(4, 2, kind), np.array([-4, 0.5, 3, -1], kind))[[0, 2, 3]] == [0.0625, 8, 0.5]).all()


def test_log_probabilities_add_up_to_one() -> None:
    assert kernels is not None
    logits = np.random.default_rng(13).normal(0, 5, 49_152).astype(np.float32)
    function = kernels.attested_log_sum_exp
    function.restype = ctypes.c_double
    found = function(ctypes.c_void_p(logits.ctypes.data), ctypes.c_int64(len(logits)))
    assert found == pytest.approx(float(np.log(np.exp(logits.astype(np.longdouble)).sum())), abs=1e-12)


def test_of_equal_values_the_first_are_among_the_largest() -> None:
    values = np.array([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -np.inf])
    assert sorted(_largest(values, 4)) == [1, 2, 3, 4]
    assert sorted(_largest(values, 7)) == list(range(7))
    assert _largest(values, 0) == []


@pytest.mark.parametrize("library", ["libggml-base.so", "libggml-cpu.so", "libllama.so"])
def test_nothing_that_the_c_library_rounds_is_imported(library: str) -> None:
    """Exact by definition may be: square roots, roundings, fma, scaling by powers of two."""

    def names(path: Path | str, which: str) -> set[str]:
        out = subprocess.run(["nm", "-D", which, path], capture_output=True, text=True, check=True).stdout
        return {line.split()[-1].partition("@")[0] for line in out.splitlines()}

    taken = names(LIBRARIES / library, "--undefined-only") & names(LIBM, "--defined-only")
    assert {name.removesuffix("f") for name in taken if name not in EXACT} <= EXACT
