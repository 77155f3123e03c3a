"""The test models in every weight format are what they say, and llama.cpp takes them."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from appliance.engine.batch import Segment
from appliance.models.store import ModelStore
from tests import tiny_models
from tests.tiny_weights import FORMATS

pytest.importorskip("llama_cpp")

from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions

TEXT = "The first people who come over the water find that there is no way down, é 漢."


@pytest.mark.parametrize("form", FORMATS)
def test_every_matrix_has_the_format_and_weights_of_the_usual_size(form: str) -> None:
    """gguf's own decoder reads the blocks: a field in the wrong place would give other sizes."""
    model = tiny_models.path(form)
    tiny_models.assert_types(form, model)
    for tensor in gguf.GGUFReader(str(model)).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("norm.weight"):
            continue
        assert abs(float(values.mean())) < 0.004
        assert 0.02 < float(values.std()) < 0.05
        assert float(np.abs(values).max()) < 0.2


def test_a_model_of_the_wrong_format_is_found() -> None:
    with pytest.raises(AssertionError):
        tiny_models.assert_types("Q4_0", tiny_models.path("Q4_1"))


@pytest.mark.parametrize("form", FORMATS)
def test_llama_cpp_evaluates_it(form: str) -> None:
    fd = os.open(tiny_models.path(form), os.O_RDONLY)
    options = RuntimeOptions(fd=fd, kv_tokens=256, n_batch=63, n_sequences=1, threads=1)
    runtime = LlamaRuntime(options, progress=lambda _: None)
    os.close(fd)
    tokens = runtime.tokenize(TEXT, parse_special=False)
    assert b"".join(map(runtime.piece, tokens)).decode() == TEXT
    assert len(tokens) < 0.6 * len(TEXT.encode())
    runtime.decode([Segment(sequence=0, position=0, tokens=tokens, outputs=1)])
    logits = runtime.logits(len(tokens) - 1)
    assert logits.shape == (tiny_models.VOCABULARY,)
    assert np.isfinite(logits).all()
    assert 1.0 < float(logits.std()) < 10.0


def test_it_can_be_served_from_a_model_store(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    name = tiny_models.installed("Q4_1", store)
    assert tiny_models.installed("Q4_1", store) == name == "tiny-q4-1"
    assert store.verify(name).paths[0].read_bytes() == tiny_models.path("Q4_1").read_bytes()
