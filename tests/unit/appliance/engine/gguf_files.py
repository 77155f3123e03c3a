"""Builds small GGUF files (metadata only) for tests."""

from __future__ import annotations

import struct


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: object) -> bytes:
    """Type code and encoding of a value: str, int (u32), float (f32), bool or a list of these."""
    match item:
        case bool():
            return struct.pack("<IB", 7, item)
        case str():
            return struct.pack("<I", 8) + string(item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case list():
            inner = [value(each) for each in item]
            kind = inner[0][:4] if inner else struct.pack("<I", 4)
            return struct.pack("<I", 9) + kind + struct.pack("<Q", len(item)) + b"".join(each[4:] for each in inner)
    raise TypeError(type(item))


MINIMAL: dict[str, object] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "<|end|>"],
    "tokenizer.ggml.scores": [0.5, -1.0, 0.0],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


def file(pairs: dict[str, object] | None = None, *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    chosen = MINIMAL if pairs is None else pairs
    body = b"".join(string(key) + value(item) for key, item in chosen.items())
    return magic + struct.pack("<IQQ", version, 0, len(chosen)) + body
