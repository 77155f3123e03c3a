"""TLS 1.3 in front of uvicorn's HTTP protocol, over pyOpenSSL memory BIOs, so that the exporter is in reach."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, ClassVar

from OpenSSL import SSL
from uvicorn.config import Config
from uvicorn.server import ServerState

from appliance.listener.certificates import CertificateRotator
from appliance.listener.connection import (
    ChannelState,
    ConnectionLimits,
    ConnectionStats,
    ConnectionTable,
    describe_peer,
)
from appliance.listener.http_guard import GuardedHttp

RECORD_BYTES = 16_384
BIO_READ_BYTES = 65_536
LINGER_S = 2.0
LINGER_BYTES = 1 << 20


class ChannelTransport(asyncio.Transport):
    """What the HTTP protocol writes to: plaintext in, TLS records (or the same bytes) out to the socket.

    Buffering and back pressure are the raw transport's own: every record is handed to it at once, so its buffer size
    and its water marks are the truth.
    """

    def __init__(self, raw: asyncio.Transport, tls: SSL.Connection | None, limits: ConnectionLimits) -> None:
        super().__init__()
        self._raw = raw
        self._tls = tls
        self._limits = limits
        self._closing = False
        self._lingering = False
        self._close_timer: asyncio.TimerHandle | None = None
        self.wants_linger: Callable[[], bool] = bool

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._raw.is_closing():
            return
        if self._tls is None:
            self._raw.write(data)
            return
        view = memoryview(data)
        for start in range(0, len(view), RECORD_BYTES):
            self._tls.sendall(view[start : start + RECORD_BYTES])
            self.flush()

    def flush(self) -> None:
        """Move pending TLS records (handshake, alerts, key updates) to the socket."""
        while self._tls is not None:
            try:
                records = self._tls.bio_read(BIO_READ_BYTES)
            except SSL.WantReadError:
                return
            self._raw.write(records)
            if len(records) < BIO_READ_BYTES:
                return  # a memory BIO gives all it has: asking again costs an exception, for every token sent

    def close(self) -> None:
        """Flush, send close_notify, close. A client in the middle of a request gets time to read the answer first:
        closing a socket that holds unread bytes resets the connection and destroys what was just written."""
        if self._closing:
            return
        self._closing = True
        linger = self.wants_linger()
        self._notify_close()
        loop = asyncio.get_running_loop()
        if linger and not self._raw.is_closing():
            self._lingering = True
            self._raw.write_eof()
            self._raw.resume_reading()
            self._close_timer = loop.call_later(LINGER_S, self.stop_lingering)
        else:
            self._finish(loop)

    def stop_lingering(self) -> None:
        """End a lingering close now."""
        if self._lingering:
            self._lingering = False
            self._finish(asyncio.get_running_loop())

    def _finish(self, loop: asyncio.AbstractEventLoop) -> None:
        self.cancel_timer()
        self._raw.close()
        # A peer that reads nothing would otherwise keep the last bytes, and the connection, for ever.
        self._close_timer = loop.call_later(self._limits.write_stall_s, self._raw.abort)

    def cancel_timer(self) -> None:
        """The connection is gone; nothing is left to time."""
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None

    def _notify_close(self) -> None:
        if self._tls is None or self._raw.is_closing():
            return
        try:
            self._tls.shutdown()
        except SSL.Error:
            return  # the TLS layer is already broken; the plain close below is all there is
        self.flush()

    def abort(self) -> None:
        self._closing = True
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._closing or self._raw.is_closing()

    def pause_reading(self) -> None:
        if not self._closing:
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        if not self._closing:
            self._raw.resume_reading()

    def is_reading(self) -> bool:
        return self._raw.is_reading()

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._raw.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            # uvicorn derives the scheme from this.
            return self._tls.get_context() if self._tls is not None else default
        return self._raw.get_extra_info(name, default)


class ChannelProtocol(asyncio.Protocol):
    """One accepted connection: admission, TLS handshake, then an inner GuardedHttp.

    Subclasses made by `make_protocol_class` carry the configuration; uvicorn makes one instance per connection.
    """

    contexts: ClassVar[CertificateRotator | None]
    limits: ClassVar[ConnectionLimits]
    stats: ClassVar[ConnectionStats]
    table: ClassVar[ConnectionTable]
    clock: ClassVar[Callable[[], float]]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._server_state = server_state
        self._app_state = app_state
        self._raw: asyncio.Transport
        self._transport: ChannelTransport | None = None
        self._tls: SSL.Connection | None = None
        self._http: GuardedHttp | None = None
        self._peer = ""
        self._peer_key: str | None = None
        self._admitted = False
        self._opened_at = 0.0
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._discarded = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._raw = transport
        sock = transport.get_extra_info("socket")
        self._peer, self._peer_key = describe_peer(sock)
        self._opened_at = type(self).clock()
        self._admitted = self.table.admit(self._peer_key)
        if not self._admitted:
            transport.abort()
            return
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does this only for sockets whose protocol number is IPPROTO_TCP; ours have 0.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.contexts is None:
            self._begin_http()
            return
        self._tls = SSL.Connection(self.contexts.context(), None)
        self._tls.set_accept_state()
        self._transport = ChannelTransport(transport, self._tls, self.limits)
        # Known to uvicorn from the start, so that a shutdown does not overlook a half-made connection.
        self._server_state.connections.add(self)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        self._handshake_timer = loop.call_later(self.limits.handshake_s, self._handshake_timed_out)

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            self._discard(len(data))
        elif self._tls is None:
            self._to_http(data)
        else:
            self._tls.bio_write(data)
            if self._http is not None or self._handshake():
                self._decrypt()

    def eof_received(self) -> None:
        """The socket is at its end: asyncio closes it. A cut TLS stream never completes a request, so none is run."""

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._admitted:
            return
        self._admitted = False
        self.table.release(self._peer_key)
        self._stop_handshake_timer()
        self._server_state.connections.discard(self)
        if self._transport is not None:
            self._transport.cancel_timer()
        if self._http is not None:
            self._http.channel.close()
            self._http.connection_lost(exc)
        # The transport, this object and the HTTP protocol form a cycle; TLS state should not wait for the collector.
        self._tls = None
        self._http = None

    def pause_writing(self) -> None:
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._http is not None:
            self._http.resume_writing()

    @property
    def transport(self) -> asyncio.Transport:
        """The raw transport, under the name uvicorn's own protocols use."""
        return self._raw

    def shutdown(self) -> None:
        """uvicorn is stopping while the handshake is not finished."""
        self._raw.abort()

    def _handshake(self) -> bool:
        """Continue the handshake; True once it is complete."""
        assert self._tls is not None
        assert self._transport is not None
        try:
            self._tls.do_handshake()
        except SSL.WantReadError:
            self._transport.flush()
            return False
        except SSL.Error:
            self.stats.handshake_failures += 1
            self._fail()
            return False
        self._transport.flush()
        self._stop_handshake_timer()
        self.stats.handshakes += 1
        self._server_state.connections.discard(self)
        self._begin_http()
        return True

    def _begin_http(self) -> None:
        if self._transport is None:
            self._transport = ChannelTransport(self._raw, None, self.limits)
        self._http = GuardedHttp(
            self._config,
            self._server_state,
            self._app_state,
            channel=ChannelState(tls=self._tls, peer=self._peer, opened_at=self._opened_at),
            limits=self.limits,
            stats=self.stats,
        )
        self._transport.wants_linger = self._http.request_incomplete
        self._http.connection_made(self._transport)

    def _decrypt(self) -> None:
        assert self._tls is not None
        assert self._transport is not None
        while not self._transport.is_closing():
            try:
                data = self._tls.recv(RECORD_BYTES)
            except SSL.WantReadError:
                self._transport.flush()
                return
            except SSL.ZeroReturnError:
                self._transport.flush()
                self._transport.close()
                return
            except SSL.Error:
                self._fail()
                return
            self._to_http(data)

    def _to_http(self, data: bytes) -> None:
        if self._http is not None:
            self._http.data_received(data)

    def _fail(self) -> None:
        """TLS is broken: send its alert, if it has one, and drop the connection."""
        assert self._transport is not None
        self._transport.flush()
        self._raw.close()

    def _discard(self, size: int) -> None:
        """Bytes that arrive while the connection closes are dropped, and not for ever."""
        self._discarded += size
        if self._discarded > LINGER_BYTES:
            self._raw.abort()

    def _stop_handshake_timer(self) -> None:
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
            self._handshake_timer = None

    def _handshake_timed_out(self) -> None:
        self._handshake_timer = None
        self.stats.handshake_timeouts += 1
        self._raw.abort()


def make_protocol_class(
    *, contexts: CertificateRotator | None, limits: ConnectionLimits, clock: Callable[[], float]
) -> type[ChannelProtocol]:
    """The protocol class of one listener, for `uvicorn.Config(http=...)`.

    `contexts` None means plain HTTP with the same guards. `clock` is monotonic seconds. The class attribute `stats`
    holds the listener's counters.
    """
    stats = ConnectionStats()
    attributes = {
        "contexts": contexts,
        "limits": limits,
        "stats": stats,
        "table": ConnectionTable(limits, stats),
        "clock": staticmethod(clock),
    }
    return type("ListenerProtocol", (ChannelProtocol,), attributes)


def without_tls(protocol_class: type[ChannelProtocol]) -> type[ChannelProtocol]:
    """The same listener as plain HTTP: it shares the limits and the counters. No channel is bound there."""
    return type("PlainListenerProtocol", (protocol_class,), {"contexts": None})
