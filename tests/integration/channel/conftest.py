"""A real listener on loopback in a thread of its own, with a small ASGI application that shows what arrived."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from OpenSSL import SSL

from appliance.listener.certificates import CertificateRotator, generate_tls_key
from appliance.listener.connection import ChannelState, ConnectionLimits, ConnectionStats
from appliance.listener.tls_server import make_protocol_class
from appliance.listener.uvicorn_server import ServerHandle, serve

BLOCK = bytes(range(256)) * 256


@dataclass
class Seen:
    """What the application noticed."""

    requests: list[tuple[str, str, str]] = field(default_factory=list)
    channels: list[ChannelState] = field(default_factory=list)
    disconnects: threading.Event = field(default_factory=threading.Event)
    blocks_sent: int = 0
    release: threading.Event = field(default_factory=threading.Event)


class ProbeApp:
    """ASGI 3. Routes: /echo /download/N /hold /poll /attest /latched /wait /early /stream/N /boom."""

    def __init__(self) -> None:
        self.seen = Seen()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        path, _, argument = scope["path"][1:].partition("/")
        self.seen.requests.append((scope["method"], scope["path"], scope["scheme"]))
        self.seen.channels.append(scope["state"]["channel"])
        await getattr(self, f"on_{path}", self.on_missing)(scope, receive, send, argument)

    async def on_missing(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        await answer(send, b"no such route", status=404)

    async def on_echo(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        digest, size = hashlib.sha256(), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.seen.disconnects.set()
                return
            digest.update(message["body"])
            size += len(message["body"])
            if not message["more_body"]:
                break
        channel = scope["state"]["channel"]
        facts = {
            "size": size,
            "sha256": digest.hexdigest(),
            "spki": channel.spki.hex() if channel.spki else None,
            "ekm": channel.export("Attestation", 32, b"n" * 32).hex() if channel.spki else None,
            "suite": channel.suite,
            "peer": channel.peer,
        }
        await answer(send, json.dumps(facts).encode())

    async def on_hold(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        await asyncio.to_thread(self.seen.release.wait, 20)
        await self.on_echo(scope, receive, send, argument)

    async def on_poll(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        while not self.seen.release.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(receive(), 0.01)
        await answer(send, b"polled")

    async def on_download(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        headers = [(b"content-length", argument.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        left = int(argument)
        while left:
            piece = BLOCK[:left]
            left -= len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": bool(left)})
            self.seen.blocks_sent += 1

    async def on_attest(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        await asyncio.sleep(0.05)
        scope["state"]["channel"].in_force = argument
        await answer(send, b"attested")

    async def on_latched(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        await answer(send, repr(scope["state"]["latched"]).encode())

    async def on_wait(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.seen.disconnects.set()

    async def on_early(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        await answer(send, b"too large", status=413)

    async def on_stream(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for index in range(int(argument)):
            await send({"type": "http.response.body", "body": b"data: %06d\n\n" % index, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def on_boom(self, scope: Any, receive: Any, send: Any, argument: str) -> None:
        raise ValueError("the prompt is secret")


async def answer(send: Any, body: bytes, *, status: int = 200) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass
class Listener:
    """A running server. `clock_offset_s` moves the certificate clock."""

    port: int
    tls: bool
    stats: ConnectionStats
    seen: Seen
    rotator: CertificateRotator
    offset: list[float]
    handle: ServerHandle
    thread: threading.Thread

    def stop(self) -> None:
        self.handle.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()

    def url(self, path: str) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}{path}"

    def connect(self, **options: Any) -> RawClient:
        return RawClient(self.port, tls=self.tls, **options)


class RawClient:
    """A socket that speaks exactly the bytes a test gives it."""

    def __init__(
        self,
        port: int,
        *,
        tls: bool,
        receive_buffer: int | None = None,
        context: SSL.Context | None = None,
        session: SSL.Session | None = None,
        source: str = "127.0.0.1",
    ) -> None:
        self.spare = b""
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(10)
        self.sock.bind((source, 0))
        self.sock.connect(("127.0.0.1", port))
        self.tls: SSL.Connection | None = None
        if tls:
            self.tls = SSL.Connection(context or SSL.Context(SSL.TLS_CLIENT_METHOD), None)
            self.tls.set_connect_state()
            if session is not None:
                self.tls.set_session(session)
            try:
                self._until(self.tls.do_handshake)
            except (OSError, SSL.Error):
                self.close()
                raise

    def send(self, data: bytes) -> None:
        if self.tls is None:
            self.sock.sendall(data)
            return
        self.tls.sendall(data)
        self._flush()

    def receive(self) -> bytes:
        """Some bytes, b"" at a clean end. ConnectionError if it was cut."""
        if self.spare:
            data, self.spare = self.spare, b""
            return data
        if self.tls is None:
            return self.sock.recv(65_536)
        try:
            return self._until(lambda: self.tls.recv(16_384))
        except SSL.ZeroReturnError:
            return b""

    def rest(self) -> bytes:
        """Everything until the server closes."""
        data = b""
        while piece := self.receive():
            data += piece
        return data

    def response(self) -> bytes:
        """One response with Content-Length."""
        data = b""
        while b"\r\n\r\n" not in data:
            piece = self.receive()
            assert piece, data
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += self.receive()
        self.spare = body[length:]
        return head + b"\r\n\r\n" + body[:length]

    def ended(self) -> bool:
        """Whether the server has closed, cleanly or not."""
        try:
            return self.receive() == b""
        except (ConnectionError, SSL.Error):
            return True

    def close(self) -> None:
        self.sock.close()

    def _until(self, operation: Callable[[], Any]) -> Any:
        assert self.tls is not None
        while True:
            try:
                result = operation()
                self._flush()
            except SSL.WantReadError:
                self._flush()
                data = self.sock.recv(65_536)
                if data:
                    self.tls.bio_write(data)
                else:
                    self.tls.bio_shutdown()
            else:
                return result

    def _flush(self) -> None:
        assert self.tls is not None
        try:
            while True:
                self.sock.sendall(self.tls.bio_read(65_536))
        except SSL.WantReadError:
            pass

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


ListenFactory = Callable[..., Listener]


@contextlib.contextmanager
def listeners() -> Iterator[ListenFactory]:
    running: list[Listener] = []

    def start(
        *,
        tls: bool = True,
        limits: ConnectionLimits | None = None,
        grace_s: float = 5,
        unix: Path | None = None,
    ) -> Listener:
        offset = [0.0]
        rotator = CertificateRotator(generate_tls_key(), now=lambda: time.time() + offset[0], random_bytes=os.urandom)
        protocol = make_protocol_class(
            contexts=rotator if tls else None, limits=limits or ConnectionLimits(), clock=time.monotonic
        )
        app = ProbeApp()
        if unix is None:
            sock = socket.create_server(("127.0.0.1", 0), backlog=256)
        else:
            sock = socket.create_server(str(unix), family=socket.AF_UNIX)
        port = 0 if unix else sock.getsockname()[1]
        started = threading.Event()
        handles: list[ServerHandle] = []

        def on_started(handle: ServerHandle) -> None:
            handles.append(handle)
            started.set()

        def run() -> None:
            asyncio.run(serve(app, [sock], protocol, grace_s=grace_s, on_started=on_started))

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(10)
        listener = Listener(port, tls, protocol.stats, app.seen, rotator, offset, handles[0], thread)
        running.append(listener)
        return listener

    yield start
    for listener in running:
        if listener.thread.is_alive():
            listener.stop()
        assert listener.stats.open == 0


@pytest.fixture
def listen() -> Iterator[ListenFactory]:
    """Start a listener: listen(tls=True, limits=ConnectionLimits(...))."""
    with listeners() as start:
        yield start


@pytest.fixture(scope="module", params=[True, False], ids=["tls", "plain"])
def shared(request: pytest.FixtureRequest) -> Iterator[Listener]:
    """One listener with default limits for all tests of a module that leave no traces in it."""
    with listeners() as start:
        yield start(tls=request.param)
