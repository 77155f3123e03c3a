"""Who may do what, receipts for later, metrics."""

from __future__ import annotations

import re

import pytest

from appliance.engine.generation.fake import FakeScript
from tests import cddl
from tests import reference_decoder as reference
from tests.integration.api.conftest import Running, StartApi, chat

ROUTES = [
    ("GET", "/v1/models", "inference"),
    ("POST", "/v1/chat/completions", "inference"),
    ("POST", "/v1/completions", "inference"),
    ("GET", "/v1/attestation?nonce=" + "ab" * 32, "inference"),
    ("GET", "/v1/receipts/" + "ab" * 16, "receipts"),
    ("GET", "/metrics", "metrics"),
]


@pytest.fixture(scope="module")
def guarded() -> object:
    from tests.integration.api.conftest import Settings, start

    running = start(Settings(keys=True))
    yield running
    running.stop()


@pytest.mark.parametrize(("method", "path", "scope"), ROUTES)
def test_b183_every_v1_route_needs_a_key(guarded: Running, method: str, path: str, scope: str) -> None:
    body = chat() if method == "POST" else b""
    wrong = ["", "Bearer", "Bearer ", "Bearer x", "Basic " + guarded.keys["all"], f"Bearer {guarded.keys['old']}"]
    wrong += [
        "Bearer ai-" + "A" * 43,
        guarded.keys["all"],
        f"Bearer {guarded.keys['all']} x",
        f"Bearer {guarded.keys['all']}=",
    ]
    for value in wrong:
        with guarded.connect() as client:
            reply = client.ask(method, path, body, {"Authorization": value})
            assert reply.error == (401, "invalid_api_key", None), value
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "x-receipt-id" not in reply.headers
    for name in {"inference", "receipts", "metrics"} - {scope}:
        with guarded.connect(name) as client:
            reply = client.ask(method, path, body)
            assert reply.error == (403, "insufficient_scope", None)
    for name in (scope, "all"):
        with guarded.connect(name) as client:
            assert client.ask(method, path, body).status not in {401, 403}


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_b183_health_needs_none(guarded: Running, path: str) -> None:
    with guarded.connect() as client:
        assert client.ask("GET", path).status == 200
        client.attested()


def test_a_401_comes_before_the_body(guarded: Running) -> None:
    with guarded.connect() as client:
        client.send(client.bytes_of("POST", "/v1/chat/completions", b"", {"Content-Length": "1000"}))
        reply = client.reply()
        assert reply.error[0] == 401
        assert reply.headers["connection"] == "close"


def test_readyz_follows_the_engine_and_the_shutdown(api: StartApi) -> None:
    running = api()
    client = running.connect()
    assert client.ask("GET", "/readyz").body == b"ready\n"
    running.engine.ready = False
    assert client.ask("GET", "/readyz").status == 503
    assert client.ask("GET", "/healthz").body == b"alive\n"
    assert client.chat().error == (503, "engine_restarting", None)


# Receipts


def test_receipts_are_picked_up_by_whoever_asked(guarded: Running) -> None:
    with guarded.connect("all") as client, guarded.connect("other") as foreign, guarded.connect("receipts") as third:
        answer = client.chat()
        identifier = answer.headers["x-receipt-id"]
        for name in (identifier, identifier.upper(), answer.document["id"]):
            reply = client.ask("GET", f"/v1/receipts/{name}")
            assert (reply.status, reply.headers["content-type"]) == (200, "application/cose")
        cddl.validate("receipt", reply.body)
        claims, salt = reference.read_receipt(reply.body, guarded.cose_key)
        assert salt
        reference.check_content(claims, salt, {"request": chat(), "response": answer.body})
        unknown = client.ask("GET", f"/v1/receipts/{'0' * 32}")
        for other in (foreign, third):
            reply = other.ask("GET", f"/v1/receipts/{identifier}")
            assert (reply.status, reply.body) == (404, unknown.body), "foreign and unknown look the same"


