"""TLS streams in the shape httpcore uses, blocking and asyncio, over a socket of their own.

They own the socket itself rather than an asyncio transport, because a transport reads ahead on its own and could not
say what has arrived: that question decides whether a server has spoken out of turn.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import h11
import httpcore

from client_sdk.errors import AuthenticityError, MalformedError, Rejection
from client_sdk.transport.tls import TlsFailure, TlsSession

READ_BYTES = 65_536
WRITE_BYTES = 65_536
PLAINTEXT_BYTES = 16_384
HANG_UP_CHECK_S = 0.5
MAX_INCOMPLETE_BYTES = 100 * 1024  # of a response head, as in httpcore: what it still reads must be watched


class _Arrived(enum.Enum):
    NOTHING = enum.auto()
    PLAINTEXT = enum.auto()
    END = enum.auto()


@contextmanager
def mapped_errors(timed_out: type[Exception], failed: type[Exception]) -> Generator[None]:
    """Turn socket and TLS trouble into the errors httpcore expects; verdicts pass through untouched."""
    try:
        yield
    except TimeoutError as error:
        raise timed_out(str(error) or "timed out") from error
    except OSError as error:
        raise failed(str(error)) from error


# A vsock whose peer has closed never becomes writable while something of the peer is unread (vsock_poll, Linux 6.1): a
# client that is still sending when an early answer comes would wait for ever. TCP fails its `send` there.


def _send_all(sock: socket.socket, data: bytes, timeout: float | None) -> None:
    """`sock.sendall` for a vsock, within `timeout` seconds. Raises BrokenPipeError once the peer has hung up."""
    deadline = None if timeout is None else time.monotonic() + timeout
    poller = select.poll()
    poller.register(sock, select.POLLOUT | select.POLLRDHUP)
    sock.settimeout(0)
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            events = poller.poll(left_ms)
            if not events:
                raise TimeoutError("the server does not read") from None
            if not events[0][1] & select.POLLOUT:
                raise BrokenPipeError(errno.EPIPE, "the server hung up") from None


async def _unless_hung_up(sock: socket.socket, sending: asyncio.Future[None]) -> None:
    """Wait for `sending`; see _send_all."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    try:
        while not sending.done():
            await asyncio.wait((sending,), timeout=HANG_UP_CHECK_S)
            if not sending.done() and poller.poll(0):
                raise BrokenPipeError(errno.EPIPE, "the server hung up")
    finally:
        sending.cancel()
    sending.result()


class _ResponseWatch:
    """Knows where the answer in progress ends, so that nothing may follow it.

    httpcore's own parser keeps bytes after an answer and takes them for the answer to the next request.
    """

    def __init__(self, request_start: bytes) -> None:
        method = request_start.partition(b" ")[0]
        self._http: h11.Connection | None = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_INCOMPLETE_BYTES)
        try:
            # How an answer ends depends on the method and on nothing else of its request.
            self._http.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
            self._http.send(h11.EndOfMessage())
        except h11.LocalProtocolError:
            self._http = None

    def received(self, data: bytes) -> None:
        """Raises AuthenticityError (UNSOLICITED_BYTES), MalformedError (MALFORMED_RESPONSE) for what is not HTTP.

        An answer that ends too early is left to httpcore: that is trouble of the network, not a verdict.
        """
        if self._http is None:
            return
        try:
            self._http.receive_data(data)
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed) or event is h11.PAUSED:
                    break
        except h11.RemoteProtocolError as error:
            self._http = None
            if not data:
                return
            raise MalformedError(Rejection.MALFORMED_RESPONSE, "the server's answer is not valid HTTP/1.1") from error
        if self._http.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED) and self._http.trailing_data[0]:
            raise AuthenticityError(Rejection.UNSOLICITED_BYTES, "bytes follow the server's answer")


