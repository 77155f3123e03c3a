"""Seeded random weights in every format that this project's kernels have, the same bits on every machine.

Nothing is rounded and no quantiser is asked: blocks are drawn as they lie in a file, with any codes at all and scales
that are integers times a power of two. So they depend on no compiler, no vector width and no library's version.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
_Make = Callable[["Draw", int], Bytes]


class Draw:
    """Integers by SplitMix64, from a name: only wrapping integer arithmetic."""

    def __init__(self, name: str) -> None:
        self._at = np.uint64(zlib.crc32(name.encode()) << 32)

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        z = self._at + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._at = z[-1]
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def bytes(self, rows: int, columns: int) -> Bytes:
        words = self.words(-(-rows * columns // 8)).astype("<u8")
        return words.view(np.uint8)[: rows * columns].reshape(rows, columns)

    def integers(self, low: int, high: int, *shape: int) -> Integers:
        """Of low <= n < high, which are few beside 2**48."""
        drawn = (self.words(int(np.prod(shape))) >> np.uint64(16)) % np.uint64(high - low)
        return drawn.astype(np.int64).reshape(shape) + low

    def bell(self, bits: int, *shape: int) -> Integers:
        """Sums of four uniform integers, between -2**bits and 2**bits, about 2**(bits - 1.8) on average."""
        quarter = 2 ** (bits - 2)
        total: Integers = self.integers(-quarter, quarter, 4, *shape).sum(axis=0)
        return total


def halves(numerators: Integers, exponent: int) -> Bytes:
    """numerators * 2**exponent as little-endian half floats: (n,) to (n, 2). No bit may be lost."""
    exact = np.ldexp(numerators.astype(np.float64), exponent)
    stored = exact.astype("<f2")
    return stored.view(np.uint8).reshape(-1, 2)


def _scales(draw: Draw, blocks: int) -> Integers:
    return draw.integers(32, 64, blocks)


def _signed(codes: int, exponent: int) -> _Make:
    """Q4_0, Q5_0, IQ4_NL: a scale of either sign, and `codes` bytes of codes."""

    def make(draw: Draw, blocks: int) -> Bytes:
        signs = draw.integers(0, 2, blocks) * 2 - 1
        return np.hstack([halves(_scales(draw, blocks) * signs, exponent), draw.bytes(blocks, codes)])

    return make


def _with_minimum(codes: int, exponent: int, greatest: int) -> _Make:
    """Q4_1, Q5_1: values of 0 to `greatest` scales above a minimum that centres them, nearly."""

    def make(draw: Draw, blocks: int) -> Bytes:
        scales = _scales(draw, blocks)
        minimum = -(scales * greatest + draw.integers(-31, 32, blocks))
        return np.hstack([halves(scales, exponent), halves(minimum, exponent - 1), draw.bytes(blocks, codes)])

    return make


def _q8_0(draw: Draw, blocks: int) -> Bytes:
    codes = draw.integers(-127, 128, blocks, 32).astype(np.int8)
    return np.hstack([halves(_scales(draw, blocks), -17), codes.view(np.uint8)])


def _q2_k(draw: Draw, blocks: int) -> Bytes:
    sub = draw.integers(1, 15, blocks, 16)
    minimum = sub + draw.integers(-1, 2, blocks, 16)
    scales = _scales(draw, blocks)
    packed = (sub | minimum << 4).astype(np.uint8)
    return np.hstack([packed, draw.bytes(blocks, 64), halves(scales, -14), halves(scales * 3, -15)])


def _q3_k(draw: Draw, blocks: int) -> Bytes:
    """High bits, low bits and the packed scales of the parts may be any bytes."""
    return np.hstack([draw.bytes(blocks, 32 + 64 + 12), halves(_scales(draw, blocks), -16)])


def _q45_k(codes: int, exponent: int, greatest: int) -> _Make:
    """Q4_K, Q5_K: eight parts with scales and minimums of six bits, packed in twelve bytes."""

    def make(draw: Draw, blocks: int) -> Bytes:
        sub = draw.integers(3, 61, blocks, 8)
        minimum = sub + draw.integers(-3, 4, blocks, 8)
        low, high, low_min, high_min = sub[:, :4], sub[:, 4:], minimum[:, :4], minimum[:, 4:]
        packed = [low | high >> 4 << 6, low_min | high_min >> 4 << 6, high & 15 | (high_min & 15) << 4]
        scales = _scales(draw, blocks)
        ends = [halves(scales, exponent), halves(scales * greatest, exponent - 1)]
        return np.hstack([*ends, np.hstack(packed).astype(np.uint8), draw.bytes(blocks, codes)])

    return make


def _q6_k(draw: Draw, blocks: int) -> Bytes:
    """The scales are so small that halves hold them without their leading one."""
    sub = draw.integers(-128, 128, blocks, 16).astype(np.int8).view(np.uint8)
    return np.hstack([draw.bytes(blocks, 128 + 64), sub, halves(_scales(draw, blocks), -21)])


def _floats(kind: str, bits: int) -> _Make:
    def make(draw: Draw, blocks: int) -> Bytes:
        exact = np.ldexp(draw.bell(bits, blocks, 256).astype(np.float64), -bits - 3)
        stored = exact.astype(kind)
        return stored.view(np.uint8).reshape(blocks, -1)

    return make


def _bf16(draw: Draw, blocks: int) -> Bytes:
    """The upper halves of floats whose lower halves are zero."""
    upper = _floats("<f4", 7)(draw, blocks).view("<u2").reshape(blocks, -1, 2)
    return np.ascontiguousarray(upper[..., 1]).view(np.uint8)


_MAKERS: Final[Mapping[str, _Make]] = MappingProxyType({
    "Q4_0": _signed(16, -13),
    "Q4_1": _with_minimum(16, -13, 15),
    "Q5_0": _signed(20, -14),
    "Q5_1": _with_minimum(20, -14, 31),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q45_k(128, -18, 15),
    "Q5_K": _q45_k(160, -19, 31),
    "Q6_K": _q6_k,
    "IQ4_NL": _signed(16, -17),
    "F16": _floats("<f2", 11),
    "BF16": _bf16,
    "F32": _floats("<f4", 20),
})  # fmt: skip
FORMATS: Final = tuple(_MAKERS)
_SUPER_BLOCK: Final = 256
_OF_32: Final = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"})


_Q = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "IQ4_NL": 20, "F32": 0, "F16": 1, "BF16": 30}
GGML_TYPES: Final[Mapping[str, int]] = MappingProxyType({**_Q, **{f"Q{bits}_K": 8 + bits for bits in range(2, 7)}})
"""The numbers that GGUF files and ggml give the formats."""


def matrix(form: str, name: str, rows: int, columns: int) -> Bytes:
    """Rows of weights as bytes, (rows, bytes of a row): about as large as keeps what they multiply its size.

    `form` is one of FORMATS, `name` the seed; columns are a multiple of 256.
    """
    if columns % _SUPER_BLOCK:
        raise ValueError(f"{columns} columns are no multiple of {_SUPER_BLOCK}")
    small = form in _OF_32
    blocks = _MAKERS[form](Draw(f"{form} {name}"), rows * columns // (32 if small else _SUPER_BLOCK))
    return np.ascontiguousarray(blocks).reshape(rows, -1)
