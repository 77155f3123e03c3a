"""What clients show or act on is what the receipt speaks of: an appliance that signs its lies gets no other text in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from client_sdk.errors import Rejection, VerificationError
from client_sdk.wire.tools import FACT_MARKS, HERMES, marks_text
from tests.simulators.attested import Attested, attested
from tests.simulators.insecure_appliance import COMPLETIONS, Options, completion_request

R = Rejection
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
LOGPROBS = {"content": [{"token": "no", "logprob": -1.0, "bytes": [110, 111], "top_logprobs": []}]}
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def client() -> Attested:
    return attested()


def edited(edit: Edit, **options: Any) -> Options:
    """`edit` changes the body, or the choice of each frame that has one, before it is committed to."""

    def apply(document: dict[str, Any]) -> dict[str, Any]:
        if document.get("choices"):
            edit(document["choices"][0])
        return document

    return Options(edit_body=apply, **options)


UNCOMPARED = {
    "refusal": {"refusal": "Send money instead."},
    "function_call": {"function_call": {"name": "f", "arguments": "{}"}},
    "audio": {"audio": {"transcript": "Five."}},
    "unknown": {"thoughts": "Five."},
    "role": {"role": "system"},
}


@pytest.mark.parametrize("said", UNCOMPARED.values(), ids=UNCOMPARED)
def test_messages_say_nothing_that_is_not_compared(client: Attested, said: dict[str, Any]) -> None:
    with pytest.raises(VerificationError) as caught:
        client.verify(client.answer(edited(lambda choice: choice["message"].update(said))))
    assert caught.value.code == R.MALFORMED_RESPONSE
    with pytest.raises(VerificationError) as caught:
        client.read(client.stream(edited(lambda choice: choice["delta"].update(said))))
    assert caught.value.code == R.MALFORMED_STREAM


def test_nulls_say_nothing(client: Attested) -> None:
    nothing = {**dict.fromkeys(UNCOMPARED), "tool_calls": None, "role": "assistant"}
    client.verify(client.answer(edited(lambda choice: choice["message"].update(nothing))))
    client.read(client.stream(edited(lambda choice: choice["delta"].update(nothing))))


@pytest.mark.parametrize("place", ["text", "message", "unknown"])
def test_choices_have_one_place_for_text(client: Attested, place: str) -> None:
    options = edited(lambda choice: choice.update({place: {"content": "Five."}}))
    with pytest.raises(VerificationError) as caught:
        client.read(client.stream(options))
    assert caught.value.code == R.MALFORMED_STREAM
    if place == "text":
        return
    with pytest.raises(VerificationError) as caught:
        client.verify(
            client.appliance.answer(completion_request(), client.connection, route=COMPLETIONS, options=options)
        )
    assert caught.value.code == R.MALFORMED_RESPONSE


def test_log_probabilities_nobody_asked_for_are_text_that_nothing_is_compared_with(client: Attested) -> None:
    options = edited(lambda choice: choice.update(logprobs=LOGPROBS))
    for read in (lambda: client.verify(client.answer(options)), lambda: client.read(client.stream(options))):
        with pytest.raises(VerificationError) as caught:
            read()
        assert caught.value.code == R.OUTPUT_MISMATCH


ERRORS: dict[str, dict[str, Any]] = {
    "empty": {"error": {}},
    "false": {"error": False},
    "zero": {"error": 0},
    "no-text": {"error": ""},
    "without-message": {"error": {"code": "engine_failed"}},
    "message-empty": {"error": {"message": ""}},
    "beside-an-answer": {"error": {"message": "no"}, "choices": [{"index": 0, "delta": {"content": "Five."}}]},
}


@pytest.mark.parametrize("frame", ERRORS.values(), ids=ERRORS)
def test_what_clients_take_for_no_error_is_none(client: Attested, frame: dict[str, Any]) -> None:
    """The stock client raises for an error that is true in Python; anything else it hands out as an answer's end."""
    options = Options(status="error", fail_after=2, edit_body=lambda event: frame if "error" in event else event)
    with pytest.raises(VerificationError) as caught:
        client.read(client.stream(options))
    assert caught.value.code == R.MALFORMED_STREAM


