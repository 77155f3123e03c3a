"""From OpenAI's messages and tools to what a chat template can render: roles it knows, and text.

Templates differ in how they take tools, and most take none. Here tools are told about in the system message and calls
and results are spelled as text, the same way for every model: the one of the Hermes and Qwen templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from appliance.api.schema import Message, Tool, as_sent
from appliance.engine.types import ChatMessage
from appliance.errors import BadRequest
from client_sdk.wire import tools as wire

_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_INSTRUCTION = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def rendered(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[ChatMessage, ...]:
    """Raises BadRequest naming the field of a message that lacks what its role needs, or has what it may not."""
    known: set[str] = set()
    chat: list[ChatMessage] = []
    results = False
    for index, message in enumerate(messages):
        text = _text(message, f"messages[{index}]", known)
        if message.role == "tool" and results:  # of calls made at once: one turn, as templates want turns to alternate
            chat[-1] = ChatMessage(role="user", content=f"{chat[-1].content}\n{text}")
            continue
        results = message.role == "tool"
        role = {"developer": "system", "tool": "user"}.get(message.role, message.role)
        chat.append(ChatMessage(role=role, content=text))
    if tools:
        introduction = _introduction(tools)
        if chat[0].role == "system":
            chat[0] = ChatMessage(role="system", content=f"{chat[0].content}\n\n{introduction}")
        else:
            chat.insert(0, ChatMessage(role="system", content=introduction))
    return tuple(chat)


def _introduction(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(as_sent(tool), ensure_ascii=False) for tool in tools)
    return f"{_INTRODUCTION}{listed}{_INSTRUCTION}"


def _text(message: Message, path: str, known: set[str]) -> str:
    """The content as the template gets it. `known` collects the ids of the calls so far."""
    given = message.model_fields_set
    for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, field) is not None and message.role != role:
            raise BadRequest(
                "invalid_field", f"The field '{path}.{field}' belongs to the role {role}.", param=f"{path}.{field}"
            )
    calls = message.tool_calls or []
    if message.content is None and not calls:
        kind, what = ("invalid_field", "should be text") if "content" in given else ("missing_field", "is required")
        raise BadRequest(kind, f"The field '{path}.content' {what}.", param=f"{path}.content")
    if message.role == "tool":
        if message.tool_call_id not in known:
            raise BadRequest(
                "invalid_field",
                f"The field '{path}.tool_call_id' names no call of an earlier message.",
                param=f"{path}.tool_call_id",
            )
        return f"<tool_response>\n{message.content}\n</tool_response>"
    known.update(call.id for call in calls)
    return wire.spelled(message.content or "", [(call.function.name, call.function.arguments) for call in calls])
