"""Taking back guesses that were wrong: cells are cut off, or a copy from before the guesses is put back.

Keys and values are one for each token, so what was evaluated last can be dropped. A recurrent state has all tokens in
one: it cannot be cut, only replaced by an earlier one. The copy is of what is committed, so what was accepted of the
guesses is then evaluated again, as part of the next step.
"""

from __future__ import annotations

from typing import Protocol

from appliance.engine.generation.sequence import Sequence

LIMIT_BYTES = 64 << 20
"""Largest copy. Recurrent states have tens of megabytes at most; with one that grows with its tokens guessing ends."""


class Memory(Protocol):
    def forget(self, sequence: int, *, start: int = 0) -> bool: ...
    def save(self, sequence: int) -> bytes: ...
    def restore(self, sequence: int, state: bytes) -> bool: ...


class Rollback:
    """At most one copy, of at most `limit_bytes`, and none from one step to the next.

    One is enough: guesses are made for one answer at a time (`planner.SPECULATE_UP_TO`).
    """

    def __init__(self, memory: Memory, *, by_copy: bool, limit_bytes: int) -> None:
        self._memory = memory
        self._by_copy = by_copy
        self._limit_bytes = limit_bytes
        self._owner: Sequence | None = None
        self._position = 0
        self._state = b""

    def prepare(self, sequence: Sequence) -> None:
        """Before guesses are evaluated behind what is committed. Without a way back they are given up, for good."""
        if not self._by_copy or not sequence.drafts or sequence.speculation is None:
            return
        assert self._owner is None
        state = self._memory.save(sequence.slot)
        if len(state) > self._limit_bytes:
            sequence.drafts = []
            sequence.speculation.controller.stop()
            return
        self._owner, self._position, self._state = sequence, sequence.position, state

    def cut(self, sequence: Sequence) -> int:
        """Leave of a sequence what is committed, or less; `position` says how much. Returns the tokens taken too many.

        They are pending again.
        """
        committed = sequence.position
        if self._memory.forget(sequence.slot, start=committed):
            return 0
        self._memory.forget(sequence.slot)
        there = self._owner is sequence and self._memory.restore(sequence.slot, self._state)
        sequence.position = self._position if there else 0
        if not there:
            sequence.drafts = []  # they are behind what is evaluated once more from the start
        return committed - sequence.position

    def release(self) -> None:
        """The step is over."""
        self._owner, self._state = None, b""
