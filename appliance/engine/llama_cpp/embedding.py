"""An embedding model in llama.cpp: token ids in, pooled vectors out. Runs in the worker process alone."""

from __future__ import annotations

import ctypes
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from appliance.engine.llama_cpp.allowance import Allowance
from appliance.engine.llama_cpp.runtime import Aborted, LlamaRuntime, RuntimeFailure, RuntimeOptions

Vector = npt.NDArray[np.float32]

_SPEED_TOKENS = 32
_HANGUL = re.compile("[\uac00-\ud7a3]+")
_HARDLY_IN_A_VOCABULARY = "\u13a0 \U0001f9ff \U0002a6d6"  # a letter, a picture, an ideograph, all rare

_POOLING_TYPES = {
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions:
    """`rows` is the most of one evaluation; `context_length` the longest input. The two differ for causal models only.

    `inputs` is the most inputs of one evaluation, `pooling` one of `embedding.POOLINGS`.
    """

    fd: int
    context_length: int
    rows: int
    inputs: int
    pooling: str
    threads: int


class EmbeddingRuntime(LlamaRuntime):
    """A loaded model with one context that pools. Nothing of an input stays in it when its vector is there."""

    def __init__(self, options: EmbeddingOptions, *, progress: Callable[[float], None]) -> None:
        """Load the model from the sealed descriptor. Raises RuntimeFailure."""
        self._wanted = options
        super().__init__(
            RuntimeOptions(
                fd=options.fd,
                kv_tokens=options.context_length,
                n_batch=options.rows,
                n_sequences=options.inputs,
                threads=options.threads,
            ),
            progress=progress,
        )
        self.causal = bool(llama_cpp.llama_get_causal_attn(self._context))
        if llama_cpp.llama_pooling_type(self._context) != _POOLING_TYPES[options.pooling]:
            raise RuntimeFailure(f"llama.cpp does not pool this model by {options.pooling!r}")
        if not self.causal and options.rows < options.context_length:
            raise RuntimeFailure("every token of this model sees all others: an input has to fit one evaluation")

    def _make_context(self) -> Any:
        wanted = self._wanted
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = wanted.context_length
        params.n_batch = params.n_ubatch = wanted.rows
        params.n_seq_max = wanted.inputs
        params.kv_unified = True
        params.embeddings = True
        params.pooling_type = _POOLING_TYPES[wanted.pooling]
        params.n_threads = params.n_threads_batch = wanted.threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        params.abort_callback = ctypes.cast(ctypes.CDLL(None).strlen, llama_cpp.ggml_abort_callback)
        params.abort_callback_data = ctypes.addressof(self._abort)
        if llama_cpp.llama_model_has_encoder(self._model) and llama_cpp.llama_model_has_decoder(self._model):
            raise RuntimeFailure("a model with an encoder and a decoder gives no vectors here")
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeFailure(f"llama.cpp cannot make a context of {wanted.context_length} tokens")
        return context

    # -- vocabulary ------------------------------------------------------------------------------------------------

    def tokenize_input(self, text: str) -> list[int]:
        """Token ids of a whole input, between the special tokens that the model's metadata ask for."""
        raw = self._spelled(text).encode()
        capacity = len(raw) + 16
        buffer = (llama_cpp.llama_token * capacity)()
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), buffer, capacity, True, False)
        if count < 0:
            raise RuntimeFailure(f"the tokenizer failed with {count}")
        return buffer[:count]

    def _spelled(self, text: str) -> str:
        """Text as the tokenizer has to be given it. The one for word pieces decomposes letters, but no Hangul."""
        if llama_cpp.llama_vocab_type(self._vocab) != llama_cpp.LLAMA_VOCAB_TYPE_WPM:
            return text
        return _HANGUL.sub(lambda found: unicodedata.normalize("NFD", found[0]), text)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Control tokens that no text may become. Where the tokenizer knows no word it gives one of them: not that."""
        unknown = self.tokenize(_HARDLY_IN_A_VOCABULARY, parse_special=False)
        return frozenset(token for token, _ in self.control_texts) - frozenset(unknown)

    # -- evaluation ------------------------------------------------------------------------------------------------

    @property
    def dimensions(self) -> int:
        return int(llama_cpp.llama_model_n_embd_out(self._model))

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[Vector]:
        """The pooled vector of each input, as the model gives it.

        All of them together have at most `rows` tokens, or there is one of at most `context_length`. Raises Aborted or
        RuntimeFailure; nothing of the inputs is left in the context either way.
        """
        if len(inputs) == 1 and len(inputs[0]) > self.options.n_batch:
            return [self._embed_long(inputs[0])]
        return self._evaluate([(sequence, 0, tokens) for sequence, tokens in enumerate(inputs)], clear=True)

    def _embed_long(self, tokens: Sequence[int]) -> Vector:
        """Part by part. Earlier tokens of a causal model do not see later ones, so that their states stay the same."""
        size = self.options.n_batch
        parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        vectors = [
            self._evaluate([(0, index * size, part)], clear=index == 0)[0].astype(np.float64)
            for index, part in enumerate(parts)
        ]
        if self._wanted.pooling == "mean":
            weighted = [vector * len(part) for vector, part in zip(vectors, parts, strict=True)]
            mean: Vector = (np.sum(weighted, axis=0) / len(tokens)).astype(np.float32)
            return mean
        return (vectors[0] if self._wanted.pooling == "cls" else vectors[-1]).astype(np.float32)

    def _evaluate(self, pieces: Sequence[tuple[int, int, Sequence[int]]], *, clear: bool) -> list[Vector]:
        """`pieces` are (sequence, position of the first token, tokens)."""
        if clear and self._memory:
            llama_cpp.llama_memory_clear(self._memory, False)
        token_view, position_view, sequence_view, output_view = self._views
        row = 0
        for sequence, position, tokens in pieces:
            end = row + len(tokens)
            token_view[row:end] = tokens
            position_view[row:end] = self._positions[position : position + end - row]
            sequence_view[row:end] = sequence
            row = end
        output_view[:row] = 1
        self._batch.n_tokens = row
        evaluate = llama_cpp.llama_decode if self._memory else llama_cpp.llama_encode
        status = evaluate(self._context, self._batch)
        if status == 2:
            raise Aborted
        if status != 0:
            raise RuntimeFailure(f"the evaluation of inputs failed with {status}")
        return [self._pooled(sequence) for sequence, _, _ in pieces]

    def _pooled(self, sequence: int) -> Vector:
        pointer = llama_cpp.llama_get_embeddings_seq(self._context, sequence)
        if not pointer:
            raise RuntimeFailure("llama.cpp gave no vector")
        vector: Vector = np.ctypeslib.as_array(pointer, shape=(self.dimensions,)).copy()
        return vector


def measure_packing(runtime: EmbeddingRuntime, allowance: Allowance) -> bool:
    """Whether inputs evaluated together give the very bits of each alone, on inputs of many lengths.

    Kernels differ with the number of rows, so this is a measurement of one model on one machine. Raises Exhausted.
    """
    lengths = [length for length in (1, 3, 12, 28, 5, 40, 2, 64) if length <= runtime.options.n_batch]
    span = max(1, min(runtime.vocabulary_size, 50_000) - 1)
    samples = [
        [(7919 * (row + 1) * (place + 3)) % span for row in range(length)] for place, length in enumerate(lengths)
    ]
    alone = [allowance.evaluate(partial(runtime.embed, [sample]))[0] for sample in samples]
    for count in range(2, len(samples) + 1):
        together = samples[:count]
        if sum(map(len, together)) > runtime.options.n_batch or count > runtime.options.n_sequences:
            break
        if not all(map(np.array_equal, allowance.evaluate(partial(runtime.embed, together)), alone)):
            return False
    return True


def measure_speed(runtime: EmbeddingRuntime, threads: int, allowance: Allowance) -> float:
    """Tokens a second with so many threads, on an input of moderate length; the faster of two runs counts.

    Raises Exhausted.
    """
    sample = [1] * min(_SPEED_TOKENS, runtime.options.n_batch)
    runtime.use_threads(threads)
    taken = []
    for _ in range(3):
        before = time.perf_counter()
        allowance.evaluate(partial(runtime.embed, [sample]))
        taken.append(time.perf_counter() - before)
    return len(sample) / max(min(taken[1:]), 1e-9)  # the first one warms the caches and the threads up
