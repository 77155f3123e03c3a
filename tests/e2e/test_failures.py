"""What breaks in mid-answer: the worker, the client, the whole appliance. Each end has a receipt that says so."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from OpenSSL import SSL

from client_sdk import Appliance, ApplianceError, AsyncAppliance, Policy
from client_sdk.transport.protocol import VerifiedAnswer
from client_sdk.transport.tls import make_client_context
from client_sdk.wire import cose, names
from client_sdk.wire.receipt import ReceiptClaims
from tests.e2e.evidence import Collected, check_answer, check_receipt
from tests.e2e.programs import MODEL, Served, make_policy, wait_for

pytestmark = pytest.mark.model
LONG: dict[str, Any] = {"model": MODEL, "max_tokens": 3000, "temperature": 1.0, "seed": 5}
STORY = "Write a very long story about a river."


@pytest.fixture(scope="module")
def frail(workspace: Path) -> Iterator[Served]:
    with Served(workspace / "frail", metrics=True) as served:
        yield served


@pytest.fixture(scope="module")
def frail_policy(workspace: Path, frail: Served) -> Policy:
    return Policy.load(make_policy(workspace / "frail-policy", environ=frail.environ))


def begin(appliance: Appliance, prompt: str = STORY) -> tuple[Any, list[str]]:
    """A long stream that has handed out its first verified text."""
    stream = appliance.stream(prompt, **LONG)
    pieces = iter(stream)
    return pieces, [next(pieces)]


def drain(pieces: Iterator[str], into: list[str]) -> None:
    for piece in pieces:
        into.append(piece)


def ready(appliance: Appliance) -> bool:
    return appliance.http.get("/readyz").status_code == 200


@contextmanager
def plain_connection(port: int) -> Iterator[SSL.Connection]:
    """A client that knows TLS and nothing of ours."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        connection = SSL.Connection(make_client_context(), sock)
        connection.set_connect_state()
        connection.do_handshake()
        yield connection


def receive_all(connection: SSL.Connection) -> bytes:
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except SSL.ZeroReturnError:
        pass
    return received


def post(body: bytes) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def claims_of(receipt: bytes) -> ReceiptClaims:
    sign1 = cose.parse_sign1(receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=1 << 16)
    return ReceiptClaims.parse(sign1.payload)


def test_worker_killed_in_mid_stream(frail: Served, frail_policy: Policy, collected: Collected) -> None:
    kept: list[VerifiedAnswer] = []
    restarts = frail.gauge("appliance_engine_restarts")
    with Appliance(frail.url, policy=frail_policy, save=kept.append) as appliance:
        assert ready(appliance)
        pieces, got = begin(appliance)
        (worker,) = frail.workers()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(ApplianceError) as caught:
            drain(pieces, got)
        assert (caught.value.code, caught.value.verified) == ("engine_failed", True)
        assert kept[0].receipt.claims.response.status == "error"
        assert not ready(appliance)
        after = appliance.chat("Hello", model=MODEL, max_tokens=2)
        assert after.receipt.claims.response.status == "complete"
        assert ready(appliance)
    assert frail.gauge("appliance_engine_restarts") == restarts + 1
    assert kept[0].body is not None
    assert check_answer(kept[0]) == "error"
    collected.answers += kept
    assert b'"error":{' in kept[0].body
    assert names.DONE_BLOCK not in kept[0].body
    assert "".join(got)


def test_worker_killed_under_a_queue(frail: Served, frail_policy: Policy) -> None:
    """Answers under evaluation and answers that wait for their turn: each is told, with a receipt, that it failed."""

    def ask(number: int) -> ApplianceError:
        with pytest.raises(ApplianceError) as caught:
            drain(iter(appliance.stream(f"{STORY} {number}", **LONG)), [])
        return caught.value

    with Appliance(frail.url, policy=frail_policy) as appliance, ThreadPoolExecutor(4) as pool:
        wait_for(lambda: ready(appliance), limit_s=20, what="ready")
        asked = [pool.submit(ask, number) for number in range(4)]

        def jobs() -> float:
            return frail.gauge("appliance_engine_active_jobs") + frail.gauge("appliance_engine_queued_jobs")

        wait_for(lambda: jobs() == 4, limit_s=10, what="all are with the engine")
        os.kill(frail.workers()[0], signal.SIGKILL)
        errors = [future.result(20) for future in asked]
        assert {(error.code, error.verified) for error in errors} == {("engine_failed", True)}
        wait_for(lambda: ready(appliance), limit_s=20, what="ready")
        assert appliance.chat("Hello", model=MODEL, max_tokens=2).receipt.claims.response.status == "complete"


