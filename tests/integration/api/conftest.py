"""The whole API on real sockets behind RA-TLS, over the fake engine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import FastAPI

from appliance.api.app import build_app, build_metrics_app
from appliance.attestation.attester import Attester
from appliance.attestation.families.insecure import InsecureAttester
from appliance.attestation.limiter import QuoteLimiter
from appliance.attestation.responder import Responder, Statement
from appliance.boot.identities import device_facts, engine_facts, model_facts
from appliance.boot.instance_keys import make_keys
from appliance.engine.generation.fake import FakeEngine, FakeScript
from appliance.inference.service import ServedModel, Service, ServiceLimits, Surroundings
from appliance.keys import KeyEntry, KeyRing, new_key
from appliance.listener.certificates import CertificateRotator
from appliance.listener.connection import ConnectionLimits
from appliance.listener.tls_server import make_protocol_class
from appliance.listener.uvicorn_server import ServerHandle, serve
from appliance.metrics import Metrics
from appliance.receipts.claims import InstanceFacts, Served
from appliance.receipts.issuer import Issuer
from client_sdk.wire import cbor
from tests import cddl
from tests import reference_decoder as reference
from tests.integration.channel.conftest import RawClient

CONFIG_DIGEST = bytes([7] * 32)


@dataclass(kw_only=True)
class Settings:
    script: FakeScript = field(default_factory=FakeScript)
    engine: FakeEngine | None = None
    attester: Attester | None = None
    keys: bool = False
    max_active: int = 8
    max_body_bytes: int = 65_536
    max_request_s: float = 20.0
    stored: int = 64
    quotes_per_s: float = 1000.0
    burst: int = 1000
    max_waiting: int = 64
    max_continued_s: int = 600


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str, str | None]:
        error = self.document["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        return self.status, error["code"], error["param"]


class Client(RawClient):
    """One connection. `ask` is one request and its whole answer; `key` goes into each."""

    def __init__(self, port: int, *, tls: bool = True, key: str | None = None, source: str = "127.0.0.1") -> None:
        super().__init__(port, tls=tls, source=source)
        self.key = key
        self.context: dict[str, bytes] = {}

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, key: str | None = None
    ) -> Reply:
        self.send(self.bytes_of(method, path, body, headers, key))
        return self.reply(method)

    def bytes_of(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, key: str | None = None
    ) -> bytes:
        fields = {"Host": "appliance"}
        if body or method == "POST":
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        if key or self.key:
            fields["Authorization"] = f"Bearer {key or self.key}"
        fields |= headers or {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body

    def reply(self, method: str = "POST") -> Reply:
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
        parser.send(h11.EndOfMessage())
        head: h11.Response | None = None
        body = b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(self.receive())
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
        assert head is not None
        self.spare = parser.trailing_data[0]
        names = [name.decode() for name, _ in head.headers]
        assert len(set(names)) == len(names), names
        return Reply(head.status_code, {n.decode(): v.decode() for n, v in head.headers}, body)

    def chat(self, **fields: Any) -> Reply:
        return self.ask("POST", "/v1/chat/completions", chat(**fields))

    # Attestation

    @property
    def spki(self) -> bytes:
        assert self.tls is not None
        certificate = self.tls.get_peer_certificate(as_cryptography=True)
        assert certificate is not None
        return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def held(self, nonce: bytes) -> dict[str, bytes]:
        assert self.tls is not None
        return {
            "nonce": nonce,
            "spki": self.spki,
            "exported": self.tls.export_keying_material(b"Attestation", 32, nonce),
        }

    def attest(self, nonce: bytes = b"n" * 32, have: bytes | None = None) -> Reply:
        asked: dict[str, Any] = {"nonce": nonce} | ({"have": have} if have else {})
        return self.ask("POST", "/.well-known/attestation", cbor.encode(asked))

    def attested(self, nonce: bytes = b"n" * 32, have: bytes | None = None, claims: bytes | None = None) -> bytes:
        """Attest and check everything; the claims bytes in force."""
        reply = self.attest(nonce, have)
        assert reply.status == 200, reply.body
        assert reply.headers["content-type"] == "application/cbor"
        assert reply.headers["cache-control"] == "no-store"
        cddl.validate("bundle", reply.body)
        held = self.held(nonce) | ({"claims": claims} if claims else {})
        self.context = held
        reference.check_bundle(reply.body, held)
        raw: bytes | None = reference.read_cbor(reply.body).get("claims", claims)
        assert raw is not None
        return raw


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


@dataclass
class Running:
    port: int
    metrics_port: int
    plain_port: int
    engine: FakeEngine
    service: Service
    issuer: Issuer
    cose_key: bytes
    keys: dict[str, str]
    loop: asyncio.AbstractEventLoop
    handles: list[ServerHandle]
    thread: threading.Thread
    app: FastAPI
    clients: list[Client] = field(default_factory=list)

    def connect(self, key: str | None = None, *, metrics: bool = False, source: str = "127.0.0.1") -> Client:
        port = self.metrics_port if metrics else self.port
        client = Client(port, tls=not metrics, key=self.keys.get(key or ""), source=source)
        self.clients.append(client)
        return client

    def receipt(self, reply: Reply) -> dict[Any, Any]:
        """Claims of the receipt in the head of a whole answer, checked against its body."""
        signed = reference._decode64(b"=" + reply.headers["x-execution-receipt"].encode() + b"\n\n", b"=")
        cddl.validate("receipt", signed)
        claims, salt = reference.read_receipt(signed, self.cose_key)
        assert salt is not None
        reference.check_content(claims, salt, {"response": reply.body})
        assert (claims[-70013]["http-status"], claims[7].hex()) == (reply.status, reply.headers["x-receipt-id"])
        return claims

    def wait_idle(self) -> None:
        for _ in range(400):
            if self.service.active == 0:
                return
            time.sleep(0.01)
        raise AssertionError("a place was not given back")

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        for handle in self.handles:
            handle.stop()  # only a flag, which the server polls
        self.thread.join(20)
        assert not self.thread.is_alive()


def key_ring() -> tuple[KeyRing, dict[str, str]]:
    """Keys named after what they may: each scope alone, "all", and "other" (all of them, another identity)."""
    entries: list[KeyEntry] = []
    texts: dict[str, str] = {}
    every = frozenset({"inference", "receipts", "metrics"})
    wanted = {name: frozenset({name}) for name in every} | {"all": every, "other": every, "old": every}
    now = int(time.time())
    for label, scopes in wanted.items():
        made = now - 100 if label == "old" else now
        text, entry = new_key(
            label=label,
            scopes=scopes,
            now=made,
            expires=made + 1 if label == "old" else None,
            random_bytes=os.urandom,
        )
        texts[label] = text
        entries.append(entry)
    return KeyRing(entries), texts


def start(settings: Settings) -> Running:
    engine = settings.engine or FakeEngine(settings.script)
    engine.ready = True
    secrets = make_keys(os.urandom)
    ring, texts = key_ring() if settings.keys else (None, {})
    served = Served(model=model_facts("fake", engine.model), engine=engine_facts(engine.info))
    issuer = Issuer(
        receipt_public=secrets.receipt.public_key().public_bytes_raw(),
        sign=secrets.receipt.sign,
        instance=InstanceFacts(iss="api", mode="insecure", config=CONFIG_DIGEST, device=device_facts()),
        random_bytes=os.urandom,
        stored_per_identity=settings.stored,
    )
    service = Service(
        models={"fake": ServedModel(name="fake", engine=engine, served=served, created=1)},
        issuer=issuer,
        surroundings=Surroundings(clock=time.time, monotonic=time.monotonic, random_bytes=os.urandom),
        limits=ServiceLimits(
            max_active=settings.max_active, max_request_s=settings.max_request_s, stream_padding_bytes=256
        ),
        metrics=Metrics(),
    )
    statement = Statement(
        receipt_key=secrets.receipt_cose,
        channel_key=secrets.channel_cose,
        sealing_key=secrets.sealing_cose,
        config=CONFIG_DIGEST,
        models={"fake": served.model.identity},
        mode="insecure",
        instance=secrets.instance,
    )
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(3)]
    started = threading.Event()
    handles: list[ServerHandle] = []
    loops: list[asyncio.AbstractEventLoop] = []
    apps: list[FastAPI] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        limiter = QuoteLimiter(
            per_s=settings.quotes_per_s,
            burst=settings.burst,
            max_waiting=settings.max_waiting,
            monotonic=time.monotonic,
        )
        responder = Responder(
            attester=settings.attester or InsecureAttester(os.urandom(32)),
            statement=statement,
            sign_channel=secrets.channel.sign,
            clock=time.time,
            monotonic=time.monotonic,
            limiter=limiter,
            max_continued_s=settings.max_continued_s,
        )
        app = build_app(
            service=service,
            responder=responder,
            ring=ring,
            clock=time.time,
            max_body_bytes=settings.max_body_bytes,
        )
        apps.append(app)
        rotator = CertificateRotator(secrets.tls, now=time.time, random_bytes=os.urandom)
        limits = ConnectionLimits()
        attested = make_protocol_class(contexts=rotator, limits=limits, clock=time.monotonic)
        plain = make_protocol_class(contexts=None, limits=limits, clock=time.monotonic)

        def on_started(handle: ServerHandle) -> None:
            handles.append(handle)
            if len(handles) == len(sockets):
                started.set()

        await asyncio.gather(
            serve(app, [sockets[0]], attested, grace_s=3, on_started=on_started),
            serve(build_metrics_app(service), [sockets[1]], plain, grace_s=3, on_started=on_started),
            serve(app, [sockets[2]], plain, grace_s=3, on_started=on_started),
        )
        responder.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(10)
    ports = [sock.getsockname()[1] for sock in sockets]
    return Running(*ports, engine, service, issuer, secrets.receipt_cose, texts, loops[0], handles, thread, apps[0])


StartApi = Callable[..., Running]


@pytest.fixture
def api() -> Iterator[StartApi]:
    """api(keys=True, max_active=1, ...) starts one; see Settings."""
    running: list[Running] = []

    def begin(**options: Any) -> Running:
        running.append(start(Settings(**options)))
        return running[-1]

    yield begin
    for one in running:
        one.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One appliance without keys for tests that leave nothing behind."""
    one = start(Settings())
    yield one
    one.stop()
