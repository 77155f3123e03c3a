"""Which JSON belongs to which inference route: for the server, and for whoever makes an answer again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from appliance.api.dialects import ChatDialect, CompletionDialect
from appliance.api.embeddings import EmbeddingDialect
from appliance.api.responses import ResponsesDialect
from appliance.api.tokens import DetokenizeDialect, TokenizeDialect
from appliance.inference.embedding import VectorDialect
from appliance.inference.request import Dialect

DIALECTS: Final[Mapping[str, Callable[[], Dialect | VectorDialect]]] = {
    "/v1/chat/completions": ChatDialect,
    "/v1/completions": CompletionDialect,
    "/v1/responses": ResponsesDialect,
    "/v1/tokenize": TokenizeDialect,
    "/v1/detokenize": DetokenizeDialect,
    "/v1/embeddings": EmbeddingDialect,
}
