"""native/llama_cpp: products of quantised weights, the same bits from every variant and in every shape."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

llama_cpp = pytest.importorskip("llama_cpp")

from appliance.engine.llama_cpp import libraries  # noqa: E402
from tests import ggml_ops  # noqa: E402
from tests.integration import gemm_reference as reference  # noqa: E402
from tests.integration.gemm_reference import FORMS, Bytes, Floats, Form  # noqa: E402

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these kernels are for x86-64")

VARIANTS = ("avx2", "avx-vnni", "avx512-vnni", "amx-int8", "amx-int8-emulated")
"""The last is the fourth with its tile operations in C++, where AVX-512 is there for the rest."""
_F32 = 0
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


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


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    library = libraries.kernels()
    assert library is not None, "llama.cpp was built without native/llama_cpp: make venv builds it with it"
    library.ggml_cpu_init()  # fills the table of halves that llama.cpp's products read
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Traits)
    library.attested_products.restype = ctypes.c_int64
    return library


def weights_of(rng: np.random.Generator, form: Form, rows: int, columns: int, *, wild: bool) -> Bytes:
    """Rows of blocks: any codes at all, scales of the usual size or (`wild`) any half there is."""
    blocks = rng.integers(0, 256, (rows, columns // form.block, form.size), dtype=np.uint8)
    for at in () if wild else form.halves:
        scales = rng.normal(0, 0.02, (rows, columns // form.block, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(rng: np.random.Generator, rows: int, columns: int) -> Floats:
    values = rng.normal(0, 10.0 ** rng.integers(-6, 5), (rows, columns)).astype(np.float32)
    values[:, rng.integers(0, columns)] = 0.0
    values[rng.integers(0, rows)] = 0.0
    return values


def computed(ggml: ctypes.CDLL, variant: str, form: Form, weights: Bytes, values: Floats) -> Floats:
    out = np.full((len(values), len(weights)), 7.0, dtype=np.float32)
    done = ggml_ops.quantised_product(ggml, variant, form.number, weights, values, out)
    assert done
    return out


def same_bits(one: Floats, other: Floats) -> bool:
    """Equal bits; any number that is none equals any other."""
    none = np.isnan(one)
    return bool((none == np.isnan(other)).all() and (one.view(np.uint32) == other.view(np.uint32))[~none].all())


def needs(ggml: ctypes.CDLL, variant: str) -> None:
    needed = "avx512-vnni" if variant == "amx-int8-emulated" else variant
    if not ggml.attested_variant_available(needed.encode()):
        pytest.skip(f"this processor has no {variant}")


@each_form
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 4), rows=st.integers(1, 9), tokens=st.integers(1, 5))
def test_plain_is_the_arithmetic_as_it_is_defined(
    ggml: ctypes.CDLL, form: Form, seed: int, blocks: int, rows: int, tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = weights_of(rng, form, rows, blocks * form.block, wild=False)
    values = values_of(rng, tokens, blocks * form.block)
    assert same_bits(computed(ggml, "plain", form, weights, values), reference.product(form, weights, values))


@each_form
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    columns=st.integers(1, 5),
    rows=st.integers(1, 40),
    tokens=st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 300])),
    gap=st.integers(0, 3),
    wild=st.booleans(),
)
def test_every_variant_has_the_bits_of_the_plain_one(
    ggml: ctypes.CDLL,
    form: Form,
    variant: str,
    seed: int,
    columns: int,
    rows: int,
    tokens: int,
    gap: int,
    wild: bool,
) -> None:
    needs(ggml, variant)
    rng = np.random.default_rng(seed)
    columns *= 256 if form.block == 256 else 160
    weights = weights_of(rng, form, rows, columns, wild=wild)
    weights = np.pad(weights, ((0, 0), (0, gap)))[:, : weights.shape[1]]  # rows that do not lie close to one another
    values = values_of(rng, tokens, columns)
    plain = computed(ggml, "plain", form, weights, values)
    assert same_bits(computed(ggml, variant, form, weights, values), plain)


@each_form
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_is_the_same_in_any_company(ggml: ctypes.CDLL, form: Form, variant: str) -> None:
    needs(ggml, variant)
    rng = np.random.default_rng(7)
    weights = weights_of(rng, form, 67, 1280, wild=False)
    values = values_of(rng, 33, 1280)
    together = computed(ggml, variant, form, weights, values)
    for token in (0, 15, 16, 32):
        assert same_bits(computed(ggml, variant, form, weights, values[token : token + 1]), together[token : token + 1])
    for tokens in (2, 8, 17):
        assert same_bits(computed(ggml, variant, form, weights, values[:tokens]), together[:tokens])


@each_form
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_largest_codes_fit_into_every_sum(ggml: ctypes.CDLL, form: Form, variant: str) -> None:
    """Codes and integer scales at either end of their range, and activations of the largest code, of either sign."""
    needs(ggml, variant)
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        weights = np.full((17, 512 // form.block, form.size), byte, dtype=np.uint8)
        for at in form.halves:
            weights[..., at : at + 2] = np.array([1.0], dtype=np.float16).view(np.uint8)
        flat = weights.reshape(17, -1)
        values = np.repeat(np.array([[1.0], [-1.0]], dtype=np.float32), 512, axis=1)
        values = np.concatenate([values, values * np.where(np.arange(512) % 2, 1, -1).astype(np.float32)])
        assert same_bits(computed(ggml, variant, form, flat, values), reference.product(form, flat, values))


@each_form
def test_results_are_those_of_llama_cpp_but_for_rounding(ggml: ctypes.CDLL, form: Form) -> None:
    rng = np.random.default_rng(3)
    columns = 512
    weights = weights_of(rng, form, 8, columns, wild=False)
    values = rng.normal(0, 1, (3, columns)).astype(np.float32)
    traits = ggml.ggml_get_type_traits_cpu(form.number).contents
    convert = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
        ggml.ggml_get_type_traits_cpu(traits.vec_dot_type).contents.from_float
    )
    arguments = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_size_t] * 3, ctypes.c_int]
    dot: Callable[..., None] = ctypes.CFUNCTYPE(None, *arguments)(traits.vec_dot)
    theirs = np.empty((3, 8), dtype=np.float32)
    for x, row in enumerate(values):
        packed = np.zeros(4 * columns, dtype=np.uint8)
        convert(row.ctypes.data, packed.ctypes.data, columns)
        for r, weight in enumerate(weights):
            dot(columns, theirs[x, r:].ctypes.data, 0, weight.ctypes.data, 0, packed.ctypes.data, 0, 1)
    ours = computed(ggml, "plain", form, weights, values)
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()


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

number, block, size = map(int, sys.argv[1:])
kept = []
for variant in (b"plain", b"avx2", b"avx-vnni", b"avx512-vnni", b"amx-int8"):
    for blocks in (1, 3, 18):
        for rows in (1, 7, 8, 9, 16, 17, 33):
            for tokens in (1, 2, 15, 16, 17):
                sizes = (rows * blocks * size, tokens * blocks * block * 4, rows * tokens * 4)
                (weights, a), (values, b), (out, c) = map(ending_at_a_wall, sizes)
                columns, stride, count, given = map(ctypes.c_int64, (block * blocks, size * blocks, rows, tokens))
                library.attested_gemm(variant, number, columns, weights, stride, count, values, given, out)
                kept = [a, b, c]
print("whole")
"""


