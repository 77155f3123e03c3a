"""Streams: what is released when, and each rejection by exactly one fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_sdk.errors import MalformedError, Rejection, VerificationError
from client_sdk.receipts.stream import LIMIT_END_FRAMES, StreamVerifier
from client_sdk.wire import cose, names
from client_sdk.wire.stream import comment, decode_base64url
from tests.simulators.attested import Attested, attested
from tests.simulators.insecure_appliance import (
    COMPLETIONS,
    InsecureAppliance,
    Options,
    SigningKey,
    Stream,
    StreamBlock,
    completion_request,
    same,
    seeded,
)

Blocks = tuple[StreamBlock, ...]
LONG = tuple(f"word{number} " for number in range(40))
R = Rejection


def frames_of(blocks: Blocks) -> bytes:
    return b"".join(block.raw for block in blocks if block.kind in ("frame", "done"))


def position(blocks: Blocks, kind: str, nth: int = 0) -> int:
    return [index for index, block in enumerate(blocks) if block.kind == kind][nth]


def without(kind: str, nth: int = 0) -> Callable[[Blocks], Blocks]:
    def edit(blocks: Blocks) -> Blocks:
        at = position(blocks, kind, nth)
        return blocks[:at] + blocks[at + 1 :]

    return edit


def insert_before(kind: str, raw: bytes, nth: int = 0) -> Callable[[Blocks], Blocks]:
    def edit(blocks: Blocks) -> Blocks:
        at = position(blocks, kind, nth)
        return (*blocks[:at], StreamBlock(kind="raw", raw=raw), *blocks[at:])

    return edit


def append(raw: bytes) -> Callable[[Blocks], Blocks]:
    return lambda blocks: (*blocks, StreamBlock(kind="raw", raw=raw))


def swap(kind: str, first: int, second: int) -> Callable[[Blocks], Blocks]:
    def edit(blocks: Blocks) -> Blocks:
        changed = list(blocks)
        a, b = position(blocks, kind, first), position(blocks, kind, second)
        changed[a], changed[b] = changed[b], changed[a]
        return tuple(changed)

    return edit


def duplicate(kind: str, nth: int) -> Callable[[Blocks], Blocks]:
    def edit(blocks: Blocks) -> Blocks:
        at = position(blocks, kind, nth)
        return (*blocks[: at + 1], blocks[at], *blocks[at + 1 :])

    return edit


def tampered(kind: str, old: bytes, new: bytes, nth: int = 0) -> Callable[[Blocks], Blocks]:
    def edit(blocks: Blocks) -> Blocks:
        at = position(blocks, kind, nth)
        raw = blocks[at].raw.replace(old, new)
        assert raw != blocks[at].raw
        return (*blocks[:at], StreamBlock(kind=kind, raw=raw), *blocks[at + 1 :])

    return edit


def cut(kind: str, nth: int = 0) -> Callable[[Blocks], Blocks]:
    """The connection ends just before a block."""
    return lambda blocks: blocks[: position(blocks, kind, nth)]


def cut_inside_last(blocks: Blocks) -> Blocks:
    return (*blocks[:-1], StreamBlock(kind="raw", raw=blocks[-1].raw[:-1]))


def stripped_receipt(blocks: Blocks) -> Blocks:
    at = position(blocks, "receipt")
    text = blocks[at].raw[len(names.COMMENT_RECEIPT) : -2]
    receipt = decode_base64url(text, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    bare = comment(names.COMMENT_RECEIPT, cose.redacted(receipt, limit_bytes=names.LIMIT_RECEIPT_BYTES))
    return (*blocks[:at], StreamBlock(kind="receipt", raw=bare), *blocks[at + 1 :])


def stripped_checkpoint(blocks: Blocks) -> Blocks:
    at = position(blocks, "checkpoint")
    text = blocks[at].raw[len(names.COMMENT_CHECKPOINT) : -2]
    signed = decode_base64url(text, limit_bytes=names.LIMIT_CHECKPOINT_BYTES)
    bare = comment(names.COMMENT_CHECKPOINT, cose.redacted(signed, limit_bytes=names.LIMIT_CHECKPOINT_BYTES))
    return (*blocks[:at], StreamBlock(kind="checkpoint", raw=bare), *blocks[at + 1 :])


def receipt_as_checkpoint(blocks: Blocks) -> Blocks:
    raw = blocks[position(blocks, "receipt")].raw
    text = raw[len(names.COMMENT_RECEIPT) : -2]
    return insert_before("receipt", names.COMMENT_CHECKPOINT + text + b"\n\n")(blocks)


BLOCK_FAULTS: list[tuple[str, Rejection, Callable[[Blocks], Blocks]]] = [
    ("frame-dropped", R.STREAM_CHECKPOINT_MISMATCH, without("frame", 3)),
    ("frame-dropped-at-the-end", R.STREAM_TRUNCATED, without("frame", 41)),
    ("frame-duplicated", R.MALFORMED_STREAM, duplicate("frame", 40)),
    ("delta-duplicated-at-the-end", R.STREAM_CHAIN_MISMATCH, duplicate("frame", 39)),
    ("delta-duplicated-before-a-checkpoint", R.STREAM_CHECKPOINT_MISSING, duplicate("frame", 5)),
    ("frames-reordered", R.STREAM_CHAIN_MISMATCH, swap("frame", 3, 5)),
    ("frames-reordered-at-the-end", R.STREAM_CHAIN_MISMATCH, swap("frame", 38, 39)),
    ("frame-tampered", R.STREAM_CHAIN_MISMATCH, tampered("frame", b"word4", b"w0rd4", 4)),
    ("last-delta-tampered", R.STREAM_CHAIN_MISMATCH, tampered("frame", b"word39", b"w0rd39", 39)),
    ("usage-tampered", R.STREAM_CHAIN_MISMATCH, tampered("frame", b'"prompt_tokens": 21', b'"prompt_tokens": 1', 41)),
    ("first-checkpoint-dropped", R.STREAM_CHECKPOINT_MISSING, without("checkpoint", 0)),
    ("later-checkpoint-dropped", R.STREAM_CHECKPOINT_MISSING, without("checkpoint", 1)),
    ("last-checkpoint-dropped", R.STREAM_CHECKPOINT_MISSING, without("checkpoint", 2)),
    ("checkpoints-swapped", R.STREAM_CHECKPOINT_MISMATCH, swap("checkpoint", 0, 1)),
    ("checkpoint-without-salt", R.STREAM_CHECKPOINT_MISMATCH, stripped_checkpoint),
    ("receipt-dressed-as-checkpoint", R.MALFORMED_TYP, receipt_as_checkpoint),
    ("checkpoint-base64", R.MALFORMED_BASE64, insert_before("receipt", names.COMMENT_CHECKPOINT + b"A\n\n")),
    ("receipt-base64", R.MALFORMED_BASE64, lambda b: (*b[:-2], StreamBlock(kind="receipt", raw=b": receipt A\n\n"))),
    ("receipt-dropped", R.RECEIPT_MISSING, without("receipt")),
    ("receipt-after-done", R.RECEIPT_MISSING, lambda b: swap_receipt_and_done(b)),
    ("receipt-stripped-of-its-salt", R.REQUIRED_CLAIM_MISSING, stripped_receipt),
    ("two-receipts", R.STREAM_AFTER_RECEIPT, duplicate("receipt", 0)),
    ("B089-frame-after-the-receipt", R.STREAM_AFTER_RECEIPT, insert_before("done", b'data: {"choices":[]}\n\n')),
    ("frame-after-done", R.STREAM_AFTER_RECEIPT, append(b'data: {"choices":[]}\n\n')),
    ("done-twice", R.STREAM_AFTER_RECEIPT, duplicate("done", 0)),
    ("done-missing", R.STREAM_TRUNCATED, without("done")),
    ("cut-before-the-receipt", R.STREAM_TRUNCATED, cut("receipt")),
    ("cut-after-the-first-frame", R.STREAM_TRUNCATED, cut("frame", 1)),
    ("cut-before-anything", R.STREAM_TRUNCATED, cut("frame", 0)),
    ("cut-inside-a-block", R.STREAM_TRUNCATED, cut_inside_last),
    ("frame-not-json", R.MALFORMED_STREAM, insert_before("receipt", b"data: {\n\n")),
    ("frame-not-an-object", R.MALFORMED_STREAM, insert_before("receipt", b"data: 1\n\n")),
    ("carriage-return", R.MALFORMED_STREAM, insert_before("receipt", b"data: {}\r\n\n")),
    ("event-field", R.MALFORMED_STREAM, insert_before("receipt", b"event: x\ndata: {}\n\n")),
    ("retry-field", R.MALFORMED_STREAM, insert_before("receipt", b"retry: 1\n\n")),
    ("comment-inside-a-frame", R.MALFORMED_STREAM, insert_before("receipt", b"data: {}\n: p AAAA\n\n")),
    ("data-inside-a-comment", R.MALFORMED_STREAM, insert_before("receipt", b": p AAAA\ndata: {}\n\n")),
    ("unknown-comment", R.MALFORMED_STREAM, insert_before("receipt", b": hello\n\n")),
    ("empty-block", R.MALFORMED_STREAM, insert_before("receipt", b"\n\n")),
    ("byte-order-mark", R.MALFORMED_STREAM, insert_before("frame", b"\xef\xbb\xbf")),
    ("endless-block", R.MALFORMED_STREAM, insert_before("receipt", b"data: " + b" " * (1 << 20))),
]  # fmt: skip


def swap_receipt_and_done(blocks: Blocks) -> Blocks:
    return (*blocks[:-2], blocks[-1], blocks[-2])


@pytest.fixture
def client() -> Attested:
    return attested()


@pytest.mark.parametrize(("code", "edit"), [f[1:] for f in BLOCK_FAULTS], ids=[f[0] for f in BLOCK_FAULTS])
def test_one_fault_on_the_way_is_one_rejection(
    client: Attested, code: Rejection, edit: Callable[[Blocks], Blocks]
) -> None:
    stream = client.stream(Options(pieces=LONG))
    client.read(stream)
    with pytest.raises(VerificationError) as caught:
        client.read(stream, edit(stream.blocks))
    assert caught.value.code == code
    assert "last verified frame: " in caught.value.message
    assert caught.value.checks[-1].status == "failed"


def checkpoint(**changes: Any) -> Options:
    return Options(edit_checkpoint=lambda value: replace(value, **changes))


def context(**changes: Any) -> Options:
    return Options(edit_checkpoint=lambda value: replace(value, context=replace(value.context, **changes)))


def stream_facts(**changes: Any) -> Options:
    return Options(
        edit_claims=lambda claims: replace(claims, stream=replace(claims.stream, **changes))  # type: ignore[type-var]
    )


SIGNED_FAULTS: list[tuple[str, Rejection, Options]] = [
    ("checkpoint-key", R.WRONG_KEY, Options(checkpoint_signer=SigningKey("somebody else"))),
    ("checkpoint-index", R.STREAM_CHECKPOINT_MISMATCH, checkpoint(index=2)),
    ("checkpoint-chain", R.STREAM_CHAIN_MISMATCH, checkpoint(chain=seeded("other chain"))),
    ("checkpoint-cti", R.STREAM_CHECKPOINT_MISMATCH, context(cti=seeded("other", 16))),
    ("checkpoint-nonce", R.STREAM_CHECKPOINT_MISMATCH, context(eat_nonce=seeded("other"))),
    ("checkpoint-attestation", R.STREAM_CHECKPOINT_MISMATCH, context(attestation=None)),
    ("checkpoint-channel", R.STREAM_CHECKPOINT_MISMATCH, context(channel=seeded("other"))),
    ("checkpoint-request", R.STREAM_CHECKPOINT_MISMATCH, context(request=seeded("other"))),
    ("checkpoint-salt", R.STREAM_CHECKPOINT_MISMATCH, Options(checkpoint_salt=seeded("other"))),
    ("receipt-frames-more", R.STREAM_TRUNCATED, stream_facts(frames=9)),
    ("receipt-frames-fewer", R.STREAM_CHAIN_MISMATCH, stream_facts(frames=2)),
    ("receipt-chain", R.STREAM_CHAIN_MISMATCH, stream_facts(chain=seeded("other chain"))),
    ("receipt-checkpoint", R.STREAM_CHECKPOINT_MISMATCH, stream_facts(checkpoint=(1, seeded("other")))),
    ("receipt-key", R.WRONG_KEY, Options(signer=SigningKey("somebody else"))),
    ("receipt-status", R.STATUS_MISMATCH, Options(status=names.STATUS_ERROR)),
    ("receipt-complete-though-failed", R.STATUS_MISMATCH, Options(fail_after=2)),
    ("id-of-another-receipt", R.RECEIPT_ID_MISMATCH, Options(edit_body=lambda b: {**b, "id": "chatcmpl-00"})),
    ("model-of-another-name", R.MODEL_MISMATCH, Options(edit_body=lambda b: {**b, "model": "other"})),
    ("no-finish", R.OUTPUT_MISMATCH, Options(edit_body=lambda b: _without_finish(b))),
    ("text-not-generated", R.OUTPUT_MISMATCH, Options(edit_body=lambda b: _other_text(b))),
]


def _without_finish(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "choices": [{**choice, "finish_reason": None} for choice in body["choices"]]}


def _other_text(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "choices": [{**choice, "delta": {"content": "no"}} for choice in body["choices"]]}


@pytest.mark.parametrize(("code", "options"), [f[1:] for f in SIGNED_FAULTS], ids=[f[0] for f in SIGNED_FAULTS])
def test_one_lie_of_the_signer_is_one_rejection(client: Attested, code: Rejection, options: Options) -> None:
    client.read(client.stream())
    with pytest.raises(VerificationError) as caught:
        client.read(client.stream(options))
    assert caught.value.code == code


def test_everything_comes_out_in_order_and_comments_stay_inside(client: Attested) -> None:
    stream = client.stream(Options(pieces=LONG))
    released, receipt = client.read(stream)
    assert released == frames_of(stream.blocks)
    assert receipt.claims.response.status == names.STATUS_COMPLETE


@pytest.mark.parametrize("include_usage", [True, False])
def test_frames_come_out_at_checkpoints_and_the_end_only_with_the_receipt(
    client: Attested, include_usage: bool
) -> None:
    stream = client.stream(Options(pieces=("a", "b"), include_usage=include_usage, checkpoint_every=1))
    verifier = client.verifier(stream)
    released = 0
    for block in stream.blocks:
        out = verifier.feed(block.raw)
        if block.kind == "checkpoint":
            released += len(out)
        else:
            assert out == []
    assert released == 2
    assert len(verifier.pending) == (2 if include_usage else 1)
    rest, _ = verifier.finish()
    assert rest[-1] == names.DONE_BLOCK
    assert len(rest) == (3 if include_usage else 2)


@pytest.mark.parametrize("checkpoint_every", [1, 16])
def test_what_may_come_after_the_end_of_the_answer_is_bounded(client: Attested, checkpoint_every: int) -> None:
    """It is held until the receipt comes, and one that never comes must not cost the caller's memory."""
    room = LIMIT_END_FRAMES - 2  # beside the frame that ends the choice and the one with the usage
    full = client.stream(Options(frames_after_finish=room, checkpoint_every=checkpoint_every))
    released, _ = client.read(full)
    assert released == frames_of(full.blocks)
    with pytest.raises(MalformedError) as caught:
        client.read(client.stream(Options(frames_after_finish=room + 1, checkpoint_every=checkpoint_every)))
    assert caught.value.code == Rejection.MALFORMED_STREAM
    endless = client.stream(Options(frames_after_finish=5000, checkpoint_every=checkpoint_every))
    verifier = client.verifier(endless)
    with pytest.raises(MalformedError):
        verifier.feed(b"".join(block.raw for block in endless.blocks))
    assert len(verifier.pending) <= LIMIT_END_FRAMES


