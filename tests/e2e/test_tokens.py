"""/v1/tokenize and /v1/detokenize: the tokens are those that answers are made from, and lies about them are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client_sdk import Appliance, ApplianceError, AsyncAppliance, Policy, Rejection, VerificationError
from client_sdk.client.answers import chat_body
from client_sdk.offline.saved import verify_saved
from client_sdk.receipts.verify import VerifiedReceipt
from tests.e2e.glass import GlassAppliance
from tests.e2e.programs import MODEL, Served
from tests.e2e.test_responses import resigned

pytestmark = pytest.mark.model
R = Rejection
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
QUESTION = "What is the capital of France? Ünïcödé 🙂"
TOOLS: Any = [{"type": "function", "function": {"name": "now", "description": "The time"}}]


@pytest.fixture(scope="module")
def appliance(server: Served, policy: Policy) -> Iterator[Appliance]:
    with Appliance(server.url, policy=policy) as appliance:
        yield appliance


def post(appliance: Appliance, route: str, **fields: Any) -> tuple[dict[str, Any], VerifiedReceipt]:
    response = appliance.http.post(route, json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json(), response.extensions["verified_receipt"]


def test_text_there_and_back(appliance: Appliance) -> None:
    there, receipt = post(appliance, TOKENIZE, prompt=QUESTION)
    assert set(there) == {"id", "object", "created", "model", "count", "max_model_len", "tokens"}
    assert there["count"] == len(there["tokens"]) > 5
    assert (receipt.claims.execution or {})["evaluated"] is False
    assert receipt.claims.output is not None
    assert [choice.count for choice in receipt.claims.output] == [0]
    assert {"prompt text", "prompt tokens", "context length"} <= {check.name for check in receipt.checks}
    back, _ = post(appliance, DETOKENIZE, tokens=there["tokens"])
    assert (back["prompt"], back["count"]) == (QUESTION, there["count"])


def test_tokens_are_those_that_an_answer_is_made_from(appliance: Appliance) -> None:
    """The same number as the answer is charged for, and as a prompt they give the very answer."""
    asked = chat_body(QUESTION, model=MODEL, stream=False, params={})
    for extra in ({}, {"tools": TOOLS}):
        told, _ = post(appliance, TOKENIZE, messages=asked["messages"], **extra)
        chat = appliance.http.post("/v1/chat/completions", json={**asked, **extra, "max_tokens": 1}).json()
        assert told["count"] == chat["usage"]["prompt_tokens"]
    told, _ = post(appliance, TOKENIZE, messages=asked["messages"])
    by_chat = appliance.chat(QUESTION, model=MODEL, temperature=0, max_tokens=8).text
    client = appliance.openai()
    by_ids = client.completions.create(model=MODEL, prompt=told["tokens"], temperature=0, max_tokens=8)
    assert by_ids.choices[0].text == by_chat
    raw, _ = post(appliance, TOKENIZE, prompt=QUESTION)
    plain = client.completions.create(model=MODEL, prompt=QUESTION, temperature=0, max_tokens=1)
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == raw["count"]


async def test_the_clients_own_methods(server: Served, policy: Policy, appliance: Appliance) -> None:
    there = appliance.tokenize(QUESTION, model=MODEL)
    back = appliance.detokenize(there.tokens, model=MODEL)
    assert (there.text, back.text, back.tokens) == (QUESTION, QUESTION, there.tokens)
    assert there.context_length == back.context_length > len(there.tokens)
    assert appliance.receipt_for(there.response_id) is there.receipt
    messages = [{"role": "user", "content": QUESTION}]
    chat = appliance.tokenize(messages, model=MODEL, tools=TOOLS)
    assert chat.text is None
    async with AsyncAppliance(server.url, policy=policy) as other:
        assert (await other.tokenize(messages, model=MODEL, tools=TOOLS)).tokens == chat.tokens
        assert (await other.detokenize(there.tokens, model=MODEL)).text == QUESTION
    with pytest.raises(ApplianceError) as caught:
        appliance.tokenize("", model=MODEL)
    assert (caught.value.code, caught.value.verified) == ("invalid_field", True)


def test_text_longer_than_the_context_is_counted(appliance: Appliance) -> None:
    told, _ = post(appliance, TOKENIZE, prompt="one two three four " * 4000)
    assert told["count"] > told["max_model_len"] > 0


def test_text_never_becomes_a_control_token(appliance: Appliance) -> None:
    told, _ = post(appliance, TOKENIZE, prompt="<|im_end|>")
    assert told["count"] > 1


@pytest.mark.parametrize(
    ("route", "fields", "code", "param"),
    [
        (TOKENIZE, {}, "conflicting_fields", "prompt"),
        (TOKENIZE, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "conflicting_fields", "prompt"),
        (TOKENIZE, {"prompt": "x", "tools": []}, "conflicting_fields", "tools"),
        (TOKENIZE, {"prompt": ""}, "invalid_field", "prompt"),
        (TOKENIZE, {"prompt": "x", "add_special_tokens": False}, "unknown_field", "add_special_tokens"),
        (TOKENIZE, {"messages": [{"role": "tool", "content": "x"}]}, "invalid_field", "messages[0].tool_call_id"),
        (DETOKENIZE, {}, "missing_field", "tokens"),
        (DETOKENIZE, {"tokens": []}, "invalid_field", "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "invalid_field", "tokens[0]"),
        (DETOKENIZE, {"tokens": ["x"]}, "invalid_field", "tokens[0]"),
        (DETOKENIZE, {"tokens": [1 << 30]}, "invalid_token", "tokens"),
    ],
)
def test_refusals_name_the_field_and_have_a_receipt(
    appliance: Appliance, route: str, fields: dict[str, Any], code: str, param: str
) -> None:
    response = appliance.http.post(route, json={"model": MODEL, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert response.extensions["verified_receipt"].claims.response.status == "refused"


def test_a_saved_answer_verifies_again(server: Served, policy: Policy, tmp_path: Path) -> None:
    with Appliance(server.url, policy=policy, save=tmp_path) as appliance:
        post(appliance, TOKENIZE, prompt=QUESTION)
    (saved,) = tmp_path.iterdir()
    assert verify_saved(saved, policy).receipt.opened


LIES: list[tuple[str, dict[str, Any], Callable[[Any], object], Rejection]] = [
    (TOKENIZE, {"prompt": "hi"}, lambda d: d["tokens"].append(1), R.OUTPUT_MISMATCH),
    (TOKENIZE, {"prompt": "hi"}, lambda d: d.update(tokens="x"), R.OUTPUT_MISMATCH),
    (TOKENIZE, {"prompt": "hi"}, lambda d: d.update(count=d["count"] + 1), R.OUTPUT_MISMATCH),
    (TOKENIZE, {"prompt": "hi"}, lambda d: d.update(max_model_len=1), R.OUTPUT_MISMATCH),
    (TOKENIZE, {"prompt": "hi"}, lambda d: d.update(model="other"), R.MODEL_MISMATCH),
    (TOKENIZE, {"prompt": "hi"}, lambda d: d.update(id="tok-" + "00" * 16), R.RECEIPT_ID_MISMATCH),
    (TOKENIZE, {"prompt": "hi"}, lambda d: d.update(text="x"), R.MALFORMED_RESPONSE),
    (DETOKENIZE, {"tokens": [100, 200]}, lambda d: d.update(prompt=d["prompt"] + "x"), R.OUTPUT_MISMATCH),
    (DETOKENIZE, {"tokens": [100, 200]}, lambda d: d.update(prompt=None), R.OUTPUT_MISMATCH),
    (DETOKENIZE, {"tokens": [100, 200]}, lambda d: d.update(prompt="\ud800"), R.OUTPUT_MISMATCH),
]


@pytest.mark.parametrize(("route", "fields", "change", "code"), LIES)
def test_a_signed_lie_is_found(
    glass: GlassAppliance,
    policy: Policy,
    route: str,
    fields: dict[str, Any],
    change: Callable[[Any], object],
    code: Rejection,
) -> None:
    glass.tamper = lambda sent: resigned(glass, sent, change)
    try:
        with Appliance(glass.url, policy=policy) as appliance, pytest.raises(VerificationError) as caught:
            appliance.http.post(route, json={"model": MODEL, **fields})
    finally:
        glass.tamper = None
    assert caught.value.code is code
