"""Machines between client and appliance, and machines in its place: none gets a byte of a prompt."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from OpenSSL import SSL

from appliance.listener.certificates import CertificateRotator, generate_tls_key
from client_sdk import Appliance, Policy, PolicyFileError, Rejection, VerificationError
from client_sdk.transport.tls import make_client_context
from client_sdk.wire import names
from tests.e2e.glass import GlassAppliance
from tests.e2e.programs import MODEL, Served, outcome, run_client

pytestmark = pytest.mark.model
CANARY = "zebra-canary-4711"
R = Rejection


@dataclass
class Relay:
    """Ends TLS with `contexts` (one per connection, in turn) and forwards every byte to `upstreams`, in turn.

    `plaintext` is everything clients sent through it: the relay has the session keys of its own two halves.
    """

    contexts: list[SSL.Context]
    upstreams: list[int]
    plaintext: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            number = self.connections
            self.connections += 1
            context = self.contexts[number % len(self.contexts)]
            upstream = self.upstreams[number % len(self.upstreams)]
            thread = threading.Thread(target=self._relay, args=(sock, context, upstream), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _relay(self, sock: socket.socket, context: SSL.Context, upstream: int) -> None:
        inner = socket.create_connection(("127.0.0.1", upstream))
        client, server = SSL.Connection(context, sock), SSL.Connection(make_client_context(), inner)
        client.set_accept_state()
        server.set_connect_state()
        with contextlib.suppress(SSL.Error, OSError):
            server.do_handshake()
            client.do_handshake()
            while True:  # the protocol is one request, one answer, in turn
                request = client.recv(65536)
                self.plaintext += request
                server.sendall(request)
                answer = b""
                while not _complete(answer):
                    answer += server.recv(65536)
                client.sendall(answer)
        sock.close()
        inner.close()


def _complete(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    if lengths:
        return len(body) >= int(lengths[0].partition(b":")[2])
    return body.endswith(b"0\r\n\r\n")


def stolen(appliance: GlassAppliance) -> SSL.Context:
    """The appliance's own TLS key and certificate, in somebody else's hands."""
    return appliance.appliance.rotator.context()


def own_certificate() -> SSL.Context:
    return CertificateRotator(generate_tls_key(), now=time.time, random_bytes=os.urandom).context()


def refused(url: str, policy: Policy) -> VerificationError:
    with Appliance(url, policy=policy) as appliance, pytest.raises(VerificationError) as caught:
        appliance.chat(CANARY, model=MODEL, max_tokens=2)
    return caught.value


def test_b040_a_relay_that_owns_the_tls_key(glass: GlassAppliance, policy: Policy) -> None:
    """Same key, same certificate, genuine evidence forwarded. The exporters of its two halves differ."""
    glass.seen.clear()
    with Relay([stolen(glass)], [glass.port]) as relay:
        error = refused(relay.url, policy)
    assert error.code == R.BINDER_MISMATCH
    assert relay.plaintext.startswith(b"POST /.well-known/attestation ")
    assert CANARY.encode() not in relay.plaintext
    assert b"/v1/" not in relay.plaintext
    assert glass.seen == []


def test_a_relay_with_a_certificate_of_its_own(glass: GlassAppliance, policy: Policy) -> None:
    """B043: the evidence names another TLS key than the one this connection ends at."""
    with Relay([own_certificate()], [glass.port]) as relay:
        error = refused(relay.url, policy)
    assert error.code == R.TLS_KEY_MISMATCH
    assert CANARY.encode() not in relay.plaintext


def test_b055_an_address_that_alternates_identities(glass: GlassAppliance, server: Served, policy: Policy) -> None:
    """The verdict belongs to the very connection that carries the request, and to no other."""
    seen: list[bytes] = []
    forward = _Switch([server.port, glass.port])
    with forward, Appliance(forward.url, policy=policy) as appliance:
        for _ in range(3):
            answer = appliance.chat("Hello", model=MODEL, max_tokens=2)
            seen.append(answer.receipt.claims.chain)
            result = appliance.attest()
            assert answer.receipt.claims.attestation == result.claims_digest
            forward.drop()
    assert len(set(seen)) == 3
    assert forward.connections >= 3


def test_b055_an_address_that_alternates_with_an_impostor(glass: GlassAppliance, policy: Policy) -> None:
    """The first connection is genuine, the next one is not; what the first proved does not help it."""
    with Relay([own_certificate()], [glass.port]) as relay:
        forward = _Switch([glass.port, int(relay.url.rpartition(":")[2])])
        with forward, Appliance(forward.url, policy=policy) as appliance:
            assert appliance.chat("Hello", model=MODEL, max_tokens=2).text
            forward.drop()
            with pytest.raises(VerificationError) as caught:
                appliance.chat(CANARY, model=MODEL, max_tokens=2)
    assert caught.value.code == R.BINDER_MISMATCH  # it forwarded a proof that the evidence of before still stands
    assert CANARY.encode() not in relay.plaintext


def test_a_default_policy_refuses_an_insecure_appliance(server: Served, policy: Policy, policy_file: Path) -> None:
    """B052: without the opt-in there is no policy that an insecure appliance passes."""
    with pytest.raises(PolicyFileError):
        Policy(models=policy.models)
    reference = policy_file.with_name("reference-values.toml")
    made = run_client(
        "policy", "init", "--from", str(reference), "-o", str(policy_file.with_name("strict.toml")), "--json"
    )
    assert made.returncode == 2
    assert outcome(made)["code"] == "POLICY_FILE"
    strict = replace(policy)
    object.__setattr__(strict, "insecure", None)  # what a policy for a hardware family looks like here
    assert refused(server.url, strict).code == R.INSECURE_NOT_ALLOWED


def test_a_policy_for_another_model(server: Served, policy: Policy) -> None:
    """B086: a name is no identity. The caller's hash decides, before the prompt leaves."""
    other = replace(policy, models={MODEL: frozenset({bytes(range(32))})})
    assert refused(server.url, other).code == R.MODEL_NOT_ALLOWED
    unnamed = replace(policy, models={"gemma-3-270m": frozenset({bytes(range(32))})})
    assert refused(server.url, unnamed).code == R.MODEL_NOT_ALLOWED


