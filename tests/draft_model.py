"""A draft model for tests and benchmarks: the first layers of a real one, with its vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Change = Callable[[list[str]], list[str]]


def write_draft(model: Path, target: Path, *, blocks: int, tokens: Change = lambda texts: texts) -> Path:
    """Write the GGUF `model` with its first `blocks` blocks only, and `tokens` of its token texts; returns `target`.

    Embedding, output and norms stay, so that what comes out of fewer blocks is still a distribution over the same
    vocabulary: a bad guess, and a legal one. A list of texts of another length leaves tensors of the old one.
    """
    reader = gguf.GGUFReader(str(model))
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(str(target), architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        _copy(writer, name, _changed(name, field.contents(), architecture, blocks, tokens), field)
    for tensor in reader.tensors:
        if _wanted(tensor.name, blocks):
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _changed(name: str, value: Any, architecture: str, blocks: int, tokens: Change) -> Any:
    if name == f"{architecture}.block_count":
        return blocks
    return tokens(list(value)) if name == "tokenizer.ggml.tokens" else value


def _copy(writer: gguf.GGUFWriter, name: str, value: Any, field: Any) -> None:
    kind = field.types[0]
    if kind == gguf.GGUFValueType.ARRAY:
        writer.add_key_value(name, value, kind, sub_type=field.types[-1])
    else:
        writer.add_key_value(name, value, kind)


def _wanted(name: str, blocks: int) -> bool:
    if not name.startswith("blk."):
        return True
    return int(name.split(".")[1]) < blocks
