"""Where the time of a scheduler's steps goes: tokens for each pass tell little without what a pass costs."""

from __future__ import annotations

from collections.abc import Callable

COPY, ADMIT, PROPOSE, EVALUATE, DRAW, COMMIT = PHASES = (
    "copy_us",
    "admit_us",
    "propose_us",
    "evaluate_us",
    "draw_us",
    "commit_us",
)
"""Names in `Scheduler.stats`; what they stand for is in `stats.ENGINE_STATS`."""


class Phases:
    """Adds up laps. Every moment from `start` on belongs to the phase whose lap ends next."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._ns = dict.fromkeys(PHASES, 0)
        self._mark = clock_ns()

    def start(self) -> None:
        self._mark = self._clock_ns()

    def lap(self, phase: str) -> None:
        now = self._clock_ns()
        self._ns[phase] += now - self._mark
        self._mark = now

    def microseconds(self) -> dict[str, int]:
        return {phase: spent // 1000 for phase, spent in self._ns.items()}
