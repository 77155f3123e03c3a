"""How many rows a step may have, so that it takes about as long as those who wait for it should wait.

Learned from the steps that were made: a row is dearer the more tokens it looks at. Answers do not depend on it, as it
is used only where every shape of evaluation was found exact.
"""

from __future__ import annotations

LONE_S = 0.3
"""Of a step in which nobody's answer advances: who comes meanwhile waits for its end."""

BESIDE_S = 0.1
"""Of a step that answers in progress share with prompts: each of them gets one token a step."""

UNLEARNED_ROWS = 64
LEAST_ROWS = 16
_TELLING_ROWS = 16  # fewer are mostly the reading of the weights, which more rows would not make dearer
_NEWEST = 0.5


class Pace:
    """The cost of a row, and what follows of it."""

    def __init__(self, most: int) -> None:
        """`most` rows are the most of one step."""
        self._most = most
        self._row_s: float | None = None

    def rows(self, *, answering: bool) -> int:
        """The rows of the next step; `answering`: answers in progress are part of it."""
        if self._row_s is None:
            return min(self._most, UNLEARNED_ROWS)
        budget_s = BESIDE_S if answering else LONE_S
        return min(self._most, max(LEAST_ROWS, int(budget_s / self._row_s)))

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if rows < _TELLING_ROWS or seconds <= 0:
            return
        row_s = seconds / rows
        known = row_s if self._row_s is None else self._row_s
        self._row_s = (1 - _NEWEST) * known + _NEWEST * row_s
