"""A tiny recurrent model for tests: two random Mamba blocks over a real model's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
WIDTH, INNER, STATE, RANK, KERNEL, BLOCKS = 64, 128, 16, 4, 4, 2
_CYCLE = 6


def write_recurrent(vocabulary_of: Path, target: Path, *, seed: int = 7) -> Path:
    """Write the model as GGUF, with the tokenizer of the GGUF `vocabulary_of`; returns `target`.

    Its output rows are its embeddings, moved within groups of six tokens, so that answers mostly go round in circles,
    and leave them where the state pushes: guesses are right for a while, and then wrong.
    """
    reader = gguf.GGUFReader(str(vocabulary_of))
    writer = gguf.GGUFWriter(str(target), "mamba")
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.ggml."):
            _copy(writer, name, field)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(BLOCKS)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, values in _tensors(len(reader.fields["tokenizer.ggml.tokens"].data), np.random.default_rng(seed)):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _tensors(vocabulary: int, rng: np.random.Generator) -> list[tuple[str, Floats]]:
    def normal(*shape: int, scale: float) -> Floats:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    embedding = normal(vocabulary, WIDTH, scale=1.0)
    ids = np.arange(vocabulary)
    before = np.where(ids % _CYCLE == 0, np.minimum(ids + _CYCLE, vocabulary) - 1, ids - 1)
    tensors = [
        ("token_embd.weight", embedding),
        ("output_norm.weight", np.ones(WIDTH, dtype=np.float32)),
        ("output.weight", embedding[before]),
    ]
    for block in range(BLOCKS):
        prefix = f"blk.{block}."
        tensors += [
            (prefix + "attn_norm.weight", np.ones(WIDTH, dtype=np.float32)),
            (prefix + "ssm_in.weight", normal(2 * INNER, WIDTH, scale=WIDTH**-0.5)),
            (prefix + "ssm_conv1d.weight", normal(INNER, KERNEL, scale=KERNEL**-0.5)),
            (prefix + "ssm_conv1d.bias", np.zeros(INNER, dtype=np.float32)),
            (prefix + "ssm_x.weight", normal(RANK + 2 * STATE, INNER, scale=INNER**-0.5)),
            (prefix + "ssm_dt.weight", normal(INNER, RANK, scale=RANK**-0.5)),
            (prefix + "ssm_dt.bias", np.full(INNER, -2.0, dtype=np.float32)),
            (prefix + "ssm_a", -np.tile(np.arange(1, STATE + 1, dtype=np.float32), (INNER, 1))),
            (prefix + "ssm_d", np.ones(INNER, dtype=np.float32)),
            (prefix + "ssm_out.weight", normal(WIDTH, INNER, scale=2.4 * INNER**-0.5)),
        ]
    return tensors


def _copy(writer: gguf.GGUFWriter, name: str, field: Any) -> None:
    kind = field.types[0]
    if kind == gguf.GGUFValueType.ARRAY:
        writer.add_key_value(name, field.contents(), kind, sub_type=field.types[-1])
    else:
        writer.add_key_value(name, field.contents(), kind)