def test_redact_leaves_the_salt_out_and_nothing_else(guarded: Running) -> None:
    with guarded.connect("all") as client:
        identifier = client.chat().headers["x-receipt-id"]
        whole = client.ask("GET", f"/v1/receipts/{identifier}").body
        bare = client.ask("GET", f"/v1/receipts/{identifier}?redact=1").body
        claims, salt = reference.read_receipt(bare, guarded.cose_key)
        assert (claims, salt) == (reference.read_receipt(whole)[0], None)
        assert reference.link(bare) == reference.link(whole)
        for query in ("redact=true", "redact=0", "redact", "Redact=1", "redact=1&redact=0", "x=1"):
            reply = client.ask("GET", f"/v1/receipts/{identifier}?{query}")
            assert reply.error == (400, "query_not_supported", "redact"), query


def test_pending_then_there_then_evicted(api: StartApi) -> None:
    running = api(script=FakeScript(delay_s=0.1), stored=2)
    client, other = running.connect(), running.connect()
    client.send(client.bytes_of("POST", "/v1/chat/completions", chat(stream=True)))
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.receive()
    found = re.search(rb"x-receipt-id: ([0-9a-f]{32})", data)
    assert found
    path = "/v1/receipts/" + found[1].decode()
    assert other.ask("GET", path).error == (409, "receipt_pending", None)
    while b"[DONE]" not in data:
        data += client.receive()
    assert other.ask("GET", path).status == 200, "without keys the identifier is the capability"
    for _ in range(2):
        other.chat(max_tokens=1)
    assert other.ask("GET", path).error == (404, "receipt_not_found", None)


@pytest.mark.parametrize(
    "name", ["", "x", "0" * 31, "0" * 33, "0" * 30 + "é", "+" + "0" * 31, "0x" + "0" * 30, "%30" * 32]
)
def test_odd_receipt_names(shared: Running, name: str) -> None:
    with shared.connect() as client:
        request = client.bytes_of("GET", f"/v1/receipts/{name}")
        client.send(request)
        assert client.reply("GET").status in {400, 404}


def test_chains_belong_to_connections_without_keys_and_to_keys_with_them(api: StartApi) -> None:
    open_, closed = api(), api(keys=True)
    chains: dict[str, list[tuple[bytes, int]]] = {}
    for running, keys in ((open_, ["", ""]), (closed, ["all", "all", "other"])):
        for index, key in enumerate(keys):
            client = running.connect(key or None)
            for _ in range(2):
                claims = running.receipt(client.chat())
                chains.setdefault(f"{key}{index}", []).append((claims[-70000], claims[-70001]))
    assert [n for _, n in chains["0"]] == [n for _, n in chains["1"]] == [0, 1]
    assert [n for _, n in chains["all0"] + chains["all1"]] == [0, 1, 2, 3]
    assert [n for _, n in chains["other2"]] == [0, 1]
    assert len({chain for pairs in chains.values() for chain, _ in pairs}) == 4


# Metrics


def test_the_metrics_listener_has_metrics_and_nothing_else(shared: Running) -> None:
    with shared.connect() as client:
        client.chat()
        client.attested()
    with shared.connect(metrics=True) as client:
        text = client.ask("GET", "/metrics").body.decode()
        assert 'appliance_answers_total{status="complete"}' in text
        assert 'appliance_attestations_total{form="full"}' in text
        assert set(re.findall(r"{([a-z]+)=", text)) == {"status", "form"}, "no labels that name anybody"
        for path in ("/v1/models", "/healthz", "/.well-known/attestation", "/v1/attestation?nonce=" + "ab" * 32):
            assert client.ask("GET", path).status == 404
        assert client.ask("POST", "/v1/chat/completions", chat()).status == 404


def test_401_is_counted(guarded: Running) -> None:
    with guarded.connect("metrics") as client:
        reply = client.ask("GET", "/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        assert b"appliance_unauthorized_total" in reply.body
