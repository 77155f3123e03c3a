"""A bounded reader of GGUF metadata (versions 2 and 3), little-endian.

Source: the GGUF specification in ggml-org/ggml, docs/gguf.md. Reads pairs and descriptions of tensors, never data, only
from bytes whose SHA-256 was already checked. Every count and length is bounded before anything is allocated for it.
"""

from __future__ import annotations

import array
import hashlib
import mmap
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from appliance.engine.weights.memory import cell_bytes
from appliance.errors import BootError
from client_sdk.wire import cbor

MAX_PAIRS = 4096
MAX_TENSORS = 1 << 20
MAX_KEY_BYTES = 1024
MAX_STRING_BYTES = 16 * 1024 * 1024
MAX_ELEMENTS = 8 * 1024 * 1024
MAX_METADATA_BYTES = 256 * 1024 * 1024
MAX_NESTING = 4
MAX_DIMENSIONS = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[str, int]] = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    7: ("B", 1),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}

Metadata = dict[str, object]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the metadata says. Digests as protocol section 5 defines them; `chat_template` is the one in force.

    `cell_bytes` is what a token takes in the context, `vocabulary_size` what the tokenizer's list says, 0 without one.
    `pooling_type` is llama.cpp's number (enum llama_pooling_type), 0 where the metadata name none; `causal` says that
    no token sees later ones.
    """

    architecture: str
    training_context_length: int
    cell_bytes: int
    vocabulary_size: int
    pooling_type: int
    causal: bool
    chat_template: str | None
    tokenizer_digest: bytes
    chat_template_digest: bytes | None


def read_facts(fd: int, *, chat_template: str | None = None) -> ModelFacts:
    """Parse the file behind `fd`. A given `chat_template` replaces the file's own. Raises BootError."""
    return facts_of(read_metadata(fd), chat_template=chat_template)


def facts_of(metadata: Mapping[str, object], *, chat_template: str | None = None) -> ModelFacts:
    """Pick and check what the engine needs. Raises BootError naming the missing or malformed key."""
    architecture = _typed(metadata, "general.architecture", str)
    context_length = _typed(metadata, f"{architecture}.context_length", int)
    if context_length < 1:
        raise BootError(f"the model's metadata says {architecture}.context_length = {context_length}")
    pooling_type = metadata.get(f"{architecture}.pooling_type", 0)
    causal = metadata.get(f"{architecture}.attention.causal", True)
    if not isinstance(pooling_type, int) or isinstance(pooling_type, bool) or not isinstance(causal, bool):
        raise BootError("the model's metadata have a pooling_type or an attention.causal of the wrong type")
    tokens = metadata.get("tokenizer.ggml.tokens")
    template = chat_template
    if template is None and "tokenizer.chat_template" in metadata:
        template = _typed(metadata, "tokenizer.chat_template", str)
    return ModelFacts(
        architecture=architecture,
        training_context_length=context_length,
        cell_bytes=cell_bytes(metadata, architecture),
        vocabulary_size=len(tokens) if isinstance(tokens, list | tuple | array.array) else 0,
        pooling_type=pooling_type,
        causal=causal,
        chat_template=template,
        tokenizer_digest=tokenizer_digest(metadata),
        chat_template_digest=None if template is None else hashlib.sha256(template.encode()).digest(),
    )


def tokenizer_digest(metadata: Mapping[str, object]) -> bytes:
    """SHA-256 of the dCBOR map of the keys `tokenizer.*` without `tokenizer.chat_template`."""
    chosen = {
        key: value
        for key, value in metadata.items()
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template"
    }
    try:
        return hashlib.sha256(cbor.encode(chosen)).digest()
    except ValueError as error:
        raise BootError(f"the model's tokenizer metadata has no digest: {error}") from error


def read_metadata(fd: int) -> Metadata:
    """Return all key-value pairs of the GGUF file behind `fd`. Raises BootError on anything malformed."""
    return _read(fd, parse_metadata)


def read_tensors(fd: int) -> dict[str, int]:
    """`parse_tensors` of the GGUF file behind `fd`. Raises BootError."""
    return _read(fd, parse_tensors)


def _read(fd: int, parse: Callable[[mmap.mmap], T]) -> T:
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as view:
            return parse(view)
    except (OSError, ValueError) as error:
        raise BootError(f"cannot read the model's metadata: {error}") from error


def parse_metadata(data: bytes | mmap.mmap) -> Metadata:
    """Return all key-value pairs of a GGUF file's bytes. Raises BootError on anything malformed."""
    return _parse_pairs(_Reader(data))[1]


