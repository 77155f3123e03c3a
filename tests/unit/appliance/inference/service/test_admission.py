"""Whenever a request ends from outside, nothing of it stays: no place, no job, one receipt."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.appliance.inference.service.rig import Clock, Rig, chat, stuck


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_h41_a_request_that_ends_at_any_await_gives_back_its_place_and_its_job(how: str, stream: bool) -> None:
    for rounds in range(40):
        engine, gate = stuck()
        rig = Rig(engine)
        first = rig.post(chat())  # holds the engine's turn: the second one also waits in its queue
        while engine.counters.started == 0:
            await asyncio.sleep(0)
        second = rig.post(chat(stream=stream))
        for _ in range(rounds):
            await asyncio.sleep(0)
        if how == "leave":
            second.leave()
            await second.done()
        else:
            second.task.cancel()
            await asyncio.wait({second.task})
        assert (rig.service.active, engine.counters.live) == (1, 1)
        gate.set()
        assert (await first.done()).status == 200
        rig.at_rest()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own", [None, "10"])
async def test_h42_one_deadline_counts_the_body_the_queue_and_the_answer_together(
    stream: bool, own: str | None
) -> None:
    clock = Clock()
    engine, gate = stuck(after=0)
    ahead = Rig(engine).post(chat())  # holds the engine's turn
    rig = Rig(engine, monotonic=clock, max_request_s=10.0 if own is None else 1000.0)
    wire = rig.open(headers={"x-request-timeout": own} if own else None)
    body = chat(stream=stream)
    wire.feed(body[:5], more=True)
    for _ in range(20):
        await asyncio.sleep(0)
    clock.now += 9.98  # the body took nearly all of it
    wire.feed(body[5:])
    while engine.counters.started < 2:
        await asyncio.sleep(0)
    assert not wire.task.done()
    clock.now += 0.03
    await wire.done()  # a deadline that began anew with the wait for the engine would be seconds away
    assert wire.error == (408, "deadline_exceeded", None)
    assert rig.claims(rig.receipts[0])[-70013]["status"] == "deadline"
    assert (rig.service.active, engine.counters.live) == (0, 1)
    gate.set()
    assert (await ahead.done()).status == 200
