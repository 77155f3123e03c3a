"""Sampling with llama.cpp's sampler chains. Worker process only."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from appliance.engine.llama_cpp import libraries
from appliance.engine.types import SamplingParams, TokenLogprob
from appliance.errors import BadRequest

MAX_LOGPROBS = 20
_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: llama.cpp replaces it with a random one
_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
_FLOOR = -9999.0  # stands for log 0, which neither JSON nor the receipts' CBOR can write


class Candidates:
    """All tokens with their logits as llama.cpp's samplers take them: scratch that all samplers of a thread share."""

    __slots__ = ("_array", "_blank", "_data", "_logits", "_one", "_one_data", "_pointer", "_raw")

    def __init__(self, vocabulary_size: int) -> None:
        self._data = np.zeros(vocabulary_size, dtype=_TOKEN_DATA)
        self._data["id"] = np.arange(vocabulary_size)
        self._logits = self._data["logit"]
        self._raw = self._data.view(np.uint8)  # one block to copy instead of fields
        self._blank = self._raw.copy()
        self._pointer = _pointer(self._data)
        self._array = llama_cpp.llama_token_data_array()
        self._one_data = np.zeros(1, dtype=_TOKEN_DATA)
        self._one = llama_cpp.llama_token_data_array()

    def fill(self, logits: npt.NDArray[np.float32]) -> None:
        self._raw[:] = self._blank  # samplers sort
        self._logits[:] = logits
        _reset(self._array, self._pointer, len(self._data))

    def apply(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(self._array))

    def best(self) -> int:
        """The token with the largest logit; of equal ones the first. Not after a sampler that sorts."""
        return int(self._logits.argmax())

    @property
    def selected(self) -> int:
        """The token that the last sampler chose."""
        return int(self._array.data[self._array.selected].id)

    def allows(self, grammar: Any, token: int) -> bool:
        """Whether the grammar takes this token next; asked of it alone, which spares all others."""
        self._one_data["id"], self._one_data["logit"] = token, 0.0
        _reset(self._one, _pointer(self._one_data), 1)
        llama_cpp.llama_sampler_apply(grammar, ctypes.byref(self._one))
        return bool(self._one_data["logit"][0] == 0.0)


def _pointer(data: npt.NDArray[Any]) -> Any:
    return ctypes.cast(data.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))


def _reset(array: Any, pointer: Any, size: int) -> None:
    array.data, array.size, array.selected, array.sorted = pointer, size, -1, False