def parse_tensors(data: bytes | mmap.mmap) -> dict[str, int]:
    """Name and type number of every tensor of a GGUF file's bytes. Raises BootError on anything malformed."""
    reader = _Reader(data)
    count, _ = _parse_pairs(reader)
    tensors: dict[str, int] = {}
    for _ in range(count):
        name = reader.string(MAX_KEY_BYTES)
        if name in tensors:
            raise BootError("malformed GGUF: two tensors have one name")
        dimensions = reader.u32()
        if dimensions > MAX_DIMENSIONS:
            raise BootError(
                f"malformed GGUF: a tensor of {dimensions} dimensions, at most {MAX_DIMENSIONS} are accepted"
            )
        reader.take(8 * dimensions)
        tensors[name] = reader.u32()
        reader.take(8)  # where its data begin
    return tensors


def _parse_pairs(reader: _Reader) -> tuple[int, Metadata]:
    """The number of tensors, and the pairs; the reader stands before the first tensor's description."""
    if reader.take(4) != b"GGUF":
        raise BootError("the model is not a GGUF file: wrong magic")
    version = reader.u32()
    if version not in (2, 3):
        raise BootError(f"GGUF version {version} is not supported, only 2 and 3 (little-endian)")
    tensors = reader.count(MAX_TENSORS, "tensors")
    pairs = reader.count(MAX_PAIRS, "metadata pairs")
    metadata: Metadata = {}
    for _ in range(pairs):
        key = reader.string(MAX_KEY_BYTES)
        if key in metadata:
            raise BootError("malformed GGUF: a metadata key appears twice")
        metadata[key] = reader.value(reader.u32(), 0)
    return tensors, metadata


class _Reader:
    """A cursor that never passes the end of the data or of the metadata budget."""

    __slots__ = ("_data", "_elements_left", "_end", "_offset")

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data = data
        self._end = min(len(data), MAX_METADATA_BYTES)
        self._offset = 0
        self._elements_left = MAX_ELEMENTS  # over all arrays: a byte of data can become 36 bytes of Python integer

    def take(self, size: int) -> bytes:
        start = self._offset
        if size > self._end - start:
            raise BootError(f"malformed GGUF: metadata runs past its end at byte {start}")
        self._offset = start + size
        return self._data[start : self._offset]

    def u32(self) -> int:
        value: int = _U32.unpack(self.take(4))[0]
        return value

    def count(self, limit: int, what: str) -> int:
        value: int = _U64.unpack(self.take(8))[0]
        if value > limit:
            raise BootError(f"malformed GGUF: {value} {what}, at most {limit} are accepted")
        return value

    def string(self, limit: int = MAX_STRING_BYTES) -> str:
        raw = self.take(self.count(limit, "bytes in one string"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise BootError("malformed GGUF: a metadata string is not UTF-8") from error

    def value(self, kind: int, depth: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._scalars(kind, 1)[0]

    def _array(self, depth: int) -> list[object]:
        if depth > MAX_NESTING:
            raise BootError(f"malformed GGUF: arrays nested deeper than {MAX_NESTING}")
        kind = self.u32()
        count = self.count(self._elements_left, "array elements")
        self._elements_left -= count
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        return self._scalars(kind, count)

    def _strings(self, count: int) -> list[object]:
        """A vocabulary has hundreds of thousands of strings: one tight loop, the same checks as `string`."""
        data, end, offset = self._data, self._end, self._offset
        unpack = _U64.unpack_from
        items: list[object] = []
        try:
            for _ in range(count):
                (size,) = unpack(data, offset)
                offset += 8
                if size > end - offset:
                    raise BootError(f"malformed GGUF: metadata runs past its end at byte {offset}")
                items.append(data[offset : offset + size].decode())
                offset += size
        except struct.error as error:
            raise BootError(f"malformed GGUF: metadata runs past its end at byte {offset}") from error
        except UnicodeDecodeError as error:
            raise BootError("malformed GGUF: a metadata string is not UTF-8") from error
        if offset > end:
            raise BootError(f"malformed GGUF: metadata runs past its end at byte {offset}")
        self._offset = offset
        return items

    def _scalars(self, kind: int, count: int) -> list[object]:
        if kind not in _SCALARS:
            raise BootError(f"malformed GGUF: unknown metadata type {kind}")
        code, size = _SCALARS[kind]
        raw = self.take(size * count)
        if kind == _BOOL:
            if raw.strip(b"\x00\x01"):
                raise BootError("malformed GGUF: a boolean is neither 0 nor 1")
            return [byte == 1 for byte in raw]
        values = array.array(code)
        values.frombytes(raw)
        if sys.byteorder == "big":
            values.byteswap()
        return list(values)


def _typed(metadata: Mapping[str, object], key: str, kind: type[T]) -> T:
    value = metadata.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BootError(f"the model's metadata lacks a well-formed {key}")
    return value
