"""What a caller gets who asks for the tokens of a prompt, or for the text of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client_sdk.client.answers import Messages, check_request
from client_sdk.receipts.verify import VerifiedReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Verified: `tokens` are the ids, `text` what they say; None of a chat, whose text is the template's and not told.

    `context_length` is how many tokens the model takes, prompt and answer together.
    """

    tokens: tuple[int, ...]
    text: str | None
    context_length: int
    response_id: str
    receipt: VerifiedReceipt


def tokenize_body(prompt: Messages, *, model: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """The body of a request; a bare text is raw text, no chat. Raises RequestError."""
    body: dict[str, Any] = {"model": model}
    if isinstance(prompt, str):
        body["prompt"] = prompt
    else:
        body["messages"] = [dict(message) for message in prompt]
    if tools is not None:
        body["tools"] = [dict(tool) for tool in tools]
    check_request(body)
    return body


def detokenize_body(tokens: Sequence[int], *, model: str) -> dict[str, Any]:
    """The body of a request. Raises RequestError."""
    body: dict[str, Any] = {"model": model, "tokens": list(tokens)}
    check_request(body)
    return body


def read_tokenized(prompt: Messages, body: bytes, receipt: VerifiedReceipt) -> Tokens:
    """Read a verified answer of /v1/tokenize, whose form has been checked with its receipt."""
    answer = json.loads(body)
    text = prompt if isinstance(prompt, str) else None
    return _read(answer, answer["tokens"], text, receipt)


def read_detokenized(tokens: Sequence[int], body: bytes, receipt: VerifiedReceipt) -> Tokens:
    """Read a verified answer of /v1/detokenize, whose form has been checked with its receipt."""
    answer = json.loads(body)
    return _read(answer, tokens, answer["prompt"], receipt)


def _read(answer: Mapping[str, Any], tokens: Sequence[int], text: str | None, receipt: VerifiedReceipt) -> Tokens:
    return Tokens(
        tokens=tuple(tokens),
        text=text,
        context_length=answer["max_model_len"],
        response_id=answer["id"],
        receipt=receipt,
    )