class Sampler:
    """llama.cpp's samplers for one job.

    In this order: logit bias, penalties; then greedy at temperature 0, else top_k, top_p, min_p, temperature and a draw
    by seed. A filter that lets everything pass is left out. The generator is MT19937 seeded with `seed`; llama.cpp
    reads 2**32-1 as "random", so that one seed shares the sequence of 2**32-2.

    A grammar is asked about the token so chosen. Where it refuses that one, all that it refuses are taken out and
    the choice is made again, at temperatures above 0 with one more number of the generator. Asking about one token is
    far cheaper than about all. Greedy, the answer is the one that asking about all first would give. Drawn, it is not
    the same draw, but without filters the same distribution: a token x comes with p(x) + (1 - p(allowed)) p(x) /
    p(allowed) = p(x) / p(allowed). With filters, what survives them among all tokens has the first go.
    """

    __slots__ = (
        "_adjust",
        "_candidates",
        "_choice",
        "_context",
        "_grammar",
        "_top",
        "_vocab",
        "_vocabulary_size",
        "logprobs",
    )

    def __init__(self, context: Any, params: SamplingParams, candidates: Candidates) -> None:
        """Raises BadRequest naming the parameter that is out of range."""
        self._context = context
        self._candidates = candidates
        self._adjust: Any = None
        self._grammar: Any = None
        self._choice: Any = None
        self._vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context))
        self._vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        self._top = params.logprobs
        self.logprobs: tuple[TokenLogprob, ...] = ()
        """Of the token sampled last; empty unless the job asked for them."""
        _check(params, self._vocabulary_size)
        if params.grammar is not None:
            self._grammar = llama_cpp.llama_sampler_init_grammar(self._vocab, params.grammar.encode(), b"root")
            if not self._grammar:
                raise BadRequest("grammar_rejected", "llama.cpp refuses the grammar made of this request")
        adjustments, choices = list(self._adjustments(params)), list(_choices(params))
        if self._grammar is not None:
            self._adjust, self._choice = _chain(adjustments), _chain(choices)
        elif adjustments or choices:
            self._choice = _chain([*adjustments, *(choices or [llama_cpp.llama_sampler_init_greedy()])])

    def _adjustments(self, params: SamplingParams) -> Iterator[Any]:
        if params.logit_bias:
            entries = [llama_cpp.llama_logit_bias(token, bias) for token, bias in params.logit_bias]
            biases = (llama_cpp.llama_logit_bias * len(entries))(*entries)
            yield llama_cpp.llama_sampler_init_logit_bias(self._vocabulary_size, len(biases), biases)
        penalties = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
        if penalties != (1.0, 0.0, 0.0):
            window = int(llama_cpp.llama_n_ctx(self._context))  # the whole answer, however long
            yield llama_cpp.llama_sampler_init_penalties(self._vocabulary_size, window, *penalties)

    def sample(self, row: int = -1) -> int:
        """Draw the next token from logits row `row` (index in the last batch; -1: its last row), and accept it."""
        if self._grammar is not None:
            token = self._constrained(row, self._grammar)
        elif self._choice is not None:
            token = int(llama_cpp.llama_sampler_sample(self._choice, self._context, row))
        else:
            token = int(self._logits(row).argmax())  # of equal ones the first, as llama.cpp's greedy sampler
        if self._top is not None:
            self.logprobs = (self._measure(row, token, self._top),)
        return token

    def _constrained(self, row: int, grammar: Any) -> int:
        logits = self._logits(row)
        plain = self._adjust is None and self._choice is None
        token = int(logits.argmax()) if plain else self._choose(logits)
        if not self._candidates.allows(grammar, token):
            token = self._choose(logits, grammar)
        for sampler in (self._adjust, grammar, self._choice):
            if sampler is not None:
                llama_cpp.llama_sampler_accept(sampler, token)
        return token

    def _choose(self, logits: npt.NDArray[np.float32], grammar: Any = None) -> int:
        candidates = self._candidates
        candidates.fill(logits)
        for sampler in (self._adjust, grammar, self._choice):
            if sampler is not None:
                candidates.apply(sampler)
        return candidates.best() if self._choice is None else candidates.selected

    def _logits(self, row: int) -> npt.NDArray[np.float32]:
        """A view of the row, good until the next evaluation."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        memory = (ctypes.c_float * self._vocabulary_size).from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(memoryview(memory).cast("B"), dtype=np.float32)

    def measure(self, row: int, token: int) -> TokenLogprob:
        """What the logits of row `row` said of `token`, with as many alternatives as the job asked for."""
        return self._measure(row, token, self._top or 0)

    def name(self, token: int) -> bytes:
        """The bytes that probabilities have for a token."""
        return self._piece(token)

    def close(self) -> None:
        for sampler in (self._adjust, self._grammar, self._choice):
            if sampler is not None:
                llama_cpp.llama_sampler_free(sampler)
        self._adjust = self._grammar = self._choice = None

    def _measure(self, row: int, token: int, top: int) -> TokenLogprob:
        """The row's own log-softmax, in binary64: the sampler changes a copy of the logits, never the row."""
        raw = self._logits(row)
        logits = raw.astype(float) - log_sum_exp(raw)
        ranked = sorted(_largest(logits, top), key=lambda index: (-logits[index], index))
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


def _chain(samplers: Iterable[Any]) -> Any:
    """One sampler that does what these do one after another; None where there are none."""
    chain: Any = None
    for sampler in samplers:
        if chain is None:
            options = llama_cpp.llama_sampler_chain_default_params()
            options.no_perf = True
            chain = llama_cpp.llama_sampler_chain_init(options)
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    return chain


def _choices(params: SamplingParams) -> Iterator[Any]:
    """None at temperature 0."""
    if params.temperature == 0.0:
        return
    if params.top_k:
        yield llama_cpp.llama_sampler_init_top_k(min(params.top_k, 2**31 - 1))
    if params.top_p < 1.0:
        yield llama_cpp.llama_sampler_init_top_p(params.top_p, 1)
    if params.min_p > 0.0:
        yield llama_cpp.llama_sampler_init_min_p(params.min_p, 1)
    yield llama_cpp.llama_sampler_init_temp(params.temperature)
    yield llama_cpp.llama_sampler_init_dist(min(params.seed, _RANDOM_SEED - 1))


@cache
def _own_log_sum_exp() -> Any:
    """This project's own, None in a build without it."""
    library = libraries.kernels()
    function = getattr(library, "attested_log_sum_exp", None)
    if function is not None:
        function.restype = ctypes.c_double
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return function


def log_sum_exp(logits: npt.NDArray[np.float32]) -> float:
    """In binary64. NumPy and the C library choose their functions by the processor, so they are the second choice."""
    if (function := _own_log_sum_exp()) is not None:
        return float(function(logits.ctypes.data, len(logits)))
    wide = logits.astype(float)
    peak = float(wide.max())
    return peak + math.log(np.exp(wide - peak).sum())


def _largest(values: npt.NDArray[np.float64], count: int) -> list[int]:
    """Where the `count` largest are; of equal ones the first, which a partition leaves to the processor."""
    if count == 0:
        return []
    least = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > least)
    return [int(index) for index in (*above, *np.flatnonzero(values == least)[: count - len(above)])]


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
