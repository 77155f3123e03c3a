"""Fit a call to the model it is for: how the model's template takes tools, and what comes before an answer.

A template that takes tools gets them as they are, and calls keep its own form. For one that does not know tools they
are told about in the system message, and calls and results are spelled as text, the way Hermes models spell them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from appliance.engine.chat import tools as engine_tools
from appliance.engine.chat.reasoning import ReasoningText
from appliance.engine.chat.tools import ToolText
from appliance.engine.types import ChatFormat, ChatMessage, PromptInput, ToolChat
from appliance.errors import BadRequest
from appliance.inference import sampling
from appliance.inference.request import Call, Choice, Fit
from client_sdk.wire import cbor
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


def fit(call: Call, chat: ChatFormat) -> Call:
    """The call as this model gets it. Raises BadRequest `tools_not_supported`, or names a call it cannot show."""
    facts: dict[str, object] = {wire.FACT_CHAT_FORMAT: chat.digest}
    syntax, prompts = wire.HERMES, list(call.prompts)
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, ToolChat):
            prompts[index] = _fitted(prompt, chat)
            facts[wire.FACT_FORMAT] = wire.FORMAT_TEMPLATE if chat.takes_tools else wire.FORMAT_HERMES
            syntax = chat.calls if chat.takes_tools and chat.calls is not None else wire.HERMES
    if syntax is not wire.HERMES:
        facts[wire.FACT_SYNTAX] = syntax.encode()
    rules, grammar = call.shape.calls, call.shape.grammar
    tags = chat.reasoning if call.split_reasoning else None
    if chat.reasoning is not None:
        facts[wire.FACT_TAGS] = wire.tags_text(chat.reasoning.start, chat.reasoning.end)
    if rules is not None:
        grammar = engine_tools.grammar(rules.tools, optional=rules.optional, parallel=rules.parallel, syntax=syntax)
    if grammar is not None and tags is not None:
        grammar = engine_tools.after_reasoning(grammar, tags, opened=chat.opens_reasoning)
    fitted = Fit(syntax=None if rules is None else syntax, tags=tags, facts=facts)
    return replace(call, prompts=tuple(prompts), shape=replace(call.shape, grammar=grammar), fit=fitted)


def choice(call: Call, index: int, prompt_text: str) -> Choice:
    """Choice `index` of a fitted call, before anything of it is generated."""
    syntax, tags = call.fit.syntax, call.fit.tags
    opened = tags is not None and prompt_text.rstrip().endswith(tags.start)
    return Choice(
        index,
        measured=call.wanted.logprobs is not None,
        echoed=sampling.echoed(call, index),
        tools=None if syntax is None else ToolText(syntax),
        reasoning=None if tags is None else ReasoningText(tags, opened=opened),
    )


def facts(fitted: Fit, choices: Sequence[Choice]) -> Mapping[str, object]:
    """What receipts say of the form of the text that was generated: what leads from an answer's parts back to it."""
    split = [each.reasoning for each in choices if each.reasoning is not None]
    if not split:
        return fitted.facts
    found: dict[str, object] = {wire.FACT_REASONING_TOKENS: sum(each.reasoning_tokens for each in choices)}
    if any(any(each.marks) for each in split):
        found[wire.FACT_MARKS] = wire.marks_text(each.marks for each in split)
    return {**fitted.facts, **found}


def _fitted(prompt: ToolChat, chat: ChatFormat) -> PromptInput:
    if not chat.takes_tools:
        return _in_words(prompt)
    if chat.calls is None:
        raise BadRequest(
            "tools_not_supported",
            "This model's chat template takes tools, but the form of its calls cannot be told (models[].tool_format).",
            param="tools" if json.loads(prompt.tools) else "messages",
        )
    if not chat.arguments_as_text:
        _check_arguments(prompt)
    return replace(prompt, arguments_as_text=chat.arguments_as_text, no_content_as_null=chat.no_content_as_null)


def _check_arguments(prompt: ToolChat) -> None:
    for index, message in enumerate(prompt.messages):
        for place, call in enumerate(message.calls):
            try:
                value = json.loads(call.arguments)
                cbor.encode(value)  # bounds how deep it goes: the template's process walks it
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                path = f"messages[{index}].tool_calls[{place}].function.arguments"
                raise BadRequest("invalid_field", f"The field {path!r} is no JSON object of bounded depth.", param=path)


def _in_words(prompt: ToolChat) -> tuple[ChatMessage, ...]:
    """The conversation in roles and text that every template knows."""
    chat: list[ChatMessage] = []
    results = False
    for message in prompt.messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if results:  # of calls made at once: one turn, as templates want turns to alternate
                chat[-1] = ChatMessage(role="user", content=f"{chat[-1].content}\n{text}")
            else:
                chat.append(ChatMessage(role="user", content=text))
        else:
            calls = [(call.name, call.arguments) for call in message.calls]
            text = wire.HERMES.spelled(message.content, calls)
            chat.append(ChatMessage(role=message.role, content=text, reasoning=message.reasoning))
        results = message.role == "tool"
    tools = json.loads(prompt.tools)
    if tools:
        introduction = _introduction(tools)
        if chat[0].role == "system":
            chat[0] = ChatMessage(role="system", content=f"{chat[0].content}\n\n{introduction}")
        else:
            chat.insert(0, ChatMessage(role="system", content=introduction))
    return tuple(chat)


def _introduction(tools: list[Mapping[str, object]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"{_INTRODUCTION}{listed}{_INSTRUCTION}"
