"""The arithmetic of products as docs/adr/0010 defines it, in numpy, written from the formats' layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A weight format: ggml's number for it, its block, where that has float scales, and what makes integers of it."""

    name: str
    number: int
    block: int
    size: int
    halves: tuple[int, ...]
    decode: Callable[[Bytes], tuple[Ints, Ints, Ints]]
    """Blocks of bytes (n, size) to codes (n, block), integer scales and minimums of sub-blocks (n, block / sub)."""


_NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def _wide(part: Bytes) -> Ints:
    return part.astype(np.int64)


def _nibbles(part: Bytes) -> Ints:
    return np.concatenate([_wide(part) & 15, _wide(part) >> 4], axis=1)


def _fifth(part: Bytes) -> Ints:
    word = np.ascontiguousarray(part).view(np.uint32)
    return (word.astype(np.int64) >> np.arange(32) & 1) << 4


def _plain(codes: Ints) -> tuple[Ints, Ints, Ints]:
    ones = np.ones((len(codes), 1), dtype=np.int64)
    return codes, ones, -ones


def _q8_0(b: Bytes) -> tuple[Ints, Ints, Ints]:
    return _plain(np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.int64))


def _shifted(part: Bytes, shifts: list[int], mask: int) -> Ints:
    """Each byte's bits from every one of `shifts` on: all bytes for the first, then for the second."""
    return np.concatenate([_wide(part) >> shift & mask for shift in shifts], axis=1)


def _q2_k(b: Bytes) -> tuple[Ints, Ints, Ints]:
    codes = np.concatenate([_shifted(b[:, at : at + 32], [0, 2, 4, 6], 3) for at in (16, 48)], axis=1)
    return codes, _wide(b[:, :16]) & 15, _wide(b[:, :16]) >> 4


def _q3_k(b: Bytes) -> tuple[Ints, Ints, Ints]:
    codes = np.concatenate([_shifted(b[:, at : at + 32], [0, 2, 4, 6], 3) for at in (32, 64)], axis=1)
    codes += (_shifted(b[:, :32], list(range(8)), 1) - 1) * 4
    low = _shifted(b[:, 96:104], [0, 4], 15)
    scales = (low | _shifted(b[:, 104:108], [0, 2, 4, 6], 3) << 4) - 32
    return codes, scales, np.zeros_like(scales)


def _six_bits(q: Ints) -> tuple[Ints, Ints]:
    scales = np.concatenate([q[:, :4] & 63, (q[:, 8:] & 15) | q[:, :4] >> 6 << 4], axis=1)
    return scales, np.concatenate([q[:, 4:8] & 63, q[:, 8:] >> 4 | q[:, 4:8] >> 6 << 4], axis=1)


def _q4_k(b: Bytes) -> tuple[Ints, Ints, Ints]:
    codes = np.concatenate([_shifted(b[:, at : at + 32], [0, 4], 15) for at in range(16, 144, 32)], axis=1)
    return codes, *_six_bits(_wide(b[:, 4:16]))


def _q5_k(b: Bytes) -> tuple[Ints, Ints, Ints]:
    codes = np.concatenate([_shifted(b[:, at : at + 32], [0, 4], 15) for at in range(48, 176, 32)], axis=1)
    return codes | _shifted(b[:, 16:48], list(range(8)), 1) << 4, *_six_bits(_wide(b[:, 4:16]))


def _q6_k(b: Bytes) -> tuple[Ints, Ints, Ints]:
    low = np.concatenate([_shifted(b[:, at : at + 64], [0, 4], 15) for at in (0, 64)], axis=1)
    high = np.concatenate([_shifted(b[:, at : at + 32], [0, 2, 4, 6], 3) for at in (128, 160)], axis=1)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.int64)
    return (low | high << 4) - 32, scales, np.zeros_like(scales)


FORMS = (
    Form(name="Q4_0", number=2, block=32, size=18, halves=(0,), decode=lambda b: _plain(_nibbles(b[:, 2:]) - 8)),
    Form(name="Q4_1", number=3, block=32, size=20, halves=(0, 2), decode=lambda b: _plain(_nibbles(b[:, 4:]))),
    Form(
        name="Q5_0",
        number=6,
        block=32,
        size=22,
        halves=(0,),
        decode=lambda b: _plain((_nibbles(b[:, 6:]) | _fifth(b[:, 2:6])) - 16),
    ),
    Form(
        name="Q5_1",
        number=7,
        block=32,
        size=24,
        halves=(0, 2),
        decode=lambda b: _plain(_nibbles(b[:, 8:]) | _fifth(b[:, 4:8])),
    ),
    Form(name="Q8_0", number=8, block=32, size=34, halves=(0,), decode=_q8_0),
    Form(
        name="IQ4_NL",
        number=20,
        block=32,
        size=18,
        halves=(0,),
        decode=lambda b: _plain(_NONLINEAR[_nibbles(b[:, 2:])]),
    ),
    Form(name="Q2_K", number=10, block=256, size=84, halves=(80, 82), decode=_q2_k),
    Form(name="Q3_K", number=11, block=256, size=110, halves=(108,), decode=_q3_k),
    Form(name="Q4_K", number=12, block=256, size=144, halves=(0, 2), decode=_q4_k),
    Form(name="Q5_K", number=13, block=256, size=176, halves=(0, 2), decode=_q5_k),
    Form(name="Q6_K", number=14, block=256, size=210, halves=(208,), decode=_q6_k),
)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once: in float64 rounded to odd, and then to float32."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = np.array(total).view(np.int64)
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    bits[inexact] += np.where((error > 0) == (total > 0), 1, -1)[inexact]
    return bits.view(np.float64).astype(np.float32)


def quantised(values: Floats, block: int) -> tuple[Ints, Floats]:
    """Codes (rows, columns) and scales (rows, blocks): the largest magnitude of a block becomes 127."""
    blocks = values.reshape(len(values), -1, block)
    most = np.abs(blocks).max(axis=2)
    factor = np.where(most == 0, np.float32(0), np.float32(127) / np.where(most == 0, np.float32(1), most))
    codes = np.rint(blocks * factor[..., None].astype(np.float32)).astype(np.int64)
    return codes.reshape(values.shape), most / np.float32(127)


def product(form: Form, weights: Bytes, values: Floats) -> Floats:
    """(rows of `values`, rows of `weights`)."""
    rows, columns = len(weights), values.shape[1]
    x, x_scales = quantised(values, form.block)
    out = np.zeros((len(values), rows), dtype=np.float32)
    for at in range(columns // form.block):
        raw = np.ascontiguousarray(weights[:, at * form.size : (at + 1) * form.size])
        scales = [
            np.ascontiguousarray(raw[:, h : h + 2]).view(np.float16)[:, 0].astype(np.float32) for h in form.halves
        ]
        codes, factors, minimums = form.decode(raw)
        taken = x[:, at * form.block : (at + 1) * form.block]
        sums = taken @ (codes * np.repeat(factors, form.block // factors.shape[1], axis=1)).T
        scale = x_scales[:, at, None]
        out = fma(scales[0][None] * scale, sums.astype(np.int32).astype(np.float32), out)
        if len(scales) == 2 and form.block == 32:
            out = fma(
                np.broadcast_to(scales[1], out.shape), scale * taken.sum(axis=1, keepdims=True).astype(np.float32), out
            )
        elif len(scales) == 2:
            least = taken @ np.repeat(minimums, form.block // minimums.shape[1], axis=1).T
            out = fma(-(scales[1][None] * scale), least.astype(np.int32).astype(np.float32), out)
    return out
