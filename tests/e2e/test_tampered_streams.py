"""A stream changed between the appliance's receipt and the client: cut, reordered, doubled, spliced, rewritten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from appliance.engine.base import Engine
from appliance.engine.types import EngineEvent, GenerationJob
from appliance.inference.service import ServedModel
from client_sdk import Appliance, Policy, Rejection, VerificationError
from client_sdk.wire import cbor, cose, names
from client_sdk.wire.stream import comment, decode_base64url
from tests.e2e.glass import GlassAppliance, Sent
from tests.e2e.programs import MODEL

pytestmark = pytest.mark.model
R = Rejection
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "temperature": 0, "stop": ["zzz"]}
PROMPT = "Write a long story about a lighthouse."  # three checkpoints at least, in any arithmetic
Blocks = list[bytes]


@pytest.fixture(scope="module")
def glass(workspace: Path) -> Iterator[GlassAppliance]:
    """One that does not guess ahead, so that each frame holds one token: what follows names frames by their number.

    Right guesses share a frame, and whether there are any depends on what rows were found to cost at the start.
    """
    with GlassAppliance(MODEL, overrides={"engine": {"speculation": "off"}}) as appliance:
        yield appliance


@pytest.fixture(scope="module")
def policy(glass: GlassAppliance, policy_file: Path) -> Policy:
    return replace(Policy.load(policy_file), configs=frozenset({glass.config.digest()}))


@pytest.fixture
def honest(glass: GlassAppliance) -> Iterator[GlassAppliance]:
    yield glass
    glass.tamper = None


@pytest.fixture(scope="module")
def truth(glass: GlassAppliance, policy: Policy) -> str:
    with Appliance(glass.url, policy=policy) as appliance:
        text = "".join(appliance.stream(PROMPT, **ASK))
    assert len(text) > 30, "these tests need a stream with several checkpoints"
    return text


@pytest.fixture(scope="module")
def other(glass: GlassAppliance, policy: Policy) -> Blocks:
    """The blocks of another stream of the same length, honest in itself."""
    glass.tamper = lambda sent: sent
    try:
        with Appliance(glass.url, policy=policy) as appliance:
            list(appliance.stream(PROMPT, **ASK))
    finally:
        glass.tamper = None
    assert glass.last is not None
    return without_padding(glass.last.blocks)


def is_frame(block: bytes) -> bool:
    return block.startswith(b"data: ") and block != names.DONE_BLOCK


def is_checkpoint(block: bytes) -> bool:
    return block.startswith(names.COMMENT_CHECKPOINT)


def without_padding(blocks: Blocks) -> Blocks:
    return [block for block in blocks if not block.startswith(names.COMMENT_PADDING)]


def at(blocks: Blocks, kind: Callable[[bytes], bool], number: int) -> int:
    return [index for index, block in enumerate(blocks) if kind(block)][number]


def receive(glass: GlassAppliance, policy: Policy, change: Callable[[Blocks], Blocks]) -> tuple[Rejection, str, str]:
    """The code, the message, and the text that was handed out before the rejection."""
    glass.tamper = lambda sent: sent.with_blocks(change(without_padding(sent.blocks)))
    got: list[str] = []
    with Appliance(glass.url, policy=policy) as appliance, pytest.raises(VerificationError) as caught:
        drain(appliance.stream(PROMPT, **ASK), got)
    return caught.value.code, caught.value.message, "".join(got)


def drain(pieces: Iterable[str], into: list[str]) -> None:
    for piece in pieces:
        into.append(piece)


def drop(kind: Callable[[bytes], bool], number: int) -> Callable[[Blocks], Blocks]:
    def change(blocks: Blocks) -> Blocks:
        del blocks[at(blocks, kind, number)]
        return blocks

    return change


def double(kind: Callable[[bytes], bool], number: int) -> Callable[[Blocks], Blocks]:
    def change(blocks: Blocks) -> Blocks:
        index = at(blocks, kind, number)
        return [*blocks[: index + 1], *blocks[index:]]

    return change


def swap(kind: Callable[[bytes], bool], one: int, two: int) -> Callable[[Blocks], Blocks]:
    def change(blocks: Blocks) -> Blocks:
        i, j = at(blocks, kind, one), at(blocks, kind, two)
        blocks[i], blocks[j] = blocks[j], blocks[i]
        return blocks

    return change


def move(kind: Callable[[bytes], bool], number: int, by: int) -> Callable[[Blocks], Blocks]:
    def change(blocks: Blocks) -> Blocks:
        index = at(blocks, kind, number)
        blocks.insert(index + by, blocks.pop(index))
        return blocks

    return change


def cut_after(kind: Callable[[bytes], bool], number: int) -> Callable[[Blocks], Blocks]:
    return lambda blocks: blocks[: at(blocks, kind, number) + 1]


def is_receipt(block: bytes) -> bool:
    return block.startswith(names.COMMENT_RECEIPT)


def is_done(block: bytes) -> bool:
    return block == names.DONE_BLOCK


def insert_after(kind: Callable[[bytes], bool], number: int, new: bytes) -> Callable[[Blocks], Blocks]:
    def change(blocks: Blocks) -> Blocks:
        blocks.insert(at(blocks, kind, number) + 1, new)
        return blocks

    return change


class Unhurried:
    """The real engine, its events handed on at a pace that lets checkpoints fall due by time between any two."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        async for event in self._engine.generate(job):
            await asyncio.sleep(names.CHECKPOINT_MAX_DELAY_S / (names.CHECKPOINT_MAX_FRAMES - 4))
            yield event


