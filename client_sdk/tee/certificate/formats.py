"""Readers of the encodings that evidence in certificates comes in: CBOR of others, MessagePack, SCALE, JSON, quotes.

Each reads only what carriers of evidence use, in definite lengths, to a small depth, and refuses the rest. None of
them is the project's own strict CBOR: foreign writers do not follow it.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from client_sdk.wire.errors import WireError

CODE = "MALFORMED_EVIDENCE"
MAX_DEPTH = 8
_MAX_ITEMS = 1 << 20

SGX, TDX, SNP, NITRO, TPM2 = "sgx", "tdx", "sev-snp", "nitro", "tpm2"
_TEE_TYPES = {0: SGX, 0x81: TDX}
_TDX_REPORT, _TDX_V5_BODY = 48, 54
_SNP_REPORT_BYTES = 1184
_ARGUMENT_BYTES = {24: 1, 25: 2, 26: 4, 27: 8}


@dataclass(frozen=True, slots=True)
class Tagged:
    """A CBOR value under a tag number."""

    tag: int
    value: Any


def _fail(what: str) -> NoReturn:
    raise WireError(CODE, what)


class _Cursor:
    """Bytes that are read from the front, never beyond their end."""

    __slots__ = ("_at", "_data", "_items")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._items = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            _fail(f"truncated at offset {self._at}")
        taken, self._at = self._data[self._at : end], end
        return taken

    def uint(self, count: int) -> int:
        return int.from_bytes(self.take(count), "big")

    def count(self, count: int) -> int:
        """A declared number of items, each of which needs a byte at least."""
        self._items += count
        if count > len(self._data) - self._at or self._items > _MAX_ITEMS:
            _fail(f"{count} items declared at offset {self._at}")
        return count

    def finish(self) -> None:
        if self._at != len(self._data):
            _fail(f"{len(self._data) - self._at} trailing bytes")


def read_cbor(data: bytes) -> Any:
    """One CBOR value that fills `data`: integers, strings, arrays, maps without doubled keys, tags. Or WireError."""
    cursor = _Cursor(data)
    value = _cbor(cursor, 0)
    cursor.finish()
    return value


def _cbor(cursor: _Cursor, depth: int) -> Any:
    if depth > MAX_DEPTH:
        _fail(f"CBOR nested deeper than {MAX_DEPTH}")
    initial = cursor.uint(1)
    major, info = initial >> 5, initial & 31
    if info > 27 or major == 7:
        _fail("CBOR with indefinite lengths, floats or simple values")
    argument = info if info < 24 else cursor.uint(_ARGUMENT_BYTES[info])
    if major < 2:
        return argument if major == 0 else -1 - argument
    if major < 4:
        raw = cursor.take(argument)
        return raw if major == 2 else _text(raw)
    if major == 6:
        return Tagged(argument, _cbor(cursor, depth + 1))
    if major == 4:
        return [_cbor(cursor, depth + 1) for _ in range(cursor.count(argument))]
    return _map(cursor, argument, _cbor, depth)


def _map(cursor: _Cursor, count: int, read: Any, depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for _ in range(cursor.count(count)):
        key = read(cursor, depth + 1)
        if not isinstance(key, str | int) or key in found:
            _fail("a map with a doubled key, or one that is neither text nor integer")
        found[key] = read(cursor, depth + 1)
    return found


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        _fail("text that is not UTF-8")


def read_msgpack(data: bytes) -> Any:
    """One MessagePack value that fills `data`, floats and extension types excepted. Raises WireError."""
    cursor = _Cursor(data)
    value = _msgpack(cursor, 0)
    cursor.finish()
    return value


_MSGPACK_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# first byte -> (kind, bytes of its length or of the number itself)
_MSGPACK_SIZED = {
    0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4),
    0xCC: ("uint", 1), 0xCD: ("uint", 2), 0xCE: ("uint", 4), 0xCF: ("uint", 8),
    0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4),
    0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip


def _msgpack(cursor: _Cursor, depth: int) -> Any:
    if depth > MAX_DEPTH:
        _fail(f"MessagePack nested deeper than {MAX_DEPTH}")
    first = cursor.uint(1)
    if first < 0x80:
        return first
    if first in _MSGPACK_CONSTANTS:
        return _MSGPACK_CONSTANTS[first]
    if first < 0xC0:
        kind, size = (
            ("map", first & 15) if first < 0x90 else ("array", first & 15) if first < 0xA0 else ("str", first & 31)
        )
    elif first in _MSGPACK_SIZED:
        kind, width = _MSGPACK_SIZED[first]
        size = cursor.uint(width)
    else:
        _fail(f"MessagePack type {first:#04x}")
    if kind == "uint":
        return size
    if kind in ("bin", "str"):
        raw = cursor.take(size)
        return raw if kind == "bin" else _text(raw)
    if kind == "array":
        return [_msgpack(cursor, depth + 1) for _ in range(cursor.count(size))]
    return _map(cursor, size, _msgpack, depth)


def msgpack_bytes(value: object) -> bytes:
    """A byte string, also where the writer spelt it as an array of numbers. Raises WireError."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 256 for item in value):
        _fail("bytes are needed")
    return bytes(value)


