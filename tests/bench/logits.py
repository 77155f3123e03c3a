"""Evaluates a text with one build of llama.cpp and writes what it found: run by bench_quality.py in a process each.

LLAMA_CPP_LIB_PATH=DIR python tests/bench/logits.py REQUEST.json OUT.npz
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`rows` of a text are evaluated at once; `own_weights`: llama.cpp may repack the weights, as it does by default.

    `variant`: that of this project's kernels, "" the one the processor gets.
    """

    model: str
    windows: list[list[int]]
    every: int
    rows: int = 512
    own_weights: bool = False
    flash_attention: bool = True
    variant: str = ""
    threads: int = 1


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def silent(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    pass


class Build:
    """The library that this process loads, with the model and one context."""

    def __init__(self, chosen: Evaluation, longest: int) -> None:
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        if chosen.variant:
            self._use(chosen.variant)
        model = llama_cpp.llama_model_default_params()
        model.use_extra_bufts = chosen.own_weights
        self._model = llama_cpp.llama_model_load_from_file(chosen.model.encode(), model)
        assert self._model, "the model was not loaded"
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = longest
        context.n_batch = context.n_ubatch = chosen.rows
        context.n_threads = context.n_threads_batch = chosen.threads
        context.flash_attn_type = int(chosen.flash_attention)
        self._context: Any = llama_cpp.llama_init_from_model(self._model, context)
        assert self._context, "no context"
        self._rows = chosen.rows
        self._batch = llama_cpp.llama_batch_init(chosen.rows, 0, 1)
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))

    def _use(self, variant: str) -> None:
        folder = Path(llama_cpp.llama_cpp._base_path)
        kernels = ctypes.CDLL(str(folder / "libggml-cpu.so.0"))
        kernels.attested_use_variant.restype = ctypes.c_bool
        assert kernels.attested_use_variant(variant.encode()), f"this processor has no {variant}"

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Of every position of a text, [len(tokens), vocabulary]."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        found = np.empty((len(tokens), self.vocabulary), dtype=np.float32)
        for start in range(0, len(tokens), self._rows):
            part = tokens[start : start + self._rows]
            self._batch.n_tokens = len(part)
            for row, token in enumerate(part):
                self._batch.token[row], self._batch.pos[row] = token, start + row
                self._batch.n_seq_id[row], self._batch.seq_id[row][0], self._batch.logits[row] = 1, 0, 1
            assert llama_cpp.llama_decode(self._context, self._batch) == 0
            for row in range(len(part)):
                pointer = llama_cpp.llama_get_logits_ith(self._context, row)
                found[start + row] = np.ctypeslib.as_array(pointer, shape=(self.vocabulary,))
        return found


def log_softmax(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def surprise(logits: npt.NDArray[np.floating[Any]], tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """Negative log probability of every token but the first of a window."""
    return np.asarray(-log_softmax(logits[:-1])[np.arange(len(tokens) - 1), np.asarray(tokens[1:])])


def evaluate(chosen: Evaluation) -> dict[str, npt.NDArray[Any]]:
    """`surprise` and the most probable token of every position; `sample` has the logits of every N-th."""
    build = Build(chosen, max(map(len, chosen.windows)))
    surprises, best, sample = [], [], []
    for window in chosen.windows:
        logits = build.logits(window)
        surprises.append(surprise(logits, window))
        best.append(logits.argmax(axis=1))
        sample.append(logits[chosen.every - 1 :: chosen.every].copy())
    return {"surprise": np.concatenate(surprises), "best": np.concatenate(best), "sample": np.concatenate(sample)}


def main() -> None:
    request, out = sys.argv[1:]
    np.savez(out, **evaluate(Evaluation(**json.loads(Path(request).read_text()))))


if __name__ == "__main__":
    main()
