"""What constrains the shape of an answer: `response_format` and tools, as a grammar and as what receipts commit to."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.api.schema import ChatCompletionRequest, ResponseFormat, Tool, ToolChoice, as_sent, encodable
from appliance.engine.chat import json_schema
from appliance.engine.chat import tools as engine_tools
from appliance.errors import BadRequest
from appliance.inference.request import CallRules, Shape

_SHOWN_KEYWORD_CHARS = 64


def shape(request: ChatCompletionRequest) -> Shape:
    """What the answer is held to. Raises BadRequest `unsupported_schema`, `conflicting_fields`, `missing_field`."""
    tools = request.tools or []
    if not tools:
        if request.tool_choice not in (None, "none", "auto"):
            raise BadRequest("conflicting_fields", "'tool_choice' needs 'tools'.", param="tool_choice")
        response_format, grammar = constrain(request.response_format)
        return Shape(
            response_format=response_format, grammar=grammar, parallel=request.parallel_tool_calls is not False
        )
    sent = [as_sent(tool) for tool in tools]
    encodable("tools", sent)
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise BadRequest("invalid_field", "Two tools have the same name.", param="tools")
    response_format, grammar = constrain(request.response_format)
    choice = request.tool_choice or "auto"
    parallel = request.parallel_tool_calls is not False
    calls = None
    if choice != "none":
        if grammar is not None:
            raise BadRequest("conflicting_fields", "'tools' and 'response_format' exclude each other.", param="tools")
        calls = _calls(tools, choice, parallel=parallel)
    return Shape(
        response_format=response_format,
        grammar=grammar,
        tools=sent,
        tool_choice=f"function:{choice.function.name}" if isinstance(choice, ToolChoice) else choice,
        parallel=parallel,
        calls=calls,
    )


def _calls(tools: Sequence[Tool], choice: str | ToolChoice, *, parallel: bool) -> CallRules:
    """Checked as a grammar in the common form: in what form a model calls has no part in what a schema may say."""
    usable = []
    for index, tool in enumerate(tools):
        parameters = {"type": "object"} if tool.function.parameters is None else tool.function.parameters
        wanted = not isinstance(choice, ToolChoice) or choice.function.name == tool.function.name
        param = f"tools[{index}].function.parameters"
        if parameters.get("type", "object") != "object":
            raise BadRequest("unsupported_schema", "The parameters of a function are an object.", param=param)
        try:
            engine_tools.grammar(
                [one := engine_tools.Tool(name=tool.function.name, parameters={"type": "object", **parameters})],
                optional=False,
                parallel=False,
            )
        except json_schema.SchemaRefused as refused:
            raise unsupported(refused, param) from None
        usable += [one] if wanted else []
    if not usable:
        raise BadRequest("invalid_field", "'tool_choice' names no tool of this request.", param="tool_choice")
    try:
        engine_tools.grammar(usable, optional=choice == "auto", parallel=parallel)
    except json_schema.SchemaRefused as refused:
        raise unsupported(refused, "tools") from None
    return CallRules(tools=tuple(usable), optional=choice == "auto", parallel=parallel)


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
