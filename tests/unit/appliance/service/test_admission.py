"""Whenever a request ends from outside, nothing of it stays: no place, no job, one receipt."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.appliance.service.rig import Rig, chat, stuck


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
