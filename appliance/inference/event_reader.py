"""Waiting for the engine without losing sight of everything else that may end an answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from appliance.errors import DeadlineExceeded, Unavailable

T = TypeVar("T")
Event = TypeVar("Event")


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupts:
    """What ends an answer from outside: the client leaves, the appliance stops, the deadline passes.

    `deadline` is in the seconds of `monotonic`.
    """

    gone: asyncio.Future[None]
    stopping: asyncio.Future[None]
    deadline: float
    monotonic: Callable[[], float]

    def check(self) -> None:
        """Raise what has happened: ClientGone, Unavailable (the appliance is stopping), DeadlineExceeded."""
        if self.gone.done():
            raise ClientGone
        if self.stopping.done():
            raise Unavailable("shutting_down", "The appliance is stopping; the answer was cut short.", retry_after_s=5)
        if self.monotonic() >= self.deadline:
            raise DeadlineExceeded("deadline_exceeded", "The answer was not finished within the time allowed.")

    async def bound(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless it is interrupted first: then it is cancelled, has ended, and `check` raises."""
        task = asyncio.ensure_future(work)
        awaited: set[asyncio.Future[Any]] = {task, self.gone, self.stopping}
        try:
            while not task.done():  # a timer may fire a tick before its time
                left_s = max(0.0, self.deadline - self.monotonic())
                await asyncio.wait(awaited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    self.check()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


class EventReader(Generic[Event]):
    """Reads the events of an answer's jobs one by one under interrupts. Always `aclose` it: that cancels the jobs.

    One task takes all events of a job from the engine and one future wakes the reader. A task and a wait of its own for
    each event cost as many rounds of the event loop again, for every token of every answer.
    """

    def __init__(self, jobs: Iterable[AsyncGenerator[Event, None]], interrupts: Interrupts) -> None:
        self._jobs = tuple(jobs)
        self._interrupts = interrupts
        self._arrived: deque[tuple[int, Event]] = deque()
        self._taking: tuple[asyncio.Task[None], ...] = ()
        self._waiter: asyncio.Future[None] | None = None

    async def next(self, wait_s: float | None = None) -> tuple[int, Event] | None:
        """The next event with the index of its job, or None when `wait_s` passes first (the event is not lost).

        Raises as `Interrupts.check`, and what the engine raises.
        """
        taking = self._taking or self._start()
        interrupts, waited = self._interrupts, False
        if self._arrived:
            await asyncio.sleep(0)  # an answer that never has to wait still lets the others have their turn
        while True:
            interrupts.check()
            if self._arrived:
                return self._arrived.popleft()
            for task in taking:
                if task.done():
                    task.result()
            if all(task.done() for task in taking):
                raise RuntimeError("the engine has no more events")
            if waited and wait_s is not None:
                return None
            left_s = max(0.0, interrupts.deadline - interrupts.monotonic())
            await self._wait(left_s if wait_s is None else max(0.0, min(left_s, wait_s)))
            waited = True

    def unread(self, events: Iterable[tuple[int, Event]]) -> None:
        """Put events back that came too early; `next` gives them again, in this order, before all others."""
        self._arrived.extendleft(reversed(tuple(events)))

    async def aclose(self) -> None:
        for interrupt in (self._interrupts.gone, self._interrupts.stopping):
            interrupt.remove_done_callback(self._wake)
        for task in self._taking:
            task.cancel()
        if self._taking:
            await asyncio.wait(self._taking)
        for task in self._taking:
            if not task.cancelled():
                task.exception()  # retrieved: whatever the engine said last, nobody is waiting for it
        for job in self._jobs:
            await job.aclose()

    def _start(self) -> tuple[asyncio.Task[None], ...]:
        for interrupt in (self._interrupts.gone, self._interrupts.stopping):
            interrupt.add_done_callback(self._wake)
        self._taking = tuple(asyncio.create_task(self._take(index)) for index in range(len(self._jobs)))
        return self._taking

    async def _take(self, index: int) -> None:
        try:
            async for event in self._jobs[index]:
                self._arrived.append((index, event))
                self._wake()
        finally:
            self._wake()

    async def _wait(self, seconds: float) -> None:
        """Until there is something to look at, at most `seconds`."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(seconds, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self, _interrupt: asyncio.Future[None] | None = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
