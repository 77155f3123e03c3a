"""From OpenAI's messages to those of the engine. `inference.chat_format` gives them to the template."""

from __future__ import annotations

import json
from collections.abc import Sequence

from appliance.api.schema import Message, Tool, as_sent
from appliance.engine.types import ChatMessage, MadeCall, ToolChat
from appliance.errors import BadRequest


def rendered(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[ChatMessage, ...] | ToolChat:
    """Raises BadRequest naming the field of a message that lacks what its role needs, or has what it may not."""
    known: dict[str, str] = {}
    chat = tuple(_message(message, f"messages[{index}]", known) for index, message in enumerate(messages))
    if not tools and not any(message.calls or message.role == "tool" for message in chat):
        return chat
    return ToolChat(messages=chat, tools=json.dumps([as_sent(tool) for tool in tools], ensure_ascii=False))


def _message(message: Message, path: str, known: dict[str, str]) -> ChatMessage:
    """`known` collects the names of the functions called so far, by the ids of the calls."""
    for field, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, field) is not None and message.role != role:
            raise BadRequest(
                "invalid_field", f"The field '{path}.{field}' belongs to the role {role}.", param=f"{path}.{field}"
            )
    calls = message.tool_calls or []
    if message.content is None and not calls:
        given = "content" in message.model_fields_set
        kind, what = ("invalid_field", "should be text") if given else ("missing_field", "is required")
        raise BadRequest(kind, f"The field '{path}.content' {what}.", param=f"{path}.content")
    if message.role == "tool" and message.tool_call_id not in known:
        raise BadRequest(
            "invalid_field",
            f"The field '{path}.tool_call_id' names no call of an earlier message.",
            param=f"{path}.tool_call_id",
        )
    known.update((call.id, call.function.name) for call in calls)
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=message.text,
        reasoning=message.reasoning_content,
        calls=tuple(
            MadeCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments) for call in calls
        ),
        call_id=message.tool_call_id,
        name=known.get(message.tool_call_id or ""),
    )
