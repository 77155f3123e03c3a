"""Reasoning in front of an answer: taken out of generated text, whatever pieces it comes in, and allowed by grammars.

A model that reasons writes START, its thoughts, END, then the answer; some templates write START for it, at the end
of the prompt. Line breaks next to the tags belong to neither part. All that is in no part is kept as `marks`, so that
the parts lead back to the text that was generated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from appliance.engine.text import partial

LIMIT_BREAKS = 8
"""White space next to a tag that counts as part of it, in characters at most; what is beyond is content."""

_LEADING = re.compile(rf"\s{{0,{LIMIT_BREAKS}}}")
_TRAILING = re.compile(rf"\n{{0,{LIMIT_BREAKS}}}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What begins and ends reasoning, free of white space at both ends."""

    start: str
    end: str


class ReasoningText:
    """Splits generated text into reasoning and what follows. `opened`: the prompt ended with the start tag."""

    __slots__ = ("_close", "_open", "_pending", "_state", "_tags", "reasoning")

    def __init__(self, tags: Tags, *, opened: bool) -> None:
        self._tags = tags
        self._state: Literal["before", "opened", "inside", "closed", "after"] = "opened" if opened else "before"
        self._pending = ""
        self._open = self._close = ""
        self.reasoning = ""

    @property
    def undecided(self) -> bool:
        """Nothing but what may become the start tag has come."""
        return self._state == "before"

    @property
    def thinking(self) -> bool:
        return self._state in ("opened", "inside")

    @property
    def marks(self) -> tuple[str, str]:
        """The generated text before and behind the reasoning that belongs to no part."""
        return self._open, self._close

    def feed(self, piece: str) -> tuple[str, str]:
        """Take generated text; (reasoning, text) that is certain now."""
        self._pending += piece
        reasoning = ""
        if self._state == "before":
            self._begin()
        if self._state == "opened":
            self._open += self._skip(self._open)
            if self._pending:
                self._state = "inside"
        if self._state == "inside":
            reasoning = self._think()
            self.reasoning += reasoning
        if self._state == "closed":
            self._close += self._skip(self._close)
            if self._pending:
                self._state = "after"
        if self._state != "after":
            return reasoning, ""
        text, self._pending = self._pending, ""
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """The text has ended: what was held back for what might have come is reasoning or text after all."""
        pending, self._pending = self._pending, ""
        if self._state == "inside":
            self.reasoning += pending
            return pending, ""
        return "", pending

    def _begin(self) -> None:
        lead = _LEADING.match(self._pending)
        assert lead is not None
        begun = self._pending[lead.end() :]
        start = self._tags.start
        if begun.startswith(start):
            self._open = lead[0] + start
            self._pending = begun[len(start) :]
            self._state = "opened"
        elif not start.startswith(begun):
            self._state = "after"

    def _skip(self, so_far: str) -> str:
        """Line breaks behind a tag, with those at the end of `so_far` no more than the limit."""
        room = LIMIT_BREAKS - (len(so_far) - len(so_far.rstrip("\n")))
        count = min(room, len(self._pending) - len(self._pending.lstrip("\n")))
        breaks, self._pending = self._pending[:count], self._pending[count:]
        return breaks

    def _think(self) -> str:
        before, found, rest = self._pending.partition(self._tags.end)
        if not found:
            cut = len(before) - partial(before, self._tags.end)
            before = before[:cut]
        breaks = _TRAILING.search(before)
        assert breaks is not None
        thought = before[: breaks.start()]
        if found:
            self._close = breaks[0] + self._tags.end
            self._pending = rest
            self._state = "closed"
        else:
            self._pending = self._pending[len(thought) :]
        return thought
