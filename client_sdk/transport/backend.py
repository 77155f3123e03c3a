"""httpcore network backends whose TLS start attests: no application byte leaves before the verdict.

httpcore opens a connection, calls `start_tls`, and pools what it gets back. Here `start_tls` does our own handshake and
then runs the caller's `attest` on that very connection, so every pooled connection was attested on its own, and the
stream that httpcore writes requests to does not exist before `attest` has returned. Asynchronous code runs on asyncio.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import h11
import httpcore

from client_sdk.errors import AuthenticityError, MalformedError, Rejection, TransportError
from client_sdk.transport.addresses import Connector
from client_sdk.transport.tls import TlsSession, make_client_context
from client_sdk.transport.tls_streams import READ_BYTES, AsyncTlsStream, TlsStream, mapped_errors

MAX_RESPONSE_HEAD_BYTES = 16_384

SocketOptions: TypeAlias = Iterable[Any] | None
Attest: TypeAlias = Callable[[TlsStream], object]
AsyncAttest: TypeAlias = Callable[[AsyncTlsStream], Awaitable[object]]


class StreamResponse(NamedTuple):
    """A whole answer: status, (lower-case name, value) pairs, body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def post_over_stream(
    stream: TlsStream, path: str, body: bytes, *, content_type: str, timeout_s: float, limit_bytes: int
) -> StreamResponse:
    """POST `body` as the one exchange in progress on `stream`, within `timeout_s` seconds in all.

    For the attestation exchange, which happens before an HTTP client may have the connection. Raises httpcore's
    network errors, MalformedError (MALFORMED_RESPONSE, also beyond `limit_bytes`) and AuthenticityError
    (UNSOLICITED_BYTES when bytes follow the answer, CONTENT_ENCODING).
    """
    exchange = _Exchange(stream.authority, path, content_type, limit_bytes)
    deadline = time.monotonic() + timeout_s
    stream.write(exchange.request(body), timeout_s)
    while (response := exchange.response()) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the answer took too long")
        exchange.received(stream.read(READ_BYTES, left))
    return response


async def apost_over_stream(
    stream: AsyncTlsStream, path: str, body: bytes, *, content_type: str, timeout_s: float, limit_bytes: int
) -> StreamResponse:
    """See post_over_stream."""
    exchange = _Exchange(stream.authority, path, content_type, limit_bytes)
    with mapped_errors(httpcore.ReadTimeout, httpcore.ReadError):
        async with asyncio.timeout(timeout_s):
            await stream.write(exchange.request(body))
            while (response := exchange.response()) is None:
                exchange.received(await stream.read(READ_BYTES))
    return response


