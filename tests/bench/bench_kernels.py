"""Milliseconds of products of quantised weights by variant, format and number of tokens, and the share of the peak.

    python tests/bench/bench_kernels.py [--variants NAME ...] [--formats Q4_1 ...] [--tokens 1 2 4 8 16 64 512]
                                        [--mib 64] [--columns 1536] [--compiler cc] [--json]

One thread, its CPU time, the least of several. A format's weights are `--mib` of random codes, more than the caches of
most cores hold, as one matrix. Few tokens are bound by memory: the share is of the bytes a second that a loop reads;
many are bound by arithmetic: of the 8-bit operations a second that the variant's instructions reach (peaks.c).
Memory of this program is in pages as numpy gets them, which may be huge ones; a model's file is in small ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llama_cpp import llama_cpp as _loaded  # noqa: F401 - maps the libraries

from appliance.engine.llama_cpp import libraries
from tests import ggml_ops
from tests.bench.machine import Peaks, processor
from tests.integration.gemm_reference import FORMS, Bytes, Floats, Form

VARIANTS = ("avx2", "avx-vnni", "avx512-vnni", "amx-int8")
_ENOUGH_S = 1.0


def weights_of(form: Form, columns: int, mib: int) -> Bytes:
    """As many whole rows as fit, scales of the usual size."""
    rng = np.random.default_rng(1)
    blocks = columns // form.block
    rows = (mib << 20) // (blocks * form.size)
    made = rng.integers(0, 256, (rows, blocks, form.size), dtype=np.uint8)
    for at in form.halves:
        made[..., at : at + 2] = rng.normal(0, 0.02, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return made.reshape(rows, -1)


def least_s(library: ctypes.CDLL, variant: str, form: Form, weights: Bytes, values: Floats) -> float:
    out = np.empty((len(values), len(weights)), dtype=np.float32)
    least, spent, runs = float("inf"), 0.0, 0
    while runs < 3 or (spent < _ENOUGH_S and runs < 20):
        begun = time.thread_time()
        done = ggml_ops.quantised_product(library, variant, form.number, weights, values, out)
        taken = time.thread_time() - begun
        if not done:
            raise SystemExit(f"no kernels for {form.name} in {variant}")
        least, spent, runs = min(least, taken), spent + taken, runs + 1
    return least


def measured(library: ctypes.CDLL, args: argparse.Namespace, peaks: Peaks) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for form in (form for form in FORMS if form.name in args.formats):
        weights = weights_of(form, args.columns, args.mib)
        for variant in args.variants:
            for tokens in args.tokens:
                values = np.random.default_rng(2).normal(0, 1, (tokens, args.columns)).astype(np.float32)
                taken = least_s(library, variant, form, weights, values)
                operations = 2 * len(weights) * args.columns * tokens / taken
                row: dict[str, object] = {"format": form.name, "variant": variant, "tokens": tokens}
                row |= {"ms": round(taken * 1e3, 3), "gb_s": round(weights.nbytes / taken / 1e9, 1)}
                row |= {"read": round(weights.nbytes / taken / peaks.read, 3), "gmac_s": round(operations / 2e9, 1)}
                peak = peaks.operations.get(variant)
                found.append(row | {"operations": round(operations / peak, 3) if peak else None})
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--formats", nargs="+", default=[form.name for form in FORMS])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--columns", type=int, default=1536, help="a multiple of 256")
    parser.add_argument("--compiler", default="cc", help="of the loops that find the peaks")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    library = libraries.kernels()
    if library is None:
        parser.error("llama.cpp was built without native/llama_cpp")
    args.variants = [name for name in args.variants if library.attested_variant_available(name.encode())]
    rows = measured(library, args, Peaks.measured(args.compiler, threads=1, mib=args.mib))
    if args.json:
        print(json.dumps({**processor().as_json(), "products": rows}))
        return 0
    print(processor().name)
    print("format  variant      tokens        ms   GB/s  of read  GMAC/s  of peak")
    for row in rows:
        share = "      -" if row["operations"] is None else f"{row['operations']:7.1%}"
        line = f"{row['format']:7} {row['variant']:12} {row['tokens']:6} {row['ms']:9.2f} {row['gb_s']:6.1f}"
        print(f"{line} {row['read']:8.1%} {row['gmac_s']:7.1f} {share}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
