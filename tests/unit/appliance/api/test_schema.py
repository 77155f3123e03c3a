"""Requests as bytes: whatever comes in, a call or a BadRequest comes out, and it quotes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.dialects import ChatDialect, CompletionDialect
from appliance.api.schema import MAX_CHOICES, MAX_SEED, ChatCompletionRequest, CompletionRequest, parse
from appliance.engine.types import TokenLogprob
from appliance.errors import BadRequest
from appliance.inference.request import Call, Choice, Dialect, Heading, Piece, Usage

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted(ChatCompletionRequest.model_fields | CompletionRequest.model_fields)
DIALECTS = (ChatDialect(), CompletionDialect())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_call_or_a_bad_request(data: bytes) -> None:
    for dialect in DIALECTS:
        with pytest.raises(BadRequest):
            dialect.parse(data)


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_any_values_are_a_call_or_a_bad_request_of_one_line(fields: dict[str, Any]) -> None:
    good = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for base, dialect in ((good, DIALECTS[0]), ({"model": "m", "prompt": "x"}, DIALECTS[1])):
        outcome = attempt(dialect, json.dumps({**base, **fields}).encode())
        if isinstance(outcome, BadRequest):
            assert outcome.param is None or len(outcome.param) < 200
            assert outcome.message.isprintable()
        else:
            wanted = outcome.wanted
            assert wanted.temperature is None or 0 <= wanted.temperature <= 2
            assert wanted.seed is None or 0 <= wanted.seed <= MAX_SEED
            assert all(stop for stop in wanted.stop)
            assert 1 <= outcome.n <= MAX_CHOICES


def attempt(dialect: Dialect, body: bytes) -> Call | BadRequest:
    try:
        return dialect.parse(body)
    except BadRequest as error:
        return error


@given(TEXT, st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=4))
def test_content_arrives_as_it_was_sent(user: str, messages: list[tuple[str, str]]) -> None:
    fields = {"model": "m", "user": user, "messages": [{"role": role, "content": text} for role, text in messages]}
    for escaped in (True, False):
        call = DIALECTS[0].parse(json.dumps(fields, ensure_ascii=escaped).encode())
        assert [(message.role, message.content) for message in call.prompts[0]] == messages  # type: ignore[union-attr]


@pytest.mark.parametrize("key", ["secret", "ключ", "a[0].b", "str"])
def test_keys_of_free_maps_are_content(key: str) -> None:
    for field in ("metadata", "logit_bias"):
        with pytest.raises(BadRequest) as caught:
            DIALECTS[1].parse(json.dumps({"model": "m", "prompt": "x", field: {key: {key: key}}}).encode())
        assert caught.value.param == field
        assert key not in caught.value.message.replace(field, "").replace("string", "")


def test_which_name_of_the_limit_is_blamed() -> None:
    base = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for name in ("max_tokens", "max_completion_tokens"):
        call = DIALECTS[0].parse(json.dumps({**base, name: 5}).encode())
        assert (call.wanted.max_tokens, call.max_tokens_field) == (5, name)
    with pytest.raises(BadRequest) as caught:
        DIALECTS[1].parse(b'{"model":"m","prompt":"x","max_completion_tokens":1}')
    assert caught.value.code == "unknown_field"


def test_the_schema_refuses_to_be_asked_twice() -> None:
    with pytest.raises(BadRequest):
        parse(CompletionRequest, b'{"model":"m","prompt":"x","prompt":"x"}')


@given(TEXT, st.sampled_from([None, 0, 2]))
def test_frames_are_one_block_whatever_the_text(text: str, logprobs: int | None) -> None:
    heading = Heading(identifier="ab" * 16, created=1, model="m", include_usage=True)
    for dialect in DIALECTS:
        usage = Usage(prompt_tokens=1, completion_tokens=2)
        choice = Choice(3, measured=logprobs is not None)
        measured = TokenLogprob(token=text.encode(), logprob=-0.5, top=((b"\xf0\n", -0.25),) * (logprobs or 0))
        piece = choice.take(text, bytes(4), (measured,) if logprobs is not None else ()) or Piece(text="")
        choice.output.finish = "stop"
        blocks = [
            *dialect.opening(heading, [choice]),
            *dialect.delta(heading, choice, piece),
            *dialect.finish(heading, choice),
            *dialect.closing(heading, usage),
        ]
        for block in blocks:
            assert block.startswith(b"data: {")
            assert block.endswith(b"}\n\n")
            assert block.count(b"\n") == 2
            assert b"\r" not in block
        whole = json.loads(dialect.whole(heading, [choice], usage))
        (document,) = whole["choices"]
        assert (document["index"], document["finish_reason"]) == (3, "stop")
        assert text == (document["message"]["content"] if "message" in document else document["text"])
        assert (document["logprobs"] is None) == (logprobs is None)
        assert whole["usage"]["total_tokens"] == 3
