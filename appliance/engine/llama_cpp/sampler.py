"""Sampling with llama.cpp's sampler chains. Worker process only."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from appliance.engine.types import SamplingParams, TokenLogprob
from appliance.errors import BadRequest

MAX_LOGPROBS = 20
_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: llama.cpp replaces it with a random one
_FLOOR = -9999.0  # stands for log 0, which neither JSON nor the receipts' CBOR can write


class Sampler:
    """A llama.cpp sampler chain for one job.

    In this order: logit bias, penalties, grammar; then greedy at temperature 0, else top_k, top_p, min_p, temperature
    and a draw by seed, exactly one for each token. A filter that lets everything pass is left out. The generator is
    MT19937 seeded with `seed`; llama.cpp reads 2**32-1 as "random", so that one seed shares the sequence of 2**32-2.
    """

    __slots__ = ("_chain", "_context", "_top", "_vocab", "_vocabulary_size", "logprobs")

    def __init__(self, context: Any, params: SamplingParams) -> None:
        """Raises BadRequest naming the parameter that is out of range."""
        self._context = context
        self._chain: Any = None
        self._vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context))
        self._vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        self._top = params.logprobs
        self.logprobs: tuple[TokenLogprob, ...] = ()
        """Of the token sampled last; empty unless the job asked for them."""
        _check(params, self._vocabulary_size)
        options = llama_cpp.llama_sampler_chain_default_params()
        options.no_perf = True
        self._chain = llama_cpp.llama_sampler_chain_init(options)
        self._add_constraints(params)
        self._add_choice(params)

    def _add_constraints(self, params: SamplingParams) -> None:
        if params.logit_bias:
            entries = [llama_cpp.llama_logit_bias(token, bias) for token, bias in params.logit_bias]
            biases = (llama_cpp.llama_logit_bias * len(entries))(*entries)
            self._add(llama_cpp.llama_sampler_init_logit_bias(self._vocabulary_size, len(biases), biases))
        penalties = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
        if penalties != (1.0, 0.0, 0.0):
            window = int(llama_cpp.llama_n_ctx(self._context))  # the whole answer, however long
            self._add(llama_cpp.llama_sampler_init_penalties(self._vocabulary_size, window, *penalties))
        if params.grammar is not None:
            grammar = llama_cpp.llama_sampler_init_grammar(self._vocab, params.grammar.encode(), b"root")
            if not grammar:
                self.close()
                raise BadRequest("grammar_rejected", "llama.cpp refuses the grammar made of this request")
            self._add(grammar)

    def _add_choice(self, params: SamplingParams) -> None:
        if params.temperature == 0.0:
            self._add(llama_cpp.llama_sampler_init_greedy())
            return
        if params.top_k:
            self._add(llama_cpp.llama_sampler_init_top_k(min(params.top_k, 2**31 - 1)))
        if params.top_p < 1.0:
            self._add(llama_cpp.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            self._add(llama_cpp.llama_sampler_init_min_p(params.min_p, 1))
        self._add(llama_cpp.llama_sampler_init_temp(params.temperature))
        self._add(llama_cpp.llama_sampler_init_dist(min(params.seed, _RANDOM_SEED - 1)))

    def _add(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def sample(self, row: int = -1) -> int:
        """Draw the next token from logits row `row` (index in the last batch; -1: its last row), and accept it."""
        token = int(llama_cpp.llama_sampler_sample(self._chain, self._context, row))
        if self._top is not None:
            self.logprobs = (self._measure(row, token, self._top),)
        return token

    def measure(self, row: int, token: int) -> TokenLogprob:
        """What the logits of row `row` said of `token`, with as many alternatives as the job asked for."""
        return self._measure(row, token, self._top or 0)

    def name(self, token: int) -> bytes:
        """The bytes that probabilities have for a token."""
        return self._piece(token)

    def close(self) -> None:
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None

    def _measure(self, row: int, token: int, top: int) -> TokenLogprob:
        """The row's own log-softmax, in binary64: the sampler changes a copy of the logits, never the row."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        logits: npt.NDArray[np.float64] = np.ctypeslib.as_array(pointer, shape=(self._vocabulary_size,)).astype(float)
        peak = logits.max()
        logits -= peak + math.log(np.exp(logits - peak).sum())
        best = np.argpartition(logits, -top)[-top:] if top else np.empty(0, dtype=int)
        # Equal ones by id: which of them comes first must not depend on how the partition went.
        ranked = sorted((int(index) for index in best), key=lambda index: (-logits[index], index))
        return TokenLogprob(
            token=self._piece(token),
            logprob=_finite(logits[token]),
            top=tuple((self._piece(index), _finite(logits[index])) for index in ranked),
        )

    def _piece(self, token: int) -> bytes:
        """Bytes of any token; control tokens have their name."""
        size = 128
        while True:
            buffer = ctypes.create_string_buffer(size)
            written = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if written >= 0:
                return buffer.raw[:written]
            size = -written


def _finite(number: float) -> float:
    return float(number) if math.isfinite(number) else _FLOOR


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("min_p", 0.0, 1.0),
    ("repeat_penalty", 0.01, 10.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", 0, 2**32 - 1),
    ("top_k", 0, math.inf),
)


def _check(params: SamplingParams, vocabulary_size: int) -> None:
    """llama.cpp takes any number, some to undefined effect: nothing out of range gets that far."""
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise BadRequest("invalid_sampling", f"{name} is outside {low:g}..{high:g}", param=name)
    if not (math.isfinite(params.top_p) and 0.0 < params.top_p <= 1.0):
        raise BadRequest("invalid_sampling", "top_p is outside (0, 1]", param="top_p")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise BadRequest("invalid_sampling", "max_tokens is less than 1", param="max_tokens")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise BadRequest("invalid_sampling", f"logprobs is outside 0..{MAX_LOGPROBS}", param="logprobs")
    for token, bias in params.logit_bias:
        if not 0 <= token < vocabulary_size:
            raise BadRequest("invalid_sampling", "logit_bias names a token the model does not have", param="logit_bias")
        if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
            raise BadRequest("invalid_sampling", "a logit bias is outside -100..100", param="logit_bias")
