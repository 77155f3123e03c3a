"""What a caller gets who asks for vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from client_sdk.client.answers import check_request
from client_sdk.receipts.verify import VerifiedReceipt
from client_sdk.routes.embeddings import numbers_of, read_embeddings

Inputs: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A text, several texts, the token ids of one input, or of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """Verified vectors, in the order of the inputs, each of Euclidean length 1.

    `prompt_tokens` is how many tokens were evaluated, those that the model puts around an input included.
    """

    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    response_id: str
    receipt: VerifiedReceipt


def embedding_body(inputs: Inputs, *, model: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request. Numbers come in base64 unless `params` say otherwise. Raises RequestError."""
    listed: str | list[object] = inputs if isinstance(inputs, str) else [_plain(each) for each in inputs]
    body = {"model": model, "input": listed, "encoding_format": "base64", **params}
    check_request(body)
    return body


def _plain(item: str | int | Sequence[int]) -> object:
    return item if isinstance(item, str | int) else list(item)


def read_verified(body: bytes, receipt: VerifiedReceipt) -> Embeddings:
    """Read a verified answer. Raises MalformedError MALFORMED_RESPONSE."""
    content = read_embeddings(body)
    return Embeddings(
        vectors=tuple(numbers_of(vector) for vector in content.vectors),
        prompt_tokens=content.prompt_tokens,
        response_id=content.response_id,
        receipt=receipt,
    )
