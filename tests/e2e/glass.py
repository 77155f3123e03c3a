"""The real appliance, composed in this process, with its pockets turned out.

A man in the middle cannot change a byte between the two ends, so the tests of what the client notices need an appliance
that itself lies: `tamper` gets every inference answer complete, just before it is sent, and returns what is sent in its
place. `sign` uses the attested receipt key, so that a lie may be properly signed too. While an answer that will be
changed is made, the appliance's monotonic clock stands still.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from appliance.boot.boot import Appliance, Host, boot, choose_attester
from appliance.config import settings as configuration
from appliance.inference.service import Surroundings
from appliance.listener.uvicorn_server import ServerHandle, serve
from appliance.models.store import ModelStore, default_store_root
from client_sdk.wire import cbor, cose, names
from client_sdk.wire.stream import comment, decode_base64url, encode_base64url

Tamper = Callable[["Sent"], "Sent"]


@dataclass(frozen=True)
class Sent:
    """One answer as it leaves: `headers` in order, `body` whole or a whole event stream."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    streamed: bool

    def header(self, name: str) -> str:
        return next(value for key, value in self.headers if key == name)

    def with_header(self, name: str, *values: str) -> Sent:
        kept = tuple(entry for entry in self.headers if entry[0] != name)
        return replace(self, headers=(*kept, *((name, value) for value in values)))

    @property
    def blocks(self) -> list[bytes]:
        """The stream cut into its blocks, blank lines included."""
        return [block + b"\n\n" for block in self.body.split(b"\n\n")[:-1]]

    def with_blocks(self, blocks: list[bytes]) -> Sent:
        return replace(self, body=b"".join(blocks))

    @property
    def receipt(self) -> bytes:
        if not self.streamed:
            return decode_base64url(self.header(names.HEADER_EXECUTION_RECEIPT).encode(), limit_bytes=1 << 16)
        block = next(block for block in self.blocks if block.startswith(names.COMMENT_RECEIPT))
        return decode_base64url(block[len(names.COMMENT_RECEIPT) : -2], limit_bytes=1 << 16)

    def with_receipt(self, receipt: bytes) -> Sent:
        if not self.streamed:
            return self.with_header(names.HEADER_EXECUTION_RECEIPT, encode_base64url(receipt).decode())
        new = comment(names.COMMENT_RECEIPT, receipt)
        return self.with_blocks([new if b.startswith(names.COMMENT_RECEIPT) else b for b in self.blocks])


class StoppableClock:
    """Monotonic seconds that stand still inside `stopped`, and are the true ones outside.

    Checkpoints come after so many frames or so much time. With the time taken out they stand at the same frames of a
    stream however slow the machine is, so that a test can name one by its number.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._moment = 0.0

    def __call__(self) -> float:
        return self._moment if self._holders else time.monotonic()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._moment = self()
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1


class GlassAppliance:
    """Serves on loopback from a thread of its own. `seen` counts inference requests by path."""

    def __init__(self, model: str, *, overrides: dict[str, dict[str, object]] | None = None) -> None:
        settings: dict[str, dict[str, object]] = {"attestation": {"attester": "insecure"}, **(overrides or {})}
        self.config = configuration.load(None, environ={}, overrides=settings, models=(model,))
        self.tamper: Tamper | None = None
        self.seen: list[str] = []
        self.attestations = 0
        self.last: Sent | None = None
        self.replaced_app: Any = None
        self._monotonic = StoppableClock()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> GlassAppliance:
        self._thread.start()
        self._started.wait(60)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def sign(self, data: bytes) -> bytes:
        """A signature by the attested receipt key."""
        issuer: Any = self.appliance.service.issuer
        signature: bytes = issuer._sign(data)
        return signature

    def resigned(self, receipt: bytes, edit: Callable[[dict[Any, Any]], object]) -> bytes:
        """`receipt` with its claims changed in place by `edit`, signed by the right key with the right header."""
        sign1 = cose.parse_sign1(receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=1 << 16)
        claims: Any = cbor.decode(sign1.payload, limit_bytes=1 << 16)
        edit(claims)
        payload = cbor.encode(claims)
        return cose.sign1(protected=sign1.protected, salt=sign1.salt, payload=payload, sign=self.sign)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._started.set()
            raise

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        around = Surroundings(clock=time.time, monotonic=self._monotonic, random_bytes=os.urandom)
        root = default_store_root(os.environ.get("XDG_DATA_HOME"), os.environ.get("HOME"))
        host = Host(store=ModelStore(root), key_ring=None, python=sys.executable, surroundings=around)
        attester = choose_attester(self.config, around)
        self.appliance: Appliance = await boot(self.config, host, attester, lambda _phase, _fraction: None)
        sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = sock.getsockname()[1]
        self.url = f"https://127.0.0.1:{self.port}"
        try:
            await serve(self._app, [sock], self.appliance.protocol_class, grace_s=2.0, on_started=self._on_started)
        finally:
            await self.appliance.close()

    def _on_started(self, handle: ServerHandle) -> None:
        self._handle = handle
        self._started.set()

    def _stop(self) -> None:
        self.appliance.service.begin_shutdown()
        self._handle.stop()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        """The application, with every inference answer passed through `tamper` when there is one."""
        if self.replaced_app is not None:
            await self.replaced_app(scope, receive, send)
            return
        inference = scope["type"] == "http" and scope["path"] in names.INFERENCE_ROUTES
        if scope["type"] == "http" and scope["path"] == names.PATH_ATTESTATION:
            self.attestations += 1
        if inference:
            self.seen.append(scope["path"])
        if not inference or self.tamper is None:
            await self.appliance.app(scope, receive, send)
            return
        messages: list[Any] = []

        async def keep(message: Any) -> None:
            messages.append(message)

        with self._monotonic.stopped():
            await self.appliance.app(scope, receive, keep)
        start, *parts = messages
        headers = tuple((name.decode(), value.decode()) for name, value in start["headers"])
        streamed = (b"content-type", names.MEDIA_EVENT_STREAM.encode()) in start["headers"]
        honest = Sent(start["status"], headers, b"".join(part.get("body", b"") for part in parts), streamed)
        self.last = honest
        sent = self.tamper(honest)
        fields = [(n, v) for n, v in sent.headers if n != "content-length"]
        if not streamed:
            fields.append(("content-length", str(len(sent.body))))
        encoded = [(name.encode(), value.encode()) for name, value in fields]
        await send({"type": "http.response.start", "status": sent.status, "headers": encoded})
        await send({"type": "http.response.body", "body": sent.body, "more_body": False})
