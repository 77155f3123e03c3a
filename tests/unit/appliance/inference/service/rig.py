"""A service over the fake engine, and clients of it that are ASGI messages: everything between is the real thing."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.api.dialects import ChatDialect, CompletionDialect
from appliance.api.http_exchange import HttpExchange
from appliance.api.responses import ResponsesDialect
from appliance.attestation.responder import InForce
from appliance.boot.identities import engine_facts, model_facts
from appliance.engine.base import Engine
from appliance.engine.generation.fake import FakeEngine, FakeScript
from appliance.inference.embedding import VectorDialect
from appliance.inference.request import Dialect
from appliance.inference.service import ServedModel, Service, ServiceLimits, Surroundings
from appliance.listener.connection import ChannelState
from appliance.metrics import Metrics
from appliance.receipts.claims import InstanceFacts, Served
from appliance.receipts.issuer import ChainScope, Issuer
from client_sdk.wire import cose, names
from client_sdk.wire.receipt import DeviceFacts, ReceiptClaims
from tests import cddl
from tests import reference_decoder as reference

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
DIALECTS: dict[str, Callable[[], Dialect | VectorDialect]] = {
    CHAT: ChatDialect,
    TEXT: CompletionDialect,
    RESPONSES: ResponsesDialect,
}
NOW = 1_800_000_000


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", "prompt": "hi", **fields}).encode()


class Clock:
    """Monotonic seconds that move only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


