"""How much the start may measure: so many evaluations and so many seconds, then the careful answer is taken.

Measurements take a second natively and hours where every vector instruction is emulated. A start that does not end
helps nobody, and what was not measured is not assumed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from appliance.engine.llama_cpp.runtime import Aborted

EVALUATIONS = 512
T = TypeVar("T")


class Interruptible(Protocol):
    def interrupt(self) -> None: ...
    def clear_interrupt(self) -> None: ...


class Exhausted(Exception):
    """The limit was reached in the middle of a measurement."""


class Allowance:
    """What is left for the measurements of one start. `cut` names those that had to end early."""

    def __init__(
        self, limit_s: float, *, evaluations: int = EVALUATIONS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._began = clock()
        self._until = self._began + limit_s
        self._evaluations = evaluations
        self.cut: list[str] = []

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._until - self._clock())

    def evaluate(self, evaluation: Callable[[], T]) -> T:
        """Run one evaluation. Raises Exhausted where there is no allowance for it, or it ended in the middle."""
        if self._evaluations < 1 or self._clock() >= self._until:
            raise Exhausted
        self._evaluations -= 1
        try:
            return evaluation()
        except Aborted:
            raise Exhausted from None

    def measured(
        self, name: str, measure: Callable[[], T], careful: T, *, runtimes: tuple[Interruptible, ...], share: float
    ) -> T:
        """What `measure` finds, or `careful` where it takes more than the allowance.

        `share`: the part of the whole limit, counted from the beginning, by which this one has to have ended.
        """
        self._until = self._began + share * self._limit_s
        try:
            with self._watch(runtimes):
                return measure()
        except Exhausted:
            self.cut.append(name)
            return careful

    @contextmanager
    def _watch(self, runtimes: tuple[Interruptible, ...]) -> Iterator[None]:
        """Interrupts an evaluation that is still going on when the time is over."""

        def interrupt() -> None:
            for runtime in runtimes:
                runtime.interrupt()

        timer = threading.Timer(max(0.0, self.seconds_left), interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            for runtime in runtimes:
                runtime.clear_interrupt()
