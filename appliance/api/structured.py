"""What constrains the shape of an answer: `response_format`, as a grammar and as the value that receipts commit to."""

from __future__ import annotations

from appliance.api.schema import ResponseFormat, as_sent, encodable
from appliance.engine import json_schema
from appliance.errors import BadRequest

_SHOWN_KEYWORD_CHARS = 64


def constrain(wanted: ResponseFormat | None) -> tuple[object, str | None]:
    """(the format as sent, its grammar), both None for plain text. Raises BadRequest `unsupported_schema`."""
    named = wanted.json_schema if wanted is not None else None
    if wanted is not None and (named is not None) != (wanted.type == "json_schema"):
        kind = "missing_field" if named is None else "conflicting_fields"
        message = "'response_format.json_schema' belongs to the type json_schema, and to no other."
        raise BadRequest(kind, message, param="response_format.json_schema")
    if wanted is None or wanted.type == "text":
        return None, None
    sent = as_sent(wanted)
    encodable("response_format", sent)
    if named is None:
        return sent, json_schema.any_object()
    try:
        return sent, json_schema.grammar(named.schema_)
    except json_schema.SchemaRefused as refused:
        raise unsupported(refused, "response_format.json_schema.schema") from None


def unsupported(refused: json_schema.SchemaRefused, param: str) -> BadRequest:
    """Names the keyword, as unknown fields are named, and nothing else of the schema."""
    keyword = refused.keyword
    shown = keyword if keyword.isprintable() and len(keyword) <= _SHOWN_KEYWORD_CHARS else "(unprintable)"
    return BadRequest("unsupported_schema", f"The schema's keyword {shown!r}: {refused}.", param=param)