def checkpoints(sent: Sent) -> list[int]:
    """How many frames stand before each checkpoint."""
    kinds = [(is_frame(block), is_checkpoint(block)) for block in sent.blocks]
    return [sum(frame for frame, _ in kinds[:index]) for index, (_, checkpoint) in enumerate(kinds) if checkpoint]


def test_checkpoints_stand_at_the_same_frames_at_any_speed(honest: GlassAppliance, policy: Policy) -> None:
    """What follows names checkpoints by their number: only counted frames may bring one, never a slow machine."""
    models = cast("dict[str, ServedModel]", honest.appliance.service.models)
    served, seen = models[MODEL], []
    honest.tamper = lambda sent: sent
    for engine in (served.engine, cast(Engine, Unhurried(served.engine))):
        models[MODEL] = replace(served, engine=engine)
        try:
            with Appliance(honest.url, policy=policy) as appliance:
                list(appliance.stream(PROMPT, **ASK))
        finally:
            models[MODEL] = served
        assert honest.last is not None
        seen.append(checkpoints(honest.last))
    assert seen[0] == [1 + number * names.CHECKPOINT_MAX_FRAMES for number in range(len(seen[0]))]
    assert len(seen[0]) >= 3
    assert seen[1] == seen[0]


CHANGES: dict[str, tuple[Callable[[Blocks], Blocks], Rejection]] = {
    "drop a frame": (drop(is_frame, 5), R.STREAM_CHECKPOINT_MISMATCH),
    "drop the first frame": (drop(is_frame, 0), R.STREAM_CHECKPOINT_MISMATCH),
    "drop the last frame": (drop(is_frame, -1), R.STREAM_TRUNCATED),
    "double a frame": (double(is_frame, 5), R.STREAM_CHECKPOINT_MISSING),
    "swap two frames": (swap(is_frame, 5, 7), R.STREAM_CHAIN_MISMATCH),
    "move a frame over a checkpoint": (move(is_checkpoint, 1, -1), R.STREAM_CHECKPOINT_MISMATCH),
    "invent a frame": (insert_after(is_frame, 5, b'data: {"choices":[]}\n\n'), R.MALFORMED_STREAM),
    "drop the first checkpoint": (drop(is_checkpoint, 0), R.STREAM_CHECKPOINT_MISSING),
    "drop a later checkpoint": (drop(is_checkpoint, 1), R.STREAM_CHECKPOINT_MISSING),
    "drop the last checkpoint": (drop(is_checkpoint, -1), R.STREAM_CHECKPOINT_MISSING),
    "swap two checkpoints": (swap(is_checkpoint, 0, 1), R.STREAM_CHECKPOINT_MISMATCH),
    "cut in a block": (lambda blocks: [*blocks[:9], blocks[9][:-3]], R.STREAM_TRUNCATED),
    "cut after a frame": (cut_after(is_frame, 8), R.STREAM_TRUNCATED),
    "cut after a checkpoint": (cut_after(is_checkpoint, 1), R.STREAM_TRUNCATED),
    "cut before the receipt": (cut_after(is_frame, -1), R.STREAM_TRUNCATED),
    "cut before [DONE]": (cut_after(is_receipt, 0), R.STREAM_TRUNCATED),
    "[DONE] without a receipt": (drop(is_receipt, 0), R.RECEIPT_MISSING),
    "two receipts": (double(is_receipt, 0), R.STREAM_AFTER_RECEIPT),
    "two [DONE]": (double(is_done, 0), R.STREAM_AFTER_RECEIPT),
    "a frame after the receipt": (insert_after(is_receipt, 0, b"data: {}\n\n"), R.STREAM_AFTER_RECEIPT),
    "a comment nobody knows": (insert_after(is_frame, 3, b": hello\n\n"), R.MALFORMED_STREAM),
    "a frame that is no JSON": (insert_after(is_frame, 3, b"data: nothing\n\n"), R.MALFORMED_STREAM),
    "CRLF": (lambda blocks: [block.replace(b"\n", b"\r\n") for block in blocks], R.STREAM_TRUNCATED),
    "a checkpoint that is rubbish": (
        insert_after(is_frame, 3, comment(names.COMMENT_CHECKPOINT, b"\xd2\x84")),
        R.MALFORMED_CBOR,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_blocks_changed(honest: GlassAppliance, policy: Policy, truth: str, name: str) -> None:
    change, expected = CHANGES[name]
    code, message, text = receive(honest, policy, change)
    assert code == expected
    assert "last verified frame: " in message
    assert truth.startswith(text), "only verified text may be handed out"
    assert len(text) < len(truth), "the end of the answer belongs to the receipt"


@pytest.mark.parametrize("number", [0, 1, 5, 17, -1])
def test_a_frame_rewritten(honest: GlassAppliance, policy: Policy, truth: str, number: int) -> None:
    def change(blocks: Blocks) -> Blocks:
        index = at(blocks, is_frame, number)
        blocks[index] = blocks[index].replace(b'"created":', b'"created":1', 1)
        return blocks

    code, _, text = receive(honest, policy, change)
    assert code == R.STREAM_CHAIN_MISMATCH
    assert truth.startswith(text)
    assert len(text) < len(truth)


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [
        (is_frame, 5, R.MALFORMED_STREAM),  # its id is another answer's
        (is_checkpoint, 0, R.STREAM_CHECKPOINT_MISMATCH),
        (is_checkpoint, 1, R.STREAM_CHECKPOINT_MISMATCH),
        (is_receipt, 0, R.RECEIPT_NONCE_MISMATCH),
    ],
)
def test_a_block_of_another_stream(
    honest: GlassAppliance,
    policy: Policy,
    other: Blocks,
    kind: Callable[[bytes], bool],
    number: int,
    expected: Rejection,
) -> None:
    """The other stream is genuine, of the same question, by the same appliance."""

    def splice(blocks: Blocks) -> Blocks:
        blocks[at(blocks, kind, number)] = other[at(other, kind, number)]
        return blocks

    assert receive(honest, policy, splice)[0] == expected


def test_another_stream_whole(honest: GlassAppliance, policy: Policy, other: Blocks) -> None:
    assert receive(honest, policy, lambda _: other)[0] == R.STREAM_CHECKPOINT_MISMATCH


@pytest.mark.parametrize("field", ["cti", "eat_nonce", "attestation", "channel", "request", "i", "h", "profile"])
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_a_checkpoint_field_changed(honest: GlassAppliance, policy: Policy, field: str, signed: bool) -> None:
    def lie(block: bytes) -> bytes:
        raw = decode_base64url(block[len(names.COMMENT_CHECKPOINT) : -2], limit_bytes=1 << 12)
        old = cose.parse_sign1(raw, typ=names.TYP_CHECKPOINT, salted=True, limit_bytes=1 << 12)
        payload: Any = cbor.decode(old.payload, limit_bytes=1 << 12)
        value = payload[field]
        payload[field] = value + 1 if field == "i" else value + "x" if field == "profile" else bytes(len(value))
        encoded = cbor.encode(payload)
        sign: Callable[[bytes], bytes] = (lambda _: old.signature) if not signed else honest.sign
        return comment(
            names.COMMENT_CHECKPOINT,
            cose.sign1(protected=old.protected, salt=old.salt, payload=encoded, sign=sign),
        )

    def change(blocks: Blocks) -> Blocks:
        index = at(blocks, is_checkpoint, 1)
        blocks[index] = lie(blocks[index])
        return blocks

    special = {"h": R.STREAM_CHAIN_MISMATCH, "profile": R.UNSUPPORTED_PROFILE}
    expected = special.get(field, R.STREAM_CHECKPOINT_MISMATCH) if signed else R.BAD_SIGNATURE
    assert receive(honest, policy, change)[0] == expected


def test_a_checkpoint_with_another_salt(honest: GlassAppliance, policy: Policy) -> None:
    """The salt is not signed; a changed one changes every digest that follows from it."""

    def change(blocks: Blocks) -> Blocks:
        for number in range(2):
            index = at(blocks, is_checkpoint, number)
            raw = decode_base64url(blocks[index][len(names.COMMENT_CHECKPOINT) : -2], limit_bytes=1 << 12)
            old = cose.parse_sign1(raw, typ=names.TYP_CHECKPOINT, salted=True, limit_bytes=1 << 12)
            signature = old.signature
            new = cose.sign1(
                protected=old.protected, salt=bytes(32), payload=old.payload, sign=partial(_same_signature, signature)
            )
            blocks[index] = comment(names.COMMENT_CHECKPOINT, new)
        return blocks

    assert receive(honest, policy, change)[0] == R.STREAM_CHECKPOINT_MISMATCH


def test_a_stream_served_as_a_whole_answer(honest: GlassAppliance, policy: Policy) -> None:
    def relabel(sent: Sent) -> Sent:
        return replace(sent.with_header("content-type", "application/json"), body=b"{}")

    honest.tamper = relabel
    with Appliance(honest.url, policy=policy) as appliance, pytest.raises(VerificationError) as caught:
        list(appliance.stream(PROMPT, **ASK))
    assert caught.value.code == R.RESPONSE_MISMATCH


def _same_signature(signature: bytes, _data: bytes) -> bytes:
    return signature