class _TlsConnection:
    """What the sync and the async stream share: the session, its socket, and the rule on unsolicited bytes.

    `attestation` is what `attest` returned (None while it runs); `request_bytes_sent` counts plaintext handed to the
    network since then: 0 means that no byte of a request can have left.
    """

    def __init__(self, sock: socket.socket, session: TlsSession, authority: str) -> None:
        self._sock = sock
        self._session = session
        # httpcore's blocking pool asks `is_readable` of a connection that another thread may just be starting to use.
        self._lock = threading.Lock()
        self._turned = True
        self._watch: _ResponseWatch | None = None
        self._is_vsock = sock.family == getattr(socket, "AF_VSOCK", None)
        self.authority = authority
        self.attestation: object | None = None
        self.request_bytes_sent = 0

    @property
    def spki(self) -> bytes:
        """DER SubjectPublicKeyInfo of the leaf presented on this connection (91 bytes)."""
        return self._session.spki

    @property
    def suite(self) -> str:
        """TLS cipher suite."""
        return self._session.suite

    def export(self, label: str, length: int, context: bytes) -> bytes:
        """TLS exporter (RFC 8446 section 7.5) of this connection, `length` bytes."""
        return self._session.export(label, length, context)

    def get_extra_info(self, info: str) -> Any:
        """httpcore's names, and `attestation`, `spki`, `suite`, `stream`."""
        if info == "is_readable":
            # httpcore drops an idle connection that is readable. Only an end may be dropped so quietly: unsolicited
            # bytes are left for the next write, which rejects them.
            return self._has_ended()
        if info in ("client_addr", "server_addr"):
            return self._sock.getsockname() if info == "client_addr" else self._sock.getpeername()
        known = {
            "attestation": self.attestation,
            "spki": self._session.spki,
            "suite": self._session.suite,
            "socket": self._sock,
            "stream": self,
        }
        return known.get(info)

    def mark_attested(self, result: object) -> None:
        """The verdict is in: from here on bytes written are requests."""
        self.attestation = result
        self.request_bytes_sent = 0
        self._turned = True

    def _has_ended(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # in use, so neither idle nor over
        try:
            return self._arrived() is _Arrived.END
        finally:
            self._lock.release()

    def _after_read(self, data: bytes) -> None:
        self._turned = True
        if self._watch is not None:
            self._watch.received(data)

    def _before_write(self, piece: memoryview) -> None:
        """Bytes from the server between an answer and the next request are nobody's answer: refuse them."""
        if self._turned:
            arrived = self._arrived()
            if arrived is _Arrived.PLAINTEXT:
                raise AuthenticityError(
                    Rejection.UNSOLICITED_BYTES, "the server sent bytes that answer no request on this connection"
                )
            if arrived is _Arrived.END:
                raise TlsFailure("the server closed the connection")
            self._turned = False
            if self.attestation is not None:
                self._watch = _ResponseWatch(bytes(piece[:32]))
        self.request_bytes_sent += len(piece)

    def _arrived(self) -> _Arrived:
        """What the server has sent by now, without waiting. Tickets and key updates are nothing."""
        if self._sock.fileno() < 0:
            return _Arrived.END
        self._sock.settimeout(0)
        try:
            while True:
                plaintext = self._session.peek()
                if plaintext is not None:
                    return _Arrived.PLAINTEXT if plaintext else _Arrived.END
                self._session.incoming(self._sock.recv(READ_BYTES))
        except BlockingIOError:
            return _Arrived.NOTHING
        except OSError:
            return _Arrived.END

    def _close(self) -> None:
        if self._sock.fileno() >= 0 and self._lock.acquire(blocking=False):
            try:
                self._session.close()
                self._sock.settimeout(0)
                self._sock.send(self._session.outgoing())
            except OSError:
                pass  # a courtesy to a peer that is no longer there
            finally:
                self._lock.release()
        self._sock.close()


class TlsStream(_TlsConnection, httpcore.NetworkStream):
    """One TLS connection over a blocking socket."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Up to `max_bytes`, b"" after close_notify. httpcore.ReadTimeout, httpcore.ReadError."""
        with self._lock, mapped_errors(httpcore.ReadTimeout, httpcore.ReadError):
            while (data := self._session.decrypt(min(max_bytes, PLAINTEXT_BYTES))) is None:
                self._sock.settimeout(timeout)
                self._session.incoming(self._sock.recv(READ_BYTES))
            self._flush(timeout)
        self._after_read(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """All of `buffer`. httpcore.WriteTimeout, httpcore.WriteError, AuthenticityError (UNSOLICITED_BYTES)."""
        if not buffer:
            return
        view = memoryview(buffer)
        with self._lock, mapped_errors(httpcore.WriteTimeout, httpcore.WriteError):
            for start in range(0, len(view), WRITE_BYTES):
                piece = view[start : start + WRITE_BYTES]
                self._before_write(piece)
                self._session.encrypt(piece)
                self._flush(timeout)

    def close(self) -> None:
        """Send close_notify if that is possible without waiting, and close the socket."""
        self._close()

    def handshake(self, *, now: float, monotonic: Callable[[], float], timeout: float | None) -> None:
        """Complete the TLS handshake within `timeout` seconds in all. Raises as `TlsSession.handshake`, and OSError."""
        deadline = None if timeout is None else monotonic() + timeout
        while not self._session.handshake(now=now):
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("the TLS handshake took too long")
            self._flush(left)
            self._sock.settimeout(left)
            self._session.incoming(self._sock.recv(READ_BYTES))
        self._flush(timeout)

    def _flush(self, timeout: float | None) -> None:
        pending = self._session.outgoing()
        if pending:
            self._sock.settimeout(timeout)
            if self._is_vsock:
                _send_all(self._sock, pending, timeout)
            else:
                self._sock.sendall(pending)


class AsyncTlsStream(_TlsConnection, httpcore.AsyncNetworkStream):
    """One TLS connection over a non-blocking socket on asyncio."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """See TlsStream.read."""
        loop = asyncio.get_running_loop()
        with mapped_errors(httpcore.ReadTimeout, httpcore.ReadError):
            async with asyncio.timeout(timeout):
                while (data := self._session.decrypt(min(max_bytes, PLAINTEXT_BYTES))) is None:
                    self._session.incoming(await loop.sock_recv(self._sock, READ_BYTES))
                await self._flush()
        self._after_read(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """See TlsStream.write."""
        if not buffer:
            return
        view = memoryview(buffer)
        with mapped_errors(httpcore.WriteTimeout, httpcore.WriteError):
            async with asyncio.timeout(timeout):
                for start in range(0, len(view), WRITE_BYTES):
                    piece = view[start : start + WRITE_BYTES]
                    self._before_write(piece)
                    self._session.encrypt(piece)
                    await self._flush()

    async def aclose(self) -> None:
        """See TlsStream.close."""
        self._close()

    async def handshake(self, *, now: float) -> None:
        """Complete the TLS handshake. Raises as `TlsSession.handshake`, and OSError."""
        loop = asyncio.get_running_loop()
        while not self._session.handshake(now=now):
            await self._flush()
            self._session.incoming(await loop.sock_recv(self._sock, READ_BYTES))
        await self._flush()

    async def _flush(self) -> None:
        pending = self._session.outgoing()
        if not pending:
            return
        sending = asyncio.get_running_loop().sock_sendall(self._sock, pending)
        if self._is_vsock:
            await _unless_hung_up(self._sock, asyncio.ensure_future(sending))
        else:
            await sending