async def test_worker_killed_under_an_async_client(frail: Served, frail_policy: Policy) -> None:
    async with AsyncAppliance(frail.url, policy=frail_policy) as appliance:
        pieces = aiter(appliance.stream(STORY, **LONG))
        await anext(pieces)
        os.kill(frail.workers()[0], signal.SIGKILL)
        with pytest.raises(ApplianceError) as caught:
            async for _ in pieces:
                pass
        assert caught.value.verified is True


def test_worker_killed_under_a_whole_answer(frail: Served, frail_policy: Policy) -> None:
    """500 with a receipt: the appliance itself says that it failed."""
    with Appliance(frail.url, policy=frail_policy) as appliance, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: ready(appliance), limit_s=20, what="ready")
        asked = pool.submit(appliance.chat, STORY, **LONG)
        wait_for(lambda: frail.gauge("appliance_engine_active_jobs") == 1, limit_s=5, what="generating")
        os.kill(frail.workers()[0], signal.SIGKILL)
        with pytest.raises(ApplianceError) as caught:
            asked.result(20)
    assert (caught.value.status, caught.value.code, caught.value.verified) == (500, "engine_failed", True)


def test_worker_killed_as_a_plain_client_sees_it(frail: Served, frail_policy: Policy) -> None:
    """The bytes: an error event in OpenAI's shape, the receipt, and the end of the connection without [DONE]."""
    with Appliance(frail.url, policy=frail_policy) as appliance:
        wait_for(lambda: ready(appliance), limit_s=20, what="ready")
    body = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"{STORY}"}}],"stream":true,"max_tokens":3000}}'
    with plain_connection(frail.port) as connection:
        connection.sendall(post(body.encode()))
        first = connection.recv(65536)
        assert first.startswith(b"HTTP/1.1 200 ")
        os.kill(frail.workers()[0], signal.SIGKILL)
        rest = receive_all(connection)
    error, receipt = rest.index(b'data: {"error":{'), rest.index(names.COMMENT_RECEIPT)
    assert error < receipt
    assert b"[DONE]" not in rest


def test_client_gone_in_mid_stream(frail: Served, frail_policy: Policy) -> None:
    """Generation stops at once, and the receipt, fetched later, says that the answer was cancelled."""
    with Appliance(frail.url, policy=frail_policy) as appliance:
        wait_for(lambda: ready(appliance), limit_s=20, what="ready")
        stream = appliance.stream(STORY, **LONG)
        pieces: Any = iter(stream)
        next(pieces)
        assert frail.gauge("appliance_engine_active_jobs") == 1
        pieces.close()
        wait_for(lambda: frail.gauge("appliance_engine_active_jobs") == 0, limit_s=3, what="generation stops")
        identifier = stream.response_id

        def fetched() -> httpx.Response | None:
            response = appliance.http.get(f"/v1/receipts/{identifier}")
            return response if response.status_code == 200 else None

        receipt = wait_for(fetched, limit_s=3, what="the receipt").content
        key = appliance.attest().claims.receipt_key
    assert claims_of(receipt).response.status == check_receipt(receipt, key) == "cancelled"


def test_half_a_request(workspace: Path) -> None:
    """Half a head, half a body: closed in time, and others never notice."""
    environ = {"APPLIANCE_LIMITS_HEAD_S": "1", "APPLIANCE_LIMITS_BODY_IDLE_S": "1"}
    policy = Policy.load(make_policy(workspace / "quick-policy", environ=environ))
    with (
        Served(workspace / "quick", environ=environ) as quick,
        Appliance(quick.url, policy=policy) as appliance,
        plain_connection(quick.port) as head,
        plain_connection(quick.port) as body,
    ):
        head.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        body.sendall(post(b"{}").removesuffix(b"}"))
        started = time.monotonic()
        assert appliance.chat("Hello", model=MODEL, max_tokens=2).text is not None
        for connection in (head, body):
            assert receive_all(connection)[:12] in (b"", b"HTTP/1.1 408")
        assert time.monotonic() - started < 8
        assert appliance.chat("Hello", model=MODEL, max_tokens=2).text is not None


def test_sigterm_in_mid_stream(frail: Served, frail_policy: Policy) -> None:
    """Answers in flight end with status `error` and a receipt within the grace period; then the process is gone."""
    kept: list[VerifiedAnswer] = []
    with Appliance(frail.url, policy=frail_policy, save=kept.append) as appliance:
        wait_for(lambda: ready(appliance), limit_s=20, what="ready")
        pieces, got = begin(appliance)
        workers = frail.workers()
        frail.process.send_signal(signal.SIGTERM)
        with pytest.raises(ApplianceError) as caught:
            drain(pieces, got)
        assert (caught.value.code, caught.value.verified) == ("shutting_down", True)
        assert kept[0].receipt.claims.response.status == "error"
        assert frail.process.wait(15) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    frail.start()
