"""/v1/embeddings over real sockets: keys, limits of time, receipts fetched again, and nothing of an input anywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from appliance.engine.embedding.fake import EmbeddingScript, FakeEmbedder
from tests.integration.api.conftest import Running, StartApi

ROUTE = "/v1/embeddings"
CANARY = "canary-51ce-never-to-be-seen"


def body(given: object = "hi", **fields: Any) -> bytes:
    return json.dumps({"model": "fake", "input": given, **fields}).encode()


@pytest.fixture
def vectors(api: StartApi) -> Callable[..., Running]:
    def begin(script: EmbeddingScript | None = None, **options: Any) -> Running:
        engine = FakeEmbedder(script)
        running = api(engine=engine, **options)
        running.service.models = {"fake": replace(running.service.models["fake"], embedder=engine)}
        return running

    return begin


def test_an_answer_and_its_receipt_again(vectors: Callable[..., Running]) -> None:
    running = vectors()
    with running.connect() as client:
        client.attested()
        reply = client.ask("POST", ROUTE, body(["a", "b"]))
        assert reply.status == 200
        claims = running.receipt(reply)
        assert claims[-70010]["route"] == ROUTE
        again = client.ask("GET", f"/v1/receipts/{reply.document['id']}")
        assert (again.status, again.headers["content-type"]) == (200, "application/cose")
    running.wait_idle()


def test_keys_need_the_scope_of_inference(vectors: Callable[..., Running]) -> None:
    running = vectors(keys=True)
    with running.connect() as client:
        assert client.ask("POST", ROUTE, body()).error == (401, "invalid_api_key", None)
        for label in ("metrics", "receipts"):
            reply = client.ask("POST", ROUTE, body(), key=running.keys[label])
            assert reply.status == 403
            assert "x-receipt-id" not in reply.headers
        assert client.ask("POST", ROUTE, body(), key=running.keys["inference"]).status == 200


def test_the_callers_own_deadline(vectors: Callable[..., Running]) -> None:
    running = vectors(EmbeddingScript(delay_s=5.0))
    with running.connect() as client:
        reply = client.ask("POST", ROUTE, body(), {"x-request-timeout": "0.1"})
        assert reply.error == (408, "deadline_exceeded", None)
        claims = running.receipt(reply)
        assert (claims[-70013]["status"], claims[-70017]["vectors"]) == ("deadline", None)
    running.wait_idle()


@pytest.mark.parametrize(
    ("request_body", "headers", "error"),
    [
        (body(), {"Content-Type": "text/plain"}, (415, "media_type", None)),
        (body(), {"Content-Encoding": "gzip"}, (415, "content_encoding", None)),
        (body("x" * 70_000), {}, (413, "body_too_large", None)),
        (b"{", {}, (400, "invalid_json", None)),
    ],
)
def test_the_rules_of_every_request_hold(
    vectors: Callable[..., Running], request_body: bytes, headers: dict[str, str], error: tuple[int, str, str | None]
) -> None:
    running = vectors()
    with running.connect() as client:
        reply = client.ask("POST", ROUTE, request_body, headers)
        assert reply.error == error
        assert running.receipt(reply)[-70013]["status"] == "refused"


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        (None, {}),
        (None, {"given": [CANARY, CANARY * 9]}),
        (None, {"model": CANARY}),
        (None, {"user": [CANARY]}),
        (None, {"encoding_format": CANARY}),
        (EmbeddingScript(fail_at=0), {}),
        (EmbeddingScript(drop=0), {}),
    ],
)
def test_no_input_reaches_a_log_an_error_or_the_metrics(
    vectors: Callable[..., Running],
    caplog: pytest.LogCaptureFixture,
    script: EmbeddingScript | None,
    fields: dict[str, Any],
) -> None:
    caplog.set_level(logging.DEBUG)
    running = vectors(script)
    with running.connect() as client:
        reply = client.ask("POST", ROUTE, body(**{"given": CANARY, **fields}))
    assert CANARY.encode() not in reply.body
    assert CANARY not in caplog.text
    assert CANARY.encode() not in running.service.metrics.render()
