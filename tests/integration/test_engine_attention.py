"""native/llama_cpp's attention: every variant bit for bit the definition, whatever the shape and the company."""

from __future__ import annotations

import ctypes
import math
import platform
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

llama_cpp = pytest.importorskip("llama_cpp")

from tests import exact_floats, ggml_ops  # noqa: E402
from tests.exact_floats import Floats, same_bits  # noqa: E402
from tests.ggml_ops import BF16, F16, F32, Q8_0, Tensor  # noqa: E402

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these kernels are for x86-64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Queries are (query, head, size), keys and values (cell, kv head, size), the mask (query, cell)."""

    queries: Floats
    keys: Tensor
    values: Tensor
    mask: npt.NDArray[np.float16] | None
    sinks: Floats | None = None
    max_bias: float = 0.0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return float(np.float32(self.queries.shape[2] ** -0.5))


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    return ggml_ops.library()


def compute(ggml: ctypes.CDLL, case: Case, variant: str, threads: int = 1) -> Floats:
    """(query, head, size), by a graph of ggml's."""
    n_queries, n_heads, _ = case.queries.shape
    with ggml_ops.variant(ggml, variant), ggml_ops.graph(ggml) as graph:
        queries = ggml_ops.floats(case.queries.transpose(1, 0, 2).copy(), F32)
        keys, values = graph.put_cache(case.keys), graph.put_cache(case.values)
        mask = None if case.mask is None else graph.put(_mask_tensor(case.mask))
        sinks = None if case.sinks is None else graph.put(ggml_ops.floats(case.sinks, F32))
        made = graph.attention(
            graph.put(queries),
            keys,
            values,
            mask,
            sinks,
            scale=case.scale,
            max_bias=case.max_bias,
            softcap=case.softcap,
        )
        return graph.compute(made, (n_queries, n_heads, case.values.sizes[0]), threads)


def _mask_tensor(mask: npt.NDArray[np.float16]) -> Tensor:
    return Tensor(np.ascontiguousarray(mask), F16, (mask.shape[1], mask.shape[0], 1, 1))


def defined(case: Case) -> Floats:
    """The same in numpy, every rounding by itself."""
    n_queries, n_heads, _ = case.queries.shape
    keys, values = ggml_ops.widened(case.keys)[0], ggml_ops.widened(case.values)[0]
    out = np.zeros((n_queries, n_heads, values.shape[2]), np.float32)
    for query in range(n_queries):
        for head in range(n_heads):
            kv = head * keys.shape[1] // n_heads
            own = _own(case, query)
            score = _scores(case, query, head, keys[own, kv])
            limit = max([*score.tolist(), -math.inf if case.sinks is None else float(case.sinks[head])])
            if limit == -math.inf:
                continue
            weight = exact_floats.exp(score - np.float32(limit))
            lanes = np.zeros(16, np.float32)
            for index, one in enumerate(weight):
                lanes[index % 16] += one
            total = exact_floats.tree(lanes)
            if case.sinks is not None:
                total = total + exact_floats.exp(np.array([case.sinks[head] - np.float32(limit)], np.float32))[0]
            result = np.zeros(values.shape[2], np.float32)
            for one, value in zip(weight, values[own, kv], strict=True):
                result = exact_floats.fma(one, value, result)
            out[query, head] = result * (np.float32(1) / total) + np.float32(0)
    return out


def _own(case: Case, query: int) -> npt.NDArray[np.intp]:
    cells = case.keys.sizes[2]
    return np.arange(cells) if case.mask is None else np.flatnonzero(case.mask[query] != -np.inf)


def _scores(case: Case, query: int, head: int, keys: Floats) -> Floats:
    raw = exact_floats.dot(case.queries[query, head], keys)
    scale, cap = np.float32(case.scale), np.float32(case.softcap)
    score = cap * exact_floats.tanh(raw * (scale / cap)) if cap else raw * scale
    if case.mask is None:
        return score
    bias = case.mask[query, _own(case, query)].astype(np.float32)
    return np.asarray(score + np.float32(_slope(case, head)) * bias, np.float32)


