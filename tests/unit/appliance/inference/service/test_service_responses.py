"""Answers of /v1/responses against their receipts: whatever the model says, in whatever pieces, cut anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from client_sdk.checks import CheckLog
from client_sdk.receipts import comparisons
from client_sdk.routes import table
from client_sdk.routes.chat import AnswerContent
from client_sdk.routes.responses import ROUTE_RESPONSES, ResponseCollector, read_response
from client_sdk.wire import responses
from client_sdk.wire.receipt import ReceiptClaims
from tests import reference_decoder as reference
from tests.unit.appliance.inference.service.rig import RESPONSES, Rig, Wire
from tests.unit.appliance.inference.service.test_service_parts import BOTH, SPOKEN, rig


def ask(**fields: Any) -> bytes:
    tools = [{"type": "function", **tool["function"]} for tool in fields.pop("tools", ())]
    return json.dumps({"model": "fake", "input": "hi", **fields, **({"tools": tools} if tools else {})}).encode()


def judged(one: Rig, wire: Wire, content: AnswerContent) -> ReceiptClaims:
    """Raises VerificationError where the client would."""
    payload, _ = reference.read_sign1(one.receipts[-1], "receipt", one.cose_key)
    claims = ReceiptClaims.parse(payload)
    request = table.read_request(ROUTE_RESPONSES, wire.request)
    log, salt = CheckLog(), one.salt(one.receipts[-1])
    assert claims.decoding is not None
    assert request is not None
    comparisons.parameters(log, request, claims.decoding, salt)
    comparisons.output(log, claims, content, request, salt)
    assert content.stated == table.stated(ROUTE_RESPONSES, wire.request, claims.decoding)
    return claims


def streamed(wire: Wire) -> AnswerContent:
    collector = ResponseCollector()
    for frame in wire.frames:
        collector.add(json.dumps(frame).encode())
    return collector.content()


@BOTH
@pytest.mark.parametrize(("said", "form", "fields"), SPOKEN)
async def test_items_lead_back_to_what_was_generated(
    said: str, form: Mapping[str, Any], fields: Mapping[str, Any], size: int
) -> None:
    one, two = rig(said, size=size, **form), rig(said, size=size, **form)
    wire = await one.ask(ask(**fields), route=RESPONSES)
    content = read_response(json.dumps(wire.document).encode())
    claims = judged(one, wire, content)
    stream = await two.ask(ask(stream=True, **fields), route=RESPONSES)
    again = streamed(stream)
    judged(two, stream, again)
    assert (again.texts, again.calls, again.reasoning) == (content.texts, content.calls, content.reasoning)
    assert (again.finishes, again.reasoning_tokens) == (content.finishes, content.reasoning_tokens)
    assert content.reasoning_tokens == (claims.execution or {}).get("reasoning-tokens", 0)
    assert wire.document["status"] == "completed"


@pytest.mark.parametrize("limit", range(1, 40, 2))
@pytest.mark.parametrize(("said", "form", "fields"), SPOKEN)
async def test_any_cut_leads_back_too(
    said: str, form: Mapping[str, Any], fields: Mapping[str, Any], limit: int
) -> None:
    one, two = rig(said, size=2, **form), rig(said, size=2, **form)
    wire = await one.ask(ask(max_output_tokens=limit, **fields), route=RESPONSES)
    content = read_response(json.dumps(wire.document).encode())
    judged(one, wire, content)
    stream = await two.ask(ask(max_output_tokens=limit, stream=True, **fields), route=RESPONSES)
    again = streamed(stream)
    judged(two, stream, again)
    assert (again.texts, again.calls, again.finishes) == (content.texts, content.calls, content.finishes)


def test_items_of_answers_are_input_again() -> None:
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    user = {"role": "user", "content": "x"}
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}

    def messages(*items: Any) -> list[Any]:
        return [message for message, _ in responses.conversation({"input": list(items)})]

    assert messages(user, thought, said, user) == [user, turn, user]
    assert messages(user, thought, said, call) == [user, {**turn, "tool_calls": [called]}]
    assert messages(user, thought, call) == [user, {**turn, "content": None, "tool_calls": [called]}]
    assert messages(user, said, said)[1:] == [{"role": "assistant", "content": "yes"}] * 2
