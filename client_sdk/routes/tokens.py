"""Read answers of /v1/tokenize and /v1/detokenize, and hold them against what the receipt says of the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection
from client_sdk.routes.chat import AnswerContent, JsonReader, packed_tokens
from client_sdk.routes.commitment import commitment
from client_sdk.wire import names
from client_sdk.wire.receipt import ReceiptClaims

ROUTE_TOKENIZE = "/v1/tokenize"
ROUTE_DETOKENIZE = "/v1/detokenize"
ROUTES = frozenset({ROUTE_TOKENIZE, ROUTE_DETOKENIZE})

_SHOWN = {ROUTE_TOKENIZE: "tokens", ROUTE_DETOKENIZE: "prompt"}
_OBJECTS = {ROUTE_TOKENIZE: "tokenization", ROUTE_DETOKENIZE: "detokenization"}
_FIELDS = frozenset({"id", "object", "created", "model", "count", "max_model_len"})
_CODE = Rejection.OUTPUT_MISMATCH
_EXECUTION_CONTEXT = "context-length"


def read_tokens(route: str, body: bytes) -> AnswerContent:
    """A successful answer: nothing was generated. Raises MalformedError MALFORMED_RESPONSE."""
    reader = JsonReader(Rejection.MALFORMED_RESPONSE)
    fields = reader.record(reader.json(body), "answer")
    if fields.keys() != _FIELDS | {_SHOWN[route]} or fields["object"] != _OBJECTS[route]:
        reader.fail("the answer has other fields than it should")
    identifier, model = (reader.text_or_none(fields, key) for key in ("id", "model"))
    if identifier is None or model is None:
        reader.fail("id or model is missing")
    return AnswerContent(
        texts={0: ""},
        calls={},
        finishes={0: "length"},
        usage=(reader.count(fields, "count"), 0),
        response_ids=frozenset({identifier}),
        models=frozenset({model}),
    )


def request_as_prompt(request: Mapping[str, object]) -> dict[str, object]:
    """A request in the terms of receipts: tokens are a prompt."""
    return {("prompt" if name == "tokens" else name): value for name, value in request.items()}


def verify_tokens(
    log: CheckLog, claims: ReceiptClaims, route: str, request: Mapping[str, object], body: bytes, salt: bytes | None
) -> None:
    """The tokens and the text in the answer, and those in the request, are what the receipt commits to."""
    assert claims.prompt is not None
    reader = JsonReader(Rejection.MALFORMED_RESPONSE)
    with log.step("answer well formed"):
        answer = reader.record(reader.json(body), "answer")
    asked = request.get("prompt")
    tokens, text = (answer["tokens"], asked) if route == ROUTE_TOKENIZE else (asked, answer["prompt"])
    if type(text) is not str and not (text is None and request.get("messages") is not None):
        log.reject("prompt text", _CODE, "neither text nor messages")
    if type(text) is str:  # the text of rendered messages is the template's, and not told
        commitment(log, "prompt text", _CODE, salt, (names.LABEL_PROMPT_TEXT, _utf8(text), claims.prompt.text))
    packed = packed_tokens(tokens)
    if packed is None:
        log.reject("prompt tokens", _CODE, "the tokens are no list of token ids")
    log.equal("number of tokens", _CODE, expected=claims.prompt.count, actual=len(packed) // 4)
    commitment(log, "prompt tokens", _CODE, salt, (names.LABEL_PROMPT_TOKENS, packed, claims.prompt.tokens))
    stated = (claims.execution or {}).get(_EXECUTION_CONTEXT)
    log.equal("context length", _CODE, expected=stated, actual=answer["max_model_len"])


def _utf8(text: str) -> bytes:
    """Text that has no UTF-8 form matches no commitment."""
    return text.encode("utf-8", "surrogatepass")
