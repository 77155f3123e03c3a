"""Whether a candidate answers a suite as well as the baseline: a paired comparison over the same questions. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from appliance.bench.runs import Arm, Run

STRICT_LOSS_AT_MOST = 1
"""So many more strict failures than the baseline's. Why one: docs/benchmarks.md, "Quality"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How many of the questions each configuration answered rightly: in more than half of its runs.

    `lost` are the places of the suite that the baseline answered and the candidate did not, strictly; `gained` the
    other way round. `bound` is the largest difference of the two that is let through.
    """

    questions: int
    strict: dict[Arm, int]
    relaxed: dict[Arm, int]
    lost: tuple[int, ...]
    gained: tuple[int, ...]
    bound: int

    @property
    def loss(self) -> int:
        """By how many strict failures the candidate is worse; negative where it is better."""
        return len(self.lost) - len(self.gained)

    @property
    def passed(self) -> bool:
        return self.loss <= self.bound

    @property
    def chance(self) -> float:
        """Exact one-sided sign test: the probability that a candidate which is as good loses as many, or more.

        Of the questions that only one of the two answered, either is then as likely to have answered each.
        """
        differing, lost = len(self.lost) + len(self.gained), len(self.lost)
        return float(Fraction(sum(math.comb(differing, many) for many in range(lost, differing + 1)), 1 << differing))


def scored(runs: Sequence[Run]) -> bool:
    """Whether these runs were of a suite."""
    return all(sample.strict is not None for run in runs for sample in run.samples)


def compare(runs: Sequence[Run], bound: int) -> Scores:
    """Raises ValueError for a negative bound, and for runs that are not all of a suite and of both configurations."""
    if bound < 0:
        raise ValueError("the bound is negative")
    if not scored(runs) or {run.arm for run in runs} != set(Arm):
        raise ValueError("scores of both configurations are needed")
    strict = {arm: passes(runs, arm, relaxed=False) for arm in Arm}
    relaxed = {arm: passes(runs, arm, relaxed=True) for arm in Arm}
    pairs = list(zip(strict[Arm.BASELINE], strict[Arm.CANDIDATE], strict=True))
    return Scores(
        questions=len(pairs),
        strict={arm: sum(of_arm) for arm, of_arm in strict.items()},
        relaxed={arm: sum(of_arm) for arm, of_arm in relaxed.items()},
        lost=tuple(place for place, pair in enumerate(pairs) if pair == (True, False)),
        gained=tuple(place for place, pair in enumerate(pairs) if pair == (False, True)),
        bound=bound,
    )


def passes(runs: Sequence[Run], arm: Arm, *, relaxed: bool) -> list[bool]:
    """Of each place: whether most runs of the configuration answered it rightly."""
    taken = [run.samples for run in runs if run.arm is arm]
    right = [[bool(sample.relaxed if relaxed else sample.strict) for sample in samples] for samples in taken]
    return [2 * sum(of_place) > len(taken) for of_place in zip(*right, strict=True)]
