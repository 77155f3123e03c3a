"""native/llama_cpp's products of F32, F16 and BF16 weights: every variant bit for bit the definition."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

llama_cpp = pytest.importorskip("llama_cpp")

from tests import exact_floats, ggml_ops  # noqa: E402
from tests.exact_floats import Floats, same_bits  # noqa: E402
from tests.ggml_ops import BF16, F16, F32, Tensor  # noqa: E402

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these kernels are for x86-64")

_TYPES = [F32, F16, BF16]


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    return ggml_ops.library()


def multiply(ggml: ctypes.CDLL, variant: str, weights: Tensor, inputs: Floats) -> Floats:
    """(token, row) of weights (row, column) and inputs (token, column)."""
    columns, rows = weights.sizes[:2]
    out = np.full((len(inputs), rows), 7.0, np.float32)
    assert ggml.attested_float_gemm(
        variant.encode(),
        weights.type,
        ctypes.c_int64(columns),
        ctypes.c_void_p(weights.content.ctypes.data),
        ctypes.c_int64(rows),
        ctypes.c_void_p(inputs.ctypes.data),
        ctypes.c_int64(len(inputs)),
        ctypes.c_void_p(out.ctypes.data),
    )
    return out


def rounded(inputs: Floats, type: int) -> Floats:
    return ggml_ops.widened(ggml_ops.floats(inputs, type)).reshape(inputs.shape)


def random_weights(rng: np.random.Generator, type: int, *shape: int) -> Tensor:
    return ggml_ops.floats(rng.normal(0, 0.5, shape).astype(np.float32), type)


@pytest.mark.parametrize("type", _TYPES)
@given(
    seed=st.integers(0, 2**32 - 1),
    columns=st.integers(1, 150),
    rows=st.integers(1, 70),
    tokens=st.integers(1, 40),
    scale=st.sampled_from([1.0, 1e-6, 1e4]),
)
def test_every_variant_has_the_bits_of_the_definition(
    ggml: ctypes.CDLL, type: int, seed: int, columns: int, rows: int, tokens: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = random_weights(rng, type, rows, columns)
    inputs = rng.normal(0, scale, (tokens, columns)).astype(np.float32)
    expected = multiply(ggml, "plain", weights, inputs)
    for variant in ggml_ops.available(ggml)[1:]:
        assert same_bits(multiply(ggml, variant, weights, inputs), expected), variant
    exact = rounded(inputs, type).astype(np.float64) @ ggml_ops.widened(weights)[0, 0].astype(np.float64).T
    assert np.abs(expected - exact).max() <= 1e-5 * scale * columns


@pytest.mark.parametrize("type", _TYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 100, 576])
def test_the_definition_is_what_the_documents_say(ggml: ctypes.CDLL, type: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    weights = random_weights(rng, type, 6, columns)
    inputs = rng.normal(0, 1, (3, columns)).astype(np.float32)
    expected = exact_floats.dot(ggml_ops.widened(weights)[0, 0][None], rounded(inputs, type)[:, None])
    assert same_bits(multiply(ggml, "plain", weights, inputs), expected)


@pytest.mark.parametrize("type", _TYPES)
def test_a_token_has_the_same_bits_in_any_company(ggml: ctypes.CDLL, type: int) -> None:
    rng = np.random.default_rng(1)
    weights = random_weights(rng, type, 129, 200)
    inputs = rng.normal(0, 1, (77, 200)).astype(np.float32)
    for variant in ggml_ops.available(ggml):
        whole = multiply(ggml, variant, weights, inputs)
        for piece in (1, 2, 3, 7, 33):
            for start in range(0, 77, piece):
                part = np.ascontiguousarray(inputs[start : start + piece])
                assert same_bits(multiply(ggml, variant, weights, part), whole[start : start + piece])


@pytest.mark.parametrize("type", _TYPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_llama_cpp_computes_with_them_with_matrices_shared_by_several(
    ggml: ctypes.CDLL, type: int, threads: int
) -> None:
    """As attention without its own operation does: key heads shared by query heads."""
    rng = np.random.default_rng(threads)
    weights = random_weights(rng, type, 2, 3, 50, 72)
    inputs = rng.normal(0, 1, (2, 6, 9, 72)).astype(np.float32)
    matrices = weights.content.reshape(2, 3, 50, 72)
    for variant in ggml_ops.available(ggml):
        with ggml_ops.variant(ggml, variant), ggml_ops.graph(ggml) as graph:
            made = graph.product(graph.put(weights), graph.put(ggml_ops.floats(inputs, F32)))
            got = graph.compute(made, (2, 6, 9, 50), threads)
        for batch, head in np.ndindex(2, 6):
            matrix = Tensor(np.ascontiguousarray(matrices[batch, head // 2]), type, (72, 50, 1, 1))
            assert same_bits(got[batch, head], multiply(ggml, "plain", matrix, inputs[batch, head]))


_AT_THE_EDGE = """
import ctypes, mmap
from tests import ggml_ops

ggml = ggml_ops.library()
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE

def ending_at_a_wall(size):
    whole = -(-size // page) * page
    area = mmap.mmap(-1, whole + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert libc.mprotect(ctypes.c_void_p(address + whole), ctypes.c_size_t(page), 0) == 0
    kept.append(area)
    return ctypes.c_void_p(address + whole - size)

for variant in ggml_ops.available(ggml):
    for type, size in ((0, 4), (1, 2), (30, 2)):
        for columns in (1, 9, 16, 31, 64):
            for rows in (1, 2, 3, 5, 8):
                for tokens in (1, 2, 3, 4, 5):
                    kept = []
                    weights = ending_at_a_wall(columns * rows * size)
                    inputs, out = ending_at_a_wall(columns * tokens * 4), ending_at_a_wall(rows * tokens * 4)
                    sizes = [ctypes.c_int64(n) for n in (columns, rows, tokens)]
                    assert ggml.attested_float_gemm(
                        variant.encode(), type, sizes[0], weights, sizes[1], inputs, sizes[2], out
                    )
print("whole")
"""


def test_nothing_behind_weights_inputs_and_results_is_touched(ggml: ctypes.CDLL) -> None:
    """Each lies at the end of a page whose next one nobody may touch."""
    run = subprocess.run([sys.executable, "-c", _AT_THE_EDGE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "whole\n"), run.stderr


def test_other_types_and_variants_are_not_taken(ggml: ctypes.CDLL) -> None:
    nothing = [ctypes.c_int64(32), None, ctypes.c_int64(0), None, ctypes.c_int64(0), None]
    assert ggml.attested_float_gemm(b"plain", F32, *nothing)
    assert not ggml.attested_float_gemm(b"plain", ggml_ops.Q8_0, *nothing)
    assert not ggml.attested_float_gemm(b"neon", F32, *nothing)
