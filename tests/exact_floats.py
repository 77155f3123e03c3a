"""Float32 arithmetic with one rounding for each step, in numpy: what native/llama_cpp is held against, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_F = np.float32


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
    """a * b + c, rounded once.

    The product of two float32 is exact in float64. Their sum with c is rounded to odd there, which makes the second
    rounding, to float32, the only one that shows (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.asarray(np.where((error != 0) & even, odd, total), np.float64).astype(_F)


def tree(lanes: Floats) -> Floats:
    """The sum of sixteen lanes (first axis): l and l + 8, then + 4, + 2, + 1."""
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    return np.asarray(lanes[0], _F)


def dot(a: Floats, b: Floats) -> Floats:
    """Sums over the last axis as arithmetic "attested-1" adds floats up; other axes are broadcast."""
    a, b = np.broadcast_arrays(a, b)
    lanes = np.zeros((16, *a.shape[:-1]), _F)
    for k in range(a.shape[-1]):
        lanes[k % 16] = fma(a[..., k], b[..., k], lanes[k % 16])
    return tree(lanes)


def exp(x: Floats) -> Floats:
    """functions_simd.h's exp, for x <= 0."""
    seen = np.where(x < -87, _F(0), x).astype(_F)
    steps = fma(seen, _F(float.fromhex("0x1.715476p+0")), _F(12582912))
    n = steps - _F(12582912)
    r = fma(n, -_F(float.fromhex("0x1.62e4p-1")), seen)
    r = fma(n, -_F(float.fromhex("0x1.7f7d1cp-20")), r)
    total = np.full_like(r, _F(1.98756915e-4))
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        total = fma(total, r, _F(factor))
    total = fma(total, r * r, r) + _F(1)
    scaled = (total.view(np.uint32) + (steps.view(np.uint32) << np.uint32(23))).view(_F)
    return np.where(x < -87, _F(0), scaled).astype(_F)


def tanh(x: Floats) -> Floats:
    e = exp(_F(-2) * np.abs(x))
    return np.copysign((_F(1) - e) / (_F(1) + e), x)


def same_bits(one: Floats, other: Floats) -> bool:
    return one.shape == other.shape and bool((one.view(np.uint32) == other.view(np.uint32)).all())