def test_a_failed_stream_verifies_and_ends_with_its_error(client: Attested) -> None:
    stream = client.stream(Options(fail_after=2, status=names.STATUS_ERROR))
    released, receipt = client.read(stream)
    assert released == frames_of(stream.blocks)
    assert b'"error"' in released
    assert receipt.claims.response.status == names.STATUS_ERROR
    assert ("output text", "not checked") in {(check.name, check.status) for check in receipt.checks}


def test_a_stream_that_fails_at_once_has_one_frame(client: Attested) -> None:
    released, receipt = client.read(client.stream(Options(fail_after=0, status=names.STATUS_ERROR)))
    assert receipt.claims.stream is not None
    assert receipt.claims.stream.frames == 1
    assert released.count(b"data:") == 1


def test_the_receipt_alone_opens_a_stream_without_checkpoints(client: Attested) -> None:
    """One frame and the receipt right behind it: no checkpoint has disclosed the salt."""
    stream = client.stream(
        Options(
            fail_after=0,
            status=names.STATUS_ERROR,
            edit_claims=lambda claims: replace(claims, stream=replace(claims.stream, checkpoint=None)),  # type: ignore[type-var]
        )
    )
    client.read(stream, without("checkpoint")(stream.blocks))


def test_a_frame_after_an_error_is_refused(client: Attested) -> None:
    stream = client.stream(Options(fail_after=2, status=names.STATUS_ERROR))
    with pytest.raises(MalformedError) as caught:
        client.read(stream, insert_before("receipt", b'data: {"choices":[]}\n\n')(stream.blocks))
    assert caught.value.code == Rejection.MALFORMED_STREAM