@dataclass
class Wire:
    """One request and everything that came back. `on_part` is called after each piece of a stream."""

    inbox: asyncio.Queue[Mapping[str, Any]]
    channel: ChannelState
    request: bytes = b""
    sent: list[Mapping[str, Any]] = field(default_factory=list)
    on_part: Callable[[int], Awaitable[None] | None] | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    parts: int = 0

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.start":
            return
        self.started.set()
        self.parts += 1
        if self.on_part is not None and (waited := self.on_part(self.parts)) is not None:
            await waited

    def feed(self, data: bytes, *, more: bool = False) -> None:
        self.request += data
        self.inbox.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def done(self) -> Wire:
        assert self.task is not None
        await asyncio.wait_for(self.task, 10)
        return self

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        pairs = self.sent[0]["headers"]
        assert len({name for name, _ in pairs}) == len(pairs)
        return {name.decode(): value.decode() for name, value in pairs}

    @property
    def writes(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    @property
    def ended(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str, str | None]:
        error = self.document["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return self.status, error["code"], error["param"]

    @property
    def frames(self) -> list[Any]:
        """The JSON of every frame."""
        return [json.loads(b[6:]) for b in self.blocks if b.startswith(b"data: {")]

    @property
    def blocks(self) -> list[bytes]:
        return reference.blocks(self.body)

    @property
    def kinds(self) -> list[str]:
        """What the stream consists of, padding aside."""
        return [_kind(block) for block in self.blocks if not block.startswith(b": p ")]


def _kind(block: bytes) -> str:
    for prefix, kind in ((b": checkpoint ", "checkpoint"), (b": receipt ", "receipt"), (b"data: [DONE]", "done")):
        if block.startswith(prefix):
            return kind
    frame = json.loads(block[6:])
    if "error" in frame:
        return "error"
    if not frame["choices"]:
        return "usage"
    return "finish" if frame["choices"][0]["finish_reason"] else "content"


class Rig:
    """A service, its key, and every receipt it issued, in order."""

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        max_active: int = 4,
        max_request_s: float = 30.0,
        padding: int = 256,
        monotonic: Callable[[], float] = time.monotonic,
        max_body_bytes: int = 4096,
        stored: int = 64,
    ) -> None:
        self.engine = engine if engine is not None else fake()
        key = Ed25519PrivateKey.generate()
        self.public = key.public_key().public_bytes_raw()
        self.cose_key = cose.okp_key(self.public, curve=names.CURVE_ED25519)
        self.metrics = Metrics()
        self.max_body_bytes = max_body_bytes
        self.issuer = Issuer(
            receipt_public=self.public,
            sign=key.sign,
            instance=InstanceFacts(
                iss="rig",
                mode="insecure",
                config=bytes([7] * 32),
                device=DeviceFacts(kind="cpu", digest=bytes([8] * 32)),
            ),
            random_bytes=os.urandom,
            stored_per_identity=stored,
        )
        served = Served(model=model_facts("fake", self.engine.model), engine=engine_facts(self.engine.info))
        self.service = Service(
            models={"fake": ServedModel(name="fake", engine=self.engine, served=served, created=NOW)},
            issuer=self.issuer,
            surroundings=Surroundings(clock=lambda: NOW + 0.7, monotonic=monotonic, random_bytes=os.urandom),
            limits=ServiceLimits(max_active=max_active, max_request_s=max_request_s, stream_padding_bytes=padding),
            metrics=self.metrics,
        )
        self.receipts: list[bytes] = []
        issue = self.issuer.issue

        def noting(*arguments: Any) -> bytes:
            self.receipts.append(issue(*arguments))
            return self.receipts[-1]

        self.issuer.issue = noting  # type: ignore[method-assign]
        self.scope = ChainScope(None)

    def open(
        self,
        *,
        route: str = CHAT,
        headers: Mapping[str, str] | None = None,
        raw_headers: list[tuple[bytes, bytes]] | None = None,
        query: bytes = b"",
        latched: InForce | None = None,
        scope: ChainScope | None = None,
        on_part: Callable[[int], Awaitable[None] | None] | None = None,
    ) -> Wire:
        """A request whose body is still to come."""
        fields = {"content-type": "application/json", **(headers or {})}
        pairs = [(name.encode(), value.encode()) for name, value in fields.items() if value]
        channel = ChannelState(tls=None, peer="rig", opened_at=0.0)
        wire = Wire(asyncio.Queue(), channel, on_part=on_part)
        asgi = {
            "type": "http",
            "method": "POST",
            "path": route,
            "headers": pairs + (raw_headers or []),
            "query_string": query,
            "state": {"latched": latched, "channel": channel},
        }
        chain = scope or self.scope

        async def respond() -> None:
            exchange = HttpExchange(
                asgi,
                wire.inbox.get,
                wire.send,
                chain_scope=chain,
                max_body_bytes=self.max_body_bytes,  # type: ignore[arg-type]
            )
            try:
                await self.service.respond(exchange, DIALECTS[route]())
            finally:
                exchange.close()

        wire.task = asyncio.create_task(respond())
        return wire

    def post(self, body: bytes, **options: Any) -> Wire:
        wire = self.open(**options)
        wire.feed(body)
        return wire

    async def ask(self, body: bytes, **options: Any) -> Wire:
        return await self.post(body, **options).done()

    def claims(self, receipt: bytes) -> dict[Any, Any]:
        """Claims of a receipt that the CDDL, our own parser and an independent reader all accept."""
        cddl.validate("receipt", receipt)
        claims, salt = reference.read_receipt(receipt, self.cose_key)
        assert salt is not None
        payload, _ = reference.read_sign1(receipt, "receipt", self.cose_key)
        assert ReceiptClaims.parse(payload).encode() == payload
        return claims

    def only(self, wire: Wire, status: str) -> dict[Any, Any]:
        """The claims of the one receipt there is: kept under its id, with that status, and every place given back."""
        assert len(self.receipts) == 1, len(self.receipts)
        claims = self.claims(self.receipts[0])
        assert claims[-70013]["status"] == status
        assert self.issuer.store.get(claims[7], self.scope.store_key) == self.receipts[0]
        reference.check_content(claims, self.salt(self.receipts[0]), {"request": wire.request})
        self.at_rest()
        assert f'appliance_answers_total{{status="{status}"}} 1.0' in self.metrics.render().decode()
        return claims

    def at_rest(self) -> None:
        assert self.service.active == 0
        if isinstance(self.engine, FakeEngine):
            assert self.engine.counters.live == 0

    @staticmethod
    def salt(receipt: bytes) -> bytes:
        salt: bytes = reference.read_cbor(receipt[1:])[1]["salt"]
        return salt

    def delivered(self, wire: Wire) -> bytes:
        """The receipt in the head of a whole answer: it names and commits to this very body."""
        padded = wire.headers["x-execution-receipt"]
        receipt = base64.urlsafe_b64decode(padded + "=" * (-len(padded) % 4))
        claims = self.claims(receipt)
        assert wire.headers["x-receipt-id"] == claims[7].hex()
        assert claims[-70013]["http-status"] == wire.status
        assert int(wire.headers["content-length"]) == len(wire.body)
        reference.check_content(claims, self.salt(receipt), {"response": wire.body})
        return receipt


def fake(script: FakeScript | None = None, **options: Any) -> FakeEngine:
    engine = FakeEngine(script, **options)
    engine.ready = True
    return engine


def stuck(pieces: tuple[bytes, ...] = (b"Hello", b" world"), after: int = 1) -> tuple[FakeEngine, asyncio.Event]:
    """An engine that makes `after` tokens and then waits for the event."""
    gate, made = asyncio.Event(), 0

    async def sleep(_seconds: float) -> None:
        nonlocal made
        made += 1
        if made > after:
            await gate.wait()

    return fake(FakeScript(pieces=pieces, delay_s=1.0), sleep=sleep), gate