def test_a_policy_for_another_configuration(server: Served, policy: Policy) -> None:
    other = replace(policy, configs=frozenset({bytes(range(32))}))
    assert refused(server.url, other).code == R.CONFIG_NOT_ALLOWED


def test_evidence_recorded_earlier(glass: GlassAppliance, policy: Policy) -> None:
    """A replayed bundle: genuine in itself, for another nonce and another connection."""
    recorded: list[Any] = []
    with Appliance(glass.url, policy=policy, save=recorded.append) as appliance:
        appliance.chat("Hello", model=MODEL, max_tokens=2)
    bundle = recorded[0].attestation.bundle
    app = glass.appliance.app

    async def replay(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != names.PATH_ATTESTATION:
            await app(scope, receive, send)
            return
        headers = [(b"content-type", names.MEDIA_CBOR.encode()), (b"content-length", str(len(bundle)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bundle, "more_body": False})

    glass.replaced_app = replay
    try:
        error = refused(glass.url, policy)
    finally:
        glass.replaced_app = None
    assert error.code == R.BINDER_MISMATCH


def test_only_the_appliance_is_spoken_to(server: Served, policy: Policy) -> None:
    """`with_options(base_url=...)` keeps the client's transport; the transport refuses the other address."""
    with Appliance(server.url, policy=policy) as appliance:
        client: Any = appliance.openai().with_options(base_url="https://127.0.0.1:1/v1")
        with pytest.raises(VerificationError) as caught:
            client.models.list()
    assert caught.value.code == R.FOREIGN_ORIGIN


class _Switch:
    """A plain TCP forwarder (a load balancer): connection n goes to `ports[n % len]`. `drop` closes all."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> _Switch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        self._thread.join(10)

    def drop(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._ports[self.connections % len(self._ports)]))
            self.connections += 1
            self._open += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for sock in (source, sink):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    source.close()
