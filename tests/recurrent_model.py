"""Tiny recurrent models for tests: two random Mamba blocks with a real model's vocabulary, or attention between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
WIDTH, INNER, STATE, RANK, KERNEL, HEADS, KV_HEADS = 64, 128, 16, 4, 4, 4, 2
_CYCLE = 6


def write_recurrent(vocabulary_of: Path, target: Path, *, attention: bool = False, seed: int = 7) -> Path:
    """Write the model as GGUF, with the tokenizer of the GGUF `vocabulary_of`; returns `target`.

    Its output rows are its embeddings, moved within groups of six tokens, so that answers mostly go round in circles,
    and leave them where the state pushes: guesses are right for a while, and then wrong. With `attention` it is a
    Jamba: a block that looks back between the two, with keys and values for each token beside their states.
    """
    reader = gguf.GGUFReader(str(vocabulary_of))
    writer = gguf.GGUFWriter(str(target), "jamba" if attention else "mamba")
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.ggml."):
            _copy(writer, name, field)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    rng = np.random.default_rng(seed)
    tensors = _ends(len(reader.fields["tokenizer.ggml.tokens"].data), rng)
    push = 1.5 if attention else 2.4
    tensors |= _mamba(0, rng, push) | _mamba(2 if attention else 1, rng, push)
    if attention:
        writer.add_block_count(3)
        writer.add_head_count([HEADS] * 3)
        writer.add_head_count_kv([0, KV_HEADS, 0])
        writer.add_feed_forward_length(WIDTH)
        tensors |= _jamba(rng)
    else:
        writer.add_block_count(2)
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _normal(rng: np.random.Generator, rows: int, columns: int, *, strength: float = 1.0) -> Floats:
    """A matrix [rows, columns] that leaves the size of what it multiplies about as it is, times `strength`."""
    return (strength * columns**-0.5 * rng.standard_normal((rows, columns))).astype(np.float32)


def _ones(size: int) -> Floats:
    return np.ones(size, dtype=np.float32)


def _ends(vocabulary: int, rng: np.random.Generator) -> dict[str, Floats]:
    embedding = rng.standard_normal((vocabulary, WIDTH)).astype(np.float32)
    ids = np.arange(vocabulary)
    before = np.where(ids % _CYCLE == 0, np.minimum(ids + _CYCLE, vocabulary) - 1, ids - 1)
    return {
        "token_embd.weight": embedding,
        "output_norm.weight": _ones(WIDTH),
        "output.weight": embedding[before],
    }


def _mamba(block: int, rng: np.random.Generator, push: float) -> dict[str, Floats]:
    prefix = f"blk.{block}."
    return {
        prefix + "attn_norm.weight": _ones(WIDTH),
        prefix + "ssm_in.weight": _normal(rng, 2 * INNER, WIDTH),
        prefix + "ssm_conv1d.weight": _normal(rng, INNER, KERNEL),
        prefix + "ssm_conv1d.bias": np.zeros(INNER, dtype=np.float32),
        prefix + "ssm_x.weight": _normal(rng, RANK + 2 * STATE, INNER),
        prefix + "ssm_dt.weight": _normal(rng, INNER, RANK),
        prefix + "ssm_dt.bias": np.full(INNER, -2.0, dtype=np.float32),
        prefix + "ssm_a": -np.tile(np.arange(1, STATE + 1, dtype=np.float32), (INNER, 1)),
        prefix + "ssm_d": _ones(INNER),
        prefix + "ssm_out.weight": _normal(rng, WIDTH, INNER, strength=push),
    }


def _jamba(rng: np.random.Generator) -> dict[str, Floats]:
    """The block of attention, the norms that Jamba has within Mamba's, and the layers behind every block."""
    tensors = {"blk.1.attn_norm.weight": _ones(WIDTH)}
    kept = WIDTH * KV_HEADS // HEADS
    for name, rows in (("q", WIDTH), ("k", kept), ("v", kept), ("output", WIDTH)):
        tensors[f"blk.1.attn_{name}.weight"] = _normal(rng, rows, WIDTH, strength=0.5)
    for block in (0, 2):
        for name, size in (("dt", RANK), ("b", STATE), ("c", STATE)):
            tensors[f"blk.{block}.ssm_{name}_norm.weight"] = _ones(size)
    for block in range(3):
        tensors[f"blk.{block}.ffn_norm.weight"] = _ones(WIDTH)
        for name in ("gate", "up", "down"):
            tensors[f"blk.{block}.ffn_{name}.weight"] = _normal(rng, WIDTH, WIDTH, strength=0.3)
    return tensors


def _copy(writer: gguf.GGUFWriter, name: str, field: Any) -> None:
    kind = field.types[0]
    if kind == gguf.GGUFValueType.ARRAY:
        writer.add_key_value(name, field.contents(), kind, sub_type=field.types[-1])
    else:
        writer.add_key_value(name, field.contents(), kind)
