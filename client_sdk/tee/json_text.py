"""JSON that others wrote, bounded in what reading it costs: empty objects take a hundred times their size in memory."""

from __future__ import annotations

import json
from typing import Any

from client_sdk.wire.errors import WireError

MAX_PARTS = 1 << 15
"""Objects, lists and commas. The longest genuine texts, event logs, have a few thousand."""


def read(text: str, code: str, what: str) -> Any:
    """The document in `text`. Raises WireError(code)."""
    if sum(text.count(mark) for mark in "{[,") > MAX_PARTS:
        raise WireError(code, f"the {what} has more than {MAX_PARTS} parts")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise WireError(code, f"the {what} is not JSON") from None


def decode(data: bytes, code: str, what: str) -> str:
    """UTF-8 alone: from bytes, json would guess at other encodings. Raises WireError(code)."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise WireError(code, f"the {what} is not UTF-8") from None
