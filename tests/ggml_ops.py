"""ggml's own functions through ctypes: graphs of one operation, computed as in llama.cpp's evaluations."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from appliance.engine.llama_cpp import libraries

Array = npt.NDArray[Any]

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
VARIANTS = ("plain", "avx2", "avx-vnni", "avx512-vnni", "amx-int8")

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_MEMORY = 192 << 20


class _InitParams(ctypes.Structure):
    """`struct ggml_init_params` of ggml.h."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def library() -> ctypes.CDLL:
    """libggml-cpu with this project's kernels; libggml-base's names are found through it."""
    found = libraries.kernels()
    assert found is not None, "llama.cpp was built without native/llama_cpp: make venv builds it with it"
    found.ggml_cpu_init()  # fills the tables that llama.cpp's conversions read
    for name in (
        "ggml_init",
        "ggml_new_tensor_4d",
        "ggml_mul_mat",
        "ggml_flash_attn_ext",
        "ggml_new_graph",
        "ggml_get_data",
        "ggml_permute",
    ):
        getattr(found, name).restype = ctypes.c_void_p
    for name in ("attested_attention", "attested_float_gemm", "attested_use_variant", "attested_variant_available"):
        if hasattr(found, name):
            getattr(found, name).restype = ctypes.c_bool
    found.attested_variant.restype = ctypes.c_char_p
    return found


def quantised_product(
    ggml: ctypes.CDLL, variant: str, type: int, weights: Array, values: npt.NDArray[np.float32], out: Array
) -> bool:
    """`attested_gemm`: weights [rows, bytes] of ggml's `type`, values [tokens, columns], out f32 [tokens, rows].

    False where this processor has no such variant.
    """
    ggml.attested_gemm.restype = ctypes.c_bool
    done: bool = ggml.attested_gemm(
        variant.encode(),
        type,
        _NUMBER(values.shape[1]),
        _POINTER(weights.ctypes.data),
        ctypes.c_size_t(weights.strides[0]),
        _NUMBER(len(weights)),
        _POINTER(values.ctypes.data),
        _NUMBER(len(values)),
        _POINTER(out.ctypes.data),
    )
    return done


def available(ggml: ctypes.CDLL) -> list[str]:
    """This machine's variants, `plain` first."""
    return [name for name in VARIANTS if ggml.attested_variant_available(name.encode())]


@contextmanager
def variant(ggml: ctypes.CDLL, name: str) -> Iterator[None]:
    before = ggml.attested_variant()
    assert ggml.attested_use_variant(name.encode())
    try:
        yield
    finally:
        assert ggml.attested_use_variant(before)


@dataclass(frozen=True, slots=True)
class Tensor:
    """Content as it lies in memory and ggml's type and sizes of it, the innermost first."""

    content: Array
    type: int
    sizes: tuple[int, int, int, int]


def floats(values: npt.NDArray[np.float32], type: int) -> Tensor:
    """Of up to four axes, the last one innermost, in one of ggml's types."""
    sizes = (*reversed(values.shape), 1, 1, 1)[:4]
    values = np.ascontiguousarray(values)
    if type == F16:
        return Tensor(values.astype(np.float16), type, sizes)
    if type == BF16:
        return Tensor(bfloat16(values), type, sizes)
    if type == Q8_0:
        return Tensor(_q8_0(values), type, sizes)
    return Tensor(values, type, sizes)


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """To the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _q8_0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1) / 127).astype(np.float16)
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)
    quants = np.rint(blocks / divisors[:, None]).clip(-127, 127).astype(np.int8)
    return np.concatenate([scales[:, None].view(np.uint8), quants.view(np.uint8)], axis=1)


def widened(tensor: Tensor) -> npt.NDArray[np.float32]:
    """The numbers that a tensor holds, exactly."""
    shape = tuple(reversed(tensor.sizes))
    if tensor.type == BF16:
        return (tensor.content.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if tensor.type == Q8_0:
        scales = np.ascontiguousarray(tensor.content[:, :2]).view(np.float16).astype(np.float32)
        return np.asarray(scales * tensor.content[:, 2:].view(np.int8).astype(np.float32), np.float32).reshape(shape)
    return tensor.content.astype(np.float32).reshape(shape)


class Graph:
    """Memory for tensors and one graph."""

    def __init__(self, ggml: ctypes.CDLL) -> None:
        self._ggml = ggml
        self._context = _POINTER(ggml.ggml_init(_InitParams(_MEMORY, None, False)))

    def close(self) -> None:
        self._ggml.ggml_free(self._context)

    def put(self, tensor: Tensor) -> ctypes.c_void_p:
        sizes = [_NUMBER(size) for size in tensor.sizes]
        made = _POINTER(self._ggml.ggml_new_tensor_4d(self._context, tensor.type, *sizes))
        ctypes.memmove(self._ggml.ggml_get_data(made), tensor.content.ctypes.data, tensor.content.nbytes)
        return made

    def put_cache(self, tensor: Tensor) -> ctypes.c_void_p:
        """Of (size, head, cell), as llama.cpp keeps keys and values, in the order in which attention takes them."""
        return _POINTER(self._ggml.ggml_permute(self._context, self.put(tensor), 0, 2, 1, 3))

    def attention(self, *inputs: ctypes.c_void_p | None, scale: float, max_bias: float, softcap: float) -> Any:
        """Of queries, keys, values, mask (or None) and sinks (or None)."""
        *tensors, sinks = inputs
        factors = (ctypes.c_float(factor) for factor in (scale, max_bias, softcap))
        made = _POINTER(self._ggml.ggml_flash_attn_ext(self._context, *tensors, *factors))
        self._ggml.ggml_flash_attn_ext_add_sinks(made, sinks)
        return made

    def product(self, weights: ctypes.c_void_p, inputs: ctypes.c_void_p) -> ctypes.c_void_p:
        return _POINTER(self._ggml.ggml_mul_mat(self._context, weights, inputs))

    def compute(self, result: ctypes.c_void_p, shape: tuple[int, ...], threads: int) -> npt.NDArray[np.float32]:
        graph = _POINTER(self._ggml.ggml_new_graph(self._context))
        self._ggml.ggml_build_forward_expand(graph, result)
        assert self._ggml.ggml_graph_compute_with_ctx(self._context, graph, threads) == 0
        out = np.empty(shape, dtype=np.float32)
        ctypes.memmove(out.ctypes.data, self._ggml.ggml_get_data(result), out.nbytes)
        return out


@contextmanager
def graph(ggml: ctypes.CDLL) -> Iterator[Graph]:
    made = Graph(ggml)
    try:
        yield made
    finally:
        made.close()
