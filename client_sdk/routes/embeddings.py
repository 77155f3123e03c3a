"""Read an answer of /v1/embeddings, as far as a receipt speaks of it: OpenAI-shaped JSON, numbers in either form."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from client_sdk.errors import MalformedError, Rejection
from client_sdk.routes.chat import load_request
from client_sdk.wire.embedding import NUMBER_BYTES

ROUTE_EMBEDDINGS = "/v1/embeddings"
MAX_VECTORS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingContent:
    """What the answer says. `vectors` are float32 little-endian, in the order of the inputs.

    `encoding` is the form they came in, "float" or "base64".
    """

    vectors: tuple[bytes, ...]
    encoding: str
    prompt_tokens: int
    total_tokens: int
    response_id: str
    model: str


def read_embeddings(body: bytes) -> EmbeddingContent:
    """Raises MalformedError MALFORMED_RESPONSE; messages never quote content."""
    answer = load_request(body)
    if answer is None:
        _fail("not a JSON object with distinct keys")
    listed = answer.get("data")
    if type(listed) is not list or not 1 <= len(listed) <= MAX_VECTORS:
        _fail(f"data is not a list of 1 to {MAX_VECTORS}")
    read = [_vector(item, index) for index, item in enumerate(listed)]
    encodings = {encoding for encoding, _ in read}
    if len(encodings) != 1:
        _fail("vectors come in two forms")
    usage = answer.get("usage")
    response_id, model = answer.get("id"), answer.get("model")
    if type(usage) is not dict or type(response_id) is not str or type(model) is not str:
        _fail("usage, id or model are missing")
    return EmbeddingContent(
        vectors=tuple(numbers for _, numbers in read),
        encoding=encodings.pop(),
        prompt_tokens=_count(usage, "prompt_tokens"),
        total_tokens=_count(usage, "total_tokens"),
        response_id=response_id,
        model=model,
    )


def numbers_of(vector: bytes) -> tuple[float, ...]:
    """A vector's numbers."""
    return struct.unpack(f"<{len(vector) // NUMBER_BYTES}f", vector)


def _vector(item: object, index: int) -> tuple[str, bytes]:
    """(encoding, float32 little-endian) of one entry, whose index has to be its place in the list."""
    if type(item) is not dict or type(item.get("index")) is not int or item["index"] != index:
        _fail("vectors are not numbered in order")
    given = item.get("embedding")
    if type(given) is str:
        try:
            numbers = base64.b64decode(given, validate=True)
        except (binascii.Error, ValueError):
            _fail("a vector is not base64")
        if not numbers or len(numbers) % NUMBER_BYTES:
            _fail("a vector is not a whole number of float32")
        return "base64", numbers
    if type(given) is not list or not given or not all(type(number) in (int, float) for number in given):
        _fail("a vector is not a list of numbers")
    try:
        return "float", struct.pack(f"<{len(given)}f", *given)
    except (OverflowError, struct.error):
        _fail("a number is none of float32")


def _count(usage: Mapping[str, object], key: str) -> int:
    number = usage.get(key)
    if type(number) is not int or number < 0:
        _fail(f"usage.{key} is not a count")
    return number


def _fail(message: str) -> NoReturn:
    raise MalformedError(Rejection.MALFORMED_RESPONSE, message)
