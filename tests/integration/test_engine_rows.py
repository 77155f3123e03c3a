"""native/llama_cpp: products of several rows at once, bit for bit those that llama.cpp makes row by row."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

llama_cpp = pytest.importorskip("llama_cpp")

from appliance.engine.llama_cpp import libraries  # noqa: E402

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these kernels are for x86-64")

_BLOCK = 32
_F32 = 0


class _Traits(ctypes.Structure):
    """`struct ggml_type_traits_cpu` of ggml-cpu.h."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


class _InitParams(ctypes.Structure):
    """`struct ggml_init_params` of ggml.h."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format: ggml's number for it, bytes before the quants of a block (halves), bytes of the quants."""

    name: str
    number: int
    halves: int
    quants: int
    input_bytes: int

    @property
    def block_bytes(self) -> int:
        return 2 * self.halves + self.quants


Q4_1 = Format("Q4_1", 3, 2, 16, 36)
Q8_0 = Format("Q8_0", 8, 1, 32, 34)


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    library = libraries.kernels()
    assert library is not None, "llama.cpp was built without native/llama_cpp: make venv builds it with it"
    library.ggml_cpu_init()  # fills the table of halves that llama.cpp's products read
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Traits)
    library.attested_products.restype = ctypes.c_int64
    library.attested_rows_multiply.restype = ctypes.c_bool
    return library


