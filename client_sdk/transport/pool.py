"""Connection pools whose every connection attested itself, and the little that httpcore does not tell about them.

httpcore hides write errors, so only the stream itself knows whether a byte of a request left; and it has no notion of a
connection that is too old to be used. Both are added here, around the streams of `client_sdk.transport.backend`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpcore

from client_sdk.transport.tls_streams import AsyncTlsStream, TlsStream

MAX_CONNECTIONS = 32
KEEPALIVE_EXPIRY_S = 60.0  # below the appliance's own 75 s, so that it rarely closes first

Expired = Callable[[object], bool]


@dataclass(slots=True)
class Attempt:
    """One try at sending one request: the connection it got, and how much that had sent before."""

    stream: TlsStream | AsyncTlsStream | None = None
    sent_before: int = 0

    def note(self, stream: TlsStream | AsyncTlsStream) -> None:
        if self.stream is None:
            self.stream, self.sent_before = stream, stream.request_bytes_sent

    @property
    def found_dead(self) -> bool:
        """The attested connection was dead when the request's first byte was due: nothing can have left."""
        return self.stream is not None and self.stream.request_bytes_sent == self.sent_before


CURRENT_ATTEMPT: ContextVar[Attempt | None] = ContextVar("current_attempt", default=None)


class _Watched:
    def __init__(self, inner: TlsStream | AsyncTlsStream, expired: Expired) -> None:
        self._watched = inner
        self._expired = expired

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable" and self._expired(self._watched.attestation):
            return True  # httpcore drops an idle connection that is "readable", which is what is wanted here
        return self._watched.get_extra_info(info)

    def _note(self) -> None:
        attempt = CURRENT_ATTEMPT.get()
        if attempt is not None:
            attempt.note(self._watched)


class _WatchedStream(_Watched, httpcore.NetworkStream):
    def __init__(self, inner: TlsStream, expired: Expired) -> None:
        super().__init__(inner, expired)
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._note()
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()


class _AsyncWatchedStream(_Watched, httpcore.AsyncNetworkStream):
    def __init__(self, inner: AsyncTlsStream, expired: Expired) -> None:
        super().__init__(inner, expired)
        self._inner = inner

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._inner.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._note()
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Raw(httpcore.NetworkStream):
    """The TCP connection before TLS: all that httpcore may do with it is start TLS or close it."""

    def __init__(self, inner: httpcore.NetworkStream, expired: Expired) -> None:
        self._inner = inner
        self._expired = expired

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        stream = self._inner.start_tls(ssl_context, server_hostname, timeout)
        assert isinstance(stream, TlsStream)
        return _WatchedStream(stream, self._expired)


class _AsyncRaw(httpcore.AsyncNetworkStream):
    def __init__(self, inner: httpcore.AsyncNetworkStream, expired: Expired) -> None:
        self._inner = inner
        self._expired = expired

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._inner.start_tls(ssl_context, server_hostname, timeout)
        assert isinstance(stream, AsyncTlsStream)
        return _AsyncWatchedStream(stream, self._expired)


class _Backend(httpcore.NetworkBackend):
    def __init__(self, inner: httpcore.NetworkBackend, expired: Expired) -> None:
        self._inner = inner
        self._expired = expired

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return _Raw(self._inner.connect_tcp(host, port, timeout, local_address, socket_options), self._expired)


class _AsyncBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, inner: httpcore.AsyncNetworkBackend, expired: Expired) -> None:
        self._inner = inner
        self._expired = expired

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return _AsyncRaw(stream, self._expired)


def make_pool(backend: httpcore.NetworkBackend, expired: Expired) -> httpcore.ConnectionPool:
    """A pool over `backend`; `expired` gets what `attest` returned and says whether that connection is too old."""
    return httpcore.ConnectionPool(
        ssl_context=_unused_context(),
        max_connections=MAX_CONNECTIONS,
        keepalive_expiry=KEEPALIVE_EXPIRY_S,
        network_backend=_Backend(backend, expired),
    )


def make_async_pool(backend: httpcore.AsyncNetworkBackend, expired: Expired) -> httpcore.AsyncConnectionPool:
    """See `make_pool`."""
    return httpcore.AsyncConnectionPool(
        ssl_context=_unused_context(),
        max_connections=MAX_CONNECTIONS,
        keepalive_expiry=KEEPALIVE_EXPIRY_S,
        network_backend=_AsyncBackend(backend, expired),
    )


def _unused_context() -> ssl.SSLContext:
    """httpcore insists on one; given none it would read the system's certificate authorities for nothing."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