def test_a_checkpoint_before_the_first_frame_is_refused(client: Attested) -> None:
    stream = client.stream()
    at = position(stream.blocks, "checkpoint")
    moved = (stream.blocks[at], *stream.blocks[:at], *stream.blocks[at + 1 :])
    with pytest.raises(VerificationError) as caught:
        client.read(stream, moved)
    assert caught.value.code == Rejection.STREAM_CHECKPOINT_MISMATCH


def test_a_dropped_checkpoint_shows_in_the_receipt(client: Attested) -> None:
    stream = client.stream(Options(checkpoint_every=3))
    client.read(stream)
    with pytest.raises(VerificationError) as caught:
        client.read(stream, without("checkpoint", 1)(stream.blocks))
    assert caught.value.code == Rejection.STREAM_CHECKPOINT_MISMATCH


def test_a_signed_checkpoint_of_the_wrong_form(client: Attested) -> None:
    signed = client.appliance.receipt_key.sign1(b"\xa0", typ=names.TYP_CHECKPOINT, salt=seeded("salt"))
    stream = client.stream()
    client.read(stream)
    raw = comment(names.COMMENT_CHECKPOINT, signed)
    with pytest.raises(MalformedError) as caught:
        client.read(stream, insert_before("receipt", raw)(stream.blocks))
    assert caught.value.code == Rejection.MALFORMED_CHECKPOINT


