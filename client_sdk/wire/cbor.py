"""Deterministic CBOR, strict in both directions (RFC 8949 section 4.2.1).

One encoding per value: the decoder refuses whatever the encoder would not have written. Map keys are integers or text,
sorted bytewise by their encoding; no tags (COSE's tag 18 is handled in `cose`), no indefinite lengths, no NaN or
infinities, no simple values but false, true and null. Nesting is at most 16; size is checked before anything else, and
a declared length is compared with the bytes that are really there before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

from client_sdk.wire.errors import WireError
from client_sdk.wire.names import MAX_NESTING

Value: TypeAlias = int | float | bool | bytes | str | list[Any] | dict[int | str, Any] | None

_MAX_UINT = (1 << 64) - 1


def encode(value: object) -> bytes:
    """The one deterministic encoding of `value`. Raises TypeError or ValueError: a value outside the format is our bug.

    Accepts int (-2**64..2**64-1), float (finite), bool, None, bytes, str, list, tuple, Mapping with int or str keys.
    """
    out = bytearray()
    _write(out, value, 0)
    return bytes(out)


def decode(data: bytes, *, limit_bytes: int) -> Value:
    """Decode exactly one value that fills `data`. Raises WireError MALFORMED_CBOR, naming the offset."""
    if len(data) > limit_bytes:
        raise WireError("MALFORMED_CBOR", f"{len(data)} bytes exceed the limit of {limit_bytes}")
    value, end = _read(data, 0, 0)
    if end != len(data):
        raise WireError("MALFORMED_CBOR", f"{len(data) - end} trailing bytes at offset {end}")
    return value


def _write_head(out: bytearray, major: int, argument: int) -> None:
    if argument < 24:
        out.append(major << 5 | argument)
    elif argument < 1 << 8:
        out += bytes((major << 5 | 24, argument))
    elif argument < 1 << 16:
        out += struct.pack(">BH", major << 5 | 25, argument)
    elif argument < 1 << 32:
        out += struct.pack(">BI", major << 5 | 26, argument)
    elif argument <= _MAX_UINT:
        out += struct.pack(">BQ", major << 5 | 27, argument)
    else:
        raise ValueError("integer outside -2**64..2**64-1")


def _write(out: bytearray, value: object, depth: int) -> None:
    kind = type(value)
    if kind is str:
        raw = value.encode()  # type: ignore[attr-defined]
        _write_head(out, 3, len(raw))
        out += raw
    elif kind is bytes:
        _write_head(out, 2, len(value))  # type: ignore[arg-type]
        out += value  # type: ignore[arg-type]
    elif kind is int:
        number: int = value  # type: ignore[assignment]
        _write_head(out, 0 if number >= 0 else 1, number if number >= 0 else -1 - number)
    elif kind is bool:
        out.append(0xF5 if value else 0xF4)
    elif value is None:
        out.append(0xF6)
    elif kind is float:
        out += _float_bytes(value)  # type: ignore[arg-type]
    elif isinstance(value, list | tuple):
        _check_depth(depth)
        _write_head(out, 4, len(value))
        for item in value:
            _write(out, item, depth + 1)
    elif isinstance(value, Mapping):
        _write_map(out, value, depth)
    else:
        raise TypeError(f"{kind.__name__} has no deterministic CBOR encoding here")


def _write_map(out: bytearray, value: Mapping[Any, object], depth: int) -> None:
    _check_depth(depth)
    entries = []
    for key, item in value.items():
        if type(key) is not int and type(key) is not str:  # True == 1 in Python: exact types only
            raise TypeError(f"map key of type {type(key).__name__}")
        encoded_key = bytearray()
        _write(encoded_key, key, depth + 1)
        encoded_item = bytearray()
        _write(encoded_item, item, depth + 1)
        entries.append((bytes(encoded_key), encoded_item))
    entries.sort(key=lambda entry: entry[0])
    _write_head(out, 5, len(entries))
    for encoded, item_bytes in entries:
        out += encoded
        out += item_bytes


def _check_depth(depth: int) -> None:
    if depth >= MAX_NESTING:
        raise ValueError(f"nesting deeper than {MAX_NESTING}")


def _float_bytes(value: float) -> bytes:
    if not math.isfinite(value):
        raise ValueError("NaN and infinities have no encoding here")
    for head, fmt in ((0xF9, ">e"), (0xFA, ">f")):
        try:
            packed = struct.pack(fmt, value)
        except OverflowError:
            continue
        if struct.unpack(fmt, packed)[0] == value:
            return bytes((head,)) + packed
    return b"\xfb" + struct.pack(">d", value)


def _fail(offset: int, what: str) -> WireError:
    return WireError("MALFORMED_CBOR", f"{what} at offset {offset}")


_ARGUMENT_SIZE = {24: 1, 25: 2, 26: 4, 27: 8}
_ARGUMENT_FLOOR = {24: 24, 25: 1 << 8, 26: 1 << 16, 27: 1 << 32}
_FLOAT_FORMAT = {25: ">e", 26: ">f", 27: ">d"}
_SIMPLE: dict[int, bool | None] = {20: False, 21: True, 22: None}


def _read(data: bytes, offset: int, depth: int) -> tuple[Value, int]:
    if offset >= len(data):
        raise _fail(offset, "truncated")
    initial = data[offset]
    major, info = initial >> 5, initial & 31
    if major == 7:
        return _read_simple(data, offset, info)
    argument, at = _read_argument(data, offset, info)
    if major == 0:
        return argument, at
    if major == 1:
        return -1 - argument, at
    if major == 2 or major == 3:
        end = at + argument
        if end > len(data):
            raise _fail(offset, "declared length exceeds the data")
        if major == 2:
            return data[at:end], end
        try:
            return data[at:end].decode("utf-8"), end
        except UnicodeDecodeError:
            raise _fail(offset, "text is not UTF-8") from None
    if major == 6:
        raise _fail(offset, f"tag {argument} is not allowed here")
    if depth >= MAX_NESTING:
        raise _fail(offset, f"nesting deeper than {MAX_NESTING}")
    if argument > (len(data) - at) >> (major - 4):  # each item takes a byte at least, each map entry two
        raise _fail(offset, "declared count exceeds the data")
    if major == 4:
        return _read_array(data, at, argument, depth)
    return _read_map(data, at, argument, depth)


def _read_argument(data: bytes, offset: int, info: int) -> tuple[int, int]:
    if info < 24:
        return info, offset + 1
    size = _ARGUMENT_SIZE.get(info)
    if size is None:
        raise _fail(offset, "indefinite length or reserved encoding")
    end = offset + 1 + size
    if end > len(data):
        raise _fail(offset, "truncated")
    argument = int.from_bytes(data[offset + 1 : end], "big")
    if argument < _ARGUMENT_FLOOR[info]:
        raise _fail(offset, "not the shortest form")
    return argument, end


def _read_simple(data: bytes, offset: int, info: int) -> tuple[Value, int]:
    if info in _SIMPLE:
        return _SIMPLE[info], offset + 1
    fmt = _FLOAT_FORMAT.get(info)
    if fmt is None:
        raise _fail(offset, "simple value not allowed")
    end = offset + 1 + struct.calcsize(fmt)
    if end > len(data):
        raise _fail(offset, "truncated")
    value: float = struct.unpack(fmt, data[offset + 1 : end])[0]
    if not math.isfinite(value):
        raise _fail(offset, "NaN or infinity")
    if _float_bytes(value) != data[offset:end]:
        raise _fail(offset, "float not in its shortest form")
    return value, end


def _read_array(data: bytes, at: int, count: int, depth: int) -> tuple[Value, int]:
    items: list[Value] = []
    for _ in range(count):
        item, at = _read(data, at, depth + 1)
        items.append(item)
    return items, at


def _read_map(data: bytes, at: int, count: int, depth: int) -> tuple[Value, int]:
    entries: dict[int | str, Value] = {}
    last_key = b""
    for _ in range(count):
        start = at
        key, at = _read(data, at, depth + 1)
        if type(key) is not int and type(key) is not str:
            raise _fail(start, "map key is neither integer nor text")
        key_bytes = data[start:at]
        if key_bytes == last_key:
            raise _fail(start, "duplicate map key")
        if key_bytes < last_key:
            raise _fail(start, "map keys out of order")
        last_key = key_bytes
        entries[key], at = _read(data, at, depth + 1)
    return entries, at
