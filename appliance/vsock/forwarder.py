"""Moves bytes between two sockets, and does nothing else to them: for the untrusted host of an enclave.

What goes through is TLS that ends inside the enclave, bound to its evidence by the exporter. A forwarder that changes,
repeats or diverts it breaks that binding, so it needs no trust, only care: bounded memory, back pressure, half-closed
connections, no lost listener.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from appliance.vsock.connector import without_delay

_LOG = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 << 10
_BURST: Final = 4  # chunks for one connection before the others have their turn
_ACCEPTS: Final = 64
_RETRY_ACCEPT_S: Final = 0.5
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardLimits:
    """`connections` at once; more wait in the backlog. `reach_s` bounds the way to the other side, `idle_s` how long
    a connection may carry nothing in either direction. `allowed_cids`: who may connect over vsock (None: all)."""

    connections: int = 1024
    reach_s: float = 10.0
    idle_s: float = 900.0
    backlog: int = 1024
    allowed_cids: frozenset[int] | None = None


@dataclass(slots=True, kw_only=True)
class ForwardStats:
    """Counters since the start, and `open` as a level."""

    accepted: int = 0
    refused: int = 0
    unreachable: int = 0
    idle: int = 0
    open: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The other side of a connection, and bytes of the client that belong there and were read already."""

    sock: socket.socket
    early: bytes = b""


Reach = Callable[[socket.socket], Awaitable[Reached]]
"""Finds the other side for a client's socket. Raises OSError where there is none."""


