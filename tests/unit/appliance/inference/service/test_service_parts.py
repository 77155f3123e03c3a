"""Answers in parts (reasoning, text, calls) against the receipt: whole and streamed alike, and no part can be changed.

The client's own checks judge them, over the bytes that the service sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from appliance.engine.chat.reasoning import Tags
from appliance.engine.generation.fake import FakeScript
from appliance.engine.types import ChatFormat
from client_sdk.checks import CheckLog
from client_sdk.errors import VerificationError
from client_sdk.receipts import comparisons
from client_sdk.routes.chat import ROUTE_CHAT, AnswerContent, DeltaCollector, read_whole
from client_sdk.wire.receipt import ReceiptClaims
from client_sdk.wire.tools import HERMES, CallSyntax
from tests import reference_decoder as reference
from tests.unit.appliance.inference.service.rig import TEXT, Rig, Wire, chat, fake, text

THINK = Tags(start="<think>", end="</think>")
LIST = CallSyntax(
    start="[TOOL_CALLS] [", before='{"name": "', middle='", "arguments": ', after="}", between=", ", end="]"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CALLS = [("f", '{"a": "]}"}'), ("g", "{}")]


def rig(said: str, *, size: int = 3, **form: Any) -> Rig:
    """A service whose model says this, `size` characters to a token."""
    pieces = tuple(said[start : start + size].encode() for start in range(0, len(said), size))
    return Rig(fake(FakeScript(pieces=pieces, chat=ChatFormat(**form))))


def judged(one: Rig, wire: Wire, content: AnswerContent) -> ReceiptClaims:
    """Raises VerificationError where the client would."""
    payload, _ = reference.read_sign1(one.receipts[-1], "receipt", one.cose_key)
    claims = ReceiptClaims.parse(payload)
    request = json.loads(wire.request)
    log, salt = CheckLog(), one.salt(one.receipts[-1])
    assert claims.decoding is not None
    comparisons.parameters(log, request, claims.decoding, salt)
    comparisons.output(log, claims, content, request, salt)
    return claims


def whole(wire: Wire, change: Callable[[Any], None] = lambda _: None) -> AnswerContent:
    document = wire.document
    change(document)
    return read_whole(ROUTE_CHAT, json.dumps(document).encode())


def streamed(wire: Wire, change: Callable[[list[Any]], None] = lambda _: None) -> AnswerContent:
    frames, collector = wire.frames, DeltaCollector(ROUTE_CHAT)
    change(frames)
    for frame in frames:
        collector.add(json.dumps(frame).encode())
    return collector.content()


SPOKEN = [
    pytest.param("<think>\nhm ü\n</think>\n\nyes", {"reasoning": THINK}, {}, id="reasoning"),
    pytest.param("hm\n</think>\nyes", {"reasoning": THINK, "opens_reasoning": True}, {}, id="opened"),
    pytest.param("yes", {"reasoning": THINK}, {}, id="no reasoning"),
    pytest.param("<think>hm", {"reasoning": THINK}, {}, id="reasoning alone"),
    pytest.param(HERMES.spelled("Let me see. ", CALLS), {}, {"tools": TOOLS}, id="calls in words"),
    pytest.param(
        LIST.spelled("Let me see. ", CALLS), {"takes_tools": True, "calls": LIST}, {"tools": TOOLS}, id="calls"
    ),
    pytest.param(
        "<think>f or g?</think>" + LIST.spelled("", CALLS),
        {"takes_tools": True, "calls": LIST, "reasoning": THINK},
        {"tools": TOOLS},
        id="reasoning and calls",
    ),
]
BOTH = pytest.mark.parametrize("size", [1, 3, 100])


@BOTH
@pytest.mark.parametrize(("said", "form", "fields"), SPOKEN)
async def test_parts_lead_back_to_what_was_generated(
    said: str, form: Mapping[str, Any], fields: Mapping[str, Any], size: int
) -> None:
    one = rig(said, size=size, **form)
    wire = await one.ask(chat(n=2, logprobs=True, **fields))
    content = whole(wire)
    claims = judged(one, wire, content)
    two = rig(said, size=size, **form)
    stream = await two.ask(chat(n=2, logprobs=True, stream=True, stream_options={"include_usage": True}, **fields))
    again = streamed(stream)
    judged(two, stream, again)
    assert (again.texts, again.calls, again.reasoning) == (content.texts, content.calls, content.reasoning)
    assert (again.finishes, again.reasoning_tokens) == (content.finishes, content.reasoning_tokens)
    details = wire.document["usage"]["completion_tokens_details"]
    execution = claims.execution or {}
    assert details["reasoning_tokens"] == execution.get("reasoning-tokens", 0)
    if "tools" in fields:
        assert execution["tool-format"] == ("template" if "calls" in form else "hermes")
        assert content.calls == {0: tuple(CALLS), 1: tuple(CALLS)}
        assert content.finishes == {0: "tool_calls", 1: "tool_calls"}
    for document in (wire.document["choices"], _merged(stream.frames)):
        for choice in document:
            tokens = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
            assert tokens.decode() == said


def _merged(frames: list[Any]) -> list[Any]:
    """Log probabilities of a stream, by choice."""
    merged: dict[int, list[Any]] = {}
    for frame in frames:
        for choice in frame["choices"]:
            merged.setdefault(choice["index"], []).extend((choice["logprobs"] or {"content": []})["content"])
    return [{"logprobs": {"content": entries}} for entries in merged.values()]


@pytest.mark.parametrize("limit", range(1, 40, 2))
@pytest.mark.parametrize(("said", "form", "fields"), SPOKEN[-3:])
async def test_any_cut_leads_back_too(
    said: str, form: Mapping[str, Any], fields: Mapping[str, Any], limit: int
) -> None:
    one = rig(said, size=2, **form)
    wire = await one.ask(chat(max_tokens=limit, **fields))
    judged(one, wire, whole(wire))


def _in_message(path: str, value: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        target, *keys = [document["choices"][0]["message"], *path.split(".")]
        for key in keys[:-1]:
            target = target[int(key) if key.isdigit() else key]
        target[keys[-1]] = value

    return change


def _tokens(document: Any) -> None:
    document["usage"]["completion_tokens_details"]["reasoning_tokens"] += 1


def _moved(document: Any) -> None:
    message = document["choices"][0]["message"]
    message["content"], message["reasoning_content"] = message["reasoning_content"], message["content"] or ""


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_in_message("content", "Let me look. "), id="content"),
        pytest.param(_in_message("reasoning_content", "f or h?"), id="reasoning"),
        pytest.param(_in_message("reasoning_content", None), id="reasoning left out"),
        pytest.param(_in_message("tool_calls.0.function.name", "g"), id="name"),
        pytest.param(_in_message("tool_calls.1.function.arguments", '{"b": 1}'), id="arguments"),
        pytest.param(_in_message("tool_calls", []), id="calls left out"),
        pytest.param(_tokens, id="reasoning tokens"),
        pytest.param(_moved, id="moved"),
    ],
)
async def test_a_changed_part_is_rejected(change: Callable[[Any], None]) -> None:
    said = "<think>f or g?</think>" + LIST.spelled("Let me see. ", CALLS)
    one = rig(said, takes_tools=True, calls=LIST, reasoning=THINK)
    wire = await one.ask(chat(tools=TOOLS))
    judged(one, wire, whole(wire))
    with pytest.raises(VerificationError):
        judged(one, wire, whole(wire, change))


@pytest.mark.parametrize("key", ["reasoning_content", "content", "tool_calls"])
async def test_a_changed_delta_is_rejected(key: str) -> None:
    said = "<think>f or g?</think>" + LIST.spelled("Let me see. ", CALLS)
    one = rig(said, takes_tools=True, calls=LIST, reasoning=THINK)
    wire = await one.ask(chat(tools=TOOLS, stream=True))

    def change(frames: list[Any]) -> None:
        delta = next(f["choices"][0]["delta"] for f in frames[1:] if f["choices"][0]["delta"].get(key))
        if key == "tool_calls":
            delta[key][0]["function"]["arguments"] += " "
        else:
            delta[key] += "!"

    judged(one, wire, streamed(wire))
    with pytest.raises(VerificationError):
        judged(one, wire, streamed(wire, change))


async def test_a_form_of_calls_that_cannot_be_told_refuses_tools() -> None:
    one = rig("x", takes_tools=True)
    wire = await one.ask(chat(tools=TOOLS))
    assert wire.error == (400, "tools_not_supported", "tools")
    assert (await one.ask(chat(tools=TOOLS, tool_choice="none"))).status == 200
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": CALLED}]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    assert (await one.ask(chat(messages=history))).error == (400, "tools_not_supported", "messages")


CALLED = {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize("arguments", ["[]", "", "{", "1", "{" * 900, '{"a":' * 400 + "1" + "}" * 400, '{"a": NaN}'])
async def test_arguments_of_earlier_calls_are_objects_where_the_template_wants_them(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    bad = [{"role": "assistant", "tool_calls": [call]}]
    path = "messages[0].tool_calls[0].function.arguments"
    assert (await rig("x", takes_tools=True, calls=LIST).ask(chat(messages=bad))).error == (400, "invalid_field", path)
    assert (await rig("x", takes_tools=True, calls=LIST, arguments_as_text=True).ask(chat(messages=bad))).status == 200
    assert (await rig("x").ask(chat(messages=bad))).status == 200


async def test_plain_completions_have_no_parts() -> None:
    one = rig("<think>hm</think>yes", reasoning=THINK)
    wire = await one.ask(text(), route=TEXT)
    assert wire.document["choices"][0]["text"] == "<think>hm</think>yes"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_free_of_the_grammar_and_stays_in_history(stream: bool) -> None:
    one = rig("<think>hm</think>{}", reasoning=THINK)
    earlier = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    asked = chat(
        messages=[{"role": "user", "content": "hi"}, earlier, {"role": "user", "content": "and?"}],
        response_format={"type": "json_object"},
        stream=stream,
    )
    wire = await one.ask(asked)
    judged(one, wire, streamed(wire) if stream else whole(wire))
    (job,) = one.engine.counters.jobs  # type: ignore[attr-defined]
    assert job.prompt[1].reasoning == "hm"
    assert job.sampling.grammar.count("root ::=") == 1
    assert '"<think>" u0' in job.sampling.grammar


async def test_obfuscation_hides_lengths_and_is_no_part_of_the_answer() -> None:
    options = {"include_usage": True, "include_obfuscation": True}
    one = Rig(fake(FakeScript(pieces=(b"a", b"b" * 40, "ü".encode(), b"c" * 150))))
    wire = await one.ask(chat(stream=True, stream_options=options))
    frames = [block for block in wire.blocks if block.startswith(b"data: {") and b'"choices":[{' in block]
    assert len(frames) == 6
    assert {len(frame) % 128 for frame in frames} == {0}
    sizes = {json.loads(frame[6:])["choices"][0]["delta"].get("content"): len(frame) for frame in frames}
    assert sizes["a"] == sizes["ü"]
    judged(one, wire, streamed(wire))

    def bare(frames: list[Any]) -> None:
        for frame in frames:
            frame.pop("obfuscation", None)

    judged(one, wire, streamed(wire, bare))
    other = Rig(fake(FakeScript()))
    plain = await other.ask(text(stream=True, stream_options={"include_obfuscation": False}), route=TEXT)
    assert all("obfuscation" not in frame for frame in plain.frames)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_is_measured_with_the_answer(stream: bool) -> None:
    one = Rig(fake(FakeScript(pieces=(b"Hel", b"lo"))))
    wire = await one.ask(text(prompt=["ab", "ü"], echo=True, logprobs=1, n=2, max_tokens=5, stream=stream), route=TEXT)
    choices: dict[int, dict[str, list[Any]]] = {}
    for frame in wire.frames if stream else [wire.document]:
        for choice in frame["choices"]:
            merged = choices.setdefault(choice["index"], {"text": []})
            merged["text"].append(choice["text"])
            for key, values in (choice["logprobs"] or {}).items():
                merged.setdefault(key, []).extend(values)
    for index, prompt in enumerate(("ab", "ab", "ü", "ü")):
        found = choices[index]
        assert "".join(found["text"]) == prompt + "Hello"
        assert "".join(found["tokens"]).replace("bytes:\\xc3bytes:\\xbc", "ü") == prompt + "Hello"
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert all(number < 0 for number in found["token_logprobs"][1:])
        assert found["text_offset"][-2:] == [len(prompt), len(prompt) + 3]
        assert found["text_offset"] == sorted(found["text_offset"])