def read_scale_bytes(data: bytes, offset: int) -> bytes:
    """The SCALE `Vec<u8>` that begins at `offset`; what follows it is not looked at. Raises WireError."""
    cursor = _Cursor(data)
    cursor.take(offset)
    first = cursor.uint(1)
    width = {0: 0, 1: 1, 2: 3}.get(first & 3)
    if width is None:
        _fail("SCALE length too large")
    return cursor.take(int.from_bytes(bytes((first,)) + cursor.take(width), "little") >> 2)


def read_json(data: bytes) -> Any:
    """One JSON document without doubled keys. Raises WireError."""
    try:
        return json.loads(data, object_pairs_hook=_pairs, parse_constant=_fail, parse_float=_fail)
    except (ValueError, RecursionError):
        _fail("not JSON")


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _fail("a JSON object with a doubled key")
    return found


def base64url(text: object) -> bytes:
    """Unpadded or padded base64url. Raises WireError."""
    if not isinstance(text, str):
        _fail("base64url text is needed")
    bare = text.rstrip("=")
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        _fail("not base64url")


def quote_family(quote: bytes) -> str:
    """ "sgx" or "tdx", by the quote's header. Raises WireError."""
    if len(quote) < 48:
        _fail("a quote shorter than its header")
    version, tee = struct.unpack_from("<H2xI", quote)
    family = SGX if version == 3 else _TEE_TYPES.get(tee) if version in (4, 5) else None
    if family is None:
        _fail(f"a quote of version {version} and TEE type {tee:#x}")
    return family


def trim_quote(quote: bytes) -> bytes:
    """The quote up to the end of its signature data: carriers pad. Raises WireError."""
    at = _signature_data_offset(quote)
    if len(quote) < at + 4:
        _fail("truncated quote")
    end = at + 4 + int.from_bytes(quote[at : at + 4], "little")
    if len(quote) < end:
        _fail("truncated quote")
    return quote[:end]


def _signature_data_offset(quote: bytes) -> int:
    family = quote_family(quote)
    version = int.from_bytes(quote[:2], "little")
    if version == 5:
        return _TDX_V5_BODY + int.from_bytes(quote[50:54], "little")
    return 48 + (384 if family == SGX else 584)


def sniff(content: bytes) -> str | None:
    """The family of evidence of unstated kind, by its outward form; None where it is none known."""
    if len(content) == _SNP_REPORT_BYTES and 2 <= int.from_bytes(content[:4], "little") < 16:
        return SNP
    if content[:1] == b"\xd2" or content[:1] == b"\x84":
        return NITRO
    if len(content) >= 436 and content[2:4] in (b"\x02\x00", b"\x03\x00"):
        return quote_family(content)
    return None


def carried_report_data(family: str, content: bytes) -> bytes | None:
    """The 64 report-data bytes, not yet authenticated; None for families whose field is elsewhere. Raises WireError."""
    start = None
    if family == SNP:
        start = 0x50
    elif family == SGX:
        start = 48 + 320
    elif family == TDX:
        start = (_TDX_V5_BODY if content[:2] == b"\x05\x00" else _TDX_REPORT) + 520
    if start is None:
        return None
    if len(content) < start + 64:
        _fail("truncated before the report data")
    return content[start : start + 64]


def mapping(value: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        _fail(f"{what} is not a map")
    return value
