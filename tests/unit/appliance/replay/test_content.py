"""Two bodies of one answer come to the same document; what is not the same is found."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from appliance.replay.content import ContentError, Said, content, first_unequal, said


def packed(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def chunk(*choices: dict[str, Any], **more: Any) -> bytes:
    return packed({"id": "chatcmpl-1", "model": "m", "choices": list(choices), **more})


def delta(index: int, finish: str | None = None, logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish}


def test_chunks_come_to_the_same_wherever_they_were_cut() -> None:
    one = [
        chunk(delta(0, role="assistant", content="")),
        chunk(delta(1, role="assistant", content="")),
        chunk(delta(0, content="He"), obfuscation="abc"),
        chunk(delta(1, content="Yes")),
        chunk(delta(0, content="llo")),
        chunk(delta(1, finish="length")),
        chunk(delta(0, finish="stop")),
        chunk(usage={"total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 7}}),
    ]
    other = [
        chunk(delta(0, role="assistant", content="")),
        chunk(delta(0, content="Hello")),
        chunk(delta(1, role="assistant", content="")),
        chunk(delta(0, finish="stop")),
        chunk(delta(1, content="Y"), obfuscation=""),
        chunk(delta(1, content="es")),
        chunk(delta(1, finish="length")),
        chunk(usage={"total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}),
    ]
    first, second = content(b"", one), content(b"", other)
    assert first_unequal(first, second) is None
    assert said(first) == {0: Said(text="Hello"), 1: Said(text="Yes")}


def test_calls_and_probabilities_are_put_together() -> None:
    def call(**function: str) -> list[dict[str, Any]]:
        return [{"index": 0, "function": function}]

    measured = {"content": [{"token": "a", "logprob": -0.5}]}
    frames = [
        chunk(delta(0, reasoning_content="hm", logprobs=measured)),
        chunk(delta(0, tool_calls=call(name="f", arguments="{"))),
        chunk(delta(0, tool_calls=call(arguments="}"), logprobs=measured)),
    ]
    document: Any = content(b"", frames)
    assert said(document) == {0: Said(reasoning="hm", calls=(("f", "{}"),))}
    assert document["choices"][0]["logprobs"]["content"] == [{"token": "a", "logprob": -0.5}] * 2


def test_what_cannot_change_and_does_is_found() -> None:
    honest = content(b"", [chunk(delta(0, content="a")), chunk(delta(0, finish="stop"))])
    turned = content(b"", [chunk(delta(0, content="a")), packed({"id": "chatcmpl-2", "model": "m", "choices": []})])
    assert first_unequal(honest, turned) is not None
    twice = content(
        b"", [chunk(delta(0, content="a")), chunk(delta(0, finish="stop")), chunk(delta(0, finish="length"))]
    )
    assert first_unequal(honest, twice) is not None


@pytest.mark.parametrize(
    ("answer", "replay", "path"),
    [
        ({"a": [1, {"b": 0.1}]}, {"a": [1, {"b": 0.1 + 2**-56}]}, "a[1].b"),
        ({"a": 0.0}, {"a": -0.0}, "a"),
        ({"a": 1}, {"a": 1.0}, "a"),
        ({"a": None}, {}, "a"),
        ({}, {"a": None}, "a"),
        ({"a": [1]}, {"a": [1, 2]}, "a[1]"),
        ({"a": [1, 2]}, {"a": [1]}, "a[1]"),
        ({"a": True}, {"a": 1}, "a"),
    ],
)
def test_the_first_difference_has_a_path(answer: Any, replay: Any, path: str) -> None:
    assert first_unequal(answer, answer) is None
    found = first_unequal(answer, replay)
    assert found is not None
    assert found.text == path


def test_vectors_are_numbers_in_either_form() -> None:
    numbers = [0.25, -1.5]
    text = base64.b64encode(struct.pack("<2f", *numbers)).decode()
    body = content(packed({"data": [{"index": 0, "embedding": text}]}), None)
    assert body == {"data": [{"index": 0, "embedding": numbers}]}


def test_events_are_put_together_by_their_place() -> None:
    def events(*deltas: str) -> list[bytes]:
        texts = [
            {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": text}
            for text in deltas
        ]
        item = {"type": "message", "content": [{"type": "output_text", "text": "".join(deltas)}]}
        end = {"type": "response.completed", "response": {"output": [item], "usage": {"input_tokens": 1}}}
        return [packed({**event, "sequence_number": n}) for n, event in enumerate([*texts, end])]

    assert first_unequal(content(b"", events("a", "bc")), content(b"", events("ab", "c"))) is None
    assert said(content(b"", events("ab", "c"))) == {0: Said(text="abc")}
    assert first_unequal(content(b"", events("a", "bc")), content(b"", events("ab", "d"))) is not None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"a":1,"a":2}', b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_answer_is_refused(body: bytes) -> None:
    with pytest.raises(ContentError):
        content(body, None)
    with pytest.raises(ContentError):
        content(b"", [body])


@pytest.mark.parametrize(
    "value", [{}, {"choices": 3}, {"choices": [None]}, {"output": [1, {"content": [2]}]}, {"x 0": 1}]
)
def test_documents_of_any_shape_say_something_or_nothing(value: Any) -> None:
    assert isinstance(said(value), dict)
