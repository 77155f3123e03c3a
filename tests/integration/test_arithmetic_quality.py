"""The arithmetic is as near to exact products as llama.cpp's own is, in every weight format."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from appliance.engine.batch import Segment
from tests import tiny_models
from tests.exact_model import ExactModel
from tests.tiny_weights import FORMATS

pytest.importorskip("llama_cpp")

from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions

LENGTH = 200
# Root mean square of the difference from exact products, in standard deviations of the logits: the largest that builds
# of llama.cpp alone gave (0.3.36; AVX2 and AVX-512; 200 rows at once and one by one) for these very tokens.
OF_LLAMA_CPP = {
    "Q4_0": 0.01516,
    "Q4_1": 0.01427,
    "Q5_0": 0.01611,
    "Q5_1": 0.01459,
    "Q8_0": 0.01717,
    "Q2_K": 0.02351,
    "Q3_K": 0.02601,
    "Q4_K": 0.02357,
    "Q5_K": 0.02691,
    "Q6_K": 0.02845,
    "IQ4_NL": 0.01538,
    "F16": 0.00215,
    "BF16": 0.00332,
    "F32": 0.00219,
}
NOISE = 1.03
"""Roundings of activations fall either way: between two builds of llama.cpp the distance varies by this much."""


def tokens() -> list[int]:
    return np.random.default_rng(7).integers(300, tiny_models.VOCABULARY - 10, LENGTH).tolist()


def evaluated(model: Path, *, rows: int) -> npt.NDArray[np.float64]:
    """The engine's logits of every position, `rows` at once."""
    fd = os.open(model, os.O_RDONLY)
    options = RuntimeOptions(fd=fd, kv_tokens=256, n_batch=rows, n_sequences=1, threads=1)
    runtime = LlamaRuntime(options, progress=lambda _: None)
    os.close(fd)
    found = []
    for start in range(0, LENGTH, rows):
        part = tokens()[start : start + rows]
        runtime.decode([Segment(sequence=0, position=start, tokens=part, outputs=len(part))])
        found += [runtime.logits(row).astype(np.float64) for row in range(len(part))]
    return np.stack(found)


@functools.cache
def exact_logits(form: str) -> npt.NDArray[np.float64]:
    return ExactModel(tiny_models.path(form)).logits(tokens())


def test_every_format_is_measured() -> None:
    assert OF_LLAMA_CPP.keys() == set(FORMATS)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 50])
def test_it_is_as_near_to_exact_products_as_llama_cpp_is(form: str, rows: int) -> None:
    exact = exact_logits(form)
    difference = evaluated(tiny_models.path(form), rows=rows) - exact
    far = float(np.sqrt((difference**2).mean()) / exact.std())
    assert 0 < far <= NOISE * OF_LLAMA_CPP[form]
