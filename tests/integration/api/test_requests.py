"""What the inference routes take and refuse, over TLS, with the receipt of every refusal."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.engine.generation.fake import FakeScript
from tests.integration.api.conftest import Client, Running, StartApi, chat

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def client(shared: Running) -> Iterator[Client]:
    with shared.connect() as client:
        yield client
    shared.wait_idle()


def post(client: Client, fields: dict[str, Any], path: str = CHAT) -> Any:
    base = {"model": "fake", "messages": MESSAGES} if path == CHAT else {"model": "fake", "prompt": "hi"}
    return client.ask("POST", path, json.dumps({**base, **fields}).encode())


BAD: list[tuple[str, Any, tuple[int, str, str | None]]] = [
    (CHAT, b"", (400, "invalid_json", None)),
    (CHAT, b"{", (400, "invalid_json", None)),
    (CHAT, b"[]", (400, "invalid_field", "(body)")),
    (CHAT, b"null", (400, "invalid_field", "(body)")),
    (CHAT, b'"x"', (400, "invalid_field", "(body)")),
    (CHAT, b"{} {}", (400, "invalid_json", None)),
    (CHAT, b"\xff", (400, "invalid_json", None)),
    (CHAT, b"\xef\xbb\xbf" + chat(), (400, "invalid_json", None)),
    (CHAT, chat().decode().encode("utf-16"), (400, "invalid_json", None)),
    (CHAT, b"[" * 20_000, (400, "invalid_json", None)),
    (CHAT, b'{"model":"fake","model":"fake","messages":[]}', (400, "invalid_json", None)),
    (CHAT, b'{"model":"fake","messages":[{"role":"user","role":"user","content":""}]}', (400, "invalid_json", None)),
    (CHAT, b'{"temperature":NaN}', (400, "invalid_json", None)),
    (CHAT, b'{"temperature":-Infinity}', (400, "invalid_json", None)),
    (CHAT, b'{"seed":' + b"9" * 5000 + b"}", (400, "invalid_json", None)),
    (CHAT, {"model": "gpt-4"}, (404, "model_not_found", "model")),
    (CHAT, {"model": 1}, (400, "invalid_field", "model")),
    (CHAT, {"model": ""}, (400, "invalid_field", "model")),
    (CHAT, {"messages": []}, (400, "invalid_field", "messages")),
    (CHAT, {"messages": "hi"}, (400, "invalid_field", "messages")),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, (400, "invalid_field", "messages[0].role")),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, (400, "invalid_field", "messages[0].tool_call_id")),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]},
        (400, "invalid_field", "messages[0].tool_call_id"),
    ),
    (CHAT, {"tool_choice": "required"}, (400, "conflicting_fields", "tool_choice")),
    (CHAT, {"tools": [TOOL, TOOL]}, (400, "invalid_field", "tools")),
    (CHAT, {"tools": [TOOL], "tool_choice": "any"}, (400, "invalid_field", "tool_choice")),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        (400, "invalid_field", "tool_choice"),
    ),
    (
        CHAT,
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
        (400, "conflicting_fields", "tools"),
    ),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"pattern": "x"}}}]},
        (400, "unsupported_schema", "tools[0].function.parameters"),
    ),
    (CHAT, {"messages": [{"role": "user"}]}, (400, "missing_field", "messages[0].content")),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": None}]}, (400, "invalid_field", "messages[1].content")),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        (400, "missing_field", "messages[0].content[0].text"),
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        (400, "invalid_field", "messages[0].content[0].type"),
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
        (400, "invalid_field", "messages[0].content[0].type"),
    ),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, (400, "invalid_field", "messages[0].content")),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, (400, "invalid_field", "messages[0].content")),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]},
        (400, "invalid_field", "messages[0].refusal"),
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]},
        (400, "invalid_field", "messages[0].audio"),
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]},
        (400, "invalid_field", "messages[0].reasoning_content"),
    ),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, (400, "invalid_json", None)),
    (TEXT, {"prompt": "\udc00\ud800"}, (400, "invalid_json", None)),
    (CHAT, {"\ud800": 1}, (400, "invalid_json", None)),
    (CHAT, {"metadata": {"\udfff": "x"}}, (400, "invalid_json", None)),
    (CHAT, {"response_format": {"type": "xml"}}, (400, "invalid_field", "response_format.type")),
    (CHAT, {"response_format": {"type": "json_schema"}}, (400, "missing_field", "response_format.json_schema")),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        (400, "invalid_field", "response_format.json_schema.name"),
    ),
    (CHAT, {"stream": "true"}, (400, "invalid_field", "stream")),
    (CHAT, {"stream": 1}, (400, "invalid_field", "stream")),
    (CHAT, {"stream_options": {"include_usage": True}}, (400, "conflicting_fields", "stream_options")),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 1}, (400, "conflicting_fields", "max_completion_tokens")),
    (CHAT, {"logprobs": 1}, (400, "invalid_field", "logprobs")),
    (CHAT, {"top_logprobs": 1}, (400, "conflicting_fields", "top_logprobs")),
    (CHAT, {"logprobs": False, "top_logprobs": 0}, (400, "conflicting_fields", "top_logprobs")),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, (400, "invalid_field", "top_logprobs")),
    (CHAT, {"user": 7}, (400, "invalid_field", "user")),
    (CHAT, {"metadata": {"a": 1}}, (400, "invalid_field", "metadata")),
    (CHAT, {"max_tokens": 4096}, (400, "context_length_exceeded", "max_tokens")),
    (TEXT, {"prompt": ""}, (400, "invalid_field", "prompt")),
    (TEXT, {"prompt": ["a", "b"]}, (400, "missing_field", "max_tokens")),
    (TEXT, {"prompt": []}, (400, "invalid_field", "prompt")),
    (TEXT, {"prompt": ["a", ""]}, (400, "invalid_field", "prompt")),
    (TEXT, {"prompt": ["a", 1]}, (400, "invalid_field", "prompt")),
    (TEXT, {"prompt": [-1]}, (400, "invalid_field", "prompt")),
    (TEXT, {"prompt": [True]}, (400, "invalid_field", "prompt")),
    (TEXT, {"prompt": [[]]}, (400, "invalid_field", "prompt")),
    (TEXT, {"prompt": ["a"] * 9, "max_tokens": 1}, (400, "invalid_field", "prompt")),
    (TEXT, {"prompt": ["a"] * 5, "n": 2, "max_tokens": 1}, (400, "conflicting_fields", "n")),
    (TEXT, {"prompt": "x" * 5000}, (400, "context_length_exceeded", "prompt")),
    (TEXT, {"echo": True, "prompt": [104]}, (400, "conflicting_fields", "echo")),
    (TEXT, {"echo": True, "suffix": "x"}, (400, "conflicting_fields", "echo")),
    (TEXT, {"suffix": "x", "prompt": [104]}, (400, "conflicting_fields", "suffix")),
    (TEXT, {"best_of": 2}, (400, "invalid_field", "best_of")),
    (TEXT, {"suffix": "x"}, (400, "suffix_not_supported", "suffix")),
    (TEXT, {"logprobs": True}, (400, "invalid_field", "logprobs")),
    (TEXT, {"top_logprobs": 1}, (400, "unknown_field", "top_logprobs")),
]


@pytest.mark.parametrize(("path", "content", "error"), BAD)
def test_b124_bad_requests(
    client: Client, shared: Running, path: str, content: Any, error: tuple[int, str, str | None]
) -> None:
    reply = client.ask("POST", path, content) if isinstance(content, bytes) else post(client, content, path)
    assert reply.error == error
    claims = shared.receipt(reply)
    assert (claims[-70013]["status"], claims[-70010]["complete"]) == ("refused", True)
    assert client.chat().status == 200, "the connection goes on"


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"functions": []}, "functions"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
    (CHAT, {"Temperature": 1}, "Temperature"),
    (CHAT, {"max_token": 1}, "max_token"),
    (CHAT, {"prompt": "x"}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
    (CHAT, {"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "x": 1}}, "stream_options.x"),
    (TEXT, {"messages": MESSAGES}, "messages"),
    (TEXT, {"grammar": "root ::= x"}, "grammar"),
    (CHAT, {"x" * 500: 1}, "(unprintable)"),
    (CHAT, {"\x00": 1}, "(unprintable)"),
    (CHAT, {"str": 1}, "str"),
]


@pytest.mark.parametrize(("path", "fields", "param"), UNKNOWN)
def test_b087_unknown_fields_are_refused_by_name_at_every_depth(
    client: Client, shared: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = post(client, fields, path)
    assert reply.error == (400, "unknown_field", param)
    shared.receipt(reply)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({}, True),
        ({"stop": None}, True),
        ({"stop": "x"}, True),
        ({"stop": ["x"]}, True),
        ({"stop": []}, True),
        ({"stop": ["a", "b", "c", "d"]}, True),
        ({"stop": "é" * 256}, True),
        ({"stop": ["a", "b", "c", "d", "e"]}, False),
        ({"stop": ""}, False),
        ({"stop": ["a", ""]}, False),
        ({"stop": "x" * 257}, False),
        ({"stop": 1}, False),
        ({"stop": [1]}, False),
        ({"stop": [["a"]]}, False),
        ({"stop": {"a": 1}}, False),
    ],
)
def test_b120_stop(client: Client, path: str, fields: dict[str, Any], accepted: bool) -> None:
    reply = post(client, fields, path)
    if accepted:
        assert reply.status == 200
    else:
        assert (reply.status, reply.error[1]) == (400, "invalid_field")
        assert (reply.error[2] or "").startswith("stop")


RANGES: list[tuple[str, list[str], list[str]]] = [
    ("temperature", ["0", "0.0", "2", "1.5", "null", "-0.0"], ["-0.1", "2.1", "1e6", "1e400", "-1e400", '"1"', "true"]),
    ("top_p", ["1", "1e-9", "null"], ["0", "-1", "1.01", "1e400", "true", "[]"]),
    ("top_k", ["0", "1048576", "null"], ["-1", "1048577", "1.0", "1e3", "true", '"1"']),
    ("seed", ["0", "4294967294", "null"], ["-1", "4294967295", "1e400", "1.5", "true", "9" * 4000]),
    ("max_tokens", ["1", "100", "null"], ["0", "-1", "1.0", "1e9", "1000000000", "true"]),
    ("n", ["1", "2", "8", "null"], ["0", "9", "5000000", "-1", "true", '"1"', "1e400", "1.0"]),
    ("presence_penalty", ["0", "0.1", "-2", "2", "null"], ["-2.1", "2.1", "1e308", "true", "false", '"0"']),
    ("frequency_penalty", ["0", "0.1", "-2", "2", "null"], ["2.1", "1e308", "true", '"0"']),
    ("repeat_penalty", ["1", "0.01", "10", "null"], ["0", "-1", "10.1", "1e400", "true"]),
    ("min_p", ["0", "0.05", "1", "null"], ["-0.1", "1.1", "1e400", "true"]),
    ("deterministic", ["true", "false", "null"], ["0", "1", '"true"']),
    ("logprobs", ["0", "20", "null"], ["-1", "21", "true", "1.0"]),
    ("echo", ["true", "false", "null"], ["0", '"false"']),
    ("best_of", ["1", "null"], ["2", "0", "true", "1.0"]),
    (
        "logit_bias",
        ["{}", "null", '{"1":1}', '{"0":-100,"49151":100.0}'],
        ['{"1":101}', '{"1":1e400}', '{"01":1}', '{"-1":1}', '{"x":1}', '{"1":true}', "[]", "0"],
    ),
]


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize(("name", "good", "bad"), RANGES)
def test_b134_b136_numbers(client: Client, name: str, good: list[str], bad: list[str], stream: str) -> None:
    head = f'{{"model":"fake","prompt":"hi","stream":{stream},"{name}":'
    for value in good:
        assert client.ask("POST", TEXT, f"{head}{value}}}".encode()).status == 200, value
    for value in bad:
        reply = client.ask("POST", TEXT, f"{head}{value}}}".encode())
        assert reply.status == 400, value
        assert (reply.error[1], (reply.error[2] or "").partition("[")[0].partition(".")[0]) == (
            "invalid_field",
            name,
        ), value


def test_b142_the_neutral_defaults_of_stock_clients(client: Client) -> None:
    langchain = {
        "n": 1,
        "temperature": 0.7,
        "top_p": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": None,
    }
    assert post(client, {**langchain, "user": "u", "logit_bias": {}, "stream": False}).status == 200
    assert (
        post(client, {**langchain, "best_of": 1, "echo": False, "logprobs": None, "suffix": None}, TEXT).status == 200
    )
    everything = {"logprobs": False, "response_format": {"type": "text"}, "metadata": {"k": "v"}, "seed": None}
    assert post(client, everything).status == 200
    assert client.chat(messages=[{"role": "user", "content": "\U0001f600 \\u"}]).status == 200
    options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert post(client, options).status == 200
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    roles = [{"role": role, "content": parts} for role in ("system", "developer", "user", "assistant")]
    assert post(client, {"messages": roles}).status == 200


@pytest.mark.parametrize(
    "media",
    ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", "application/jsonx", ""],
)
def test_b130_other_media_types_are_not_parsed(client: Client, shared: Running, media: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    head = client.bytes_of("POST", CHAT, b"", {"Content-Type": media, "Content-Length": str(100 << 20)})
    started = time.monotonic()
    client.send(head + b"a=" + b"x" * 65_536)
    reply = client.reply()
    assert reply.error == (413, "body_too_large", None) or reply.error == (415, "media_type", None)
    assert time.monotonic() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
    claims = shared.receipt(reply)
    assert (claims[-70010]["complete"], claims[-70010]["length"]) == (False, 0)


REPEATED: list[tuple[str, str, tuple[int, str, str | None], bool]] = [
    ("Content-Type: application/json", "Content-Type: text/plain", (400, "repeated_header", "content-type"), True),
    (
        "Content-Type: application/json",
        "Content-Type: application/json",
        (400, "repeated_header", "content-type"),
        True,
    ),
    ("Content-Encoding: identity", "Content-Encoding: gzip", (415, "content_encoding", None), True),
    ("X-Request-Timeout: 9", "X-Request-Timeout: 9", (400, "invalid_timeout", "x-request-timeout"), True),
    (
        "X-Inference-Nonce: " + "aa" * 8,
        "x-inference-nonce: " + "aa" * 8,
        (400, "invalid_nonce", "x-inference-nonce"),
        True,
    ),
    ("Authorization: Bearer a", "authorization: Bearer b", (400, "bad_request", None), False),
    ("Content-Length: 2", "Content-Length: 2", (400, "bad_request", None), False),
    ("Host: a", "Host: a", (400, "bad_request", None), False),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", (501, "not_implemented", None), False),
]


@pytest.mark.parametrize(("one", "two", "error", "receipted"), REPEATED)
def test_a_header_that_can_only_mean_one_thing_is_refused_where_it_comes_twice(
    shared: Running, one: str, two: str, error: tuple[int, str, str | None], receipted: bool
) -> None:
    """Two readers of the same request may each take another one of the two; the receipt could not say which counted.

    What makes the request no HTTP, or leaves open who asks, has no receipt.
    """
    lines = {"Host": "appliance", "Content-Type": "application/json", "Content-Length": str(len(chat()))}
    doubled = one.partition(":")[0].title()
    kept = [f"{name}: {value}" for name, value in lines.items() if name != doubled]
    if doubled == "Transfer-Encoding":
        kept = [line for line in kept if not line.startswith("Content-Length")]
    head = "\r\n".join([f"POST {CHAT} HTTP/1.1", *kept, one, two])
    with shared.connect() as client:
        client.send(f"{head}\r\n\r\n".encode() + chat())
        reply = client.reply()
        assert reply.error == error
        assert ("x-receipt-id" in reply.headers) is receipted
        if receipted:
            claims = shared.receipt(reply)
            assert (claims[-70013]["status"], claims[-70010]["length"]) == ("refused", 0)
        else:
            assert client.ended()
    shared.wait_idle()


def test_media_type_parameters_are_ignored(client: Client) -> None:
    for media in ("application/json; charset=utf-8", "Application/JSON"):
        assert client.ask("POST", CHAT, chat(), {"Content-Type": media}).status == 200


def test_b131_a_length_beyond_the_limit_is_refused_at_once(shared: Running) -> None:
    with shared.connect() as client:
        started = time.monotonic()
        client.send(client.bytes_of("POST", CHAT, b"", {"Content-Length": "10000000000"}) + b'{"model"')
        reply = client.reply()
        assert time.monotonic() - started < 1
        assert reply.error == (413, "body_too_large", None)
        assert reply.headers["connection"] == "close"
        assert shared.receipt(reply)[-70010]["length"] == 0
        assert client.ended()
    with shared.connect() as client:
        client.send(client.bytes_of("POST", CHAT, b"", {"Content-Length": "", "Transfer-Encoding": "chunked"}))
        for _ in range(3):
            client.send(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
        reply = client.reply()
        assert reply.error == (413, "body_too_large", None)
        assert 65_536 < shared.receipt(reply)[-70010]["length"] <= 3 * 0x8000


def test_no_continue_is_asked_for_a_body_that_is_refused(shared: Running) -> None:
    with shared.connect() as client:
        fields = {"Expect": "100-continue", "Content-Length": "10000000000"}
        client.send(client.bytes_of("POST", CHAT, b"", fields))
        assert client.receive().startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("method", "path", "error"),
    [
        ("POST", CHAT + "?x=1", (400, "query_not_supported", None)),
        ("GET", CHAT, (405, "method_not_allowed", None)),
        ("PUT", TEXT, (405, "method_not_allowed", None)),
        ("POST", "/v1/chat/completions/", (404, "route_not_found", None)),
        ("GET", "/v1/embeddings", (405, "method_not_allowed", None)),
        ("POST", "/v1/rerank", (404, "route_not_found", None)),
        ("GET", "/", (404, "route_not_found", None)),
        ("GET", "/docs", (404, "route_not_found", None)),
        ("GET", "/metrics", (404, "route_not_found", None)),
        ("GET", "/v1/receipts/xyz", (404, "receipt_not_found", None)),
    ],
)
def test_routes_that_are_not_there(
    client: Client, shared: Running, method: str, path: str, error: tuple[int, str, str | None]
) -> None:
    reply = client.ask(method, path, chat() if method == "POST" else b"")
    assert reply.error == error
    assert ("x-receipt-id" in reply.headers) is (error[0] == 400)


def test_429_has_retry_after_and_no_receipt(api: StartApi) -> None:
    running = api(script=FakeScript(delay_s=0.2), max_active=1)
    first, second = running.connect(), running.connect()
    first.send(first.bytes_of("POST", CHAT, chat(stream=True)))
    while b"data:" not in first.receive():
        pass
    reply = second.chat()
    assert reply.error == (429, "queue_full", None)
    assert reply.headers["retry-after"] == "1"
    assert "x-receipt-id" not in reply.headers
    first.close()
    running.wait_idle()
    assert second.chat().status == 200


def test_models(client: Client) -> None:
    reply = client.ask("GET", "/v1/models")
    assert reply.document == {
        "object": "list",
        "data": [{"id": "fake", "object": "model", "created": 1, "owned_by": "attested-inference"}],
    }


def test_a_client_that_leaves_stops_its_generation(api: StartApi) -> None:
    running = api(script=FakeScript(pieces=(b"x",) * 1000, delay_s=0.01))
    client = running.connect()
    client.send(client.bytes_of("POST", CHAT, chat(stream=True)))
    while b"data:" not in client.receive():
        pass
    client.close()
    running.wait_idle()
    assert running.engine.counters.cancelled == 1


def test_an_error_in_mid_stream_ends_the_connection(api: StartApi) -> None:
    running = api(script=FakeScript(fail_at=2))
    client = running.connect()
    reply = client.chat(stream=True)
    assert reply.status == 200
    assert b'"engine_failed"' in reply.body
    assert b"[DONE]" not in reply.body
    assert client.ended()
