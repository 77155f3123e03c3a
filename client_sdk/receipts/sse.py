"""Split a server-sent event stream into blocks, by the strict grammar this protocol uses. No I/O.

A block is all bytes up to and with its blank line. Lines end with LF alone. A block is a frame (every line `data:`) or
one comment line; comments carry checkpoints, the receipt and padding. Whatever else SSE knows is refused: the receiver
must never wonder what another parser would have made of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from client_sdk.errors import MalformedError, Rejection
from client_sdk.wire import names

LIMIT_BLOCK_BYTES = 1 << 20
BlockKind = Literal["frame", "done", "checkpoint", "receipt", "padding"]
_BASE64URL = re.compile(rb"[A-Za-z0-9_-]*")
_COMMENTS: tuple[tuple[bytes, BlockKind], ...] = (
    (names.COMMENT_CHECKPOINT, "checkpoint"),
    (names.COMMENT_RECEIPT, "receipt"),
    (names.COMMENT_PADDING, "padding"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`raw` is the whole block. `content` is the payload: of a frame its data, of a comment the text after its word."""

    kind: BlockKind
    raw: bytes
    content: bytes


class BlockSplitter:
    """Takes chunks as they come and returns the blocks that are complete. Raises MalformedError MALFORMED_STREAM."""

    __slots__ = ("_buffer", "_scanned")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer)

    def split(self, chunk: bytes) -> list[Block]:
        buffer, blocks, start = self._buffer, [], 0
        buffer += chunk
        at = self._scanned
        while (end := buffer.find(b"\n\n", at)) >= 0:
            end += 2
            if end - start > LIMIT_BLOCK_BYTES:
                raise malformed(f"a block exceeds {LIMIT_BLOCK_BYTES} bytes")
            blocks.append(parse_block(bytes(buffer[start:end])))
            start = at = end
        del buffer[:start]
        if len(buffer) > LIMIT_BLOCK_BYTES:
            raise malformed(f"a block exceeds {LIMIT_BLOCK_BYTES} bytes")
        self._scanned = max(len(buffer) - 1, 0)
        return blocks


def parse_block(raw: bytes) -> Block:
    """Classify one complete block. Raises MalformedError MALFORMED_STREAM."""
    if b"\r" in raw or b"\x00" in raw:
        raise malformed("CR or NUL in the stream")
    if raw.startswith(b":"):
        return _comment(raw)
    if raw == names.DONE_BLOCK:
        return Block(kind="done", raw=raw, content=b"")
    if raw.startswith(b"data:") and raw.find(b"\n") == len(raw) - 2:  # one line, as nearly always
        return Block(kind="frame", raw=raw, content=raw[5:-2].removeprefix(b" "))
    lines = raw[:-2].split(b"\n")
    if not all(line.startswith(b"data:") for line in lines):
        raise malformed("a line that is neither data nor a comment between frames")
    return Block(kind="frame", raw=raw, content=b"\n".join(line[5:].removeprefix(b" ") for line in lines))


def _comment(raw: bytes) -> Block:
    for prefix, kind in _COMMENTS:
        if raw.startswith(prefix):
            content = raw[len(prefix) : -2]
            if _BASE64URL.fullmatch(content) is None:
                raise malformed(f"a {kind} comment is not one line of base64url")
            return Block(kind=kind, raw=raw, content=content)
    raise malformed("a comment of an unknown kind")


def malformed(message: str) -> MalformedError:
    return MalformedError(Rejection.MALFORMED_STREAM, message)
