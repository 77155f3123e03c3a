"""/v1/responses through the stock client, verified on receipt; and what becomes of answers that lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from client_sdk import Appliance, AsyncAppliance, Policy, Rejection, VerificationError
from client_sdk.offline.saved import verify_saved
from client_sdk.wire import cose, digests, names
from tests.e2e.evidence import Collected
from tests.e2e.glass import GlassAppliance, Sent
from tests.e2e.programs import MODEL, Served

pytestmark = pytest.mark.model
R = Rejection
QUESTION = "What is the capital of France?"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "get_weather", "description": "Weather", "parameters": CITY, "strict": True}


@pytest.fixture(scope="module")
def appliance(server: Served, policy: Policy, collected: Collected) -> Iterator[Appliance]:
    with Appliance(server.url, policy=policy, save=collected) as appliance:
        yield appliance


@pytest.fixture(scope="module")
def expected(appliance: Appliance) -> str:
    """What chat answers: one model, one path."""
    chat = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    return appliance.chat(QUESTION, **chat).text


def test_a_whole_answer_is_the_one_of_chat(appliance: Appliance, expected: str) -> None:
    response = appliance.openai().responses.create(input=QUESTION, **GREEDY)
    assert response.output_text == expected
    assert (response.status, response.model) == ("incomplete", MODEL)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    receipt = appliance.receipt_for(response.id)
    claims = receipt.claims
    assert claims.request.route == "/v1/responses"
    assert claims.prompt is not None
    assert claims.output is not None
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (claims.prompt.count, claims.output[0].count)
    assert {"output text 0", "request as repeated", "usage"} <= {check.name for check in receipt.checks}


def test_a_stream_is_the_same_answer(appliance: Appliance, expected: str) -> None:
    events = list(appliance.openai().responses.create(input=QUESTION, stream=True, **GREEDY))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == expected
    claims = appliance.receipt_for(last.response.id).claims
    assert claims.stream is not None
    assert claims.stream.frames == len(events)


async def test_the_async_client(server: Served, policy: Policy, expected: str) -> None:
    async with AsyncAppliance(server.url, policy=policy) as appliance:
        client = appliance.openai()
        assert (await client.responses.create(input=QUESTION, **GREEDY)).output_text == expected
        stream = await client.responses.create(input=QUESTION, stream=True, **GREEDY)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == expected


def test_instructions_and_earlier_turns_reach_the_model(appliance: Appliance) -> None:
    client = appliance.openai()
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "My name is Ada."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello Ada.", "annotations": []}]},
        {"role": "user", "content": "What is my name?"},
    ]
    response = client.responses.create(instructions="Be brief.", input=turns, metadata={"a": "b"}, **GREEDY)
    assert (response.instructions, response.metadata, response.store) == ("Be brief.", {"a": "b"}, False)
    chat = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=12,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": "Hello Ada."},
            {"role": "user", "content": "What is my name?"},
        ],
    )
    assert response.output_text == chat.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_functions_there_and_back(appliance: Appliance, stream: bool) -> None:
    client = appliance.openai()
    asked: dict[str, Any] = {**GREEDY, "max_output_tokens": 60, "tools": [TOOL], "input": "The weather in Paris?"}
    answer: Any = client.responses.create(
        tool_choice={"type": "function", "name": "get_weather"}, parallel_tool_calls=False, stream=stream, **asked
    )
    if stream:
        events = list(answer)
        answer = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == answer.output[0].arguments
    (call,) = answer.output
    assert (answer.status, call.type, call.name, call.status) == (
        "completed",
        "function_call",
        "get_weather",
        "completed",
    )
    jsonschema.validate(json.loads(call.arguments), CITY)
    decoding = appliance.receipt_for(answer.id).claims.decoding or {}
    assert (decoding["tool_choice"], decoding["parallel_tool_calls"]) == ("function:get_weather", False)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turns: Any = [{"role": "user", "content": "The weather in Paris?"}, call, result]
    assert client.responses.create(**{**asked, "input": turns, "max_output_tokens": 4}).usage is not None


def test_shaped_answers(appliance: Appliance) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    shape: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = appliance.openai().responses.create(input="A number?", text=shape, **{**GREEDY, "max_output_tokens": 40})
    jsonschema.validate(json.loads(response.output_text), schema)
    assert (appliance.receipt_for(response.id).claims.decoding or {})["response_format"] is not None


def test_what_needs_a_stored_answer_is_refused_by_name(appliance: Appliance) -> None:
    refused: list[dict[str, Any]] = [
        {"previous_response_id": "resp_1"},
        {"conversation": "c"},
        {"background": True},
        {"store": True},
        {"tools": [{"type": "web_search"}]},
    ]
    for fields in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            appliance.openai().responses.create(input="x", **GREEDY, **fields)
        (name,) = fields
        assert (caught.value.param or "").startswith(name)


@pytest.mark.parametrize("stream", [False, True])
def test_saved_answers_verify_again(server: Served, policy: Policy, tmp_path: Path, stream: bool) -> None:
    with Appliance(server.url, policy=policy, save=tmp_path) as appliance:
        answer: Any = appliance.openai().responses.create(input=QUESTION, stream=stream, **GREEDY)
        if stream:
            list(answer)
    (saved,) = tmp_path.iterdir()
    verified = verify_saved(saved, policy)
    assert verified.receipt.opened
    assert verified.receipt.claims.request.route == "/v1/responses"


def resigned(glass: GlassAppliance, sent: Sent, change: Callable[[Any], object]) -> Sent:
    """The answer changed, and a receipt over the change, by the attested key: the appliance itself lies."""
    document = json.loads(sent.body)
    change(document)
    body = json.dumps(document).encode()
    salt = cose.parse_sign1(sent.receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=1 << 16).salt
    assert salt is not None

    def sign_over(claims: dict[Any, Any]) -> None:
        commitment = digests.commitment(salt, names.LABEL_RESPONSE, body)
        claims[names.CLAIM_RESPONSE] |= {"length": len(body), "body": commitment}

    changed = Sent(status=sent.status, headers=sent.headers, body=body, streamed=False)
    changed = changed.with_header("content-length", str(len(body)))
    return changed.with_receipt(glass.resigned(sent.receipt, sign_over))


SIGNED_LIES: list[tuple[str, Callable[[Any], object], Rejection]] = [
    ("text", lambda d: d["output"][0]["content"][0].update(text="Rome."), R.OUTPUT_MISMATCH),
    ("a second part", lambda d: d["output"][0]["content"].append(d["output"][0]["content"][0]), R.MALFORMED_RESPONSE),
    ("a second message", lambda d: d["output"].append(d["output"][0]), R.MALFORMED_RESPONSE),
    ("no output", lambda d: d.update(output=[]), R.OUTPUT_MISMATCH),
    ("status", lambda d: d.update(status="completed", incomplete_details=None), R.MALFORMED_RESPONSE),
    (
        "usage",
        lambda d: d["usage"].update(output_tokens=11, total_tokens=d["usage"]["total_tokens"] - 1),
        R.OUTPUT_MISMATCH,
    ),
    ("id", lambda d: d.update(id="resp_" + "00" * 16), R.RECEIPT_ID_MISMATCH),
    ("model", lambda d: d.update(model="other"), R.MODEL_MISMATCH),
    ("temperature", lambda d: d.update(temperature=1.0), R.PARAMETER_MISMATCH),
    ("instructions", lambda d: d.update(instructions="Lie."), R.PARAMETER_MISMATCH),
    ("store", lambda d: d.update(store=True), R.PARAMETER_MISMATCH),
    ("tools", lambda d: d.update(tools=[TOOL]), R.PARAMETER_MISMATCH),
    ("a field of its own", lambda d: d.update(output_text="Rome."), R.MALFORMED_RESPONSE),
    (
        "a call",
        lambda d: d["output"].append(
            {"id": "a", "type": "function_call", "status": "completed", "call_id": "b", "name": "f", "arguments": "{}"}
        ),
        R.MALFORMED_RESPONSE,
    ),
]


@pytest.mark.parametrize(("name", "change", "code"), SIGNED_LIES, ids=[name for name, _, _ in SIGNED_LIES])
def test_a_signed_lie_is_found(
    glass: GlassAppliance, policy: Policy, name: str, change: Callable[[Any], object], code: Rejection
) -> None:
    glass.tamper = lambda sent: resigned(glass, sent, change)
    try:
        with Appliance(glass.url, policy=policy) as appliance, pytest.raises(VerificationError) as caught:
            appliance.openai().responses.create(input=QUESTION, **GREEDY)
    finally:
        glass.tamper = None
    assert caught.value.code is code, name


def test_a_changed_stream_is_found(glass: GlassAppliance, policy: Policy) -> None:
    def change(sent: Sent) -> Sent:
        blocks = sent.blocks
        index = next(i for i, block in enumerate(blocks) if b"output_text.done" in block)
        blocks[index] = blocks[index].replace(b'"text":"', b'"text":"x')
        return sent.with_blocks(blocks)

    glass.tamper = change
    try:
        with Appliance(glass.url, policy=policy) as appliance, pytest.raises(VerificationError) as caught:
            list(appliance.openai().responses.create(input=QUESTION, stream=True, **GREEDY))
    finally:
        glass.tamper = None
    assert caught.value.code is R.MALFORMED_STREAM


@pytest.mark.parametrize(("stream", "code"), [(False, R.RESPONSE_MISMATCH), (True, R.STREAM_CHAIN_MISMATCH)])
def test_a_changed_byte_is_found(glass: GlassAppliance, policy: Policy, stream: bool, code: Rejection) -> None:
    def change(sent: Sent) -> Sent:
        body = sent.body.replace(b'"created_at":1', b'"created_at":2')
        return Sent(status=sent.status, headers=sent.headers, body=body, streamed=sent.streamed)

    def ask(appliance: Appliance) -> None:
        list(appliance.openai().responses.create(input=QUESTION, stream=stream, **GREEDY))

    glass.tamper = change
    try:
        with Appliance(glass.url, policy=policy) as appliance, pytest.raises(VerificationError) as caught:
            ask(appliance)
    finally:
        glass.tamper = None
    assert caught.value.code is code
