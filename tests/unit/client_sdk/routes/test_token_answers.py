"""Answers about tokens: what they count is what they list."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import VerificationError
from client_sdk.routes.tokens import ROUTE_DETOKENIZE, ROUTE_TOKENIZE, request_as_prompt, verify_tokens
from client_sdk.wire import digests, names
from client_sdk.wire.receipt import PromptFacts
from tests.simulators.attested import attested
from tests.simulators.insecure_appliance import seeded

SALT = seeded("salt")
TOKENS = [104, 105]


@pytest.mark.parametrize(
    ("route", "asked", "answer"),
    [
        (ROUTE_TOKENIZE, {"prompt": "hi"}, {"tokens": TOKENS}),
        (ROUTE_DETOKENIZE, {"tokens": TOKENS}, {"prompt": "hi"}),
    ],
)
def test_the_receipt_counts_the_tokens_that_are_there(
    route: str, asked: dict[str, object], answer: dict[str, object]
) -> None:
    prompt = PromptFacts(
        text=digests.commitment(SALT, names.LABEL_PROMPT_TEXT, b"hi"),
        tokens=digests.commitment(SALT, names.LABEL_PROMPT_TOKENS, struct.pack("<2I", *TOKENS)),
        count=2,
    )
    claims = replace(attested().answer().claims, prompt=prompt, execution={"context-length": 9})
    body = json.dumps({**answer, "max_model_len": 9}).encode()
    verify_tokens(CheckLog(), claims, route, request_as_prompt(asked), body, SALT)
    lie = replace(claims, prompt=replace(prompt, count=3))
    with pytest.raises(VerificationError) as caught:
        verify_tokens(CheckLog(), lie, route, request_as_prompt(asked), body, SALT)
    assert caught.value.checks[-1].name == "number of tokens"
