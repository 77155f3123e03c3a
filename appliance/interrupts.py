"""Waiting for the engine without losing sight of everything else that may end an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from appliance.engine.types import EngineEvent
from appliance.errors import DeadlineExceeded, Unavailable

T = TypeVar("T")


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


class EventReader:
    """Reads engine events one by one under interrupts. Always `aclose` it: that is what cancels the job."""

    def __init__(self, events: AsyncGenerator[EngineEvent, None], interrupts: Interrupts) -> None:
        self._events = events
        self._interrupts = interrupts
        self._next: asyncio.Task[EngineEvent] | None = None

    async def next(self, wait_s: float | None = None) -> EngineEvent | None:
        """The next event, or None when `wait_s` passes first (the event is not lost). Raises as `Interrupts.check`,
        and what the engine raises."""
        interrupts = self._interrupts
        if self._next is None:
            self._next = asyncio.ensure_future(_advance(self._events))
        awaited: set[asyncio.Future[Any]] = {self._next, interrupts.gone, interrupts.stopping}
        while True:
            left_s = max(0.0, interrupts.deadline - interrupts.monotonic())
            await asyncio.wait(
                awaited,
                timeout=left_s if wait_s is None else max(0.0, min(left_s, wait_s)),
                return_when=asyncio.FIRST_COMPLETED,
            )
            interrupts.check()
            if self._next.done():
                break
            if wait_s is not None:
                return None
        finished, self._next = self._next, None
        return finished.result()

    async def aclose(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            if not self._next.cancelled():
                self._next.exception()  # retrieved: whatever the engine said last, nobody is waiting for it
            self._next = None
        await self._events.aclose()


async def _advance(events: AsyncGenerator[EngineEvent, None]) -> EngineEvent:
    return await anext(events)
