"""The appliance goes away and comes back: the same one with new keys, another one, or one that only takes prompts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client_sdk import Appliance, ApplianceError, AsyncAppliance, Policy, Rejection, TransportError, VerificationError
from client_sdk.transport.protocol import VerifiedAnswer
from client_sdk.wire import names
from tests.e2e.glass import GlassAppliance
from tests.e2e.programs import MODEL, Served, make_policy

pytestmark = pytest.mark.model
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 2}
LONG = "Write a long story about a lighthouse."


@pytest.fixture(scope="module")
def mortal(workspace: Path) -> Iterator[Served]:
    with Served(workspace / "mortal", metrics=True) as served:
        yield served


@pytest.fixture(scope="module")
def mortal_policy(workspace: Path, mortal: Served) -> Policy:
    return Policy.load(make_policy(workspace / "mortal-policy", environ=mortal.environ))


async def test_b058_restarted_with_new_keys(mortal: Served, mortal_policy: Policy) -> None:
    """One re-attestation under the same policy, then as before, for clients of both kinds."""
    kept: list[VerifiedAnswer] = []
    with Appliance(mortal.url, policy=mortal_policy, save=kept.append) as appliance:
        async with AsyncAppliance(mortal.url, policy=mortal_policy, save=kept.append) as other:
            appliance.chat("Hello", **ASK)
            await other.chat("Hello", **ASK)
            assert mortal.stop() == 0
            mortal.start()
            appliance.chat("Hello", **ASK)
            assert mortal.gauge("appliance_attestations") == 1
            assert mortal.gauge("appliance_answers") == 1
            await other.chat("Hello", **ASK)
            assert mortal.gauge("appliance_attestations") == 2
            assert "".join(appliance.stream("Hello", **ASK))
            assert mortal.gauge("appliance_attestations") == 2, "an attested connection is used again"
    keys = [answer.attestation.result.receipt_key for answer in kept]
    assert keys[0] == keys[1] != keys[2] == keys[3] == keys[4]


def test_replaced_by_something_else(mortal: Served, mortal_policy: Policy, workspace: Path) -> None:
    """Another configuration in its place is refused by the policy, before the prompt leaves, and nothing is resent."""
    with Appliance(mortal.url, policy=mortal_policy) as appliance:
        appliance.chat("Hello", **ASK)
        mortal.stop()
        changed = {**mortal.environ, "APPLIANCE_ENGINE_BATCH_TOKENS": "256"}
        with Served(workspace / "changed", listen=f"127.0.0.1:{mortal.port}", environ=changed) as impostor:
            impostor.metrics_url = mortal.metrics_url
            with pytest.raises(VerificationError) as caught:
                appliance.chat("Hello", **ASK)
            assert impostor.gauge("appliance_answers") == 0
    mortal.start()
    assert caught.value.code == Rejection.CONFIG_NOT_ALLOWED


def test_nothing_is_resent_once_a_byte_has_left(glass: GlassAppliance, policy: Policy) -> None:
    """A server that dies after it has read the request has read it once."""
    app = glass.appliance.app
    arrived: list[str] = []

    async def dying(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in names.INFERENCE_ROUTES:
            await receive()
            arrived.append(scope["path"])
            raise ConnectionResetError
        await app(scope, receive, send)

    with Appliance(glass.url, policy=policy) as appliance:
        appliance.chat("Hello", **ASK)
        glass.replaced_app = dying
        try:
            with pytest.raises(ApplianceError) as caught:
                appliance.chat("Hello", **ASK)
        finally:
            glass.replaced_app = None
        assert caught.value.verified is False
        assert appliance.chat("Hello", **ASK).text is not None
    assert arrived == ["/v1/chat/completions"]


def test_a_connection_that_dies_under_the_request(server: Served, policy: Policy) -> None:
    """The forwarder takes bytes of the request and closes: who knows what was read? Nothing is resent."""
    with _Taking(server.port) as taking, Appliance(taking.url, policy=policy) as appliance:
        appliance.attest()
        taking.swallow.set()
        with pytest.raises(TransportError) as caught:
            appliance.chat("Hello", **ASK)
        assert caught.value.code == "CONNECTION_BROKEN"
        assert taking.connections == 1
        taking.swallow.clear()
        assert appliance.chat("Hello", **ASK).text is not None


def test_old_channels_are_attested_again(glass: GlassAppliance, policy: Policy) -> None:
    with Appliance(glass.url, policy=replace(policy, max_channel_age_s=1, max_continued_s=0)) as appliance:
        before = glass.attestations
        appliance.chat("Hello", **ASK)
        first = glass.attestations
        threading.Event().wait(1.1)
        appliance.chat("Hello", **ASK)
        assert (first, glass.attestations) == (before + 1, before + 2)


def test_a_second_connection_continues_the_first(glass: GlassAppliance, policy: Policy) -> None:
    """The evidence of the first connection serves the second; the result says how old it is."""
    kept: list[VerifiedAnswer] = []
    with Appliance(glass.url, policy=policy, save=kept.append) as appliance:
        # Longer than one read takes: a stream that has ended would leave its connection to the next request.
        stream = iter(appliance.stream(LONG, model=MODEL, max_tokens=200, temperature=0))
        next(stream)
        appliance.chat("Hello", **ASK)
        list(stream)
    chat, streamed = kept if kept[0].exchange.stream is None and kept[0].body else kept[::-1]
    records = sorted((chat.attestation, streamed.attestation), key=lambda record: record.verified_mono)
    assert records[0].prior is None
    assert records[1].prior is records[0]
    assert records[0].channel != records[1].channel


class _Taking:
    """A TCP forwarder that, once told so, takes what the client sends and closes instead of passing it on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.swallow = threading.Event()
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> _Taking:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._port))
            for source, sink, judge in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=(source, sink, judge), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, judge: bool) -> None:
        try:
            while data := source.recv(65536):
                if judge and self.swallow.is_set():
                    break
                sink.sendall(data)
        except OSError:
            pass
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        source.close()
