"""A bounded reader for CBOR that others wrote (RFC 8949): AWS Nitro's, which is not our deterministic CBOR.

Real documents have an indefinite-length payload map and keys in no particular order, so both are read here. Refused are
duplicate keys, trailing bytes, tags (but one that the caller names), floats, undefined, indefinite strings, keys that
are neither integers nor text, nesting deeper than 8 and more than 4096 items: nothing genuine has them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from client_sdk.wire.errors import WireError

CODE = "MALFORMED_EVIDENCE"
Value: TypeAlias = int | bool | bytes | str | list[Any] | dict[int | str, Any] | None

_MAX_DEPTH = 8
_MAX_ITEMS = 4096
_INDEFINITE = 31
_BREAK = 0xFF
_SIMPLE: dict[int, bool | None] = {0xF4: False, 0xF5: True, 0xF6: None}
_MAJOR_UINT, _MAJOR_NINT, _MAJOR_BYTES, _MAJOR_TEXT, _MAJOR_ARRAY, _MAJOR_MAP, _MAJOR_TAG = range(7)


def decode(data: bytes, *, limit_bytes: int, optional_tag: int | None = None) -> Value:
    """The one value that fills `data`, which may stand in `optional_tag`. Raises WireError MALFORMED_EVIDENCE."""
    if len(data) > limit_bytes:
        raise WireError(CODE, f"{len(data)} bytes exceed the limit of {limit_bytes}")
    reader = _Reader(data)
    if optional_tag is not None and data and data[0] >> 5 == _MAJOR_TAG:
        reader.tag(optional_tag)
    value = reader.value(0)
    reader.finish()
    return value


class _Reader:
    __slots__ = ("_at", "_data", "_items")

    def __init__(self, data: bytes) -> None:
        self._data, self._at, self._items = data, 0, 0

    def tag(self, expected: int) -> None:
        _, found = self._head()
        if found != expected:
            raise self._fail(f"tag {found} instead of {expected}")

    def finish(self) -> None:
        if self._at != len(self._data):
            raise self._fail(f"{len(self._data) - self._at} trailing bytes")

    def value(self, depth: int) -> Value:
        self._items += 1
        if depth > _MAX_DEPTH or self._items > _MAX_ITEMS:
            raise self._fail("too deep or too many items")
        initial = self._peek()
        if initial in _SIMPLE:
            self._at += 1
            return _SIMPLE[initial]
        major, argument = self._head()
        if major == _MAJOR_UINT and argument is not None:
            return argument
        if major == _MAJOR_NINT and argument is not None:
            return -1 - argument
        if major == _MAJOR_BYTES and argument is not None:
            return self._take(argument)
        if major == _MAJOR_TEXT and argument is not None:
            return self._text(argument)
        if major == _MAJOR_ARRAY:
            return self._array(argument, depth)
        if major == _MAJOR_MAP:
            return self._map(argument, depth)
        raise self._fail(f"an item that begins with {initial:#04x}")

    def _array(self, count: int | None, depth: int) -> list[Value]:
        found: list[Value] = []
        while not self._at_end(count, len(found)):
            found.append(self.value(depth + 1))
        return found

    def _map(self, count: int | None, depth: int) -> dict[int | str, Value]:
        found: dict[int | str, Value] = {}
        while not self._at_end(count, len(found)):
            key = self.value(depth + 1)
            if type(key) is not int and type(key) is not str:
                raise self._fail("a map key that is neither integer nor text")
            if key in found:
                raise self._fail("a duplicate map key")
            found[key] = self.value(depth + 1)
        return found

    def _at_end(self, count: int | None, read: int) -> bool:
        if count is not None:
            return read == count
        if self._peek() != _BREAK:
            return False
        self._at += 1
        return True

    def _head(self) -> tuple[int, int | None]:
        """Major type and argument; None is an indefinite length."""
        initial = self._peek()
        self._at += 1
        major, info = initial >> 5, initial & 31
        if info < 24:
            return major, info
        if info == _INDEFINITE:
            return major, None
        if info > 27:
            raise self._fail("a reserved length")
        return major, int.from_bytes(self._take(1 << (info - 24)), "big")

    def _peek(self) -> int:
        if self._at >= len(self._data):
            raise self._fail("truncated")
        return self._data[self._at]

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise self._fail("declared length exceeds the data")
        piece, self._at = self._data[self._at : end], end
        return piece

    def _text(self, size: int) -> str:
        try:
            return self._take(size).decode()
        except UnicodeDecodeError:
            raise self._fail("text that is not UTF-8") from None

    def _fail(self, what: str) -> WireError:
        return WireError(CODE, f"foreign CBOR: {what} at offset {self._at}")