def weights_of(rng: np.random.Generator, form: Format, rows: int, columns: int, *, wild: bool) -> Bytes:
    """Rows of blocks: any quants at all, scales of the usual size or (`wild`) any half there is."""
    blocks = np.empty((rows, columns // _BLOCK, form.block_bytes), dtype=np.uint8)
    blocks[...] = rng.integers(0, 256, blocks.shape, dtype=np.uint8)
    if not wild:
        scales = rng.normal(0, 0.02, (rows, columns // _BLOCK, form.halves)).astype(np.float16)
        blocks[..., : 2 * form.halves] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def quantized(ggml: ctypes.CDLL, form: Format, inputs: Floats) -> Bytes:
    """`inputs` as ggml turns them into eight bits a value for products with `form`."""
    weights = ggml.ggml_get_type_traits_cpu(form.number).contents
    convert = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
        ggml.ggml_get_type_traits_cpu(weights.vec_dot_type).contents.from_float
    )
    out = np.zeros((inputs.shape[0], inputs.shape[1] // _BLOCK * form.input_bytes), dtype=np.uint8)
    for source, to in zip(inputs, out, strict=True):
        convert(source.ctypes.data, to.ctypes.data, inputs.shape[1])
    return out


def row_by_row(ggml: ctypes.CDLL, form: Format, weights: Bytes, inputs: Bytes, columns: int) -> Floats:
    """What llama.cpp itself computes: one product of two rows at a time; (rows of inputs, rows of weights)."""
    arguments = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_size_t] * 3, ctypes.c_int]
    dot: Callable[..., None] = ctypes.CFUNCTYPE(None, *arguments)(
        ggml.ggml_get_type_traits_cpu(form.number).contents.vec_dot
    )
    out = np.empty((len(inputs), len(weights)), dtype=np.float32)
    for x, row in enumerate(inputs):
        for r, weight in enumerate(weights):
            dot(columns, out[x, r:].ctypes.data, 0, weight.ctypes.data, 0, row.ctypes.data, 0, 1)
    return out


def same_bits(one: Floats, other: Floats) -> bool:
    """Equal bits; any number that is none equals any other."""
    none = np.isnan(one)
    return bool((none == np.isnan(other)).all() and (one.view(np.uint32) == other.view(np.uint32))[~none].all())


@pytest.mark.parametrize("form", [Q4_1, Q8_0], ids=lambda form: form.name)
@pytest.mark.parametrize("bits", [256, 512])
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 50),
    rows=st.integers(1, 21),
    inputs=st.integers(1, 20),
    wild=st.booleans(),
)
def test_every_product_has_the_bits_of_llama_cpp(
    ggml: ctypes.CDLL, form: Format, bits: int, seed: int, blocks: int, rows: int, inputs: int, wild: bool
) -> None:
    if bits > ggml.attested_rows_bits():
        pytest.skip(f"this processor's build has no vectors of {bits} bits")
    rng = np.random.default_rng(seed)
    columns = blocks * _BLOCK
    weights = weights_of(rng, form, rows, columns, wild=wild)
    values = rng.normal(0, 10.0 ** rng.integers(-6, 5), (inputs, columns)).astype(np.float32)
    values[:, rng.integers(0, columns)] = 0.0
    packed = quantized(ggml, form, values)
    out = np.full((inputs, rows), 7.0, dtype=np.float32)
    done = ggml.attested_rows_multiply(
        bits,
        form.number,
        ctypes.c_int64(columns),
        ctypes.c_void_p(weights.ctypes.data),
        ctypes.c_int64(rows),
        ctypes.c_void_p(packed.ctypes.data),
        ctypes.c_int64(inputs),
        ctypes.c_void_p(out.ctypes.data),
    )
    assert done
    assert same_bits(out, row_by_row(ggml, form, weights, packed, columns))


_AT_THE_EDGE = """
import ctypes, mmap, sys
from appliance.engine.llama_cpp import libraries
from llama_cpp import llama_cpp  # loads the libraries

library = libraries.kernels()
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE

def ending_at_a_wall(size):
    whole = -(-size // page) * page
    area = mmap.mmap(-1, whole + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert libc.mprotect(ctypes.c_void_p(address + whole), ctypes.c_size_t(page), 0) == 0
    return ctypes.c_void_p(address + whole - size), area

number, block, input_block = map(int, sys.argv[1:])
kept = []
for bits in (256, 512):
    for blocks in (1, 3, 18):
        for rows in range(1, 10):
            for inputs in range(1, 18):
                sizes = (rows * blocks * block, inputs * blocks * input_block, rows * inputs * 4)
                (weights, a), (values, b), (out, c) = map(ending_at_a_wall, sizes)
                columns, count, given = (ctypes.c_int64(n) for n in (32 * blocks, rows, inputs))
                library.attested_rows_multiply(bits, number, columns, weights, count, values, given, out)
                kept = [a, b, c]
print("whole")
"""


@pytest.mark.parametrize("form", [Q4_1, Q8_0], ids=lambda form: form.name)
def test_nothing_behind_weights_inputs_and_results_is_touched(ggml: ctypes.CDLL, form: Format) -> None:
    """Each lies at the end of a page whose next one nobody may touch."""
    numbers = (str(form.number), str(form.block_bytes), str(form.input_bytes))
    run = subprocess.run([sys.executable, "-c", _AT_THE_EDGE, *numbers], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "whole\n"), run.stderr


def test_other_formats_and_vectors_are_not_taken(ggml: ctypes.CDLL) -> None:
    nothing = [ctypes.c_int64(32), None, ctypes.c_int64(0), None, ctypes.c_int64(0), None]
    assert ggml.attested_rows_multiply(256, Q4_1.number, *nothing)
    assert not ggml.attested_rows_multiply(256, 2, *nothing)
    assert not ggml.attested_rows_multiply(128, Q4_1.number, *nothing)


def graph_product(ggml: ctypes.CDLL, form: Format, weights: Bytes, inputs: Floats, threads: int) -> Floats:
    """The same product as a graph of ggml computes it, as in llama.cpp's own evaluations."""
    # libggml-cpu and libggml-base are in one process: the names of the second are found through the first.
    for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph", "ggml_get_data"):
        getattr(ggml, name).restype = ctypes.c_void_p
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    size = 64 * 1024 * 1024
    context = pointer(ggml.ggml_init(_InitParams(size, None, False)))
    try:
        columns = inputs.shape[1]
        w = pointer(ggml.ggml_new_tensor_2d(context, form.number, number(columns), number(len(weights))))
        x = pointer(ggml.ggml_new_tensor_2d(context, _F32, number(columns), number(len(inputs))))
        for tensor, content in ((w, weights), (x, inputs)):
            ctypes.memmove(ggml.ggml_get_data(tensor), content.ctypes.data, content.nbytes)
        product = pointer(ggml.ggml_mul_mat(context, w, x))
        graph = pointer(ggml.ggml_new_graph(context))
        ggml.ggml_build_forward_expand(graph, product)
        assert ggml.ggml_graph_compute_with_ctx(context, graph, threads) == 0
        out = np.empty((len(inputs), len(weights)), dtype=np.float32)
        ctypes.memmove(out.ctypes.data, ggml.ggml_get_data(product), out.nbytes)
        return out
    finally:
        ggml.ggml_free(context)


@pytest.mark.parametrize("form", [Q4_1, Q8_0], ids=lambda form: form.name)
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(("rows", "columns", "inputs"), [(576, 576, 1), (1, 32, 3), (999, 1536, 9), (3001, 96, 63)])
def test_llama_cpp_computes_with_them_on_any_number_of_threads(
    ggml: ctypes.CDLL, form: Format, threads: int, rows: int, columns: int, inputs: int
) -> None:
    rng = np.random.default_rng(rows + inputs)
    weights = weights_of(rng, form, rows, columns, wild=False)
    values = rng.normal(0, 1, (inputs, columns)).astype(np.float32)
    before = ggml.attested_products()
    got = graph_product(ggml, form, weights, values, threads)
    assert ggml.attested_products() == before + 1
    packed = quantized(ggml, form, values)
    assert same_bits(got, row_by_row(ggml, form, weights, packed, columns))


def test_the_version_in_receipts_says_which_build_it_is(ggml: ctypes.CDLL) -> None:
    assert libraries.version() == f"{llama_cpp.__version__}+{ggml.attested_arithmetic().decode()}"
