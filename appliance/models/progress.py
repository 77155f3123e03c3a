"""Progress on a terminal: bars where there is one, a line per tenth where there is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Fractions = Callable[[str, float], None]


class ByteProgress(Protocol):
    """Told often, with growing `done`: (phase, bytes done, bytes in all)."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


def silent(phase: str, done: int, total: int) -> None:
    """The ByteProgress of callers that show nothing."""


@contextmanager
def terminal_progress(stream: TextIO | None = None) -> Iterator[ByteProgress]:
    """A ByteProgress drawn on `stream` (stderr unless given) while the block runs."""
    out = stream if stream is not None else sys.stderr
    if not out.isatty():
        yield _Lines(out)
        return
    columns = (TextColumn("{task.description:<10}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=out)) as bars:
        yield _Bars(bars)


def fractions(progress: ByteProgress) -> Fractions:
    """`progress` for a phase that knows only how far it is (0..1), as the engine's loading does."""

    def report(phase: str, fraction: float) -> None:
        progress(phase, int(fraction * 1000), 1000)

    return report


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        self._bars.update(self._tasks[phase], completed=done, total=total)


class _Lines:
    """One line per tenth: a log that is not a terminal stays readable."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown: dict[str, int] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if tenth > self._shown.get(phase, -1):
            self._shown[phase] = tenth
            print(f"{phase}: {10 * tenth} %", file=self._out, flush=True)
