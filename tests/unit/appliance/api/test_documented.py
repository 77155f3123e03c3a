"""docs/api.md names every field there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.api.embeddings import EmbeddingRequest
from appliance.api.responses_schema import ResponsesRequest
from appliance.api.schema import ChatCompletionRequest, CompletionRequest, Message, StreamOptions
from appliance.api.tokens import DetokenizeRequest, TokenizeRequest

API = (Path(__file__).parents[4] / "docs" / "api.md").read_text(encoding="utf-8")


KINDS = [
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    EmbeddingRequest,
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_in_the_table(kind: type[ChatCompletionRequest]) -> None:
    missing = [name for name in kind.model_fields if not re.search(rf"[`.]{name}[`.\[]", API)]
    assert missing == []
