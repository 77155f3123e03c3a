"""A reader for closed maps: every field is taken by name and type, and whatever is left over is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from client_sdk.wire.errors import WireError

T = TypeVar("T")

MAX_TEXT_BYTES = 1024


class MapReader:
    """Takes the fields of one decoded map. `where` names the map in errors, `code` is the WireError code.

    Every `take` removes its field; `finish()` refuses what was not taken, so an unknown field is never skipped.
    """

    def __init__(self, value: object, where: str, code: str) -> None:
        self._where = where
        self._code = code
        if type(value) is not dict:
            raise WireError(code, f"{where} is not a map")
        self._left: dict[int | str, object] = dict(value)

    def fail(self, key: int | str, what: str) -> WireError:
        return WireError(self._code, f"{self._where}[{key!r}] {what}")

    def has(self, key: int | str) -> bool:
        return key in self._left

    def take(self, key: int | str, kind: type[T]) -> T:
        """The field `key`, whose exact type is `kind` (so that True is no integer)."""
        if key not in self._left:
            raise self.fail(key, "is missing")
        value = self._left.pop(key)
        if type(value) is not kind:
            raise self.fail(key, f"is not a {kind.__name__}")
        return value

    def take_or_null(self, key: int | str, kind: type[T]) -> T | None:
        """Like `take`, but null stands for "not applicable". The field itself must be there."""
        if key in self._left and self._left[key] is None:
            del self._left[key]
            return None
        return self.take(key, kind)

    def uint(self, key: int | str) -> int:
        value = self.take(key, int)
        if value < 0:
            raise self.fail(key, "is negative")
        return value

    def bstr(self, key: int | str, size: int) -> bytes:
        return self._sized(key, self.take(key, bytes), size)

    def bstr_or_null(self, key: int | str, size: int) -> bytes | None:
        value = self.take_or_null(key, bytes)
        return None if value is None else self._sized(key, value, size)

    def text(self, key: int | str) -> str:
        value = self.take(key, str)
        if not value or len(value.encode()) > MAX_TEXT_BYTES:
            raise self.fail(key, f"is empty or longer than {MAX_TEXT_BYTES} bytes")
        return value

    def one_of(self, key: int | str, allowed: frozenset[str]) -> str:
        value = self.take(key, str)
        if value not in allowed:
            raise self.fail(key, f"is not one of {', '.join(sorted(allowed))}")
        return value

    def rest(self) -> Mapping[int | str, object]:
        """Everything not taken yet; the caller takes responsibility for it."""
        left, self._left = self._left, {}
        return left

    def finish(self) -> None:
        if self._left:
            unknown = ", ".join(repr(key) for key in sorted(self._left, key=repr)[:4])
            raise WireError(self._code, f"{self._where} has unknown fields: {unknown}")

    def _sized(self, key: int | str, value: bytes, size: int) -> bytes:
        if len(value) != size:
            raise self.fail(key, f"has {len(value)} bytes instead of {size}")
        return value
