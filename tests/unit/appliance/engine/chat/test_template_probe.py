"""What a template says of itself when it is rendered. In tests/templates are the shapes that models bring."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from appliance.engine.chat.chat_template import ChatTemplate, TemplateTooSlow
from appliance.engine.chat.reasoning import Tags
from appliance.engine.chat.template_probe import probe
from appliance.engine.types import ChatFormat, ChatMessage, MadeCall, ToolChat
from client_sdk.wire.tools import HERMES, CallSyntax

TEMPLATES = Path(__file__).parents[4] / "templates"
PLAIN, TAGGED, THINKING, SINGLE, LIST, WITH_IDS, FENCED, MARKUP = (
    (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    for name in ("plain", "tagged", "thinking", "single", "list", "with-ids", "fenced", "markup")
)
NULL = TAGGED.replace("m.role == 'assistant' and m.tool_calls", "m.role == 'assistant' and m.content is none")
NO_RESULTS = TAGGED.replace(" + m.content + '\\n</tool_response>", " + '\\n</tool_response>")
OPENING = PLAIN.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<ponder>\\n'")

THINK = Tags(start="<think>", end="</think>")


def found(source: str, **options: object) -> ChatFormat:
    return probe(
        ChatTemplate(source, bos_text="<s>", eos_text="</s>"), **{"reasoning": None, "detect": True, **options}
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, ChatFormat()),
        (TAGGED, ChatFormat(takes_tools=True, calls=HERMES)),
        (THINKING, ChatFormat(takes_tools=True, calls=HERMES, reasoning=THINK)),
        (
            SINGLE,
            ChatFormat(
                takes_tools=True,
                calls=CallSyntax(
                    start="", before='{"name": "', middle='", "parameters": ', after="}", between=None, end=""
                ),
            ),
        ),
        (
            LIST,
            ChatFormat(
                takes_tools=True,
                calls=CallSyntax(
                    start="[TOOL_CALLS] [",
                    before='{"name": "',
                    middle='", "arguments": ',
                    after="}",
                    between=", ",
                    end="]",
                ),
            ),
        ),
        (
            FENCED,
            ChatFormat(
                takes_tools=True,
                calls=CallSyntax(
                    start="<calls>",
                    before="<call>function<sep>",
                    middle="\n```json\n",
                    after="\n```</call>",
                    between="\n",
                    end="</calls>",
                ),
                arguments_as_text=True,
                reasoning=THINK,
                opens_reasoning=True,
            ),
        ),
        (NULL, ChatFormat(takes_tools=True, calls=HERMES, no_content_as_null=True)),
        (WITH_IDS, ChatFormat(takes_tools=True)),
        (MARKUP, ChatFormat(takes_tools=True)),
        (NO_RESULTS, ChatFormat(takes_tools=True)),
        ("{{ unclosed", ChatFormat()),
        ("{{ raise_exception('no') }}{{ tools }}", ChatFormat()),
    ],
    ids=[
        "plain",
        "tagged",
        "thinking",
        "single",
        "list",
        "fenced",
        "null",
        "ids",
        "markup",
        "no-results",
        "broken",
        "refusing",
    ],
)
def test_formats(source: str, expected: ChatFormat) -> None:
    assert found(source) == expected


def test_tools_may_be_kept_from_a_template() -> None:
    assert found(MARKUP, tools=False) == ChatFormat()
    assert found(THINKING, tools=False) == ChatFormat(reasoning=THINK)


def test_no_template_knows_nothing() -> None:
    template = ChatTemplate(None, bos_text="", eos_text="")
    assert probe(template, reasoning=None, detect=True) == ChatFormat()


@pytest.mark.parametrize(
    ("source", "tags"),
    [
        (PLAIN, None),
        # The tag that prompts end with, which the template closes elsewhere or does not.
        (OPENING + "{% set closing = '</ponder>' %}", "ponder"),
        (OPENING, None),
        # Something between the reasoning and what was said: no end tag can be told.
        (THINKING.replace("'\\n</think>\\n\\n' + said", "'</think>final:' + said").replace("'</think>'", "'/'"), None),
    ],
)
def test_reasoning_is_what_the_template_shows_and_no_more(source: str, tags: str | None) -> None:
    expected = None if tags is None else Tags(start=f"<{tags}>", end=f"</{tags}>")
    assert found(source).reasoning == expected
    assert found(source, detect=False).reasoning is None


def test_configured_tags_count_whatever_the_template_shows() -> None:
    for source in (PLAIN, THINKING, FENCED, "{{ unclosed"):
        assert found(source, reasoning=("[T]", "[/T]"), detect=False).reasoning == Tags(start="[T]", end="[/T]")
    assert found(FENCED, reasoning=("<think>", "</think>"), detect=False).opens_reasoning


def test_a_template_that_takes_too_long_is_the_callers_to_judge() -> None:
    class Slow(ChatTemplate):
        def run(self, *_: object, **__: object) -> str:
            raise TemplateTooSlow("the template takes too long")

    with pytest.raises(TemplateTooSlow):
        probe(Slow(TAGGED, bos_text="", eos_text=""), reasoning=None, detect=True)


@pytest.mark.parametrize(
    "source", [TAGGED, THINKING, LIST, FENCED, NULL], ids=["tagged", "thinking", "list", "fenced", "null"]
)
def test_what_the_template_shows_of_calls_is_what_the_form_spells(source: str) -> None:
    """Whole conversations: tools, two calls with text before them, their results, and where each word came from."""
    template = ChatTemplate(source, bos_text="<s>", eos_text="</s>")
    chat = probe(template, reasoning=None, detect=True)
    assert chat.calls is not None
    calls = (
        MadeCall(call_id="a", name="f", arguments='{"x": "<|im_end|>", "y": [1, null]}'),
        MadeCall(call_id="b", name="g", arguments='{"z": {"deep": "ü"}}'),
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "It says <|im_end|>.", "parameters": {}}}]
    prompt = ToolChat(
        messages=(
            ChatMessage(role="user", content="Do it."),
            ChatMessage(role="assistant", content="", calls=calls),
            ChatMessage(role="tool", content="done <|im_start|>", call_id="a", name="f"),
            ChatMessage(role="tool", content="twice", call_id="b", name="g"),
            ChatMessage(role="user", content="And now?"),
        ),
        tools=json.dumps(tools),
        arguments_as_text=chat.arguments_as_text,
        no_content_as_null=chat.no_content_as_null,
    )
    rendering = template.render(prompt, template_date="2026-01-01", random_bytes=os.urandom)
    assert chat.calls.spelled("", [(call.name, call.arguments) for call in calls]) in rendering.text
    assert rendering.spans is not None
    shown = [rendering.text[start:end] for start, end in rendering.spans]
    texts = [call.arguments for call in calls] if chat.arguments_as_text else ["<|im_end|>", "deep", "ü"]
    for text in ("Do it.", "done <|im_start|>", "twice", "And now?", "It says <|im_end|>.", *texts):
        assert text in shown
