"""The grammars of calls and of reasoning in llama.cpp's own hands, in every form that templates were seen to have."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from appliance.engine.chat.reasoning import ReasoningText, Tags
from appliance.engine.chat.tools import Tool, ToolText, after_reasoning, grammar
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import EngineSettings
from appliance.engine.types import ChatFormat, ChatMessage, Delta, Finished, GenerationJob, SamplingParams
from client_sdk.wire.tools import HERMES, CallSyntax

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]
SHA256 = bytes.fromhex("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
TEMPLATE = Path(__file__).parents[1] / "templates" / "thinking.jinja"
FORMS = {
    "hermes": HERMES,
    "list": CallSyntax(
        start="[TOOL_CALLS] [", before='{"name": "', middle='", "arguments": ', after="}", between=", ", end="]"
    ),
    "single": CallSyntax(start="", before='{"name": "', middle='", "parameters": ', after="}", between=None, end=""),
    "fenced": CallSyntax(
        start="<calls>",
        before="<call>function<sep>",
        middle="\n```json\n",
        after="\n```</call>",
        between="\n",
        end="</calls>",
    ),
    "bare": CallSyntax(start="", before="[CALL]", middle="[ARGS]", after="", between="", end=""),
    "wide": CallSyntax(start="", before="<▁call▁→>", middle="<▁sep▁>", after="<▁end▁>", between="", end=""),
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"type": "string", "maxLength": 4}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(name="f", parameters=SCHEMA),
    Tool(name="g_2", parameters={"type": "object", "additionalProperties": False}),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(smollm2: Path) -> AsyncIterator[SupervisedEngine]:
    made = SupervisedEngine(
        EngineSettings(
            model_paths=(smollm2,),
            sha256=SHA256,
            size_bytes=98_362_432,
            worker_python=sys.executable,
            context_length=512,
            chat_template=TEMPLATE.read_text(encoding="utf-8"),
        )
    )
    await made.start(lambda phase, fraction: None)
    yield made
    await made.stop(5.0)


async def said(engine: SupervisedEngine, rules: str, seed: int, max_tokens: int = 120) -> tuple[str, str]:
    sampling = SamplingParams(
        temperature=1.0, top_p=0.95, top_k=0, seed=seed, max_tokens=max_tokens, grammar=rules, logprobs=None
    )
    prompt = (ChatMessage(role="user", content="Call a function, please."),)
    job = GenerationJob(job_id=seed.to_bytes(16, "big"), prompt=prompt, sampling=sampling, template_date="2026-01-01")
    text, reason = "", ""
    async for event in engine.generate(job):
        if isinstance(event, Delta):
            text += event.text
        if isinstance(event, Finished):
            reason = event.reason
    return text, reason


def check(syntax: CallSyntax, text: str) -> None:
    parser = ToolText(syntax)
    parser.feed(text)
    parser.finish()
    assert parser.complete
    assert syntax.spelled(parser.text, parser.calls) == text
    for name, arguments in parser.calls:
        jsonschema.validate(json.loads(arguments), SCHEMA if name == "f" else {"type": "object", "maxProperties": 0})


async def test_the_worker_tells_what_its_template_knows(engine: SupervisedEngine) -> None:
    tags = Tags(start="<think>", end="</think>")
    assert engine.model.chat == ChatFormat(takes_tools=True, calls=HERMES, reasoning=tags)


@pytest.mark.parametrize("syntax", FORMS.values(), ids=FORMS)
async def test_forced_calls_keep_to_their_form(engine: SupervisedEngine, syntax: CallSyntax) -> None:
    ended = 0
    for seed in range(3):
        rules = grammar(TOOLS, optional=False, parallel=seed == 0, syntax=syntax)
        text, reason = await said(engine, rules, seed)
        if reason == "stop":
            check(syntax, text)
            ended += 1
    assert ended


@pytest.mark.parametrize("syntax", FORMS.values(), ids=FORMS)
async def test_text_goes_free_until_it_makes_the_mark(engine: SupervisedEngine, syntax: CallSyntax) -> None:
    text, _ = await said(engine, grammar(TOOLS, optional=True, parallel=True, syntax=syntax), seed=7, max_tokens=12)
    parser = ToolText(syntax)
    parser.feed(text)
    parser.finish()
    assert parser.calls or parser.text == text


@pytest.mark.parametrize("opened", [False, True])
async def test_reasoning_comes_before_what_a_grammar_holds(engine: SupervisedEngine, opened: bool) -> None:
    tags = Tags(start="<think>", end=".")
    rules = after_reasoning(grammar(TOOLS, optional=False, parallel=False), tags, opened=opened)
    text, reason = await said(engine, rules, seed=5)
    reasoning = ReasoningText(tags, opened=opened)
    _, answer = reasoning.feed(text)
    if opened:
        assert reasoning.reasoning
    if reason == "stop":
        check(HERMES, answer)
