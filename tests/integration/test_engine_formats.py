"""One arithmetic: the same bits in every weight format, variant of the kernels, shape and number of threads.

What a machine's processor lacks is not run there: the digests below were seen on the processors that docs/benchmarks.md
names, and a machine with other units has to find the same ones.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest

from appliance.models.store import ModelStore
from tests import tiny_models
from tests.tiny_weights import FORMATS

pytest.importorskip("llama_cpp")

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these kernels are for x86-64")

ARITHMETIC = "attested-1"
# SHA-256, cut to 16 digits, of the logits behind each of 520 tokens of the tiny model. Another bit is another
# arithmetic, and another name for it.
GOLDEN: Final[Mapping[str, str]] = MappingProxyType({
    "Q4_0": "8e5988fde52b41fd",
    "Q4_1": "3deb9af4d0ae3811",
    "Q5_0": "4b0b5cbe3e604a35",
    "Q5_1": "88b5c25a96edd436",
    "Q8_0": "f5f63988813faca4",
    "Q2_K": "fba0df7a3a2ea43c",
    "Q3_K": "b5994e92920ba90b",
    "Q4_K": "a5c06eeb980fd585",
    "Q5_K": "bd4eab3e1437c12d",
    "Q6_K": "5b59dac677255742",
    "IQ4_NL": "f3886800fb4ea6bc",
    "F16": "9e37adee5acbbf45",
    "BF16": "7a7fc8d8edc0e945",
    "F32": "7f3be9dc5ffb5e37",
})  # fmt: skip

# One process for each model, so that the tests go on whatever a kernel does. Prints {variant: {shape: digest}}.
_PROGRAM = r"""
import hashlib, json, os, sys

from appliance.engine.batch import Segment
from appliance.engine.llama_cpp import libraries
from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions
from appliance.engine.llama_cpp.allowance import Allowance
from appliance.engine.llama_cpp.selftest import measure_exactness

path, count, threads_of = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
library = libraries.kernels()


def opened(threads, n_batch):
    fd = os.open(path, os.O_RDONLY)
    options = RuntimeOptions(fd=fd, kv_tokens=4096, n_batch=n_batch, n_sequences=9, threads=threads)
    runtime = LlamaRuntime(options, progress=lambda _: None)
    os.close(fd)
    return runtime


def tokens(runtime, offset, length):
    return [(3 + (offset + at) * 7919) % runtime.vocabulary_size for at in range(length)]


def pieces(runtime, size, sequence=0):
    # Logits behind every token, the prompt evaluated in pieces of that size.
    digest = hashlib.sha256()
    for start in range(0, count, size):
        length = min(size, count - start)
        piece = tokens(runtime, start, length)
        runtime.decode([Segment(sequence=sequence, position=start, tokens=piece, outputs=length)])
        for row in range(length):
            digest.update(runtime.logits(row).tobytes())
    runtime.forget(sequence)
    return digest.hexdigest()[:16]


def beside_others(runtime):
    # The same in pieces of 16, each beside rows of seven other sequences and a piece of an eighth one's prompt.
    for other in range(1, 8):
        runtime.decode([Segment(sequence=other, position=0, tokens=tokens(runtime, 50 * other, 20 + other), outputs=0)])
    digest = hashlib.sha256()
    for start in range(0, count, 16):
        length = min(16, count - start)
        here = Segment(sequence=0, position=start, tokens=tokens(runtime, start, length), outputs=length)
        there = [
            Segment(sequence=other, position=20 + other, tokens=tokens(runtime, other, 1), outputs=1)
            for other in range(1, 8)
        ]
        prompt = Segment(sequence=8, position=0, tokens=tokens(runtime, 99, 1 + start % 39), outputs=0)
        runtime.decode([*there, here, prompt])
        for row in range(length):
            digest.update(runtime.logits(7 + row).tobytes())
        for other in range(1, 8):
            runtime.forget(other, start=20 + other)
        runtime.forget(8)
    for sequence in range(9):
        runtime.forget(sequence)
    return digest.hexdigest()[:16]


found = {}
for threads in threads_of:
    for n_batch in (63, 512):
        runtime = opened(threads, n_batch)
        for variant in ("plain", "avx2", "avx-vnni", "avx512-vnni", "amx-int8"):
            if not library.attested_use_variant(variant.encode()):
                continue
            shapes = found.setdefault(variant, {})
            name = f"{threads} threads, at most {n_batch} rows"
            if variant == "plain":  # loops that define the arithmetic, and are slow
                sizes = (512,) if (threads, n_batch) == (1, 512) else ()
            elif n_batch == 63:
                sizes = (1, 7, 63) if threads == 1 else (63,)
            else:
                sizes = (64, 128, 512) if threads == 1 else (512,)
            for size in sizes:
                shapes[f"{name}, pieces of {size}"] = pieces(runtime, size)
            if variant != "plain":
                shapes[f"{name}, beside others"] = beside_others(runtime)
                exact = measure_exactness(runtime, Allowance(600.0))
                shapes[f"{name}, self-test"] = [exact.batch, exact.verify, exact.chunk, exact.rollback]
        del runtime
print(json.dumps({"arithmetic": libraries.arithmetic(), "found": found}))
"""


def evaluated(model: Path, tokens: int, threads: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    arguments = [str(model), str(tokens), json.dumps(threads)]
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, "GOMP_SPINCOUNT": "1000"},  # as the worker has it: more threads than cores
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["arithmetic"] == ARITHMETIC
    found: dict[str, dict[str, Any]] = answer["found"]
    assert {"plain", "avx2"} <= set(found)
    return found


def assert_one_arithmetic(found: Mapping[str, Mapping[str, Any]], digest: str | None) -> None:
    """Every shape of every variant has the same logits, those of `digest` where it is known."""
    every = {
        (variant, shape): value
        for variant, shapes in found.items()
        for shape, value in shapes.items()
        if not shape.endswith("self-test")
    }
    expected = digest or every[next(iter(every))]
    assert {key: value for key, value in every.items() if value != expected} == {}
    verdicts = {
        (variant, shape): value
        for variant, shapes in found.items()
        for shape, value in shapes.items()
        if shape.endswith("self-test")
    }
    assert verdicts
    assert {key: value for key, value in verdicts.items() if value != [True] * 4} == {}


@pytest.mark.parametrize("form", FORMATS)
def test_every_variant_shape_and_number_of_threads_gives_the_same_bits(form: str) -> None:
    found = evaluated(tiny_models.path(form), 520, (1, 2, 3))
    assert_one_arithmetic(found, GOLDEN[form])


@pytest.mark.model
def test_the_demo_model_too(smollm2: Path) -> None:
    assert_one_arithmetic(evaluated(smollm2, 66, (1,)), None)


@pytest.mark.model
def test_a_mixture_of_types_too(model_store: ModelStore) -> None:
    """Q4_K_M: Q5_0, Q8_0, Q4_K and Q6_K side by side, windows of attention, another way to scale."""
    if "gemma-3-270m" not in model_store.names():
        pytest.skip("gemma-3-270m has terms to agree to: appliance models pull gemma-3-270m")
    assert_one_arithmetic(evaluated(model_store.verify("gemma-3-270m").paths[0], 66, (1,)), None)
