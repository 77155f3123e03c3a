"""What a build of the engine computes: digests of logits, draws and functions, with one variant of the kernels.

    python -m appliance.engine.llama_cpp.proof                      # which variants this processor has, as JSON
    python -m appliance.engine.llama_cpp.proof --variant avx2       # the digests, as JSON

Runs as a process of its own: a library that was built for another processor, or by a compiler with a fault, ends it by
a signal, and its last line on stderr says what it was doing. `scripts/engine_proof.py` compares the digests with those
that the project holds (`native/attested-1.json`).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.batch import Segment
from appliance.engine.llama_cpp.proof_weights import FORMATS, Draw
from appliance.engine.types import SamplingParams

if TYPE_CHECKING:
    from appliance.engine.llama_cpp.runtime import LlamaRuntime

PROMPT, CHUNK, SEQUENCES = 72, 7, 4
UNSUPPORTED = 3
"""Exit status on a processor that lacks what everything is compiled for."""
_NEEDED = {"AVX2": "avx2", "FMA3": "fma", "F16C": "f16c"}
_FLOATS = ("expf", "exp2f", "expm1f", "logf", "log2f", "log1pf", "sinf", "cosf", "tanhf", "erff", "powf")
_DOUBLES = ("exp", "exp2", "log", "log2", "pow")


def missing_features() -> list[str]:
    """What x86-64-v3 has and this processor does not, asked of the processor itself; empty on other architectures."""
    found: dict[str, bool] = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    return [name for key, name in _NEEDED.items() if platform.machine() == "x86_64" and not found.get(key, False)]


def digests(variant: str, forms: Sequence[str] = FORMATS) -> dict[str, str]:
    """By name, each a SHA-256 in hexadecimal; for a format in which shapes differ, which one does."""
    from appliance.engine.llama_cpp import libraries

    libraries.choose(variant)
    library = libraries.kernels()
    found: dict[str, str] = {}
    if library is not None and hasattr(library, "attested_function_of_floats"):
        found["functions"] = _functions(library)
    with tempfile.TemporaryDirectory(prefix="engine-proof-") as folder:
        for form in forms:
            try:
                found |= _evaluate(form, Path(folder) / form, variant)
            except _ShapesDiffer as error:
                found[form] = str(error)
    return found


def _functions(library: ctypes.CDLL) -> str:
    sums = hashlib.sha256()
    draw = Draw("functions")
    floats = draw.words(2048).astype("<u8").view("<f4")
    ordinary = np.ldexp(draw.integers(-(1 << 20), 1 << 20, 4096).astype(np.float64), -16)
    for names, kind, of in ((_FLOATS, np.float32, "floats"), (_DOUBLES, np.float64, "doubles")):
        x = np.concatenate([floats.astype(kind), ordinary.astype(kind)])
        y = np.ascontiguousarray(x[::-1])
        out = np.empty_like(x)
        function = getattr(library, f"attested_function_of_{of}")
        for name in names:
            print(f"the function {name}", file=sys.stderr, flush=True)
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, y, out)]
            function(name.encode(), ctypes.c_int64(len(x)), *pointers)
            out[np.isnan(out)] = np.nan  # of one kind: which is left open
            sums.update(out.tobytes())
    return sums.hexdigest()


def _evaluate(form: str, model: Path, variant: str) -> dict[str, str]:
    from appliance.engine.llama_cpp.proof_model import write
    from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions

    write(form, model)
    fd = os.open(model, os.O_RDONLY)
    try:
        options = RuntimeOptions(fd=fd, kv_tokens=512, n_batch=PROMPT, n_sequences=SEQUENCES + 1, threads=1)
        runtime = LlamaRuntime(options, progress=lambda _: None)
    finally:
        os.close(fd)
        model.unlink()
    evaluation = _Evaluation(runtime, partial(_doing, f"{form} with {variant or 'llama.cpp alone'}"))
    found = {form: evaluation.digest()}
    if form == "F32":
        found["sampler"] = evaluation.draws()
    return found


def _doing(what: str, rows: int) -> None:
    print(f"{what}, {rows} rows", file=sys.stderr, flush=True)


class _ShapesDiffer(Exception):
    """A shape has other bits than rows alone. Says which."""


class _Evaluation:
    """One prompt in every shape in which the appliance evaluates tokens."""

    def __init__(self, runtime: LlamaRuntime, doing: Callable[[int], None]) -> None:
        self._runtime = runtime
        self._doing = doing
        self._tokens = [(1 + 37 * place) % runtime.vocabulary_size for place in range(PROMPT)]

    def digest(self) -> str:
        alone = self._in_pieces(1)
        for size in (2, 4, CHUNK, PROMPT):
            if self._in_pieces(size) != alone:
                raise _ShapesDiffer(f"{size} rows at once give other bits than one")
        self._beside_others(alone)
        return hashlib.sha256(b"".join(alone)).hexdigest()

    def _in_pieces(self, size: int) -> list[bytes]:
        self._doing(size)
        self._runtime.forget(0)
        rows = []
        for start in range(0, PROMPT, size):
            tokens = self._tokens[start : start + size]
            self._runtime.decode([Segment(sequence=0, position=start, tokens=tokens, outputs=len(tokens))])
            rows += [self._runtime.logits(row).tobytes() for row in range(len(tokens))]
        return rows

    def _beside_others(self, alone: Sequence[bytes]) -> None:
        last = PROMPT - 1
        self._runtime.forget(0, start=last)
        state = self._runtime.save(0)
        for sequence in range(1, SEQUENCES):
            self._runtime.restore(sequence, state)
        row = [Segment(sequence=n, position=last, tokens=self._tokens[last:], outputs=1) for n in range(SEQUENCES)]
        self._runtime.decode(row)
        found = {self._runtime.logits(place).tobytes() for place in range(SEQUENCES)}
        for sequence in range(SEQUENCES):
            self._runtime.forget(sequence)
        if found != {alone[last]}:
            raise _ShapesDiffer(f"rows of {SEQUENCES} sequences at once give other bits than one")

    def draws(self) -> str:
        """Tokens drawn with the usual filters and without, and the logarithm that log probabilities are made with."""
        from appliance.engine.llama_cpp.sampler import log_sum_exp

        self._in_pieces(PROMPT)
        told: list[object] = [log_sum_exp(self._runtime.logits(PROMPT - 1)).hex()]
        for top_p, top_k, min_p in ((0.95, 40, 0.05), (1.0, 0, 0.0)):
            params = SamplingParams(
                temperature=0.8, top_p=top_p, top_k=top_k, min_p=min_p, seed=7, max_tokens=1, repeat_penalty=1.1
            )
            sampler = self._runtime.sampler(params)
            told += [sampler.sample(row % PROMPT) for row in range(2 * PROMPT)]
            sampler.close()
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", help="empty: what a build without this project's kernels computes")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated, where time is short")
    options = parser.parse_args(arguments)
    variant: str | None = options.variant
    if missing := missing_features():
        print(f"this processor has no {', '.join(missing)}: the engine is compiled for x86-64-v3", file=sys.stderr)
        return UNSUPPORTED
    # Native, and compiled for more than every processor has: only now.
    from appliance.engine.llama_cpp import libraries

    if variant is None:
        build = libraries.choose("")
        told: dict[str, object] = {"arithmetic": libraries.arithmetic(), "variants": build.variants}
        told |= {"in_use": build.kernels, "library": build.library, "version": build.version}
        told["proof"] = libraries.recorded_proof()
    else:
        told = {
            "arithmetic": libraries.arithmetic(),
            "variant": variant,
            "digests": digests(variant, options.formats.split(",")),
        }
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
