"""A null in a request is the same as no field, to the appliance and to the client that compares what it sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from appliance.api.dialects import ChatDialect, CompletionDialect
from appliance.api.schema import ChatCompletionRequest, CompletionRequest
from appliance.inference import sampling as decoding
from appliance.receipts.transcript import Subject
from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection, VerificationError
from client_sdk.receipts import comparisons

SUBJECT = Subject(cti=bytes(16), salt=bytes(range(32)), iat=1, eat_nonce=None, attestation=None, channel=None)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
FUNCTION = {"name": "f"}


def optional(kind: type[ChatCompletionRequest] | type[CompletionRequest]) -> list[str]:
    return sorted(field.alias or name for name, field in kind.model_fields.items() if not field.is_required())


def effective(request: Mapping[str, Any]) -> Mapping[str, object]:
    """The receipt's `decoding`, by the appliance; the client has compared it with the request."""
    dialect = ChatDialect() if "messages" in request else CompletionDialect()
    call = dialect.parse(json.dumps(request).encode())
    sampling = decoding.resolve(call, drawn_seed=7, deterministic=False)
    stated = decoding.claim(SUBJECT, call, sampling, sampling.max_tokens or 100)
    comparisons.parameters(CheckLog(), request, stated, SUBJECT.salt)
    return stated


@pytest.mark.parametrize("field", optional(ChatCompletionRequest))
def test_null_is_absent_in_chat(field: str) -> None:
    assert effective({**CHAT, field: None}) == effective(CHAT)


@pytest.mark.parametrize("field", optional(CompletionRequest))
def test_null_is_absent_in_completions(field: str) -> None:
    assert effective({**TEXT, field: None}) == effective(TEXT)


@pytest.mark.parametrize("field", [{}, {"echo": None}, {"echo": False}])
def test_an_echo_that_nobody_asked_for_is_rejected_however_nobody_did(field: dict[str, Any]) -> None:
    with pytest.raises(VerificationError) as caught:
        comparisons.parameters(CheckLog(), {**TEXT, **field}, {**effective(TEXT), "echo": True}, SUBJECT.salt)
    assert caught.value.code == Rejection.PARAMETER_MISMATCH


DEEP: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "text", "json_schema": None}}, {"response_format": {"type": "text"}}),
    ({"response_format": {"type": "text", "json_schema": None}}, {}),
    ({"stream": True, "stream_options": {"include_usage": None}}, {"stream": True}),
    ({"stream": True, "stream_options": {"include_obfuscation": None}}, {"stream": True, "stream_options": {}}),
    ({"logprobs": True, "top_logprobs": None}, {"logprobs": True}),
    ({"logprobs": None, "top_logprobs": None}, {"logprobs": False}),
    ({"max_tokens": None, "max_completion_tokens": 5}, {"max_completion_tokens": 5}),
    ({"tools": [], "tool_choice": None}, {}),
]


@pytest.mark.parametrize(("nulls", "absent"), DEEP)
def test_null_is_absent_at_every_depth(nulls: dict[str, Any], absent: dict[str, Any]) -> None:
    assert effective({**CHAT, **nulls}) == effective({**CHAT, **absent})


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "json_schema": None}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": None, "strict": None, "schema": {"type": "object"}},
            }
        },
        {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": None, "strict": None}}]},
        {"tools": [{"type": "function", "function": {**FUNCTION, "description": None}}], "tool_choice": None},
    ],
)
def test_nulls_in_what_a_receipt_commits_to_are_part_of_it(fields: dict[str, Any]) -> None:
    """Both sides commit to the value as it was sent, nulls included."""
    effective({**CHAT, **fields})
