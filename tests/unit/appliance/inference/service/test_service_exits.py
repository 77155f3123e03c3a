"""Every way a request can end: one receipt, true and kept, and its place given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest

from appliance.engine.generation.fake import FakeEngine, FakeScript
from appliance.engine.types import EngineEvent, GenerationJob
from appliance.errors import AnswerEnded, EngineFailed, Overloaded, Unavailable
from tests import reference_decoder as reference
from tests.unit.appliance.inference.service.rig import CHAT, TEXT, Rig, Wire, chat, fake, stuck, text

BODIES = {CHAT: chat, TEXT: text}
ROUTES = pytest.mark.parametrize("route", [CHAT, TEXT])
BOTH = pytest.mark.parametrize("stream", [False, True])


async def settle(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


@ROUTES
async def test_complete_whole(route: str) -> None:
    rig = Rig()
    wire = await rig.ask(BODIES[route](), route=route)
    claims = rig.only(wire, "complete")
    assert rig.delivered(wire) == rig.receipts[0]
    assert (wire.status, claims[-70010]["route"], claims[-70010]["complete"]) == (200, route, True)
    assert wire.document["id"].endswith(claims[7].hex())


@ROUTES
async def test_complete_stream(route: str) -> None:
    rig = Rig()
    wire = await rig.ask(BODIES[route](stream=True), route=route)
    claims = rig.only(wire, "complete")
    assert reference.check_stream(wire.body, rig.cose_key, wire.request) == claims
    assert wire.headers["x-receipt-id"] == claims[7].hex()
    assert wire.kinds[-2:] == ["receipt", "done"]
    assert wire.ended


@BOTH
async def test_an_answer_that_has_its_receipt_gets_no_second_one_and_sends_no_more(stream: bool) -> None:
    """Whatever fails behind the receipt, sending it included, is a fault of ours: nothing is there to be said of it."""
    rig = Rig()

    def fail(_part: int) -> None:
        if rig.receipts:
            raise EngineFailed("late", "too late")

    wire = rig.post(chat(stream=stream), on_part=fail)
    with pytest.raises(AnswerEnded):
        await wire.done()
    rig.only(wire, "complete")
    if stream:
        assert wire.kinds[-2:] == ["receipt", "done"]
    else:
        assert rig.delivered(wire) == rig.receipts[0]


REFUSALS: list[tuple[bytes, dict[str, Any], tuple[int, str, str | None]]] = [
    (b"{", {}, (400, "invalid_json", None)),
    (chat(extra=1), {}, (400, "unknown_field", "extra")),
    (chat(model="absent"), {}, (404, "model_not_found", "model")),
    (chat(), {"query": b"a=1"}, (400, "query_not_supported", None)),
    (chat(), {"headers": {"content-type": "text/plain"}}, (415, "media_type", None)),
    (chat(), {"headers": {"content-type": ""}}, (415, "media_type", None)),
    (chat(), {"headers": {"content-encoding": "gzip"}}, (415, "content_encoding", None)),
    (chat(), {"headers": {"content-length": "10000000000"}}, (413, "body_too_large", None)),
    (chat(user="x" * 5000), {}, (413, "body_too_large", None)),
    (chat(max_tokens=4096), {}, (400, "context_length_exceeded", "max_tokens")),
    (chat(max_completion_tokens=4096), {}, (400, "context_length_exceeded", "max_completion_tokens")),
]
NONCES = ["", "ab", "abc", "0x" + "ab" * 8, "ab" * 65, "gg" * 8, "ab " * 8, "é" * 16]


@pytest.mark.parametrize(("body", "options", "error"), REFUSALS)
async def test_refused(body: bytes, options: dict[str, Any], error: tuple[int, str, str | None]) -> None:
    rig = Rig()
    wire = rig.post(body, **options)
    await wire.done()
    assert wire.error == error
    assert rig.delivered(wire) == rig.receipts[0]
    claims = rig.claims(rig.receipts[0])
    taken = error[1] not in {"query_not_supported", "media_type", "content_encoding"} and error[0] != 413
    assert claims[-70010]["complete"] is taken
    if not taken and error[0] != 413:
        assert claims[-70010]["length"] == 0
    assert claims[-70013]["status"] == "refused"
    assert claims[-70013]["http-status"] == error[0]
    rig.at_rest()


async def test_413_by_length_has_read_nothing_and_by_counting_says_how_much() -> None:
    rig = Rig(max_body_bytes=100)
    declared = rig.open(headers={"content-length": "101"})
    await declared.done()
    assert rig.claims(rig.receipts[0])[-70010]["length"] == 0
    counted = rig.open()
    counted.feed(b"x" * 60, more=True)
    counted.feed(b"x" * 60, more=True)
    await counted.done()
    claims = rig.claims(rig.receipts[1])
    assert (claims[-70010]["length"], claims[-70010]["complete"]) == (120, False)
    reference.check_content(claims, rig.salt(rig.receipts[1]), {"request": b"x" * 120})
    one_too_many = rig.open()
    one_too_many.feed(b"x" * 101)
    assert (await one_too_many.done()).error[1] == "body_too_large"
    exact = rig.open(headers={"content-length": "100"})
    exact.feed(b"x" * 100)
    assert (await exact.done()).error[1] == "invalid_json"


@pytest.mark.parametrize("value", NONCES)
async def test_a_bad_nonce_is_refused_with_a_receipt_that_has_none(value: str) -> None:
    rig = Rig()
    wire = rig.post(chat(), raw_headers=[(b"x-inference-nonce", value.encode())])
    await wire.done()
    assert wire.error == (400, "invalid_nonce", "x-inference-nonce")
    assert 10 not in rig.claims(rig.delivered(wire))


async def test_two_nonces_are_refused_and_one_is_echoed() -> None:
    rig = Rig()
    pairs = [(b"x-inference-nonce", b"ab" * 8)]
    assert (await rig.ask(chat(), raw_headers=pairs * 2)).error[1] == "invalid_nonce"
    for raw in (b"aB" * 8, b"cd" * 64):
        await rig.ask(chat(), raw_headers=[(b"x-inference-nonce", raw)])
        assert rig.claims(rig.receipts[-1])[10] == bytes.fromhex(raw.decode())
    refused = await rig.ask(b"{", raw_headers=pairs)
    assert rig.claims(rig.delivered(refused))[10] == b"\xab" * 8


@BOTH
async def test_a_prompt_that_is_too_long_is_refused_before_the_head(stream: bool) -> None:
    rig = Rig(fake(FakeScript(context_length=8)))
    wire = await rig.ask(chat(stream=stream))
    assert wire.error == (400, "context_length_exceeded", "messages")
    claims = rig.only(wire, "refused")
    assert claims[-70006]["name"] == "fake"
    assert -70012 not in claims


async def test_client_gone_before_the_body_ends() -> None:
    rig = Rig()
    wire = rig.open()
    wire.feed(b'{"model"', more=True)
    wire.leave()
    await wire.done()
    claims = rig.only(wire, "cancelled")
    assert (claims[-70010]["complete"], claims[-70010]["length"], wire.sent) == (False, 8, [])


@BOTH
async def test_client_gone_while_queued(stream: bool) -> None:
    engine, gate = stuck()
    rig = Rig(engine)
    first = rig.post(chat())
    await settle(lambda: engine.counters.started == 1)
    second = rig.post(chat(stream=stream))
    await settle(lambda: engine.queued == 1)
    second.leave()
    await second.done()
    assert rig.claims(rig.receipts[0])[-70013]["status"] == "cancelled"
    assert (rig.service.active, engine.counters.live) == (1, 1)
    gate.set()
    assert (await first.done()).status == 200
    rig.at_rest()


@BOTH
async def test_client_gone_in_the_middle(stream: bool) -> None:
    engine, _gate = stuck()
    rig = Rig(engine)
    wire = rig.post(chat(stream=stream))
    await settle(lambda: engine.counters.started == 1 and (wire.parts >= 2 or not stream))
    wire.leave()
    await wire.done()
    claims = rig.only(wire, "cancelled")
    assert engine.counters.cancelled == 1
    assert b"[DONE]" not in wire.body
    if stream:
        sent = [block for block in wire.blocks if block.startswith(b"data: ")]
        assert claims[-70015]["frames"] == len(sent)
        assert claims[-70014][0]["count"] == 1


@BOTH
@pytest.mark.parametrize("made", [0, 1])
async def test_a_receipt_tells_how_much_of_the_prompt_was_kept_also_where_the_answer_was_cut_short(
    stream: bool, made: int
) -> None:
    engine, _gate = stuck(after=made)
    engine.script = replace(engine.script, cached_tokens=7)
    rig = Rig(engine)
    wire = rig.post(chat(stream=stream))
    await settle(lambda: engine.counters.started == 1 and (wire.parts >= 1 + made or not stream))
    wire.leave()
    await wire.done()
    claims = rig.only(wire, "cancelled")
    assert claims[-70016]["cached-prompt-tokens"] == 7


@BOTH
async def test_the_deadline(stream: bool) -> None:
    engine, _gate = stuck()
    rig = Rig(engine, max_request_s=0.15)
    wire = await rig.ask(chat(stream=stream))
    claims = rig.only(wire, "deadline")
    assert engine.counters.cancelled == 1
    assert claims[-70014][0]["finish"] is None
    failed_last(wire, rig, "deadline_exceeded") if stream else None
    assert stream or (wire.error == (408, "deadline_exceeded", None) and rig.delivered(wire))


async def test_the_deadline_before_the_head_of_a_stream() -> None:
    class Late(FakeEngine):
        async def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
            await asyncio.sleep(60)
            yield  # type: ignore[misc]  # pragma: no cover

    engine = Late()
    engine.ready = True
    rig = Rig(engine, max_request_s=0.1)
    wire = await rig.ask(chat(stream=True))
    assert wire.error == (408, "deadline_exceeded", None)
    assert -70012 not in rig.only(wire, "deadline")


@pytest.mark.parametrize("shutdown", [False, True])
async def test_a_body_that_never_ends_does_not_hold_its_place(shutdown: bool) -> None:
    rig = Rig(max_request_s=30 if shutdown else 0.1)
    wire = rig.open()
    wire.feed(b"{", more=True)
    if shutdown:
        await asyncio.sleep(0.01)
        rig.service.begin_shutdown()
    await wire.done()
    assert wire.status == (503 if shutdown else 408)
    claims = rig.only(wire, "error" if shutdown else "deadline")
    assert (claims[-70010]["complete"], claims[-70010]["length"]) == (False, 1)


def failed_last(wire: Wire, rig: Rig, code: str) -> None:
    """One error frame, then the receipt, no [DONE], and the connection is told to close."""
    assert wire.status == 200
    assert wire.kinds.count("error") == 1
    assert [kind for kind in wire.kinds if kind != "checkpoint"][-2:] == ["error", "receipt"]
    assert wire.frames[-1]["error"]["code"] == code
    assert set(wire.frames[-1]["error"]) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in wire.body
    assert wire.ended
    assert wire.channel.close_after_response
    reference.check_stream(wire.body, rig.cose_key, wire.request)


@pytest.mark.parametrize("fail_at", [0, 1, 3])
@ROUTES
async def test_b106_engine_failure_in_mid_stream(fail_at: int, route: str) -> None:
    rig = Rig(fake(FakeScript(fail_at=fail_at)))
    wire = await rig.ask(BODIES[route](stream=True), route=route)
    claims = rig.only(wire, "error")
    failed_last(wire, rig, "engine_failed")
    assert claims[-70014][0]["count"] == fail_at


async def test_engine_failure_of_a_whole_answer() -> None:
    rig = Rig(fake(FakeScript(fail_at=2)))
    wire = await rig.ask(chat())
    rig.only(wire, "error")
    assert wire.error == (500, "engine_failed", None)
    rig.delivered(wire)
    assert not wire.channel.close_after_response


@BOTH
async def test_engine_not_there(stream: bool) -> None:
    engine = fake()
    engine.ready = False
    rig = Rig(engine)
    wire = await rig.ask(chat(stream=stream))
    rig.only(wire, "error")
    assert (wire.error, wire.headers["retry-after"]) == ((503, "engine_restarting", None), "1")


@BOTH
async def test_shutdown_in_the_middle(stream: bool) -> None:
    engine, _gate = stuck()
    rig = Rig(engine)
    wire = rig.post(chat(stream=stream))
    await settle(lambda: engine.counters.started == 1 and (wire.parts >= 2 or not stream))
    assert rig.service.ready
    rig.service.begin_shutdown()
    rig.service.begin_shutdown()
    await wire.done()
    assert not rig.service.ready
    rig.only(wire, "error")
    if stream:
        failed_last(wire, rig, "shutting_down")
    else:
        assert wire.error == (503, "shutting_down", None)
        rig.delivered(wire)
    with pytest.raises(Unavailable):
        await rig.ask(chat())
    assert len(rig.receipts) == 1


class Broken(FakeEngine):
    """An engine with a fault nobody foresaw, before or after its first text."""

    late = False

    async def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        if not self.late:
            raise ValueError("quotes the prompt")
        events = super().generate(job)
        yield await anext(events)
        yield await anext(events)
        await events.aclose()
        raise ValueError("quotes the prompt")


@BOTH
@pytest.mark.parametrize("late", [False, True])
async def test_a_fault_of_ours_still_leaves_a_receipt(stream: bool, late: bool) -> None:
    engine = Broken()
    engine.late, engine.ready = late, True
    rig = Rig(engine)
    wire = rig.post(chat(stream=stream))
    with pytest.raises(ValueError, match="quotes the prompt"):
        await wire.done()
    claims = rig.only(wire, "error")
    assert (claims[-70013]["media-type"] == "text/event-stream") is (stream and late)
    if not (stream and late):
        assert claims[-70013]["http-status"] == 500
        assert wire.sent == []


@BOTH
async def test_an_engine_that_ends_without_an_end_is_a_fault(stream: bool) -> None:
    class Short(FakeEngine):
        async def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
            yield self._prepare(job)

    engine = Short()
    engine.ready = True
    rig = Rig(engine)
    wire = rig.post(chat(stream=stream))
    with pytest.raises(RuntimeError, match="no more events"):
        await wire.done()
    rig.only(wire, "error")


@BOTH
async def test_cancelled_by_the_server(stream: bool) -> None:
    engine, _gate = stuck()
    rig = Rig(engine)
    wire = rig.post(chat(stream=stream))
    await settle(lambda: engine.counters.started == 1 and (wire.parts >= 2 or not stream))
    assert wire.task is not None
    wire.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wire.done()
    rig.only(wire, "cancelled")
    assert engine.counters.cancelled == 1


async def test_h41_b149_a_full_queue_is_refused_without_a_receipt_and_places_are_held_to_the_end() -> None:
    engine, gate = stuck()
    rig = Rig(engine, max_active=2)
    held = [rig.post(chat(stream=True)), rig.post(chat())]
    await held[0].started.wait()
    assert rig.service.active == 2
    with pytest.raises(Overloaded) as caught:
        await rig.ask(chat())
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    assert rig.receipts == []
    assert "appliance_refused_busy_total 1.0" in rig.metrics.render().decode()
    gate.set()
    for wire in held:
        await wire.done()
    assert (await rig.ask(chat())).status == 200
    assert len(rig.receipts) == 3
    rig.at_rest()
