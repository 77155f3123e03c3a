"""A forwarder in a thread of its own, and peers that speak exactly the bytes a test gives them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from appliance.config.addresses import Address, parse_address
from appliance.listener.sockets import BoundSocket, bind_all
from appliance.vsock.connector import connect
from appliance.vsock.forwarder import Forwarder, ForwardLimits, ForwardStats, Reached


@dataclass
class Running:
    """A forwarder at work."""

    bound: Sequence[BoundSocket]
    forwarder: Forwarder
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    grace_s: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stats(self) -> ForwardStats:
        return self.forwarder.stats

    def connect(self, *, buffer_bytes: int = 0) -> socket.socket:
        name = self.bound[0].sock.getsockname() if self.bound[0].place is None else self.bound[0].place.path
        sock = socket.socket(self.bound[0].sock.family)
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.settimeout(20)
        sock.connect(name)
        return sock

    def stop(self, grace_s: float = 0.0) -> None:
        self.grace_s = grace_s
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.done.set)
        self.thread.join(20)
        assert not self.thread.is_alive()


StartForwarder = Callable[..., Running]


@pytest.fixture
def forward() -> Iterator[StartForwarder]:
    """forward(listen, to, **limits): `to` is an address or a `reach`."""
    running: list[Running] = []

    def start(listen: str, to: str | Callable[[socket.socket], Awaitable[Reached]], **limits: Any) -> Running:
        started = threading.Event()
        bound = bind_all((listen,))
        reach = _to(parse_address(to)) if isinstance(to, str) else to

        async def run() -> None:
            for one in bound:
                one.listen(limits.get("backlog", 1024))
            forwarder = Forwarder([one.sock for one in bound], reach, ForwardLimits(**limits))
            forwarder.start()
            mine = Running(bound, forwarder, asyncio.get_running_loop(), threading.current_thread())
            running.append(mine)
            started.set()
            await mine.done.wait()
            await forwarder.stop(mine.grace_s)
            for one in bound:
                one.close()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        assert started.wait(10)
        return running[-1]

    yield start
    for one in running:
        one.stop()
        assert one.stats.open == 0


def _to(address: Address) -> Callable[[socket.socket], Awaitable[Reached]]:
    async def reach(_client: socket.socket) -> Reached:
        return Reached(sock=await connect(address))

    return reach


class Peer:
    """Serves every connection with `talk` in a thread of its own. `address` is what a forwarder is given."""

    def __init__(self, talk: Callable[[socket.socket], None], path: Path | None = None, *, buffer: int = 0) -> None:
        self._talk = talk
        self._buffer = buffer
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.create_server(str(path), family=socket.AF_UNIX, backlog=1024)
            self.address = f"unix:{path}"
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20)

    def _accept(self) -> None:
        for number in itertools.count(1):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections = number
            if self._buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer)
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(20)
            self._talk(sock)


def echo(sock: socket.socket) -> None:
    while data := sock.recv(65_536):
        sock.sendall(data)


def rest(sock: socket.socket) -> bytes:
    """Everything until the other end says that there is no more."""
    data = bytearray()
    while piece := sock.recv(1 << 16):
        data += piece
    return bytes(data)
