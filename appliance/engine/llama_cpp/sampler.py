"""Sampling with llama.cpp's sampler chains. Worker process only."""

from __future__ import annotations

import math
from typing import Any

import llama_cpp

from appliance.engine.types import SamplingParams
from appliance.errors import BadRequest

_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: llama.cpp replaces it with a random one


class Sampler:
    """A llama.cpp sampler chain for one job: greedy at temperature 0, else top_k, top_p, temperature, draw by seed.

    A filter that lets everything pass (top_k 0, top_p 1) is left out. The generator is MT19937 seeded with `seed`;
    llama.cpp reads 2**32-1 as "random", so that one seed shares the sequence of 2**32-2.
    """

    __slots__ = ("_chain", "_context")

    def __init__(self, context: Any, params: SamplingParams) -> None:
        """Raises BadRequest naming the parameter that is out of range."""
        _check(params)
        options = llama_cpp.llama_sampler_chain_default_params()
        options.no_perf = True
        self._context = context
        self._chain = llama_cpp.llama_sampler_chain_init(options)
        if params.temperature == 0.0:
            self._add(llama_cpp.llama_sampler_init_greedy())
            return
        if params.top_k:
            self._add(llama_cpp.llama_sampler_init_top_k(min(params.top_k, 2**31 - 1)))
        if params.top_p < 1.0:
            self._add(llama_cpp.llama_sampler_init_top_p(params.top_p, 1))
        self._add(llama_cpp.llama_sampler_init_temp(params.temperature))
        self._add(llama_cpp.llama_sampler_init_dist(min(params.seed, _RANDOM_SEED - 1)))

    def _add(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def sample(self, row: int = -1) -> int:
        """Draw the next token from logits row `row` (index in the last batch; -1: its last row), and accept it."""
        return int(llama_cpp.llama_sampler_sample(self._chain, self._context, row))

    def close(self) -> None:
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None


def _check(params: SamplingParams) -> None:
    """llama.cpp takes any number, some to undefined effect: nothing out of range gets that far."""
    if not (math.isfinite(params.temperature) and 0.0 <= params.temperature <= 100.0):
        raise BadRequest("invalid_sampling", "temperature is outside 0..100", param="temperature")
    if not (math.isfinite(params.top_p) and 0.0 < params.top_p <= 1.0):
        raise BadRequest("invalid_sampling", "top_p is outside (0, 1]", param="top_p")
    if params.top_k < 0:
        raise BadRequest("invalid_sampling", "top_k is negative", param="top_k")
    if not 0 <= params.seed < 2**32:
        raise BadRequest("invalid_sampling", "seed is outside 0..2**32-1", param="seed")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise BadRequest("invalid_sampling", "max_tokens is less than 1", param="max_tokens")