def test_spliced_from_another_answer_of_the_same_connection(client: Attested) -> None:
    one, two = client.stream(), client.stream()
    with pytest.raises(VerificationError) as caught:
        client.read(one, (*one.blocks[:1], *two.blocks[1:]))
    assert caught.value.code == Rejection.STREAM_CHECKPOINT_MISMATCH


def test_stream_of_another_boot(client: Attested) -> None:
    stream = InsecureAppliance("next boot").stream({**completion_request(), "stream": True}, client.connection)
    with pytest.raises(VerificationError) as caught:
        client.read(stream)
    assert caught.value.code == Rejection.WRONG_KEY


def test_head_without_receipt_id(client: Attested) -> None:
    stream = client.stream()
    with pytest.raises(VerificationError) as caught:
        client.read(replace(stream, head=replace(stream.head, receipt_id=None)))
    assert caught.value.code == Rejection.RECEIPT_ID_MISMATCH


def test_completions_stream(client: Attested) -> None:
    request = {**completion_request(), "stream": True}
    client.read(client.appliance.stream(request, client.connection, route=COMPLETIONS))


def test_whole_answer_asked_stream_came(client: Attested) -> None:
    stream = client.appliance.stream(completion_request(), client.connection, route=COMPLETIONS)
    with pytest.raises(VerificationError) as caught:
        client.read(stream)
    assert caught.value.code == Rejection.PARAMETER_MISMATCH


