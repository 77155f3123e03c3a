"""The smallest model that every kernel takes part in: one block of llama's architecture, in any format, as a GGUF file.

Seeded random weights of some 600 kB (a float's 2.5 MB), the same bytes on every machine. It has no tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from appliance.engine.llama_cpp.proof_weights import GGML_TYPES, Draw, matrix

WIDTH, INNER, HEADS, KV_HEADS, CONTEXT = 256, 512, 4, 2, 1024
VOCABULARY: Final = 96
_ALIGNMENT = 32
_U32, _F32, _STRING = 4, 6, 8


def write(form: str, target: Path) -> None:
    """`form` is one of proof_weights.FORMATS."""
    tensors = list(_tensors(form))
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(_FACTS))]
    head += [_fact(key, value) for key, value in _FACTS.items()]
    place = 0
    for name, kind, shape, content in tensors:
        head.append(_string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape))
        head.append(struct.pack("<IQ", kind, place))
        place += len(content) + -len(content) % _ALIGNMENT
    with target.open("wb") as out:
        out.write(_padded(b"".join(head)))
        for _, _, _, content in tensors:
            out.write(_padded(content))


_FACTS: Final[Mapping[str, str | int | float]] = {
    "general.architecture": "llama",
    "general.quantization_version": 2,
    "llama.context_length": CONTEXT,
    "llama.embedding_length": WIDTH,
    "llama.block_count": 1,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 2.0**-17,
    "llama.rope.dimension_count": WIDTH // HEADS,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": VOCABULARY,
    "tokenizer.ggml.model": "no_vocab",
}


def _tensors(form: str) -> Iterator[tuple[str, int, tuple[int, ...], bytes]]:
    """(name, type, (columns, rows), content)."""
    kept = WIDTH * KV_HEADS // HEADS
    for name, rows, columns in (
        ("token_embd", VOCABULARY, WIDTH),
        ("output", VOCABULARY, WIDTH),
        ("blk.0.attn_q", WIDTH, WIDTH),
        ("blk.0.attn_k", kept, WIDTH),
        ("blk.0.attn_v", kept, WIDTH),
        ("blk.0.attn_output", WIDTH, WIDTH),
        ("blk.0.ffn_gate", INNER, WIDTH),
        ("blk.0.ffn_up", INNER, WIDTH),
        ("blk.0.ffn_down", WIDTH, INNER),
    ):
        weights = matrix(form, f"proof {name}", rows, columns).tobytes()
        yield f"{name}.weight", GGML_TYPES[form], (columns, rows), weights
    for name, around in (("output_norm", 4), ("blk.0.attn_norm", 1), ("blk.0.ffn_norm", 1)):
        yield f"{name}.weight", GGML_TYPES["F32"], (WIDTH,), _norm(f"proof {name}", around).tobytes()


def _norm(name: str, around: int) -> npt.NDArray[np.float32]:
    return np.ldexp(Draw(name).integers(192, 320, WIDTH).astype(np.float32) * around, -8).astype("<f4")


def _fact(key: str, value: str | int | float) -> bytes:
    if isinstance(value, str):
        return _string(key) + struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, int):
        return _string(key) + struct.pack("<II", _U32, value)
    return _string(key) + struct.pack("<If", _F32, value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % _ALIGNMENT)
