"""EventReader: no event is lost, and whatever ends an answer from outside is noticed while it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from appliance.engine.types import Delta, EngineEvent, Finished
from appliance.errors import DeadlineExceeded, EngineFailed, Unavailable
from appliance.inference.event_reader import ClientGone, EventReader, Interrupts

ONE = Delta(text="a", token_ids=b"\x01\0\0\0")
TWO = Delta(text="b", token_ids=b"\x02\0\0\0")
END = Finished(reason="stop")


class Engine:
    """Yields what is put; an exception in the queue is raised. `closed` says that the job was given up or has ended."""

    def __init__(self, *events: EngineEvent | Exception) -> None:
        self.queue: asyncio.Queue[EngineEvent | Exception] = asyncio.Queue()
        self.closed = False
        for event in events:
            self.queue.put_nowait(event)

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        try:
            while True:
                event = await self.queue.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self.closed = True


def interrupts(*, seconds: float = 60.0) -> Interrupts:
    loop = asyncio.get_running_loop()
    deadline = time.monotonic() + seconds
    return Interrupts(
        gone=loop.create_future(), stopping=loop.create_future(), deadline=deadline, monotonic=time.monotonic
    )


async def read_for_ever(reader: EventReader) -> None:
    while True:
        await reader.next()


async def test_events_come_in_order_and_the_job_ends() -> None:
    engine = Engine(ONE, TWO, END)
    reader = EventReader([engine.events()], interrupts())
    assert [await reader.next() for _ in range(3)] == [(0, ONE), (0, TWO), (0, END)]
    with pytest.raises(RuntimeError, match="no more events"):
        await reader.next()
    await reader.aclose()
    assert engine.closed


async def test_a_wait_that_runs_out_loses_nothing() -> None:
    engine = Engine()
    reader = EventReader([engine.events()], interrupts())
    assert await reader.next(0.01) is None
    assert await reader.next(0.0) is None
    engine.queue.put_nowait(ONE)
    assert await reader.next(5.0) == (0, ONE)
    await reader.aclose()
    assert engine.closed


async def test_what_the_engine_raises_comes_after_what_it_said() -> None:
    reader = EventReader([Engine(ONE, EngineFailed("engine_failed", "gone")).events()], interrupts())
    await asyncio.sleep(0)
    assert await reader.next() == (0, ONE)
    with pytest.raises(EngineFailed):
        await reader.next()
    await reader.aclose()


@pytest.mark.parametrize("waiting", [True, False])
async def test_a_client_that_leaves_ends_the_job(waiting: bool) -> None:
    engine, around = Engine(ONE, *() if waiting else (TWO,)), interrupts()
    reader = EventReader([engine.events()], around)
    assert await reader.next() == (0, ONE)
    asyncio.get_running_loop().call_soon(around.gone.set_result, None)
    with pytest.raises(ClientGone):
        await read_for_ever(reader)
    await reader.aclose()
    assert engine.closed


async def test_the_end_of_the_appliance_and_the_deadline_cut_a_wait() -> None:
    stopped = interrupts()
    reader = EventReader([Engine().events()], stopped)
    asyncio.get_running_loop().call_later(0.01, stopped.stopping.set_result, None)
    with pytest.raises(Unavailable):
        await reader.next()
    await reader.aclose()
    late = EventReader([Engine().events()], interrupts(seconds=0.02))
    with pytest.raises(DeadlineExceeded):
        await late.next()
    await late.aclose()


async def test_the_appliance_keeps_nothing_of_an_answer_that_has_ended() -> None:
    around = interrupts()
    for _ in range(3):
        reader = EventReader([Engine(ONE, END).events()], around)
        assert await reader.next() == (0, ONE)
        await reader.aclose()
        assert not around.stopping._callbacks  # the future lives as long as the appliance


async def test_events_of_several_jobs_come_with_the_index_of_theirs_and_can_be_put_back() -> None:
    first, second = Engine(ONE, END), Engine()
    reader = EventReader([first.events(), second.events()], interrupts())
    early = [await reader.next(), await reader.next()]
    assert early == [(0, ONE), (0, END)]
    second.queue.put_nowait(TWO)
    reader.unread(event for event in early if event is not None)
    assert [await reader.next() for _ in range(3)] == [*early, (1, TWO)]
    second.queue.put_nowait(EngineFailed("engine_failed", "gone"))
    with pytest.raises(EngineFailed):
        await reader.next()
    await reader.aclose()
    assert first.closed
    assert second.closed
