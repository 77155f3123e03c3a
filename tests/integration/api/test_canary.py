"""What people ask never reaches a log, an error, or the metrics, at any level, on any path."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from appliance.engine.generation.fake import FakeEngine, FakeScript
from appliance.engine.types import EngineEvent, GenerationJob
from tests import reference_decoder as reference
from tests.integration.api.conftest import Client, Reply, StartApi, chat

CANARY = "canary-7b1f-never-to-be-seen"
BYTES = CANARY.encode()


class Quoting(FakeEngine):
    """Its faults quote the prompt. `late`: after the first text."""

    late = False

    async def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        if self.late:
            events = super().generate(job)
            yield await anext(events)
            yield await anext(events)
            await events.aclose()
        raise ValueError(f"{job.prompt!r}")


def content(**fields: Any) -> bytes:
    """A request with the canary everywhere a request has content."""
    return chat(
        **{
            "messages": [{"role": role, "content": f"{role} {CANARY}"} for role in ("system", "user", "assistant")],
            "stop": [CANARY],
            "user": CANARY,
            "metadata": {CANARY: CANARY},
            **fields,
        }
    )


def prompt(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", "prompt": CANARY, "stop": CANARY, "user": CANARY, **fields}).encode()


REFUSED: list[bytes] = [
    BYTES,
    b'{"model": "fake", "messages": "' + BYTES,
    b'{"model": NaN, "x": "' + BYTES + b'"}',
    content(model=CANARY),
    content(user=[CANARY]),
    content(user=CANARY * 100),
    content(metadata={CANARY: 1}),
    content(metadata={CANARY: {CANARY: CANARY}}),
    content(metadata={CANARY * 3 + str(i): "" for i in range(20)}),
    content(logit_bias={CANARY: 1}),
    content(stop=[CANARY] * 5),
    content(stop={CANARY: CANARY}),
    content(stop=CANARY * 20),
    content(messages=[CANARY]),
    content(messages=CANARY),
    content(messages=[{"role": CANARY, "content": CANARY}]),
    content(messages=[{"role": "user", "content": [CANARY]}]),
    content(messages=[{"role": "user", "content": {"text": CANARY}}]),
    content(temperature=CANARY),
    content(stream=CANARY),
    content(response_format={"type": CANARY}),
    content(stream=True, stream_options={"include_usage": CANARY}),
    content(stream_options={"include_usage": True}),
    content(unknown=CANARY),
    content(unknown={CANARY: [CANARY]}),
    content(max_tokens=4096),
    content(max_tokens=1, max_completion_tokens=1),
    content(messages=[{"role": "user", "content": CANARY * 200}]),
    content(messages=[{"role": "user", "content": CANARY + "\ud800"}]),
    content(user="x" * 70_000),
]


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Everything logged, at every level, by everybody, and everything written to stdout and stderr."""
    caplog.set_level(logging.DEBUG)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        caplog.set_level(logging.DEBUG, logger=name)
    formatter = logging.Formatter("%(name)s %(message)s")

    def everything() -> str:
        gc.collect()  # what nobody retrieved is logged when it is collected
        written = capfd.readouterr()
        return "\n".join(formatter.format(record) for record in caplog.records) + written.out + written.err

    return everything


def unseen(client: Client, reply: Reply) -> None:
    assert BYTES not in reply.body
    assert CANARY not in json.dumps(reply.headers)


