"""OpenAI's JSON for /v1/embeddings. The bytes made here are the bytes that receipts commit to."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from appliance.api.schema import Closed, PromptText, PromptTokens, parse
from appliance.engine.embedding.jobs import MAX_INPUTS, TextInput
from appliance.engine.types import TokenPrompt
from appliance.errors import ApplianceError
from appliance.inference.embedding import VectorCall
from appliance.inference.request import Heading
from client_sdk.wire.embedding import NUMBER_BYTES

_PREFIX = "embd-"


def _form(value: object) -> str:
    """Which form an input has, by its first element, so that a fault is told by its place in that form."""
    if not isinstance(value, list):
        return "str"
    first = value[0] if value else ""
    return "list[str]" if isinstance(first, str) else "list[list]" if isinstance(first, list) else "list[int]"


Inputs = Annotated[
    Annotated[PromptText, Tag("str")]
    | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_INPUTS), Tag("list[str]")]
    | Annotated[PromptTokens, Tag("list[int]")]
    | Annotated[list[PromptTokens], Field(min_length=1, max_length=MAX_INPUTS), Tag("list[list]")],
    Discriminator(_form),
]


class EmbeddingRequest(Closed):
    """`user` is bound by the commitment to the request; nothing else reads it."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None


class EmbeddingDialect:
    """/v1/embeddings"""

    def parse_inputs(self, body: bytes) -> VectorCall:
        """Raises BadRequest naming the field."""
        request = parse(EmbeddingRequest, body)
        return VectorCall(
            model=request.model,
            inputs=_inputs(request.input),
            dimensions=request.dimensions,
            encoding=request.encoding_format or "float",
        )

    def vectors(self, heading: Heading, call: VectorCall, vectors: Sequence[bytes], prompt_tokens: int) -> bytes:
        """See `embeddings.VectorDialect.vectors`."""
        write = _base64 if call.encoding == "base64" else _decimals
        data = ",".join(
            f'{{"object":"embedding","index":{index},"embedding":{write(numbers)}}}'
            for index, numbers in enumerate(vectors)
        )
        identifier, model = json.dumps(_PREFIX + heading.identifier), json.dumps(heading.model, ensure_ascii=False)
        return (
            f'{{"id":{identifier},"object":"list","data":[{data}],"model":{model},'
            f'"usage":{{"prompt_tokens":{prompt_tokens},"total_tokens":{prompt_tokens}}}}}'
        ).encode()

    def explain(self, error: ApplianceError) -> ApplianceError:
        return error

    def failure(self, heading: Heading, error: ApplianceError) -> bytes:
        raise AssertionError("vectors do not come in streams")


def _inputs(given: str | list[str] | list[int] | list[list[int]]) -> tuple[TextInput, ...]:
    if isinstance(given, str):
        return (given,)
    tokens = [item for item in given if isinstance(item, int)]
    if tokens:
        return (TokenPrompt(tokens=tuple(tokens)),)
    return tuple(TokenPrompt(tokens=tuple(item)) if isinstance(item, list) else str(item) for item in given)


def _base64(numbers: bytes) -> str:
    return f'"{base64.b64encode(numbers).decode()}"'


def _decimals(numbers: bytes) -> str:
    """Nine digits tell one float32 from the next, so that reading them gives the very bits."""
    values = struct.unpack(f"<{len(numbers) // NUMBER_BYTES}f", numbers)
    return f"[{','.join(repr(float(f'{value:.9g}')) for value in values)}]"
