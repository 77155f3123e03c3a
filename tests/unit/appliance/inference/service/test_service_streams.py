"""What a stream consists of, in which order, and when its checkpoints come."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.generation.fake import FakeScript
from tests import cddl
from tests import reference_decoder as reference
from tests.unit.appliance.inference.service.rig import CHAT, TEXT, Clock, Rig, Wire, chat, fake, text

BODIES = {CHAT: chat, TEXT: text}
ROUTES = pytest.mark.parametrize("route", [CHAT, TEXT])


def spoken(wire: Wire, route: str) -> str:
    choices = [frame["choices"][0] for frame in wire.frames if frame.get("choices")]
    return "".join(c["delta"].get("content", "") if route == CHAT else c["text"] for c in choices)


@ROUTES
@pytest.mark.parametrize("usage", [False, True])
async def test_b089_b103_b104_b107_order_and_end(route: str, usage: bool) -> None:
    rig = Rig()
    wire = await rig.ask(BODIES[route](stream=True, stream_options={"include_usage": usage}), route=route)
    kinds = [kind for kind in wire.kinds if kind != "checkpoint"]
    assert kinds == [*["content"] * (4 if route == CHAT else 3), "finish", *["usage"] * usage, "receipt", "done"]
    assert [f["choices"][0]["finish_reason"] for f in wire.frames if f["choices"]].count("stop") == 1
    if usage:
        assert all(frame["usage"] is None for frame in wire.frames[:-1])
        claims = rig.claims(rig.receipts[0])
        prompt, output = claims[-70011]["count"], claims[-70014][0]["count"]
        expected = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        assert expected.items() <= wire.frames[-1]["usage"].items()
    else:
        assert all("usage" not in frame for frame in wire.frames)
    assert len({(f["id"], f["created"], f["model"], f["object"]) for f in wire.frames}) == 1
    assert wire.body.endswith(b"data: [DONE]\n\n")
    assert wire.headers["content-type"] == "text/event-stream"
    assert wire.headers["cache-control"] == "no-store"
    assert not wire.channel.close_after_response


@pytest.mark.parametrize(
    ("fields", "finish", "said"),
    [
        ({}, "stop", "Hello world."),
        ({"max_tokens": 2}, "length", "Hello world"),
        ({"stop": "o w"}, "stop", "Hell"),
        ({"stop": ["zzz", "."]}, "stop", "Hello world"),
        ({"stop": "Hello"}, "stop", ""),
    ],
)
@ROUTES
async def test_every_end_says_the_same_whole_and_streamed(
    fields: dict[str, Any], finish: str, said: str, route: str
) -> None:
    rig = Rig()
    body = BODIES[route](**fields)
    whole = await rig.ask(body, route=route)
    choice = whole.document["choices"][0]
    assert (choice["message"]["content"] if route == CHAT else choice["text"]) == said
    assert choice["finish_reason"] == finish
    stream = await rig.ask(BODIES[route](stream=True, **fields), route=route)
    assert spoken(stream, route) == said
    assert stream.kinds.count("finish") == 1
    opened = [rig.claims(receipt)[-70014][0] for receipt in rig.receipts]
    assert [entry["finish"] for entry in opened] == [finish, finish]
    assert opened[0]["count"] == opened[1]["count"]


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=6), min_size=1, max_size=12), padding=st.sampled_from([0, 1, 7, 256])
)
def test_deltas_concatenated_are_the_whole_text(pieces: list[bytes], padding: int) -> None:
    async def both() -> tuple[str, str]:
        rig = Rig(fake(FakeScript(pieces=tuple(pieces))), padding=padding)
        whole = await rig.ask(chat())
        stream = await rig.ask(chat(stream=True))
        reference.check_stream(stream.body, rig.cose_key, stream.request)
        return whole.document["choices"][0]["message"]["content"], spoken(stream, CHAT)

    said, streamed = asyncio.run(both())
    assert said == streamed == b"".join(pieces).decode(errors="replace")


async def test_no_text_means_no_frame_but_every_token_counts() -> None:
    rig = Rig(fake(FakeScript(pieces=("é".encode()[:1], "é".encode()[1:], b"!"))))
    wire = await rig.ask(text(stream=True), route=TEXT)
    assert [kind for kind in wire.kinds if kind != "checkpoint"] == ["content", "content", "finish", "receipt", "done"]
    assert rig.claims(rig.receipts[0])[-70014][0]["count"] == 4


# Commitments, recomputed by the other reader

DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "deterministic": False,
    "max_tokens": 4087,
    "n": 1,
    "prompts": 1,
    "echo": False,
    "logprobs": None,
    "stop": None,
    "response_format": None,
    "tools": None,
    "tool_choice": "none",
    "parallel_tool_calls": True,
}


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
async def test_every_commitment_opens_to_what_was_there(route: str, stream: bool) -> None:
    rig = Rig()
    fields = {"stop": ["zzz"], "temperature": 1, "top_p": 0.5, "top_k": 3, "seed": 11, "max_tokens": 9}
    wire = await rig.ask(BODIES[route](stream=stream, **fields), route=route)
    claims, salt = rig.claims(rig.receipts[0]), rig.salt(rig.receipts[0])
    prompt = "<user>hi\n" if route == CHAT else "hi"
    held: dict[str, Any] = {
        "request": wire.request,
        "prompt_text": prompt,
        "prompt_tokens": [byte + 3 for byte in prompt.encode()],
        "outputs": [{"text": "Hello world.", "tokens": [3, 4, 5, 2]}],
        "stop": ["zzz"],
    }
    if not stream:
        held["response"] = wire.body
    assert len(reference.check_content(claims, salt, held)) == 6 + (not stream)
    decoding = {**claims[-70012], "stop": None}
    assert decoding == {**DEFAULTS, "top_p": 0.5, "top_k": 3, "seed": 11, "max_tokens": 9}
    assert isinstance(decoding["temperature"], float)
    assert claims[6] == 1_800_000_000
    assert claims[-70016]["template-date"] == "2027-01-15"


async def test_defaults_are_resolved_and_seeds_differ() -> None:
    rig = Rig()
    for _ in range(3):
        await rig.ask(chat())
    decodings = [rig.claims(receipt)[-70012] for receipt in rig.receipts]
    assert len({decoding["seed"] for decoding in decodings}) == 3
    assert decodings[0] == {**DEFAULTS, "seed": decodings[0]["seed"]}
    assert all(0 <= decoding["seed"] <= 2**31 - 1 for decoding in decodings)
    assert len({rig.salt(receipt) for receipt in rig.receipts}) == 3


async def test_the_claims_in_force_are_named_or_null() -> None:
    from appliance.attestation.responder import InForce

    rig = Rig()
    await rig.ask(chat(), latched=InForce(attestation=b"a" * 32, binder=b"b" * 32))
    await rig.ask(chat())
    named, null = (rig.claims(receipt) for receipt in rig.receipts)
    assert (named[-70004], named[-70005], null[-70004], null[-70005]) == (b"a" * 32, b"b" * 32, None, None)


# Checkpoints


def positions(rig: Rig, wire: Wire) -> list[int]:
    """The index of every checkpoint, each validated."""
    found = []
    for block in wire.blocks:
        if block.startswith(b": checkpoint "):
            signed = reference._decode64(block, b": checkpoint ")
            cddl.validate("checkpoint", signed)
            found.append(reference.read_checkpoint(signed, rig.cose_key)[0]["i"])
    return found


@pytest.mark.parametrize(
    ("delay_s", "expected"),
    [
        (0.0, [1, 17, 33]),  # at least every 16 frames
        (0.125, [1, 6, 11, 16, 21, 26, 31, 36, 41]),  # half a second after a frame not covered
        (0.5, [1, *range(3, 42, 2)]),
        (1.0, [1, *range(3, 42, 2)]),
    ],
)
async def test_checkpoints_come_by_count_and_by_time(delay_s: float, expected: list[int]) -> None:
    clock = Clock()
    engine = fake(FakeScript(pieces=(b"x",) * 40, delay_s=delay_s), sleep=clock.sleep)
    rig = Rig(engine, monotonic=clock, max_request_s=1000)
    wire = await rig.ask(chat(stream=True))
    assert reference.check_stream(wire.body, rig.cose_key, wire.request)[-70015]["frames"] == 42
    assert positions(rig, wire) == expected


async def test_a_checkpoint_comes_alone_when_the_engine_is_silent() -> None:
    waits = iter((0.0, 0.0, 0.7, 0.0))

    async def sleep(_seconds: float) -> None:
        await asyncio.sleep(next(waits))

    rig = Rig(fake(FakeScript(pieces=(b"a", b"b", b"c"), delay_s=1.0), sleep=sleep))
    wire = await rig.ask(text(stream=True), route=TEXT)
    assert positions(rig, wire) == [1, 2]
    alone = [write for write in wire.writes if write.startswith(b": checkpoint ")]
    assert len(alone) == 1
    assert len(alone[0]) % 256 == 0
    reference.check_stream(wire.body, rig.cose_key, wire.request)


async def test_silence_before_the_first_frame_makes_no_checkpoint() -> None:
    rig = Rig(fake(FakeScript(pieces=(b"a",), delay_s=0.6)))
    wire = await rig.ask(text(stream=True), route=TEXT)
    assert positions(rig, wire)[0] == 1


# Padding


async def test_writes_are_padded_and_padding_is_random() -> None:
    rig = Rig(fake(FakeScript(pieces=tuple(b"y" * size for size in range(1, 300, 7)))))
    wire = await rig.ask(chat(stream=True))
    sizes = [len(write) for write in wire.writes if write]
    assert all(size % 256 == 0 for size in sizes)
    padding = [block for block in wire.blocks if block.startswith(b": p ")]
    assert len({block for block in padding if len(block) > 30}) == len([b for b in padding if len(b) > 30]) > 10
    assert wire.blocks[-1] == b"data: [DONE]\n\n"


async def test_padding_off_sends_none() -> None:
    rig = Rig(padding=0)
    wire = await rig.ask(chat(stream=True))
    assert b": p " not in wire.body
    reference.check_stream(wire.body, rig.cose_key, wire.request)


async def test_an_error_frame_is_one_line_of_json_in_openai_shape() -> None:
    rig = Rig(fake(FakeScript(fail_at=1)))
    wire = await rig.ask(chat(stream=True))
    error = next(block for block in wire.blocks if block.startswith(b'data: {"error"'))
    assert error.count(b"\n") == 2
    assert json.loads(error[6:])["error"]["type"] == "server_error"