def test_after_an_error_nothing_more_comes_out(client: Attested) -> None:
    stream = client.stream(Options(pieces=LONG))
    verifier = client.verifier(stream)
    verifier.feed(stream.blocks[0].raw)
    with pytest.raises(VerificationError) as first:
        verifier.feed(b"junk\n\n")
    for call in (lambda: verifier.feed(stream.blocks[1].raw), verifier.finish):
        with pytest.raises(VerificationError) as again:
            call()
        assert again.value is first.value


def test_a_stream_opens_its_redacted_receipt_with_the_salt_of_its_checkpoints(client: Attested) -> None:
    stream = client.stream()
    verifier = client.verifier(stream, accept_redacted=True)
    verifier.feed(b"".join(block.raw for block in stripped_receipt(stream.blocks)))
    _, receipt = verifier.finish()
    assert receipt.opened
    assert ("stream chain", "passed") in {(check.name, check.status) for check in receipt.checks}


def test_the_frames_behind_the_last_checkpoint_cannot_be_forged_by_redacting_the_receipt(client: Attested) -> None:
    stream = client.stream(Options(checkpoint_every=1000))
    raw = b"".join(block.raw for block in stripped_receipt(stream.blocks))
    assert raw.count(b'"content": "ur"') == 1
    verifier = client.verifier(stream, accept_redacted=True)
    verifier.feed(raw.replace(b'"content": "ur"', b'"content": "ol"'))
    with pytest.raises(VerificationError) as caught:
        verifier.finish()
    assert caught.value.code == Rejection.STREAM_CHAIN_MISMATCH