def _slope(case: Case, head: int) -> float:
    if case.max_bias == 0:
        return 1.0
    n_heads = case.queries.shape[1]
    n = 2 ** int(math.log2(n_heads))
    return float(2.0 ** (-case.max_bias * ((head + 1) if head < n else (head - n) + 0.5) / n))


def approximately(case: Case) -> npt.NDArray[np.float64]:
    """By the formula, in 64 bits."""
    keys, values = (ggml_ops.widened(tensor)[0].astype(np.float64) for tensor in (case.keys, case.values))
    n_queries, n_heads, _ = case.queries.shape
    out = np.zeros((n_queries, n_heads, values.shape[2]))
    for query in range(n_queries):
        own = _own(case, query)
        for head in range(n_heads):
            kv = head * keys.shape[1] // n_heads
            score = keys[own, kv] @ case.queries[query, head].astype(np.float64) * case.scale
            if case.softcap:
                score = case.softcap * np.tanh(score / case.softcap)
            if case.mask is not None:
                score = score + _slope(case, head) * case.mask[query, own].astype(np.float64)
            sink = [] if case.sinks is None else [float(case.sinks[head])]
            if len(own) + len(sink):
                weight = np.exp(score - max([*score, *sink]))
                total = weight.sum() + sum(math.exp(one - max([*score, *sink])) for one in sink)
                out[query, head] = weight @ values[own, kv] / total
    return out


