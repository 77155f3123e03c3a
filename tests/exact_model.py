"""A llama model evaluated with exact products: weights as the file has them, everything else in double precision.

What a processor computes differs from it by the rounding of activations to 8 bits and by the order of its additions.
Slow, one whole text at a time, numpy alone. For models of the architecture "llama".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize

Real = npt.NDArray[np.float64]


class ExactModel:
    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._layers = int(self._fact("block_count"))
        self._heads, self._key_heads = (
            int(self._fact("attention.head_count")),
            int(self._fact("attention.head_count_kv")),
        )
        self._head_size = int(self._fact("embedding_length")) // self._heads
        self._epsilon = float(self._fact("attention.layer_norm_rms_epsilon"))
        self._base = float(self._fact("rope.freq_base"))

    def logits(self, tokens: Sequence[int]) -> Real:
        """Of every position, [len(tokens), vocabulary]."""
        state = self._weights("token_embd.weight")[np.asarray(tokens)]
        for layer in range(self._layers):
            state = state + self._attention(self._norm(state, f"blk.{layer}.attn_norm.weight"), layer)
            state = state + self._feed_forward(self._norm(state, f"blk.{layer}.ffn_norm.weight"), layer)
        tied = "output.weight" not in self._tensors
        return self._product(self._norm(state, "output_norm.weight"), "token_embd.weight" if tied else "output.weight")

    def _attention(self, state: Real, layer: int) -> Real:
        length = len(state)
        query = self._rotated(self._product(state, f"blk.{layer}.attn_q.weight"), self._heads)
        key = self._rotated(self._product(state, f"blk.{layer}.attn_k.weight"), self._key_heads)
        value = self._product(state, f"blk.{layer}.attn_v.weight").reshape(length, self._key_heads, self._head_size)
        unseen = np.triu(np.full((length, length), -np.inf), 1)
        heads = []
        for head in range(self._heads):
            shared = head // (self._heads // self._key_heads)
            scores = query[:, head] @ key[:, shared].T / np.sqrt(self._head_size) + unseen
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ value[:, shared])
        return self._product(np.concatenate(heads, axis=1), f"blk.{layer}.attn_output.weight")

    def _rotated(self, flat: Real, heads: int) -> Real:
        """Rotary embedding of neighbouring pairs, as this architecture has it."""
        length, half = len(flat), self._head_size // 2
        pairs = flat.reshape(length, heads, half, 2)
        angles = np.arange(length)[:, None] * self._base ** (-np.arange(half) / half)
        cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
        even, odd = pairs[..., 0], pairs[..., 1]
        turned = np.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
        return turned.reshape(length, heads, self._head_size)

    def _feed_forward(self, state: Real, layer: int) -> Real:
        gate = self._product(state, f"blk.{layer}.ffn_gate.weight")
        up = self._product(state, f"blk.{layer}.ffn_up.weight")
        return self._product(gate / (1 + np.exp(-gate)) * up, f"blk.{layer}.ffn_down.weight")

    def _norm(self, state: Real, name: str) -> Real:
        scale = np.sqrt((state**2).mean(axis=1, keepdims=True) + self._epsilon)
        return state / scale * self._weights(name)

    def _product(self, state: Real, name: str) -> Real:
        return state @ self._weights(name).T

    def _weights(self, name: str) -> Real:
        tensor = self._tensors[name]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float64)

    def _fact(self, name: str) -> float:
        field = self._reader.get_field(f"llama.{name}")
        assert field is not None, f"no llama.{name}: another architecture"
        return float(field.contents())