class Forwarder:
    """Accepts on `listening` (listening sockets) and joins every client with what `reach` finds for it.

    Everything runs on the event loop that `start` was called on: asyncio's own selector loop.
    """

    def __init__(self, listening: Sequence[socket.socket], reach: Reach, limits: ForwardLimits) -> None:
        self._listening = listening
        self._reach = reach
        self._limits = limits
        self._links: set[_Link] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        self._accepting = False
        self._stopping = False
        self._empty = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.stats = ForwardStats()

    def start(self) -> None:
        """Begin to accept."""
        self._loop = asyncio.get_running_loop()
        for sock in self._listening:
            sock.setblocking(False)
        self._resume()
        self._watch_idle()

    async def stop(self, grace_s: float) -> None:
        """Accept no more, let connections end for `grace_s` seconds, then cut them."""
        self._stopping = True
        self._pause()
        if self._timer is not None:
            self._timer.cancel()
        for task in tuple(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        self._empty.clear()
        if self._links and grace_s > 0:
            try:
                await asyncio.wait_for(self._empty.wait(), grace_s)
            except TimeoutError:
                pass
        for link in tuple(self._links):
            link.cut()

    def _resume(self) -> None:
        if not self._accepting and not self._stopping:
            self._accepting = True
            for sock in self._listening:
                self._loop.add_reader(sock, self._accept, sock)

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            for sock in self._listening:
                self._loop.remove_reader(sock)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            if len(self._links) + len(self._opening) >= self._limits.connections:
                self._pause()  # until one of them ends
                return
            try:
                client, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    _LOG.warning("cannot accept connections for a while: %s", error.strerror)
                    self._pause()
                    self._loop.call_later(_RETRY_ACCEPT_S, self._resume)
                    return
                continue  # that client has gone again
            if not self._may_connect(client):
                self.stats.refused += 1
                client.close()
                continue
            self.stats.accepted += 1
            client.setblocking(False)
            task = self._loop.create_task(self._open(client))
            self._opening.add(task)
            task.add_done_callback(self._opened)

    def _may_connect(self, client: socket.socket) -> bool:
        allowed = self._limits.allowed_cids
        if allowed is None or client.family != getattr(socket, "AF_VSOCK", None):
            return True
        try:
            cid: int = client.getpeername()[0]
        except OSError:
            return False
        return cid in allowed

    async def _open(self, client: socket.socket) -> None:
        try:
            without_delay(client)
            async with asyncio.timeout(self._limits.reach_s):
                reached = await self._reach(client)
        except TimeoutError:
            self._unreachable(client, f"no connection within {self._limits.reach_s:g} s")
        except OSError as error:
            self._unreachable(client, error.strerror or str(error))
        except BaseException:
            client.close()
            raise
        else:
            link = _Link(self, client, reached)
            self._links.add(link)
            self.stats.open += 1
            link.start(reached.early)

    def _unreachable(self, client: socket.socket, reason: str) -> None:
        self.stats.unreachable += 1
        client.close()
        _LOG.warning("%s", reason)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error  # a fault of our own: the event loop reports it
        self._resume()

    def closed(self, link: _Link) -> None:
        """A connection has ended."""
        self._links.discard(link)
        self.stats.open -= 1
        if not self._links:
            self._empty.set()
        self._resume()

    def _watch_idle(self) -> None:
        deadline = self._loop.time() - self._limits.idle_s
        for link in tuple(self._links):
            if link.active_at < deadline:
                self.stats.idle += 1
                link.cut()
        self._timer = self._loop.call_later(self._limits.idle_s / 8, self._watch_idle)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def scratch(self) -> memoryview:
        """One buffer for all: what a peer does not take at once is the only thing that is kept for each connection."""
        return self._scratch


class _Link:
    """Two joined sockets. It ends when both directions have, or at the first failure of either."""

    def __init__(self, forwarder: Forwarder, client: socket.socket, reached: Reached) -> None:
        self._forwarder = forwarder
        self._sockets = (client, reached.sock)
        self._there = _Pump(self, client, reached.sock)
        self._back = _Pump(self, reached.sock, client)
        self._open = True
        self.loop = forwarder.loop
        self.scratch = forwarder.scratch
        self.active_at = self.loop.time()

    def start(self, early: bytes) -> None:
        self._there.start(early)
        if self._open:
            self._back.start(b"")

    def ended(self) -> None:
        """A direction is at its end, everything of it delivered."""
        if self._there.ended and self._back.ended:
            self._close()

    def cut(self) -> None:
        """End it so that neither side takes it for an orderly end, where the kind of socket has a way to say so."""
        if self._open:
            for sock in self._sockets:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._close()

    def _close(self) -> None:
        self._open = False
        for sock in self._sockets:
            self.loop.remove_reader(sock)
            self.loop.remove_writer(sock)
            sock.close()
        self._forwarder.closed(self)


class _Pump:
    """One direction: reads only while everything read before is gone."""

    def __init__(self, link: _Link, source: socket.socket, sink: socket.socket) -> None:
        self._link = link
        self._source = source
        self._sink = sink
        self._pending = memoryview(b"")
        self.ended = False

    def start(self, early: bytes) -> None:
        if early:
            self._keep(memoryview(early))
        else:
            self._link.loop.add_reader(self._source, self._readable)

    def _readable(self) -> None:
        self._link.active_at = self._link.loop.time()
        scratch = self._link.scratch
        for _ in range(_BURST):
            try:
                size = self._source.recv_into(scratch)
                if not size:
                    self._end()
                    return
                sent = self._send(scratch[:size])
            except BlockingIOError:
                return
            except OSError:
                self._link.cut()
                return
            if sent < size:
                self._link.loop.remove_reader(self._source)
                self._keep(memoryview(bytes(scratch[sent:size])))
                return
            if size < CHUNK_BYTES:
                return

    def _send(self, data: memoryview) -> int:
        try:
            return self._sink.send(data)
        except BlockingIOError:
            return 0

    def _keep(self, rest: memoryview) -> None:
        self._pending = rest
        self._link.loop.add_writer(self._sink, self._writable)

    def _writable(self) -> None:
        self._link.active_at = self._link.loop.time()
        try:
            sent = self._send(self._pending)
        except OSError:
            self._link.cut()
            return
        self._pending = self._pending[sent:]
        if not self._pending:
            self._link.loop.remove_writer(self._sink)
            self._link.loop.add_reader(self._source, self._readable)

    def _end(self) -> None:
        """The source says no more: say so to the sink, whose own direction goes on."""
        self.ended = True
        self._link.loop.remove_reader(self._source)
        try:
            self._sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._link.cut()  # the sink has gone already
        else:
            self._link.ended()
