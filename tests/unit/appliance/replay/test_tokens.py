"""Where two answers part, by the text and by what opens the commitment; the fake engine has a token for every byte."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from appliance.engine.generation.fake import FakeEngine
from appliance.replay.run import Job
from appliance.replay.tokens import Claimed, Speller, locate
from client_sdk.wire import digests

SALT, LABEL = bytes(32), "output-tokens/0"


async def speller() -> Speller:
    engine = FakeEngine()
    await engine.start(lambda _phase, _fraction: None)
    return Speller(engine)


def ids(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def claimed(tokens: list[int], text: str | None) -> Claimed:
    return Claimed(
        choice=0,
        commitment=digests.commitment(SALT, LABEL, packed(tokens)),
        count=len(tokens),
        key=digests.inner_key(SALT, LABEL),
        text=text,
    )


def token(text: str) -> dict[str, Any]:
    return {"token_id": ids(text)[0], "text": text}


@pytest.mark.parametrize(
    ("signed", "replayed", "place", "answer", "replay"),
    [
        ("the cat sat", "the dog sat", 4, token("c"), token("d")),
        ("a", "b", 0, token("a"), token("b")),
        ("one", "one two", 3, None, token(" ")),
        ("one two", "one", 3, token(" "), None),
        ("", "x", 0, None, token("x")),
    ],
)
async def test_the_first_token_that_differs(signed: str, replayed: str, place: int, answer: Any, replay: Any) -> None:
    found = await locate(
        claimed(ids(signed), signed), Job(text=replayed, tokens=packed(ids(replayed))), await speller()
    )
    assert (found.what, found.place) == ("token", {"choice": 0, "token": place})
    assert (found.answer, found.replay) == (answer, replay)


async def test_an_exchanged_token_that_the_tokenizer_would_not_write() -> None:
    """Whatever id it is, as long as the tokens around it are the replay's."""
    signed = [*ids("ab"), 200, *ids("cd")]
    job = Job(text="abxcd", tokens=packed(ids("abxcd")))
    found = await locate(claimed(signed, "ab?cd"), job, await speller())
    assert found.place == {"choice": 0, "token": 2}
    assert found.answer == {"token_id": 200, "text": "\ufffd"}


async def test_a_token_that_nothing_opens_is_told_by_its_text() -> None:
    signed = [*ids("ab"), 200, 201, 202]
    found = await locate(claimed(signed, "abCDE"), Job(text="abcde", tokens=packed(ids("abcde"))), await speller())
    assert found.place == {"choice": 0, "token": 2}
    assert found.answer == {"token_id": None, "text": "CDE"}
    assert found.replay == token("c")


async def test_without_a_text_the_counts_remain() -> None:
    found = await locate(claimed([7, 8, 9], None), Job(text="a", tokens=packed(ids("a"))), await speller())
    assert (found.what, found.answer, found.replay) == ("tokens", {"tokens": 3}, {"tokens": 1})
    same = await locate(claimed([7], "a"), Job(text="a", tokens=packed(ids("a"))), await speller())
    assert same.what in ("tokens", "token")
