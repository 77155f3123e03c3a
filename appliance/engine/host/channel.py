"""Messages between supervisor and worker: u32 big-endian length, then one deterministic CBOR map.

Both ends bound the length before they read or allocate. The worker's side is blocking, the supervisor's is asyncio.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Mapping

from client_sdk.wire import cbor
from client_sdk.wire.errors import WireError

LIMIT_BYTES = 16 * 1024 * 1024
"""Largest message body, in bytes, either way."""

SUBMIT_LIMIT_BYTES = 4 * 1024 * 1024
"""Largest job, in bytes: what comes back for it (rendered text and token ids) must fit one message too."""

_HEADER = struct.Struct(">I")
Message = dict[str, object]


class ChannelError(Exception):
    """The peer broke the framing, or a message of ours is too large to send. Never carries message content."""


def encode_frame(message: Mapping[str, object], *, limit_bytes: int = LIMIT_BYTES) -> bytes:
    """Return header and body. Raises ChannelError when the body is longer than `limit_bytes`."""
    body = cbor.encode(dict(message))
    if len(body) > limit_bytes:
        raise ChannelError(f"message of {len(body)} bytes exceeds the limit of {limit_bytes}")
    return _HEADER.pack(len(body)) + body


def decode_body(body: bytes, *, limit_bytes: int = LIMIT_BYTES) -> Message:
    """Parse one message body. Raises ChannelError unless it is a map with text keys."""
    try:
        value = cbor.decode(body, limit_bytes=limit_bytes)
    except WireError as error:
        raise ChannelError(f"message body: {error.code}") from error
    if not isinstance(value, dict):
        raise ChannelError("message body is not a map")
    message: Message = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ChannelError("message key is not text")
        message[key] = item
    return message


class FrameReader:
    """Incremental parser of the byte stream; holds at most one incomplete message."""

    __slots__ = ("_buffer", "_limit_bytes")

    def __init__(self, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._buffer = bytearray()
        self._limit_bytes = limit_bytes

    @property
    def pending(self) -> bool:
        """True when the stream ended, or would end, inside a message."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take bytes, yield the messages now complete; to be drained. Raises ChannelError on a bad length or body."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer, start)
            if length > self._limit_bytes:
                raise ChannelError(f"announced message of {length} bytes exceeds the limit of {self._limit_bytes}")
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            yield decode_body(bytes(buffer[start + _HEADER.size : end]), limit_bytes=self._limit_bytes)
            start = end
        del buffer[:start]


class BlockingChannel:
    """The worker's end. `receive` belongs to one thread, `send` to one thread."""

    def __init__(self, sock: socket.socket, *, limit_bytes: int = LIMIT_BYTES) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._reader = FrameReader(limit_bytes=limit_bytes)
        self._limit_bytes = limit_bytes
        self._ready: list[Message] = []

    def send(self, message: Mapping[str, object]) -> None:
        """Write one message. Raises ChannelError (too large) or OSError (peer gone)."""
        self._socket.sendall(encode_frame(message, limit_bytes=self._limit_bytes))

    def receive(self) -> Message | None:
        """Block for the next message; None when the peer closed between messages. Raises ChannelError."""
        while not self._ready:
            data = self._socket.recv(65536)
            if not data:
                if self._reader.pending:
                    raise ChannelError("the peer closed in the middle of a message")
                return None
            self._ready += self._reader.feed(data)
        return self._ready.pop(0)

    def close(self) -> None:
        self._socket.close()


class ChannelProtocol(asyncio.Protocol):
    """The supervisor's end: messages go to `on_message` as they complete, the end to `on_closed`, once.

    No task and no queue of its own: a token reaches its job in the same loop iteration in which its bytes arrived.
    """

    def __init__(self, on_message: Callable[[Message], None], on_closed: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.violation: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.violation is not None:
            return
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except ChannelError as error:
            self.violation = str(error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed()

    def send(self, message: Mapping[str, object], *, limit_bytes: int = LIMIT_BYTES) -> None:
        """Queue one message; dropped once the connection is gone, as `on_closed` tells. Raises ChannelError."""
        frame = encode_frame(message, limit_bytes=limit_bytes)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def connect(
    sock: socket.socket, on_message: Callable[[Message], None], on_closed: Callable[[], None]
) -> ChannelProtocol:
    """Attach one end of a socketpair to the running loop; the transport owns `sock` from here on."""
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_unix_connection(lambda: ChannelProtocol(on_message, on_closed), sock=sock)
    return protocol
