"""A llama of two small layers with a real model's vocabulary, for emulated machines, where real ones take hours.

    python -m tests.small_llama STORE      write it into the model store STORE, with the tokenizer of the demo's model

Its weights are random, and so is what it says; that has the same bytes for the same seed, on every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from appliance.models.manifest import ModelFacts
from appliance.models.store import ModelStore, default_store_root

NAME = "small-llama"
Floats = npt.NDArray[np.float32]
WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 64, 128, 2, 4, 2
_STRIDE, _PUSH = 4999, 1.5


def write_small_llama(vocabulary_of: Path, target: Path, *, seed: int = 11) -> Path:
    """Write the model as GGUF with weights in Q8_0; returns `target`.

    Its output rows are its embeddings, moved on by _STRIDE tokens: what it says goes round the vocabulary, pushed off
    its way by what came before, and ends with the number of tokens that was asked for.
    """
    reader = gguf.GGUFReader(str(vocabulary_of))
    writer = gguf.GGUFWriter(str(target), "llama")
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            _copy(writer, name, field)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    for name, values in _tensors(vocabulary, np.random.default_rng(seed)).items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _tensors(vocabulary: int, rng: np.random.Generator) -> dict[str, Floats]:
    embedding = rng.standard_normal((vocabulary, WIDTH)).astype(np.float32)
    made = {
        "token_embd.weight": embedding,
        "output_norm.weight": np.ones(WIDTH, dtype=np.float32),
        "output.weight": np.roll(embedding, _STRIDE, axis=0),
    }
    kept = WIDTH * KV_HEADS // HEADS
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kept, WIDTH),
        "attn_v": (kept, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            made[f"blk.{layer}.{norm}.weight"] = np.ones(WIDTH, dtype=np.float32)
        for name, (rows, columns) in shapes.items():
            values = _PUSH * columns**-0.5 * rng.standard_normal((rows, columns))
            made[f"blk.{layer}.{name}.weight"] = values.astype(np.float32)
    return made


def _copy(writer: gguf.GGUFWriter, name: str, field: Any) -> None:
    kind = field.types[0]
    if kind == gguf.GGUFValueType.ARRAY:
        writer.add_key_value(name, field.contents(), kind, sub_type=field.types[-1])
    else:
        writer.add_key_value(name, field.contents(), kind)


def install(vocabulary_of: Path, store: ModelStore) -> None:
    """Put it into the store as NAME, unless these very bytes are there."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_small_llama(vocabulary_of, Path(folder) / f"{NAME}.gguf")
        digest = hashlib.sha256(path.read_bytes()).digest()
        if NAME in store.names():
            if store.get(NAME).sha256 == digest:
                return
            store.remove(NAME)
        store.add(path, ModelFacts(name=NAME, sha256=digest, size=None, licence="Apache-2.0", source="file:random"))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, metavar="STORE")
    store = parser.parse_args(arguments).store
    users = ModelStore(default_store_root(os.environ.get("XDG_DATA_HOME"), os.environ.get("HOME")))
    install(users.get("smollm2-135m-instruct").paths[0], ModelStore(store))
    print(f"{NAME} is in {store}")


if __name__ == "__main__":
    main(sys.argv[1:])
