"""Reader of TPM 2.0 structures (TCG TPM 2.0 Library, Part 2): big-endian, sized buffers, nothing left over."""

from __future__ import annotations

from client_sdk.wire.errors import WireError

CODE = "MALFORMED_EVIDENCE"


class Reader:
    """Takes fields from the front of one structure; `where` names it in errors. Raises WireError."""

    __slots__ = ("_at", "_data", "_where")

    def __init__(self, data: bytes, where: str, *, limit_bytes: int) -> None:
        if len(data) > limit_bytes:
            raise WireError(CODE, f"{where} is larger than {limit_bytes} bytes")
        self._data, self._at, self._where = data, 0, where

    def take(self, size: int, what: str) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise WireError(CODE, f"{self._where} ends within {what}")
        piece, self._at = self._data[self._at : end], end
        return piece

    def integer(self, size: int, what: str) -> int:
        return int.from_bytes(self.take(size, what), "big")

    def sized(self, what: str, *, limit_bytes: int) -> bytes:
        """A TPM2B: two bytes of length, then that many bytes."""
        size = self.integer(2, what)
        if size > limit_bytes:
            raise WireError(CODE, f"{self._where}: {what} has {size} bytes, more than {limit_bytes}")
        return self.take(size, what)

    def finish(self) -> None:
        left = len(self._data) - self._at
        if left:
            raise WireError(CODE, f"{left} bytes after {self._where}")
