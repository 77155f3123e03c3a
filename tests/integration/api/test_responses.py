"""What /v1/responses, /v1/tokenize and /v1/detokenize take and refuse over TLS, with the receipt of every outcome."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.engine.generation.fake import FakeScript
from tests.integration.api.conftest import Client, Reply, Running, StartApi

RESPONSES, TOKENIZE, DETOKENIZE = "/v1/responses", "/v1/tokenize", "/v1/detokenize"
TOOL: dict[str, Any] = {"type": "function", "name": "f"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "1", "output": "x"}


@pytest.fixture
def client(shared: Running) -> Iterator[Client]:
    with shared.connect() as client:
        yield client
    shared.wait_idle()


def post(client: Client, path: str = RESPONSES, **fields: Any) -> Reply:
    base = {"input": "hi"} if path == RESPONSES else {}
    return client.ask("POST", path, json.dumps({"model": "fake", **base, **fields}).encode())


def message(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def schema(**fields: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "n", "schema": {}, **fields}}


ACCEPTED: list[dict[str, Any]] = [
    {"input": [message("x")]},
    {"input": [message([{"type": "input_text", "text": "x"}], type="message", id="m", status="completed")]},
    {"input": [message("x", "developer"), message("y", "system"), message("z")]},
    {"input": [message("x"), message([{"type": "output_text", "text": "y", "annotations": []}], "assistant")]},
    {"input": [message("x"), CALL, RESULT]},
    {"input": [message("x"), THOUGHT, message("y", "assistant"), {**THOUGHT, "id": "rs", "summary": []}, CALL, RESULT]},
    {"input": [message("x"), {**CALL, "id": "fc", "status": "completed"}, {**RESULT, "id": None}]},
    {"input": [message("x"), CALL, {**RESULT, "output": [{"type": "input_text", "text": "x"}]}]},
    {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s"},
    {"store": False, "background": False, "truncation": "disabled", "include": [], "top_logprobs": 0},
    dict.fromkeys(
        ("store", "background", "truncation", "include", "tools", "text", "reasoning", "conversation", "metadata")
    ),
    {"text": {"format": {"type": "text"}}},
    {"text": {"format": {"type": "text", "name": None}, "verbosity": None}},
    {"text": {"format": {"type": "json_object"}}},
    {"text": schema(strict=True, description="d")},
    {"tools": [{**TOOL, "strict": True, "description": None, "parameters": None}], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 7, "presence_penalty": 1, "logit_bias": {"7": 1}},
    {"max_output_tokens": 2, "deterministic": True, "prompt_cache_key": "k"},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", ACCEPTED, ids=[",".join(fields) for fields in ACCEPTED])
def test_what_is_taken(client: Client, shared: Running, fields: dict[str, Any], stream: bool) -> None:
    reply = post(client, stream=stream, **fields)
    assert reply.status == 200, reply.body
    if stream:
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.body.endswith(b"data: [DONE]\n\n")
        return
    document = reply.document
    assert (document["object"], document["store"]) == ("response", False)
    assert document["id"] == "resp_" + reply.headers["x-receipt-id"]
    claims = shared.receipt(reply)
    assert (claims[-70013]["status"], claims[-70010]["route"]) == ("complete", RESPONSES)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "invalid_field", "input"),
    ({"input": ""}, "invalid_field", "input"),
    ({"input": []}, "invalid_field", "input"),
    ({"input": ["x"]}, "invalid_field", "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "invalid_field", "input[0].type"),
    ({"input": [{"type": "reasoning"}]}, "missing_field", "input[0].content"),
    ({"input": [message("x"), THOUGHT]}, "invalid_field", "input[1].content"),
    ({"input": [message("x"), {**THOUGHT, "encrypted_content": "x"}]}, "invalid_field", "input[1].encrypted_content"),
    ({"input": [message("x"), {"type": "web_search_call"}]}, "invalid_field", "input[1].type"),
    ({"input": [message("x", "tool")]}, "invalid_field", "input[0].role"),
    ({"input": [message(None)]}, "invalid_field", "input[0].content"),
    ({"input": [message([])]}, "invalid_field", "input[0].content"),
    ({"input": [message([{"type": "input_image"}])]}, "invalid_field", "input[0].content[0].type"),
    ({"input": [message([{"type": "output_text", "text": "x"}])]}, "invalid_field", "input[0].content[0].type"),
    (
        {"input": [message([{"type": "input_text", "text": "x"}], "assistant")]},
        "invalid_field",
        "input[0].content[0].type",
    ),
    (
        {"input": [message([{"type": "refusal", "refusal": "x"}], "assistant")]},
        "invalid_field",
        "input[0].content[0].type",
    ),
    ({"input": [message("x", name="n")]}, "unknown_field", "input[0].name"),
    ({"input": [message("x"), RESULT]}, "invalid_field", "input[1].call_id"),
    ({"input": [message("x"), {**CALL, "name": "a b"}]}, "invalid_field", "input[1].name"),
    ({"instructions": ""}, "invalid_field", "instructions"),
    ({"instructions": [message("x")]}, "invalid_field", "instructions"),
    ({"instructions": "x" * 5000}, "context_length_exceeded", "input"),
    ({"max_output_tokens": 0}, "invalid_field", "max_output_tokens"),
    ({"max_output_tokens": 5000}, "context_length_exceeded", "max_output_tokens"),
    ({"max_tokens": 5}, "unknown_field", "max_tokens"),
    ({"max_completion_tokens": 5}, "unknown_field", "max_completion_tokens"),
    ({"messages": []}, "unknown_field", "messages"),
    ({"n": 2}, "unknown_field", "n"),
    ({"stop": "x"}, "unknown_field", "stop"),
    ({"response_format": {"type": "text"}}, "unknown_field", "response_format"),
    ({"text": {"format": {"type": "grammar"}}}, "invalid_field", "text.format.type"),
    ({"text": {"format": {"type": "text", "name": "n"}}}, "unknown_field", "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "missing_field", "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "missing_field", "text.format.name"),
    ({"text": schema(schema={"pattern": "x"})}, "unsupported_schema", "text.format.schema"),
    ({"text": {"verbosity": "low"}}, "invalid_field", "text.verbosity"),
    ({"tools": [{"type": "web_search"}]}, "invalid_field", "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "missing_field", "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "invalid_field", "tools"),
    ({"tools": [{**TOOL, "parameters": {"pattern": "x"}}]}, "unsupported_schema", "tools[0].parameters"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "invalid_field", "tool_choice"),
    ({"tools": [TOOL], "text": {"format": {"type": "json_object"}}}, "conflicting_fields", "tools"),
    ({"tool_choice": "required"}, "conflicting_fields", "tool_choice"),
    ({"store": True}, "invalid_field", "store"),
    ({"background": True}, "invalid_field", "background"),
    ({"truncation": "auto"}, "invalid_field", "truncation"),
    ({"include": ["reasoning.encrypted_content"]}, "invalid_field", "include"),
    ({"top_logprobs": 1}, "invalid_field", "top_logprobs"),
    ({"previous_response_id": "resp_1"}, "invalid_field", "previous_response_id"),
    ({"conversation": "c"}, "invalid_field", "conversation"),
    ({"prompt": {"id": "p"}}, "invalid_field", "prompt"),
    ({"reasoning": {"effort": "low"}}, "invalid_field", "reasoning"),
    ({"service_tier": "auto"}, "invalid_field", "service_tier"),
    ({"max_tool_calls": 1}, "invalid_field", "max_tool_calls"),
    ({"stream_options": {"include_usage": True}}, "conflicting_fields", "stream_options"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED)
def test_what_is_refused_is_named_in_the_requests_own_terms(
    client: Client, shared: Running, fields: dict[str, Any], code: str, param: str
) -> None:
    reply = post(client, **fields)
    assert reply.error == (400, code, param)
    assert shared.receipt(reply)[-70013]["status"] == "refused"


def test_what_answers_repeat_is_bounded(api: StartApi) -> None:
    running = api(max_body_bytes=1 << 20)
    with running.connect() as client:
        reply = post(client, tools=[{**TOOL, "parameters": {"type": "object", "description": "x" * (300 << 10)}}])
        assert reply.error == (400, "invalid_field", "instructions")


def test_the_chat_form_is_what_the_engine_gets(client: Client, shared: Running) -> None:
    post(client, instructions="s", input=[message("x"), CALL, RESULT, message("y")], temperature=0, seed=3)
    job = shared.engine.counters.jobs[-1]
    chat = {
        "messages": [
            message("s", "system"),
            message("x"),
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
            message("y"),
        ]
    }
    client.chat(**chat, temperature=0, seed=3)
    same = shared.engine.counters.jobs[-1]
    assert (job.prompt, job.sampling) == (same.prompt, same.sampling)


def test_a_stream_that_fails_ends_with_its_own_event(api: StartApi) -> None:
    running = api(script=FakeScript(fail_at=2))
    with running.connect() as client:
        reply = post(client, stream=True)
    events = [json.loads(line[6:]) for line in reply.body.decode().splitlines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "engine_failed"
    assert b"[DONE]" not in reply.body
    whole = running.connect()
    assert post(whole).error == (500, "engine_failed", None)


def test_obfuscation_hides_the_length_of_deltas(client: Client) -> None:
    reply = post(client, stream=True, stream_options={"include_obfuscation": True})
    frames = [block for block in reply.body.split(b"\n\n") if b"output_text.delta" in block]
    assert len(frames) == 3
    assert len({len(frame) for frame in frames}) == 1
    assert all(json.loads(frame[6:])["obfuscation"] for frame in frames)


@pytest.mark.parametrize(
    ("path", "fields", "key", "expected"),
    [
        (TOKENIZE, {"prompt": "hi"}, "tokens", [107, 108]),
        (TOKENIZE, {"prompt": None, "messages": [message("hi")], "tools": None}, "tokens", None),
        (TOKENIZE, {"prompt": "x" * 5000}, "count", 5000),
        (DETOKENIZE, {"tokens": [107, 108]}, "prompt", "hi"),
        (DETOKENIZE, {"tokens": [107, 258]}, "prompt", "h\ufffd"),
    ],
)
def test_tokens(client: Client, shared: Running, path: str, fields: dict[str, Any], key: str, expected: Any) -> None:
    before = shared.engine.counters.live
    reply = post(client, path, **fields)
    assert reply.status == 200, reply.body
    assert reply.document["max_model_len"] == 4096
    assert expected is None or reply.document[key] == expected
    claims = shared.receipt(reply)
    assert claims[-70011]["count"] == reply.document["count"]
    assert (claims[-70012]["max_tokens"], claims[-70014][0]["count"], claims[-70014][0]["finish"]) == (0, 0, "length")
    assert shared.engine.counters.live == before
