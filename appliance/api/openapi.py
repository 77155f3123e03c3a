"""The OpenAPI description of the HTTP surface, made from the very classes that read requests. It depends on no setting.

OpenAPI 3.1, whose schemas are JSON Schema 2020-12.
"""

from __future__ import annotations

import functools
import json

from pydantic.json_schema import models_json_schema

from appliance.api.embeddings import EmbeddingRequest
from appliance.api.openapi_answers import ANSWERS, COUNT, NULL, TEXT, Schema, const, ref
from appliance.api.responses_schema import ITEMS, ResponsesRequest
from appliance.api.schema import ChatCompletionRequest, Closed, CompletionRequest
from appliance.api.tokens import DetokenizeRequest, TokenizeRequest
from client_sdk.wire import names

VERSION = "3.1.0"
PATH = "/openapi.json"

_REQUESTS: dict[str, tuple[type[Closed], str, str]] = {
    "/v1/chat/completions": (ChatCompletionRequest, "ChatCompletion", "Answer a chat"),
    "/v1/completions": (CompletionRequest, "Completion", "Continue a text"),
    "/v1/responses": (ResponsesRequest, "Response", "Answer as the Responses API does, without state"),
    "/v1/embeddings": (EmbeddingRequest, "Embeddings", "Vectors of texts"),
    "/v1/tokenize": (TokenizeRequest, "Tokenization", "The tokens of a prompt"),
    "/v1/detokenize": (DetokenizeRequest, "Detokenization", "The text of tokens"),
}
_STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
# Before OpenAPI 3.2 the schema of this media type is one event's.
_EVENT: Schema = {
    "type": "object",
    "description": "One server-sent event: a JSON object, the last one [DONE]. Comments between events carry "
    "checkpoints and the receipt (docs/receipt-format.md).",
    "properties": {"data": TEXT, "event": const("message")},
    "required": ["data"],
}
_KEYED: list[Schema] = [{"key": []}, {}]
_MEANING = {
    400: "A field, a header or the query is refused; `param` names it.",
    401: "No valid API key.",
    403: "The key lacks the scope.",
    404: "There is no such thing here.",
    405: "The route does not take that method.",
    408: "The time allowed is over.",
    409: "The answer has not ended yet.",
    413: "The body is too large.",
    415: "The body must be application/json, and not encoded.",
    429: "All places are taken.",
    500: "A fault of the appliance.",
    503: "Not able to serve now.",
}


@functools.cache
def document_bytes() -> bytes:
    """The description as UTF-8 JSON, as it is served and as docs/openapi.json has it."""
    return (json.dumps(document(), indent=1, ensure_ascii=False) + "\n").encode()


