"""Guessing tokens ahead and keeping exactly those the model would have made: drafters, their judge, their throttle.

One transaction for every drafter: the committed position is the checkpoint, a proposal is evaluated behind it in one
pass, the longest agreeing prefix and one token of the model's own are committed, and the rest is cut off again. Tokens
are drawn row by row and the drawing stops at the first disagreement, so a sampler draws one number for each committed
token, as it would have without any of this.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

NARROW = 3
WINDOW = 12
MIN_YIELD = 0.75
DRAFT_LIMIT = 64
LOSS_LIMIT = 3.0
"""Evaluations of one row: what guessing may cost an answer in all before it ends."""


class Drafter(Protocol):
    """`tokens` is the prompt and all that was committed; it only ever grows."""

    def propose(self, tokens: Sequence[int], width: int) -> list[int]:
        """At most `width` tokens that may come next; none is fine. Raises what evaluating them raises."""

    def rewind(self, length: int) -> None:
        """A step has failed: whatever was evaluated behind the first `length` tokens is dropped again."""

    def close(self) -> None: ...


def committed(proposal: Sequence[int], targets: Sequence[int]) -> list[int]:
    """What one pass commits: the targets up to and with the first one that the proposal did not foresee.

    `targets[i]` is the model's own token after `proposal[:i]`; there is one more of them than there are proposals.
    """
    for index, token in enumerate(proposal):
        if targets[index] != token:
            return list(targets[: index + 1])
    return list(targets[: len(proposal) + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessCosts:
    """What guessing costs, in evaluations of one row.

    `row` is one row more in an evaluation, the making of the guess included. `shape` is going over to another number
    of rows and back again: llama.cpp keeps what it has prepared for one number only. `replay` is evaluating an accepted
    row once more, where what was wrong cannot be cut off behind it.
    """

    row: float = 0.0
    shape: float = 0.0
    replay: float = 0.0


@dataclass(slots=True, kw_only=True)
class WidthController:
    """How many tokens to propose, by what became of the proposals before. A pure state machine.

    At most two widths ever: narrow, and wide where the first round was accepted whole; the first round at the wide
    one that was not closes it for good. A window of rounds with too little yield, half of them with none at all, ends
    proposing for good; so does one whose guesses cost more than they brought, at once where they always must; and so
    do guesses that have cost LOSS_LIMIT in all. `adaptive` false keeps to the wide one.
    """

    wide: int
    adaptive: bool = True
    costs: GuessCosts = GuessCosts()
    width: int = 0
    rounds: int = 0
    _balance: float = 0.0
    _window: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def __post_init__(self) -> None:
        if not 1 <= self.wide <= DRAFT_LIMIT:
            raise ValueError(f"the width of a proposal is outside 1..{DRAFT_LIMIT}")
        self.width = min(NARROW, self.wide) if self.adaptive else self.wide
        if self.adaptive and self.costs.row >= 1.0:
            self.width = 0  # a right guess saves one pass: not even that would pay

    @property
    def active(self) -> bool:
        return self.width > 0

    def stop(self) -> None:
        """Propose no more, for good; also where the width is fixed."""
        self.width = 0

    def record(self, proposed: int, accepted: int) -> None:
        """One round that proposed at least one token."""
        if not self.adaptive or not self.active:
            return
        self.rounds += 1
        self._window.append((proposed, accepted))
        full = accepted == proposed
        if self.rounds == 1 and full:
            self.width = self.wide
        elif not full:
            self.width = min(NARROW, self.wide)
        self._balance += self._gain(proposed, accepted)
        if self._balance < -LOSS_LIMIT or (len(self._window) == WINDOW and self._in_vain()):
            self.width = 0

    def _in_vain(self) -> bool:
        accepted = sum(count for _, count in self._window)
        misses = sum(1 for _, count in self._window if count == 0)
        poor = accepted < MIN_YIELD * WINDOW and 2 * misses >= WINDOW
        return poor or sum(self._gain(*round_) for round_ in self._window) < 0.0

    def _gain(self, proposed: int, accepted: int) -> float:
        """Evaluations that a round saved. One that was right in all is mostly followed by another of its shape."""
        wrong = 0.0 if accepted == proposed else self.costs.shape + self.costs.replay * (accepted + 1)
        return accepted - self.costs.row * proposed - wrong


class PromptLookup:
    """Copies what followed the last earlier occurrence of the newest tokens, in the prompt or the answer so far."""

    def __init__(self, lengths: tuple[int, ...] = (4, 3, 2)) -> None:
        self._lengths = lengths
        self._seen: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], width: int) -> list[int]:
        self._index(tokens)
        for length in self._lengths:
            if len(tokens) > length:
                end = self._seen.get(tuple(tokens[-length:]))
                if end is not None:
                    return _continue(tokens, end, width)
        return []

    def rewind(self, length: int) -> None:
        """Nothing is evaluated, and only committed tokens are indexed."""

    def close(self) -> None:
        self._seen.clear()

    def _index(self, tokens: Sequence[int]) -> None:
        """Every group of tokens that something follows; later places replace earlier ones."""
        for end in range(max(1, self._indexed), len(tokens)):
            for length in self._lengths:
                if end >= length:
                    self._seen[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)


def _continue(tokens: Sequence[int], start: int, width: int) -> list[int]:
    """`width` tokens from `start` on; past the end the copy goes on with itself, as a repetition does."""
    copy = list(tokens[start : start + width])
    period = len(tokens) - start
    while len(copy) < width:
        copy.append(copy[len(copy) - period])
    return copy


class NGramContext:
    """Guesses token by token: what most often followed the newest 5, or else 4, 3, 2 tokens so far."""

    def __init__(self, orders: tuple[int, ...] = (5, 4, 3, 2)) -> None:
        self._orders = orders
        self._followers: dict[tuple[int, ...], Counter[int]] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], width: int) -> list[int]:
        self._index(tokens)
        context = list(tokens[-max(self._orders) :])
        proposal: list[int] = []
        while len(proposal) < width:
            guess = self._guess(context)
            if guess is None:
                break
            proposal.append(guess)
            context.append(guess)
        return proposal

    def rewind(self, length: int) -> None:
        """Nothing is evaluated, and only committed tokens are indexed."""

    def close(self) -> None:
        self._followers.clear()

    def _guess(self, context: list[int]) -> int | None:
        for order in self._orders:
            if len(context) >= order and (seen := self._followers.get(tuple(context[-order:]))):
                return seen.most_common(1)[0][0]
        return None

    def _index(self, tokens: Sequence[int]) -> None:
        for end in range(max(1, self._indexed), len(tokens)):
            for order in self._orders:
                if end >= order:
                    self._followers.setdefault(tuple(tokens[end - order : end]), Counter())[tokens[end]] += 1
        self._indexed = len(tokens)


@dataclass(slots=True, kw_only=True)
class Speculation:
    """What one job speculates with, and its counts."""

    drafter: Drafter
    controller: WidthController
    proposed: int = 0
    accepted: int = 0


DRAFTERS: Mapping[str, Callable[[], Drafter]] = {"prompt-lookup": PromptLookup, "n-gram": NGramContext}
"""Drafters that need nothing but the tokens, by the name in the configuration. `draft.DraftModel` makes the others."""