@each_form
def test_nothing_behind_weights_inputs_and_results_is_touched(ggml: ctypes.CDLL, form: Form) -> None:
    """Each lies at the end of a page whose next one nobody may touch."""
    numbers = (str(form.number), str(form.block), str(form.size))
    run = subprocess.run([sys.executable, "-c", _AT_THE_EDGE, *numbers], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "whole\n"), run.stderr


def test_other_formats_and_variants_are_not_taken(ggml: ctypes.CDLL) -> None:
    number = ctypes.c_int64
    nothing = [number(256), None, ctypes.c_size_t(0), number(0), None, number(0), None]
    for form in FORMS:
        assert ggml.attested_gemm(b"plain", form.number, *nothing)
    assert not ggml.attested_gemm(b"plain", _F32, *nothing)
    assert not ggml.attested_gemm(b"neon", FORMS[0].number, *nothing)


def graph_product(ggml: ctypes.CDLL, form: Form, weights: Bytes, values: Floats, threads: int) -> Floats:
    """The same product as a graph of ggml computes it; `weights` (2, rows, bytes), `values` (4, tokens, columns)."""
    # libggml-cpu and libggml-base are in one process: the names of the second are found through the first.
    for name in ("ggml_init", "ggml_new_tensor_3d", "ggml_mul_mat", "ggml_new_graph", "ggml_get_data"):
        getattr(ggml, name).restype = ctypes.c_void_p
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    context = pointer(ggml.ggml_init(_InitParams(64 * 1024 * 1024, None, False)))
    try:
        columns = number(values.shape[2])
        w = pointer(ggml.ggml_new_tensor_3d(context, form.number, columns, *map(number, weights.shape[1::-1])))
        x = pointer(ggml.ggml_new_tensor_3d(context, _F32, columns, *map(number, values.shape[1::-1])))
        for tensor, content in ((w, weights), (x, values)):
            ctypes.memmove(ggml.ggml_get_data(tensor), content.ctypes.data, content.nbytes)
        product = pointer(ggml.ggml_mul_mat(context, w, x))
        graph = pointer(ggml.ggml_new_graph(context))
        ggml.ggml_build_forward_expand(graph, product)
        assert ggml.ggml_graph_compute_with_ctx(context, graph, threads) == 0
        out = np.empty((*values.shape[:2], weights.shape[1]), dtype=np.float32)
        ctypes.memmove(out.ctypes.data, ggml.ggml_get_data(product), out.nbytes)
        return out
    finally:
        ggml.ggml_free(context)


@each_form
@pytest.mark.parametrize(
    ("matrices", "inputs", "rows", "blocks", "tokens"),
    [(1, 1, 576, 3, 1), (1, 1, 1, 1, 3), (1, 1, 999, 2, 9), (1, 1, 130, 5, 63), (2, 4, 40, 2, 18)],
)
def test_llama_cpp_computes_with_them_on_any_number_of_threads(
    ggml: ctypes.CDLL, form: Form, matrices: int, inputs: int, rows: int, blocks: int, tokens: int
) -> None:
    rng = np.random.default_rng(rows + tokens)
    columns = blocks * form.block
    weights = np.stack([weights_of(rng, form, rows, columns, wild=False) for _ in range(matrices)])
    values = rng.normal(0, 1, (inputs, tokens, columns)).astype(np.float32)
    shared = inputs // matrices  # neighbours share a matrix of weights
    expected = [computed(ggml, "plain", form, weights[i // shared], values[i]) for i in range(inputs)]
    for threads in (1, 2, 3, 4):
        before = ggml.attested_products()
        got = graph_product(ggml, form, weights, values, threads)
        assert ggml.attested_products() == before + 1
        assert all(same_bits(got[i], expected[i]) for i in range(inputs))


def test_the_version_in_receipts_says_which_arithmetic_it_is(ggml: ctypes.CDLL) -> None:
    assert libraries.version() == f"{llama_cpp.__version__}+attested-1"
