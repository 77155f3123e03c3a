"""Strict HTTP/1.1 request framing (RFC 9112), applied before any other parser sees a byte.

Two parsers that disagree on where a request ends are how one request becomes two. This one finds the boundaries, the
HTTP library then parses exactly the bytes between them, and a disagreement between the two closes the connection. It
also knows at every moment whether a head or a body is incomplete, which is what the time limits need.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_HEADER_FIELDS = 100
MAX_CHUNK_LINE_BYTES = 16
MAX_TARGET_BYTES = 8192

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/(\d)\.(\d)")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t -~\x80-\xff]*)")
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")
_LENGTH = re.compile(rb"[0-9]{1,18}")


class BadHttp(Exception):
    """A request this server does not take; the connection closes after the answer.

    `status` is the HTTP status, `reason` a fixed sentence that never quotes the request.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Phase(enum.Enum):
    """What the next byte belongs to."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


@dataclass(frozen=True, slots=True)
class Head:
    """A complete, well-formed request head, final CRLF CRLF included."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes after the head, transfer coding included."""

    data: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The request is complete; what follows belongs to the next one."""


Event = Head | Body | End


class RequestFramer:
    """Splits a byte stream into request heads, bodies and ends. Holds at most one incomplete head."""

    def __init__(self, *, head_bytes: int) -> None:
        self._head_bytes = head_bytes
        self._head = bytearray()
        self._length = 0
        self._chunks: _ChunkScanner | None = None
        self.phase = Phase.IDLE

    def feed(self, data: bytes) -> Iterator[tuple[Event, bytes]]:
        """Yield each event with the bytes of `data` that are left after it. Raises BadHttp.

        The caller may stop after any event and feed the rest later.
        """
        while data:
            if self.phase is Phase.BODY:
                data, body, done = self._take_body(data)
                if body:
                    yield Body(body), data
            else:
                data, head = self._take_head(data)
                if head is None:
                    return
                self._begin_body(head)
                yield Head(head), data
                done = self.phase is Phase.IDLE
            if done:
                self.phase = Phase.IDLE
                yield End(), data

    def _take_head(self, data: bytes) -> tuple[bytes, bytes | None]:
        """(rest, the complete head or None)"""
        self.phase = Phase.HEAD
        if not self._head:
            # RFC 9112 2.2: empty lines before a request line are skipped, but they start the clock.
            data = data.lstrip(b"\r\n")
            if not data:
                return b"", None
        return self._scan_head(data)

    def _scan_head(self, data: bytes) -> tuple[bytes, bytes | None]:
        search_from = max(0, len(self._head) - 3)
        taken = len(self._head)
        self._head += data[: self._head_bytes + 4 - taken]
        end = self._head.find(b"\r\n\r\n", search_from)
        if end < 0:
            if len(self._head) >= self._head_bytes:
                raise BadHttp(431, "The request head is too large.")
            if b"\n" in data and re.search(rb"(?<!\r)\n", self._head):
                raise BadHttp(400, "A line of the request head does not end in CRLF.")
            return b"", None
        head = bytes(self._head[: end + 4])
        if len(head) > self._head_bytes:
            raise BadHttp(431, "The request head is too large.")
        self._head.clear()
        return data[len(head) - taken :], head

    def _begin_body(self, head: bytes) -> None:
        length, chunked = check_head(head)
        self._length = length
        self._chunks = _ChunkScanner() if chunked else None
        self.phase = Phase.BODY if chunked or length else Phase.IDLE

    def _take_body(self, data: bytes) -> tuple[bytes, bytes, bool]:
        """(rest, body, whether the request is complete)"""
        if self._chunks is not None:
            taken, done = self._chunks.scan(data)
            return data[taken:], data[:taken], done
        body = data[: self._length]
        self._length -= len(body)
        return data[len(body) :], body, self._length == 0


def check_head(head: bytes) -> tuple[int, bool]:
    """Check a whole head and return (content length, whether the body is chunked). Raises BadHttp.

    Stricter than RFC 9112 where leniency has led to request smuggling: no absolute-form or asterisk-form target (this
    server is an origin, never a proxy), no obs-fold, no Upgrade, no Content-Length beside Transfer-Encoding.
    """
    request_line, *lines = head[:-4].split(b"\r\n")
    _check_request_line(request_line)
    if len(lines) > MAX_HEADER_FIELDS:
        raise BadHttp(431, "The request has too many header fields.")
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise BadHttp(400, "The request has a malformed header field.")
        fields.setdefault(match[1].lower(), []).append(match[2].strip(b" \t"))
    if len(fields.get(b"host", [])) != 1:
        raise BadHttp(400, "A request carries exactly one Host field.")
    if len(fields.get(b"authorization", [])) > 1:
        raise BadHttp(400, "A request carries at most one Authorization field.")
    if b"upgrade" in fields or b"http2-settings" in fields:
        raise BadHttp(400, "This server does not change protocols.")
    if any(value.lower() != b"100-continue" for value in fields.get(b"expect", [])):
        raise BadHttp(417, "The expectation cannot be met.")
    return _body_framing(fields.get(b"content-length", []), fields.get(b"transfer-encoding", []))


def _check_request_line(line: bytes) -> None:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise BadHttp(400, "The request line is malformed.")
    method, target, major, minor = match.groups()
    if (major, minor) != (b"1", b"1"):
        raise BadHttp(505, "This server speaks HTTP/1.1.")
    if method not in _METHODS:
        raise BadHttp(501, "The method is not known.")
    if target[:1] != b"/" or b"#" in target:
        raise BadHttp(400, "The request target is not a path.")
    if len(target) > MAX_TARGET_BYTES:
        raise BadHttp(414, "The request target is too long.")


def _body_framing(lengths: list[bytes], codings: list[bytes]) -> tuple[int, bool]:
    if lengths and codings:
        raise BadHttp(400, "Content-Length and Transfer-Encoding exclude each other.")
    if codings:
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise BadHttp(501, "The only transfer coding is chunked.")
        return 0, True
    if not lengths:
        return 0, False
    if len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
        raise BadHttp(400, "The Content-Length is malformed.")
    return int(lengths[0]), False


class _ChunkScanner:
    """Finds the end of a chunked body (RFC 9112 7.1), taking neither chunk extensions nor trailer fields."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._remaining = 0
        self._last = False
        # After a chunk's data, and after the last chunk in place of trailers, stands a bare CRLF.
        self._expects_empty_line = False

    def scan(self, data: bytes) -> tuple[int, bool]:
        """(how many bytes of `data` belong to the body, whether it is complete). Raises BadHttp."""
        position = 0
        while position < len(data):
            if self._remaining:
                step = min(self._remaining, len(data) - position)
                self._remaining -= step
                position += step
                continue
            self._line.append(data[position])
            position += 1
            if self._line.endswith(b"\r\n") and self._end_of_line():
                return position, True
            if len(self._line) > MAX_CHUNK_LINE_BYTES or b"\n" in self._line:
                raise BadHttp(400, "The chunked body is malformed.")
        return position, False

    def _end_of_line(self) -> bool:
        """Act on one line of framing; True at the very end of the body."""
        line = bytes(self._line[:-2])
        if self._expects_empty_line:
            if line:
                raise BadHttp(400, "The chunked body is malformed.")
            self._expects_empty_line = False
            self._line.clear()
            return self._last
        if not _CHUNK_SIZE.fullmatch(line):
            raise BadHttp(400, "The chunked body is malformed.")
        self._remaining = int(line, 16)
        self._last = self._remaining == 0
        self._expects_empty_line = True
        self._line.clear()
        return False
