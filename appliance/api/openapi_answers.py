"""JSON Schemas of what the routes answer. Closed like the requests: a field that is not here is never sent."""

from __future__ import annotations

from typing import Any

from client_sdk.wire import responses as wire

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def const(value: object) -> Schema:
    return {"const": value}


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def closed(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": sorted(required),
        "additionalProperties": False,
    }


def _identifier(prefix: str) -> Schema:
    return {"type": "string", "pattern": f"^{prefix}[0-9a-f]{{32}}$"}


_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
_CALLED = closed({"name": TEXT, "arguments": TEXT})
_CALL = closed({"id": TEXT, "type": const("function"), "function": _CALLED})
_LOGPROB = closed({"token": TEXT, "logprob": NUMBER, "bytes": listed(COUNT)})
_CHAT_LOGPROBS = closed(
    {
        "content": listed(
            closed({"token": TEXT, "logprob": NUMBER, "bytes": listed(COUNT), "top_logprobs": listed(_LOGPROB)})
        ),
        "refusal": NULL,
    }
)
_TOP: Schema = {"type": "object", "additionalProperties": NUMBER}
_TEXT_LOGPROBS = closed(
    {
        "tokens": listed(TEXT),
        "token_logprobs": listed(or_null(NUMBER)),
        "top_logprobs": listed(or_null(_TOP)),
        "text_offset": listed(COUNT),
    }
)
_USAGE = closed(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": closed({"cached_tokens": COUNT}),
        "completion_tokens_details": closed(
            {"reasoning_tokens": COUNT, "accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT}
        ),
    }
)
_ENVELOPE: dict[str, Schema] = {"created": COUNT, "model": TEXT}
_ITEM_STATUS: Schema = {"enum": [wire.STATUS_COMPLETED, wire.STATUS_INCOMPLETE]}
_PART = closed({"type": const("output_text"), "text": TEXT, "annotations": listed(TEXT), "logprobs": listed(TEXT)})
_REASONING_ITEM = closed(
    {
        "id": _identifier("rs_"),
        "type": const("reasoning"),
        "status": _ITEM_STATUS,
        "summary": {"type": "array", "maxItems": 0},
        "content": listed(closed({"type": const("reasoning_text"), "text": TEXT})),
    }
)
_MESSAGE_ITEM = closed(
    {
        "id": _identifier("msg_"),
        "type": const("message"),
        "status": _ITEM_STATUS,
        "role": const("assistant"),
        "content": listed(_PART),
    }
)
_CALL_ITEM = closed(
    {
        "id": TEXT,
        "type": const("function_call"),
        "status": _ITEM_STATUS,
        "call_id": TEXT,
        "name": TEXT,
        "arguments": TEXT,
    }
)
_RESPONSE_USAGE = closed(
    {
        "input_tokens": COUNT,
        "input_tokens_details": closed({"cached_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": closed({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
# As in the request, or the default.
_STATED: dict[str, Schema] = {name: {} for name in wire.stated({})}
_TOKENS: dict[str, Schema] = {**_ENVELOPE, "count": COUNT, "max_model_len": COUNT}


ANSWERS: dict[str, Schema] = {
    "Error": closed(
        {"error": closed({"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": TEXT})},
    ),
    "ChatCompletion": closed(
        {
            "id": _identifier("chatcmpl-"),
            "object": const("chat.completion"),
            **_ENVELOPE,
            "choices": listed(
                closed(
                    {
                        "index": COUNT,
                        "message": closed(
                            {"role": const("assistant"), "content": or_null(TEXT), "refusal": NULL},
                            {"reasoning_content": TEXT, "tool_calls": listed(_CALL)},
                        ),
                        "logprobs": or_null(_CHAT_LOGPROBS),
                        "finish_reason": _FINISH,
                    }
                )
            ),
            "usage": _USAGE,
        }
    ),
    "Completion": closed(
        {
            "id": _identifier("cmpl-"),
            "object": const("text_completion"),
            **_ENVELOPE,
            "choices": listed(
                closed({"index": COUNT, "text": TEXT, "logprobs": or_null(_TEXT_LOGPROBS), "finish_reason": _FINISH})
            ),
            "usage": _USAGE,
        }
    ),
    "Response": closed(
        {
            **_STATED,
            "id": _identifier("resp_"),
            "object": const(wire.OBJECT),
            "created_at": COUNT,
            "status": {"enum": [wire.STATUS_COMPLETED, wire.STATUS_INCOMPLETE]},
            "error": NULL,
            "incomplete_details": or_null(closed({"reason": const(wire.REASON_LENGTH)})),
            "model": TEXT,
            "output": listed({"anyOf": [_REASONING_ITEM, _MESSAGE_ITEM, _CALL_ITEM]}),
            "store": const(False),
            "temperature": NUMBER,
            "top_p": NUMBER,
            "usage": _RESPONSE_USAGE,
        }
    ),
    "Embeddings": closed(
        {
            "id": _identifier("embd-"),
            "object": const("list"),
            "model": TEXT,
            "data": listed(
                closed(
                    {
                        "object": const("embedding"),
                        "index": COUNT,
                        "embedding": {"anyOf": [listed(NUMBER), {"type": "string", "contentEncoding": "base64"}]},
                    }
                )
            ),
            "usage": closed({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "Tokenization": closed(
        {"id": _identifier("tok-"), "object": const("tokenization"), **_TOKENS, "tokens": listed(COUNT)}
    ),
    "Detokenization": closed(
        {"id": _identifier("detok-"), "object": const("detokenization"), **_TOKENS, "prompt": TEXT}
    ),
    "Models": closed(
        {
            "object": const("list"),
            "data": listed(
                closed(
                    {
                        "id": TEXT,
                        "object": const("model"),
                        "created": COUNT,
                        "owned_by": const("attested-inference"),
                    }
                )
            ),
        }
    ),
    "Attestation": closed(
        {
            "claims": TEXT,
            "evidence": listed(listed(TEXT)),
            "channel-proof": TEXT,
            "endorsements": listed(listed(TEXT)),
            "event-logs": listed(listed(TEXT)),
        }
    ),
}
"""Component schemas by name."""
