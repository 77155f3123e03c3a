"""/v1/responses in the terms of /v1/chat/completions. Both sides must agree: receipts speak of the chat form, answers
of the request's own.

Pure functions of JSON values. The appliance gives them requests it has checked; what does not have the expected shape
is passed on unchanged, so that nobody takes it for something it is not.
"""

from __future__ import annotations

from collections.abc import Mapping

OBJECT = "response"
STATUS_COMPLETED, STATUS_INCOMPLETE, STATUS_IN_PROGRESS, STATUS_FAILED = (
    "completed",
    "incomplete",
    "in_progress",
    "failed",
)
REASON_LENGTH = "max_output_tokens"

EVENT_CREATED = "response.created"
EVENT_IN_PROGRESS = "response.in_progress"
EVENT_ITEM_ADDED = "response.output_item.added"
EVENT_ITEM_DONE = "response.output_item.done"
EVENT_PART_ADDED = "response.content_part.added"
EVENT_PART_DONE = "response.content_part.done"
EVENT_TEXT_DELTA = "response.output_text.delta"
EVENT_TEXT_DONE = "response.output_text.done"
EVENT_REASONING_DELTA = "response.reasoning_text.delta"
EVENT_REASONING_DONE = "response.reasoning_text.done"
EVENT_ARGUMENTS_DELTA = "response.function_call_arguments.delta"
EVENT_ARGUMENTS_DONE = "response.function_call_arguments.done"
EVENT_END = {status: f"response.{status}" for status in (STATUS_COMPLETED, STATUS_INCOMPLETE, STATUS_FAILED)}

# Fields that ask for nothing where they have this value; null asks for nothing anywhere.
_NEUTRAL: Mapping[str, object] = {
    "background": False,
    "include": [],
    "store": False,
    "top_logprobs": 0,
    "truncation": "disabled",
}
# Bound by the commitment to the request; nothing else reads them.
_BOUND = frozenset({"safety_identifier"})
_READ_HERE = frozenset({"input", "instructions", "text", "tools", "tool_choice", "max_output_tokens"})
# What an answer says of its request, where the request does not say it.
_STATED: Mapping[str, object] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}


def stated(request: Mapping[str, object]) -> dict[str, object]:
    """The fields of an answer that repeat its request, defaults filled in; nothing is ever stored."""
    said = {name: default if request.get(name) is None else request[name] for name, default in _STATED.items()}
    text = said["text"]
    if isinstance(text, dict) and text.get("format") is None:
        said["text"] = _STATED["text"]
    return said


def chat_form(request: Mapping[str, object]) -> dict[str, object]:
    """The same request to /v1/chat/completions. A field that neither knows stays, for whoever checks to refuse."""
    chat: dict[str, object] = {"messages": [message for message, _ in conversation(request)]}
    for name, value in request.items():
        neutral = name in _NEUTRAL and type(value) is type(_NEUTRAL[name]) and value == _NEUTRAL[name]
        if name not in _READ_HERE and name not in _BOUND and value is not None and not neutral:
            chat[name] = value
    moved = {
        "max_completion_tokens": request.get("max_output_tokens"),
        "response_format": _response_format(request.get("text")),
        "tools": _tools(request.get("tools")),
        "tool_choice": _tool_choice(request.get("tool_choice")),
    }
    chat.update({name: value for name, value in moved.items() if value is not None})
    return chat


def conversation(request: Mapping[str, object]) -> list[tuple[dict[str, object], str]]:
    """The messages of the chat form, each with the path of the part of the request that it came from.

    A call of a function belongs to the assistant's message before it, and that message to the reasoning before it, as
    chat has it.
    """
    messages: list[tuple[dict[str, object], str]] = []
    if request.get("instructions") is not None:
        messages.append(({"role": "system", "content": request["instructions"]}, "instructions"))
    given = request.get("input")
    if not isinstance(given, list):
        return [*messages, ({"role": "user", "content": given}, "input")]
    for index, item in enumerate(given):
        path = f"input[{index}]"
        if not isinstance(item, dict):
            messages.append(({"role": "user", "content": item}, path))
        elif item.get("type") == "function_call":
            _add_call(messages, item, path)
        elif item.get("type") == "reasoning":
            thought = {"role": "assistant", "content": None, "reasoning_content": _text(item.get("content"))}
            messages.append((thought, path))
        elif item.get("type") == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
            messages.append((result, path))
        else:
            _add_message(messages, item, path)
    return messages


def _add_message(messages: list[tuple[dict[str, object], str]], item: Mapping[str, object], path: str) -> None:
    last = messages[-1][0] if messages else {}
    text = _text(item.get("content"))
    thought = last.get("content") is None and "reasoning_content" in last and "tool_calls" not in last
    if item.get("role") == "assistant" and thought:
        last["content"] = text
    else:
        messages.append(({"role": item.get("role"), "content": text}, path))


def _add_call(messages: list[tuple[dict[str, object], str]], item: Mapping[str, object], path: str) -> None:
    if not messages or messages[-1][0].get("role") != "assistant":
        messages.append(({"role": "assistant", "content": None, "tool_calls": []}, path))
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    calls = messages[-1][0].setdefault("tool_calls", [])
    assert isinstance(calls, list)
    calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _text(content: object) -> object:
    """Parts of text as one text."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    return "".join(text for text in texts if isinstance(text, str))


def _response_format(text: object) -> object:
    wanted = text.get("format") if isinstance(text, dict) else None
    if not isinstance(wanted, dict):
        return wanted
    given = {name: value for name, value in wanted.items() if value is not None and name != "type"}
    kind = {"type": wanted.get("type")}
    return {**kind, "json_schema": given} if wanted.get("type") == "json_schema" else {**kind, **given}


def _tools(tools: object) -> object:
    return [_tool(tool) for tool in tools] if isinstance(tools, list) else tools


def _tool(tool: object) -> object:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: object) -> object:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {name: value for name, value in choice.items() if name != "type"}}
