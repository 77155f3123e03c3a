"""The one error of the wire format: bytes that are not what the specification says."""

from __future__ import annotations


class WireError(ValueError):
    """Bytes that break the wire format.

    `code` is a stable name (`MALFORMED_CBOR`, `MALFORMED_COSE`, ...), part of the API; the message is prose for people
    and never carries content of prompts or answers.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
