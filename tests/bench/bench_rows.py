"""Milliseconds of an evaluation by its number of rows and by the tokens before it: what steps and prompts are made of.

    python tests/bench/bench_rows.py [--model NAME|FILE.gguf] [--requantise] [--threads 1] [--variants NAME ...]
                                     [--rows 1 2 4 8 16 32 64 128 512] [--contexts 0 1000 3000] [--repeats 5]

The engine's runtime alone, in this process: no server, no sampling, logits of the last row. The rows are of one
sequence, as a prompt's are. One thread is timed by the CPU time that it used, several by the clock; the least of
`--repeats` counts (fewer where one takes seconds). Beside it the multiply-adds of the weights' products a second
(GMAC/s), and what each kind of row costs behind the context, over the same without one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from appliance.engine.batch import Segment
from appliance.engine.llama_cpp import libraries
from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions
from tests.bench.harness import MODEL
from tests.bench.machine import processor
from tests.bench.peer_models import Weights, chosen

CHUNK = 512
_ENOUGH_S = 4.0


def evaluation_s(runtime: LlamaRuntime, context: int, rows: int, repeats: int) -> float:
    """The least time of one, behind `context` tokens that are there already."""
    piece = Segment(sequence=0, position=context, tokens=_tokens(rows, context), outputs=1)
    clock = time.thread_time if runtime.threads == 1 else time.perf_counter
    least, spent = float("inf"), 0.0
    for _ in range(repeats):
        start = clock()
        runtime.decode([piece])
        took = clock() - start
        runtime.forget(0, start=context)
        least, spent = min(least, took), spent + took
        if spent > _ENOUGH_S:
            break
    return least


def fill(runtime: LlamaRuntime, held: int, wanted: int) -> None:
    for start in range(held, wanted, CHUNK):
        count = min(CHUNK, wanted - start)
        runtime.decode([Segment(sequence=0, position=start, tokens=_tokens(count, start), outputs=0)])


def _tokens(count: int, offset: int) -> list[int]:
    return [1 + (offset + index) * 7919 % 20_000 for index in range(count)]


def measure(weights: Weights, options: argparse.Namespace, variant: str) -> list[dict[str, object]]:
    fd = os.open(weights.path, os.O_RDONLY)
    size = max(options.contexts) + max(options.rows) + 64
    runtime = LlamaRuntime(
        RuntimeOptions(
            fd=fd, kv_tokens=size, n_batch=max(*options.rows, CHUNK), n_sequences=1, threads=options.threads
        ),
        progress=lambda _: None,
    )
    os.close(fd)
    found: list[dict[str, object]] = []
    held = 0
    empty: dict[int, float] = {}
    for context in sorted(options.contexts):
        fill(runtime, held, context)
        held = context
        for rows in options.rows:
            took = evaluation_s(runtime, context, rows, options.repeats)
            empty.setdefault(rows, took)
            products = weights.layer_products * rows + weights.output_products
            found.append({
                "variant": variant,
                "context": context,
                "rows": rows,
                "ms": 1e3 * took,
                "gmac_s": products / took / 1e9,
                "behind_ms_a_row": 1e3 * (took - empty[rows]) / rows,
            })  # fmt: skip
    return found


def show(found: Sequence[dict[str, object]]) -> None:
    print(
        f"{'variant':<12} {'context':>8} {'rows':>5} {'ms':>9} {'ms a row':>9} {'GMAC/s':>8} {'context, ms a row':>18}"
    )
    for each in found:
        ms, rows = float(str(each["ms"])), int(str(each["rows"]))
        print(
            f"{each['variant']:<12} {each['context']:>8} {rows:>5} {ms:>9.2f} {ms / rows:>9.3f} {each['gmac_s']:>8.1f} "
            f"{each['behind_ms_a_row']:>18.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a model of the catalogue, or a GGUF file")
    parser.add_argument("--requantise", action="store_true", help="measure the same weights in Q8_0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", nargs="+", default=[], help="of the kernels, by default the one that is chosen")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--contexts", type=int, nargs="+", default=[0, 1000, 3000])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    weights = chosen(options.model, requantised=options.requantise)
    print(f"{processor().name}: {' '.join(processor().features)}")
    print(f"{options.model}, {weights.form}; {libraries.arithmetic()}, {options.threads} thread(s)")
    kernels = libraries.kernels()
    done: list[dict[str, object]] = []
    for variant in options.variants or [libraries.variant() or "llama.cpp"]:
        if kernels is not None and not kernels.attested_use_variant(variant.encode()):
            raise SystemExit(f"this processor has no variant {variant}")
        found = measure(weights, options, variant)
        show(found)
        done += found
    facts = {"bench": "rows", "model": options.model, "format": weights.form, **processor().as_json()}
    print(json.dumps({**facts, "arithmetic": libraries.arithmetic(), "threads": options.threads, "figures": done}))


if __name__ == "__main__":
    main()
