"""Which cells of the context are in use, and in which order.

Attention adds up a sequence's tokens in the order of their cells, so the same tokens in another order give other bits.
llama.cpp fills holes: a sequence that goes on after another has left would have its newest token before its oldest.
So nothing is freed below what is in use. What has left stays as dead cells, and when there are many of them, all living
sequences are taken out and put back one after another, which costs about a millisecond for each thousand tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from appliance.engine.generation.sequence import Sequence

DEAD_AT_MOST = 512


class Memory(Protocol):
    def forget(self, sequence: int, *, start: int = 0) -> bool: ...
    def save(self, sequence: int) -> bytes: ...
    def restore(self, sequence: int, state: bytes) -> bool: ...


class CellPool:
    """Hands out sequence ids and keeps count; `capacity` in cells."""

    def __init__(self, memory: Memory, *, capacity: int, sequences: int) -> None:
        self._memory = memory
        self._capacity = capacity
        self._free = list(range(sequences - 1, -1, -1))
        self._dead: list[int] = []
        self.used = 0
        """Cells in use, dead ones included."""
        self.sweeps = 0

    def claim(self, living: Many[Sequence]) -> int:
        """An id with nothing in the context."""
        if not self._free:
            self.sweep(living)
        return self._free.pop()

    def leave(self, sequence: int) -> None:
        """The id's cells are dead from now on."""
        self._dead.append(sequence)

    def placed(self, rows: int) -> None:
        """So many cells were filled; negative: freed again, and nothing had been filled after them."""
        self.used += rows

    def make_room(self, rows: int, living: Many[Sequence]) -> None:
        """Sweep where `rows` more would not fit, and where dead cells slow everyone down."""
        if self._dead:
            dead = self.used - sum(sequence.position for sequence in living)
            if self.used + rows > self._capacity or dead >= DEAD_AT_MOST or not living:
                self.sweep(living)

    def sweep(self, living: Many[Sequence]) -> None:
        """Free the dead cells and put the living sequences together, in order."""
        held = [(sequence, self._memory.save(sequence.slot)) for sequence in living if sequence.position]
        for identifier in (*self._dead, *(sequence.slot for sequence, _ in held)):
            self._memory.forget(identifier)
        self._free += self._dead
        self._dead = []
        self.used = 0
        for sequence, state in held:
            if not self._memory.restore(sequence.slot, state):
                sequence.position = 0  # it is evaluated again
            self.used += sequence.position
        self.sweeps += bool(held)