def feed_all(verifier: StreamVerifier, chunks: list[bytes]) -> bytes:
    out = [block for chunk in chunks for block in verifier.feed(chunk)]
    rest, _ = verifier.finish()
    return b"".join(out + rest)


CLIENT = attested()
STREAM: Stream = CLIENT.stream(Options(pieces=LONG))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, len(STREAM.raw)), max_size=20))
def test_chunk_boundaries_do_not_matter(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM.raw)]
    chunks = [STREAM.raw[a:b] for a, b in itertools.pairwise(edges)]
    assert feed_all(CLIENT.verifier(STREAM), chunks) == frames_of(STREAM.blocks)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(STREAM.raw) - 1), st.integers(1, 255))
def test_no_flipped_byte_is_ever_released_or_accepted(at: int, flip: int) -> None:
    """A change inside a padding comment may pass (it carries nothing); whatever is released is what was sent."""
    damaged = STREAM.raw[:at] + bytes((STREAM.raw[at] ^ flip,)) + STREAM.raw[at + 1 :]
    verifier = CLIENT.verifier(STREAM)
    released: list[bytes] = []
    try:
        released += verifier.feed(damaged)
        rest, _ = verifier.finish()
        released += rest
    except VerificationError:
        pass
    assert frames_of(STREAM.blocks).startswith(b"".join(released))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(STREAM.blocks), max_size=60))
def test_no_arrangement_of_genuine_blocks_releases_anything_but_the_answer(blocks: list[StreamBlock]) -> None:
    verifier = CLIENT.verifier(STREAM)
    released: list[bytes] = []
    try:
        for block in blocks:
            released += verifier.feed(block.raw)
        released += verifier.finish()[0]
    except VerificationError:
        pass
    assert frames_of(STREAM.blocks).startswith(b"".join(released))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_rejected_not_crashed_on(data: bytes) -> None:
    verifier = CLIENT.verifier(STREAM)
    with pytest.raises(VerificationError):
        feed_all(verifier, [data, same(b"")])