def test_b172_refusals(api: StartApi, watched: Callable[[], str]) -> None:
    running = api()
    for body in REFUSED:
        client = running.connect()
        reply = client.ask("POST", "/v1/chat/completions", body)
        assert reply.status in {400, 404, 413}, body
        unseen(client, reply)
    for method, path, headers in [
        ("POST", f"/v1/chat/completions?{CANARY}", {}),
        ("POST", "/v1/chat/completions", {"Content-Type": CANARY}),
        ("POST", "/v1/chat/completions", {"Content-Encoding": CANARY}),
        ("POST", "/v1/chat/completions", {"X-Inference-Nonce": CANARY}),
        ("GET", f"/v1/receipts/{CANARY}", {}),
        ("GET", f"/v1/attestation?nonce={CANARY}", {}),
        ("GET", f"/{CANARY}", {}),
        ("POST", "/.well-known/attestation", {}),
    ]:
        client = running.connect()
        reply = client.ask(method, path, content() if method == "POST" else b"", headers)
        assert 400 <= reply.status < 500
        unseen(client, reply)
    client = running.connect()
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n" + BYTES + b"\r\n\r\n")
    assert BYTES not in client.rest()
    client = running.connect(metrics=True)
    assert BYTES not in client.ask("GET", "/metrics").body
    assert CANARY not in watched()


@pytest.mark.parametrize("stream", [False, True])
def test_b172_answers_and_failures(api: StartApi, watched: Callable[[], str], stream: bool) -> None:
    late, early = Quoting(), Quoting()
    late.late = True
    statuses = []
    for options in (
        {},
        {"script": FakeScript(fail_at=1)},
        {"script": FakeScript(delay_s=0.5), "max_request_s": 0.2},
        {"engine": early},
        {"engine": late},
    ):
        running = api(**options)
        for path, body in (
            ("/v1/chat/completions", content(stream=stream)),
            ("/v1/completions", prompt(stream=stream)),
        ):
            client = running.connect()
            client.send(client.bytes_of("POST", path, body))
            data = b""
            while b"\r\n\r\n" not in data:
                data += client.receive()
            statuses.append(int(data[9:12]))
            client.sock.settimeout(0.4)
            try:
                data += client.rest()
            except TimeoutError:
                pass  # a whole answer leaves its connection open
            assert BYTES not in data
        running.wait_idle()
        assert BYTES not in running.connect(metrics=True).ask("GET", "/metrics").body
    assert statuses == ([200] * 6 + [500] * 2 + [200] * 2 if stream else [200] * 2 + [500] * 2 + [408] * 2 + [500] * 4)
    seen = watched()
    assert CANARY not in seen
    assert "Exception in ASGI application (ValueError)" in seen, "a fault is logged by its kind"


def test_b172_clients_that_leave_and_a_server_that_stops(api: StartApi, watched: Callable[[], str]) -> None:
    running = api(script=FakeScript(pieces=(b"x",) * 50, delay_s=0.05))
    for body, cut in ((content(stream=True), 0), (content(), 0), (content(), 9)):
        client = running.connect()
        request = client.bytes_of("POST", "/v1/chat/completions", body)
        client.send(request[: len(request) - cut])
        if b'"stream"' in body:
            client.receive()
        client.close()
    staying = running.connect()
    staying.send(staying.bytes_of("POST", "/v1/chat/completions", content(stream=True)))
    staying.receive()
    running.loop.call_soon_threadsafe(running.service.begin_shutdown)
    running.handles[0].stop()
    data = staying.rest()
    assert b'"shutting_down"' in data
    assert BYTES not in data
    running.stop()
    assert CANARY not in watched()


def test_the_canary_would_be_found(watched: Callable[[], str]) -> None:
    logging.getLogger("anybody").debug("%s", CANARY)
    assert CANARY in watched()


def test_an_internal_error_has_openai_shape_and_the_receipt_of_it_commits_to_the_bytes(api: StartApi) -> None:
    running = api(engine=Quoting())
    client = running.connect()
    reply = client.ask("POST", "/v1/chat/completions", content())
    assert reply.error == (500, "internal_error", None)
    kept = list(running.issuer.store._kept[None].values())
    claims, salt = reference.read_receipt(kept[0], running.cose_key)
    assert salt
    assert claims[-70013]["status"] == "error"
    reference.check_content(claims, salt, {"request": content(), "response": reply.body})