def random_case(
    rng: np.random.Generator,
    *,
    cells: int,
    queries: int,
    heads: tuple[int, int] = (6, 2),
    size: int = 64,
    type: int = F16,
) -> Case:
    """Several sequences with holes between them; a query sees some of one's cells. The last query may see none."""
    n_heads, n_kv = heads
    owner = np.repeat(rng.integers(0, 3, -(-cells // 7)), 7)[:cells]
    owner[rng.random(cells) < 0.05] = -1
    whose = np.sort(rng.integers(0, 3, queries))
    seen = (owner[None] == whose[:, None]) & (np.arange(cells)[None] <= rng.integers(0, cells, queries)[:, None])
    return Case(
        queries=rng.normal(0, 1, (queries, n_heads, size)).astype(np.float32),
        keys=ggml_ops.floats(rng.normal(0, 1, (cells, n_kv, size)).astype(np.float32), type),
        values=ggml_ops.floats(rng.normal(0, 1, (cells, n_kv, size)).astype(np.float32), type),
        mask=np.where(seen, np.float16(0), np.float16(-np.inf)),
    )


def causal(rng: np.random.Generator, *, before: int, queries: int, window: int | None = None) -> Case:
    cells = before + queries
    case = random_case(rng, cells=cells, queries=queries)
    at, cell = before + np.arange(queries)[:, None], np.arange(cells)[None]
    seen = (cell <= at) & (cell > at - (window or cells + 1))
    return replace(case, mask=np.where(seen, np.float16(0), np.float16(-np.inf)))


def dressed(rng: np.random.Generator, case: Case) -> Case:
    """With one of the things that some models have."""
    n_heads = case.queries.shape[1]
    kind = rng.integers(0, 5)
    if kind == 0:
        return replace(case, mask=None)
    if kind == 1:
        return replace(case, sinks=rng.normal(0, 2, n_heads).astype(np.float32))
    if kind == 2:
        return replace(case, softcap=float(rng.choice([0.5, 20.0, 50.0])))
    if kind == 3 and case.mask is not None:
        far = -rng.integers(0, 90, case.mask.shape).astype(np.float16)
        return replace(case, max_bias=8.0, mask=np.where(case.mask == 0, far, case.mask))
    return case


@given(
    seed=st.integers(0, 2**32 - 1),
    cells=st.integers(1, 150),
    queries=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (3, 1), (9, 3), (4, 4), (10, 2), (49, 1)]),
    size=st.sampled_from([16, 64, 80, 96, 128, 8, 72, 256]),
    type=st.sampled_from([F16, F16, F32, BF16]),
)
def test_every_variant_has_the_bits_of_the_definition(
    ggml: ctypes.CDLL, seed: int, cells: int, queries: int, heads: tuple[int, int], size: int, type: int
) -> None:
    rng = np.random.default_rng(seed)
    case = dressed(
        rng, random_case(rng, cells=cells, queries=min(queries, 200 // heads[0]), heads=heads, size=size, type=type)
    )
    expected = compute(ggml, case, "plain")
    for variant in ggml_ops.available(ggml)[1:]:
        assert same_bits(compute(ggml, case, variant), expected), variant
    exact = approximately(case)
    assert np.abs(expected - exact).max() < 2e-5 * max(1.0, np.abs(exact).max())


@given(
    seed=st.integers(0, 2**32 - 1),
    cells=st.integers(1, 40),
    queries=st.integers(1, 3),
    size=st.sampled_from([16, 40, 64]),
    type=st.sampled_from([F16, F32, BF16]),
)
def test_the_definition_is_what_the_documents_say(
    ggml: ctypes.CDLL, seed: int, cells: int, queries: int, size: int, type: int
) -> None:
    rng = np.random.default_rng(seed)
    case = dressed(rng, random_case(rng, cells=cells, queries=queries, heads=(3, 1), size=size, type=type))
    assert same_bits(compute(ggml, case, "plain"), defined(case))


def test_caches_of_eight_bits_are_read_as_the_numbers_that_they_hold(ggml: ctypes.CDLL) -> None:
    rng = np.random.default_rng(8)
    case = random_case(rng, cells=300, queries=20, size=64, type=Q8_0)
    wide = replace(
        case,
        keys=ggml_ops.floats(ggml_ops.widened(case.keys)[0], F32),
        values=ggml_ops.floats(ggml_ops.widened(case.values)[0], F32),
    )
    for variant in ggml_ops.available(ggml):
        assert same_bits(compute(ggml, case, variant), compute(ggml, wide, variant))


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("before", "queries"), [(700, 1), (30, 2), (600, 70), (0, 130)])
def test_threads_change_nothing(ggml: ctypes.CDLL, threads: int, before: int, queries: int) -> None:
    case = causal(np.random.default_rng(queries), before=before, queries=queries)
    for variant in ggml_ops.available(ggml)[1:]:
        assert same_bits(compute(ggml, case, variant, threads), compute(ggml, case, "plain"))


@pytest.mark.parametrize("window", [None, 50])
def test_a_query_alone_has_the_bits_that_it_has_among_hundreds(ggml: ctypes.CDLL, window: int | None) -> None:
    """Prompts in one piece, in pieces, and an answer's row beside them; a sliding window too."""
    rng = np.random.default_rng(3)
    case = causal(rng, before=100, queries=300, window=window)
    assert case.mask is not None
    for variant in ggml_ops.available(ggml)[1:]:
        whole = compute(ggml, case, variant)
        for piece in (1, 7, 63, 64, 200):
            for start in range(0, 300 if piece > 1 else 5, piece):
                end = min(start + piece, 300)
                part = replace(case, queries=case.queries[start:end], mask=case.mask[start:end])
                assert same_bits(compute(ggml, part, variant), whole[start:end]), (variant, piece, start)


def test_cells_of_others_change_nothing_whatever_they_hold(ggml: ctypes.CDLL) -> None:
    """Numbers that are none, infinite, or those of other sequences, in any places between a query's own cells."""
    rng = np.random.default_rng(4)
    case = causal(rng, before=90, queries=33)
    assert case.mask is not None
    crowded_cells = 400
    places = np.sort(rng.choice(crowded_cells, 123, replace=False))
    keys, values = (rng.normal(0, 1, (crowded_cells, 2, 64)).astype(np.float16) for _ in range(2))
    for cache in (keys, values):
        others = np.setdiff1d(np.arange(crowded_cells), places)
        cache[others[::3]], cache[others[1::3]] = np.nan, np.inf
    keys[places], values[places] = case.keys.content, case.values.content
    mask = np.full((33, crowded_cells), -np.inf, np.float16)
    mask[:, places] = case.mask
    sizes = (64, 2, crowded_cells, 1)
    crowded = replace(case, keys=Tensor(keys, F16, sizes), values=Tensor(values, F16, sizes), mask=mask)
    for variant in ggml_ops.available(ggml):
        assert same_bits(compute(ggml, crowded, variant), compute(ggml, case, "plain"))


def test_long_contexts_are_computed_in_smaller_tiles(ggml: ctypes.CDLL) -> None:
    """More scores than a thread keeps: 48 rows of 20,000, and heads one by one from 262,144 on."""
    rng = np.random.default_rng(5)
    case = random_case(rng, cells=20_000, queries=20, heads=(3, 1), size=16)
    case = replace(
        case, mask=np.where(np.arange(20_000)[None] <= 19_900 + np.arange(20)[:, None], 0, -np.inf).astype(np.float16)
    )
    longest = random_case(rng, cells=270_000, queries=1, heads=(3, 1), size=16)
    for long in (case, replace(longest, mask=None)):
        for variant in ggml_ops.available(ggml)[1:]:
            assert same_bits(compute(ggml, long, variant), compute(ggml, long, "plain"))


def test_a_query_without_cells_gets_zeros(ggml: ctypes.CDLL) -> None:
    case = random_case(np.random.default_rng(6), cells=70, queries=12)
    assert case.mask is not None
    case.mask[3:] = -np.inf
    for variant in ggml_ops.available(ggml):
        assert not compute(ggml, case, variant)[3:].any()


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
    return address + whole - size

def rows(size, row, head):
    return [ending_at_a_wall(size), row, head, 0]

size_t, number = ctypes.c_size_t, ctypes.c_int64
class Attention(ctypes.Structure):
    _fields_ = [(f"rows{i}{j}", size_t) for i in range(3) for j in range(4)]
    _fields_ += [("to_float", size_t * 2), ("elements", ctypes.c_int32 * 2)]
    _fields_ += [(f"mask{j}", size_t) for j in range(4)] + [("mask_sizes", number * 2)]
    _fields_ += [("sinks", size_t), ("out", size_t)]
    _fields_ += [("sizes", number * 2), ("counts", number * 5), ("factors", ctypes.c_float * 3)]

for variant in ggml_ops.available(ggml):
    for size in (16, 64, 96):
        for cells in (1, 15, 33, 64, 100):
            for queries in (1, 3, 17):
                kept = []
                q = rows(queries * 3 * size * 4, size * 4, queries * size * 4)
                k, v = rows(cells * size * 2, size * 2, 0), rows(cells * size * 2, size * 2, 0)
                mask = rows(queries * cells * 2, cells * 2, 0)
                sinks, out = ending_at_a_wall(12), ending_at_a_wall(queries * 3 * size * 4)
                work = Attention(
                    *q, *k, *v, (size_t * 2)(0, 0), (ctypes.c_int32 * 2)(1, 1), *mask, (number * 2)(1, 1), sinks, out,
                    (number * 2)(size, size), (number * 5)(queries, 3, 1, 1, cells), (ctypes.c_float * 3)(0.1, 0, 0),
                )
                assert ggml.attested_attention(variant.encode(), ctypes.byref(work))
print("whole")
"""


def test_nothing_behind_queries_keys_values_mask_and_results_is_touched(ggml: ctypes.CDLL) -> None:
    """Each lies at the end of a page whose next one nobody may touch."""
    run = subprocess.run([sys.executable, "-c", _AT_THE_EDGE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "whole\n"), run.stderr


def test_variants_that_are_not_there_compute_nothing(ggml: ctypes.CDLL) -> None:
    assert not ggml.attested_attention(b"neon", None)