def document() -> Schema:
    """The description as a JSON value."""
    kinds: list[type[Closed]] = [kind for kind, _, _ in _REQUESTS.values()]
    _, made = models_json_schema(
        [(kind, "validation") for kind in (*kinds, *ITEMS)], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Schema] = made["$defs"]
    _describe_items(schemas["ResponsesRequest"])
    schemas["Message"]["anyOf"] = _MESSAGES
    schemas["TextFormat"]["oneOf"] = _FORMATS
    schemas["TokenizeRequest"]["oneOf"] = [
        {"properties": {"prompt": TEXT, "messages": NULL, "tools": NULL}, "required": ["prompt"]},
        {"properties": {"prompt": NULL, "messages": {"type": "array"}}, "required": ["messages"]},
    ]
    return {
        "openapi": VERSION,
        "info": {
            "title": "Attested inference",
            "version": "1",
            "description": "Confidential inference with a signed receipt for every answer. A client that verifies is "
            "part of this project; what is described here is what any HTTP client sees.",
        },
        "paths": _paths(),
        "components": {
            "schemas": {**schemas, **ANSWERS},
            "headers": _headers(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


# What belongs to which role is checked by `conversation`, behind the class.
_NO_CALLS: Schema = {"tool_calls": NULL, "tool_call_id": NULL}
_GIVEN: Schema = {"type": ["string", "array"]}
_MESSAGES: list[Schema] = [
    {
        "properties": {"role": {"enum": ["system", "developer", "user"]}, "content": _GIVEN, **_NO_CALLS},
        "required": ["role", "content"],
    },
    {
        "properties": {"role": const("assistant"), "content": _GIVEN, "tool_call_id": NULL},
        "required": ["role", "content"],
    },
    {
        "properties": {
            "role": const("assistant"),
            "tool_calls": {"type": "array", "minItems": 1},
            "tool_call_id": NULL,
        },
        "required": ["role", "tool_calls"],
    },
    {
        "properties": {"role": const("tool"), "content": _GIVEN, "tool_call_id": TEXT, "tool_calls": NULL},
        "required": ["role", "content", "tool_call_id"],
    },
]


_FORMATS: list[Schema] = [
    {
        "properties": {
            "type": {"enum": ["text", "json_object"]},
            **dict.fromkeys(("name", "description", "schema", "strict"), NULL),
        }
    },
    {
        "properties": {"type": const("json_schema"), "name": TEXT, "schema": {"type": "object"}},
        "required": ["name", "schema"],
    },
]


def _describe_items(request: Schema) -> None:
    """The items of `input` are read one by one, each by its own class."""
    for form in request["properties"]["input"]["oneOf"]:
        if form["type"] == "array":
            form["items"] = {"anyOf": [ref(kind.__name__) for kind in ITEMS]}


def _headers() -> Schema:
    return {
        "ReceiptId": {
            "description": "Names the receipt of this answer.",
            "required": True,
            "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
        },
        "Receipt": {
            "description": "The receipt of a whole answer, base64url of COSE_Sign1, where it fits into a header.",
            "schema": TEXT,
        },
        "RetryAfter": {"description": "Seconds.", "schema": COUNT},
    }


def _paths() -> Schema:
    paths: Schema = {path: {"post": _inference(path)} for path in _REQUESTS}
    paths["/v1/models"] = {"get": _operation("List the models", _json("Models"), (401, 403, 405, 500), keyed=True)}
    paths[names.PATH_RECEIPTS + "{identifier}"] = {"get": _receipt()}
    paths[names.PATH_ATTESTATION_JSON] = {"get": _shown_attestation()}
    paths[names.PATH_ATTESTATION] = {"post": _attestation()}
    text = {"text/plain": {"schema": TEXT}}
    paths["/healthz"] = {"get": _operation("Whether the process lives", text, (405, 500))}
    ready = _operation("Whether requests would be answered", text, (405, 500))
    ready["responses"] |= {"503": {"description": "Not now.", "content": text}}
    paths["/readyz"] = {"get": ready}
    paths["/metrics"] = {"get": _operation("Metrics for Prometheus", text, (401, 403, 404, 405, 500), keyed=True)}
    paths[PATH] = {"get": _operation("This description", {names.MEDIA_JSON: {"schema": {}}}, (405, 500))}
    return paths


def _inference(path: str) -> Schema:
    kind, answer, summary = _REQUESTS[path]
    content = _json(answer)
    if path in _STREAMED:
        content[names.MEDIA_EVENT_STREAM] = {"schema": _EVENT}
    operation = _operation(summary, content, (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503), keyed=True)
    receipt = {name: {"$ref": f"#/components/headers/{part}"} for name, part in _RECEIPT_HEADERS.items()}
    operation["responses"]["200"]["headers"] = receipt
    operation["parameters"] = [
        _header(names.HEADER_INFERENCE_NONCE, "^([0-9a-fA-F]{2}){8,64}$", "Echoed in the receipt."),
        _header(
            names.HEADER_REQUEST_TIMEOUT, r"^(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,6})?$", "Seconds the answer may take."
        ),
    ]
    operation["requestBody"] = {"required": True, "content": {names.MEDIA_JSON: {"schema": ref(kind.__name__)}}}
    return operation


_RECEIPT_HEADERS = {names.HEADER_RECEIPT_ID: "ReceiptId", names.HEADER_EXECUTION_RECEIPT: "Receipt"}


def _receipt() -> Schema:
    content = {names.MEDIA_COSE: {"schema": {"type": "string", "format": "binary"}}}
    operation = _operation("A receipt again", content, (400, 401, 403, 404, 405, 409, 500), keyed=True)
    operation["parameters"] = [
        {
            "name": "identifier",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": "^([a-z]{1,16}[-_])?[0-9a-fA-F]{32}$"},
        },
        {"name": "redact", "in": "query", "required": False, "schema": {"type": "string", "enum": ["1"]}},
    ]
    return operation


def _shown_attestation() -> Schema:
    operation = _operation(
        "Attestation for people; never in force", _json("Attestation"), (400, 401, 403, 405, 429, 500, 503), keyed=True
    )
    operation["parameters"] = [
        {
            "name": "nonce",
            "in": "query",
            "required": True,
            "schema": {"type": "string", "pattern": "^[0-9a-fA-F]{64}$", "not": {"const": "0" * 64}},
        }
    ]
    return operation


def _attestation() -> Schema:
    binary = {names.MEDIA_CBOR: {"schema": {"type": "string", "format": "binary"}}}
    operation = _operation("Attestation for programs, docs/receipt-format.md", binary, (400, 405, 413, 429, 500, 503))
    operation["requestBody"] = {"required": True, "content": binary}
    return operation


def _operation(summary: str, content: Schema, errors: tuple[int, ...], *, keyed: bool = False) -> Schema:
    answers: dict[str, Schema] = {"200": {"description": summary + ".", "content": content}}
    for status in errors:
        answer: Schema = {"description": _MEANING[status], "content": _json("Error")}
        if status in (429, 503):
            answer["headers"] = {"retry-after": {"$ref": "#/components/headers/RetryAfter"}}
        answers[str(status)] = answer
    return {"summary": summary, "responses": answers, **({"security": _KEYED} if keyed else {})}


def _json(answer: str) -> Schema:
    return {names.MEDIA_JSON: {"schema": ref(answer)}}


def _header(name: str, pattern: str, description: str) -> Schema:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": {"type": "string", "pattern": pattern},
    }