class _Exchange:
    """One HTTP/1.1 request and its answer, as a state machine without I/O."""

    def __init__(self, authority: str, path: str, content_type: str, limit_bytes: int) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_RESPONSE_HEAD_BYTES)
        self._head = [("host", authority), ("content-type", content_type), ("accept-encoding", "identity")]
        self._path = path
        self._limit_bytes = limit_bytes
        self._response: h11.Response | None = None
        self._body = bytearray()
        self._ended = False

    def request(self, body: bytes) -> bytes:
        headers = [*self._head, ("content-length", str(len(body)))]
        events = (h11.Request(method="POST", target=self._path, headers=headers), h11.Data(body), h11.EndOfMessage())
        return b"".join(self._http.send(event) or b"" for event in events)

    def received(self, data: bytes) -> None:
        self._ended = not data
        self._http.receive_data(data)

    def response(self) -> StreamResponse | None:
        """The answer once it is complete. Raises as post_over_stream."""
        try:
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self._response = event
                elif isinstance(event, h11.Data):
                    self._add(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return self._complete()
                elif isinstance(event, h11.ConnectionClosed):
                    raise httpcore.ReadError("the server closed the connection without an answer")
        except h11.RemoteProtocolError as error:
            if self._ended:
                raise httpcore.ReadError("the server closed the connection in its answer") from error
            raise MalformedError(Rejection.MALFORMED_RESPONSE, "the server's answer is not valid HTTP/1.1") from error
        return None

    def _add(self, data: bytes | bytearray) -> None:
        if len(self._body) + len(data) > self._limit_bytes:
            raise MalformedError(Rejection.MALFORMED_RESPONSE, f"the answer exceeds {self._limit_bytes} bytes")
        self._body += data

    def _complete(self) -> StreamResponse:
        assert self._response is not None
        if self._http.trailing_data[0]:
            raise AuthenticityError(Rejection.UNSOLICITED_BYTES, "bytes follow the server's answer")
        headers = [(bytes(name), bytes(value)) for name, value in self._response.headers]
        if any(name == b"content-encoding" for name, _ in headers):
            raise AuthenticityError(Rejection.CONTENT_ENCODING, "the server encoded an answer that must come as it is")
        return StreamResponse(self._response.status_code, headers, bytes(self._body))


def _server_name(host: str) -> str | None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return None  # RFC 6066 section 3: addresses are not server names


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refuse_plaintext(buffer: bytes) -> None:
    """Only a proxy's CONNECT may be sent before TLS; a request may not, not even by a wrong URL scheme."""
    if not buffer.startswith(b"CONNECT "):
        raise TransportError("PLAINTEXT_REFUSED", "requests are sent over an attested TLS channel only")


class _UnattestedStream(httpcore.NetworkStream):
    """A TCP connection on which nothing but `start_tls` (or a proxy's CONNECT) happens."""

    def __init__(self, sock: socket.socket, authority: str, backend: AttestingBackend) -> None:
        self._sock = sock
        self._authority = authority
        self._backend = backend

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with mapped_errors(httpcore.ReadTimeout, httpcore.ReadError):
            self._sock.settimeout(timeout)
            return self._sock.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        _refuse_plaintext(buffer)
        with mapped_errors(httpcore.WriteTimeout, httpcore.WriteError):
            self._sock.settimeout(timeout)
            self._sock.sendall(buffer)

    def close(self) -> None:
        self._sock.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> TlsStream:
        """Handshake, certificate, attestation. The standard library's `ssl_context` has no exporter and is not used."""
        name = _server_name(server_hostname) if server_hostname and self._backend.connector is None else None
        stream = TlsStream(self._sock, TlsSession(self._backend.context, server_name=name), self._authority)
        try:
            with mapped_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
                stream.handshake(now=self._backend.now(), monotonic=time.monotonic, timeout=timeout)
            stream.mark_attested(self._backend.attest(stream))
        except BaseException:
            stream.close()
            raise
        return stream

    def get_extra_info(self, info: str) -> Any:
        return {"socket": self._sock}.get(info)


class AttestingBackend(httpcore.NetworkBackend):
    """For httpcore.ConnectionPool(network_backend=...).

    `attest(stream)` judges a connection and returns what `stream.attestation` shall be, or raises; `now` gives Unix
    seconds, for the validity of certificates. With a `connector` every connection is made by it, whatever host and
    port are asked for, and no server name is sent: the name is made up.
    """

    def __init__(self, *, attest: Attest, now: Callable[[], float], connector: Connector | None = None) -> None:
        self.attest = attest
        self.now = now
        self.connector = connector
        self.context = make_client_context()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: SocketOptions = None,
    ) -> httpcore.NetworkStream:
        """Raises httpcore.ConnectError, httpcore.ConnectTimeout."""
        if self.connector is not None:
            with mapped_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
                return _UnattestedStream(self.connector.connect(timeout), _authority(host, port), self)
        source = None if local_address is None else (local_address, 0)
        with mapped_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
            sock = socket.create_connection((host, port), timeout, source_address=source)
            _set_options(sock, socket_options)
        return _UnattestedStream(sock, _authority(host, port), self)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: SocketOptions = None
    ) -> httpcore.NetworkStream:
        """Raises httpcore.ConnectError, httpcore.ConnectTimeout."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with mapped_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
                sock.settimeout(timeout)
                sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return _UnattestedStream(sock, "localhost", self)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _AsyncUnattestedStream(httpcore.AsyncNetworkStream):
    """See _UnattestedStream."""

    def __init__(self, sock: socket.socket, authority: str, backend: AsyncAttestingBackend) -> None:
        self._sock = sock
        self._authority = authority
        self._backend = backend

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with mapped_errors(httpcore.ReadTimeout, httpcore.ReadError):
            async with asyncio.timeout(timeout):
                return await asyncio.get_running_loop().sock_recv(self._sock, max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        _refuse_plaintext(buffer)
        with mapped_errors(httpcore.WriteTimeout, httpcore.WriteError):
            async with asyncio.timeout(timeout):
                await asyncio.get_running_loop().sock_sendall(self._sock, buffer)

    async def aclose(self) -> None:
        self._sock.close()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> AsyncTlsStream:
        """See _UnattestedStream.start_tls."""
        name = _server_name(server_hostname) if server_hostname and self._backend.connector is None else None
        stream = AsyncTlsStream(self._sock, TlsSession(self._backend.context, server_name=name), self._authority)
        try:
            with mapped_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
                async with asyncio.timeout(timeout):
                    await stream.handshake(now=self._backend.now())
            stream.mark_attested(await self._backend.attest(stream))
        except BaseException:
            await stream.aclose()
            raise
        return stream

    def get_extra_info(self, info: str) -> Any:
        return {"socket": self._sock}.get(info)


class AsyncAttestingBackend(httpcore.AsyncNetworkBackend):
    """For httpcore.AsyncConnectionPool(network_backend=...). See AttestingBackend; needs asyncio."""

    def __init__(self, *, attest: AsyncAttest, now: Callable[[], float], connector: Connector | None = None) -> None:
        self.attest = attest
        self.now = now
        self.connector = connector
        self.context = make_client_context()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: SocketOptions = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises httpcore.ConnectError, httpcore.ConnectTimeout."""
        if self.connector is not None:
            with mapped_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
                async with asyncio.timeout(timeout):
                    sock = await self.connector.aconnect()
            return _AsyncUnattestedStream(sock, _authority(host, port), self)
        with mapped_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
            async with asyncio.timeout(timeout):
                sock = await _connect_first(host, port, local_address)
            _set_options(sock, socket_options)
        return _AsyncUnattestedStream(sock, _authority(host, port), self)

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: SocketOptions = None
    ) -> httpcore.AsyncNetworkStream:
        """Raises httpcore.ConnectError, httpcore.ConnectTimeout."""
        with mapped_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
            async with asyncio.timeout(timeout):
                sock = await _connect(socket.AF_UNIX, path, None)
        return _AsyncUnattestedStream(sock, "localhost", self)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def _connect_first(host: str, port: int, local_address: str | None) -> socket.socket:
    """Connect to the first address of `host` that answers. Raises the last OSError."""
    failure: OSError = OSError(f"no address for {host}")
    for family, _, _, _, address in await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return await _connect(family, address, local_address)
        except OSError as error:
            failure = error
    raise failure


async def _connect(family: int, address: Any, local_address: str | None) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if local_address is not None:
            sock.bind((local_address, 0))
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _set_options(sock: socket.socket, options: SocketOptions) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in options or ():
        sock.setsockopt(*option)