def calling(*calls: tuple[str, str], besides: dict[str, Any] | None = None) -> Options:
    made = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
            **(besides or {}),
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return edited(
        lambda choice: choice["message"].update(content=None, tool_calls=made),
        text=HERMES.spelled("", calls),
        finish="tool_calls",
    )


def test_calls_that_could_be_made_pass(client: Attested) -> None:
    client.verify(client.answer(calling(("f", "{}"), ("g", "{}")), tools=TOOLS))
    client.verify(client.answer(calling(("f", "{}")), tools=TOOLS, parallel_tool_calls=False))


CALLED: dict[str, tuple[Rejection, Options, dict[str, Any]]] = {
    "a-tool-nobody-offered": (R.OUTPUT_MISMATCH, calling(("h", "{}")), {"tools": TOOLS}),
    "no-tools": (R.OUTPUT_MISMATCH, calling(("f", "{}")), {}),
    "two-where-one-was-allowed": (
        R.OUTPUT_MISMATCH,
        calling(("f", "{}"), ("g", "{}")),
        {"tools": TOOLS, "parallel_tool_calls": False},
    ),
    "arguments-of-no-object": (R.OUTPUT_MISMATCH, calling(("f", "[]")), {"tools": TOOLS}),
    "arguments-of-no-json": (R.OUTPUT_MISMATCH, calling(("f", '{"a": ')), {"tools": TOOLS}),
    "two-shown-as-one": (
        R.OUTPUT_MISMATCH,
        calling(("f", '{}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}')),
        {"tools": TOOLS},
    ),
    "none-made": (R.OUTPUT_MISMATCH, Options(text="Four.", finish="tool_calls"), {"tools": TOOLS}),
    "custom": (
        R.MALFORMED_RESPONSE,
        calling(("f", "{}"), besides={"type": "custom", "custom": {"name": "h", "input": "x"}}),
        {"tools": TOOLS},
    ),
    "two-of-one-id": (R.MALFORMED_RESPONSE, calling(("f", "{}"), ("g", "{}"), besides={"id": "x"}), {"tools": TOOLS}),
    "type-alone": (R.MALFORMED_RESPONSE, calling(("f", "{}"), besides={"type": "custom"}), {"tools": TOOLS}),
}


@pytest.mark.parametrize(("code", "options", "asked"), CALLED.values(), ids=CALLED)
def test_calls_nobody_allowed(client: Attested, code: Rejection, options: Options, asked: dict[str, Any]) -> None:
    with pytest.raises(VerificationError) as caught:
        client.verify(client.answer(options, **asked))
    assert caught.value.code == code


def thinking(thought: str, text: str, marks: tuple[str, str]) -> Options:
    return replace(
        edited(lambda choice: choice["message"].update(content=text, reasoning_content=thought)),
        text=f"{marks[0]}{thought}{marks[1]}{text}",
        edit_claims=lambda claims: replace(
            claims, execution={**(claims.execution or {}), FACT_MARKS: marks_text([marks])}
        ),
    )


@pytest.mark.parametrize(
    ("thought", "text", "marks"),
    [("Hm.", "Four.", ("<think>", "</think>")), ("Hm.", "", ("<think>", "")), ("", "", ("<think>", ""))],
)
def test_reasoning_that_was_ended_or_cut_passes(
    client: Attested, thought: str, text: str, marks: tuple[str, str]
) -> None:
    client.verify(client.answer(thinking(thought, text, marks)))


@pytest.mark.parametrize(
    ("thought", "text", "marks"), [("Never say", " four.", ("", "")), ("", " four.", ("Never say", ""))]
)
def test_text_is_no_reasoning_without_its_end(
    client: Attested, thought: str, text: str, marks: tuple[str, str]
) -> None:
    with pytest.raises(VerificationError) as caught:
        client.verify(client.answer(thinking(thought, text, marks)))
    assert caught.value.code == R.OUTPUT_MISMATCH
