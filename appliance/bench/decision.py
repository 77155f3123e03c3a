"""Whether a candidate may replace the baseline. Pure: runs in, verdict out.

The rule: the same output first, or, where it may differ by intent, a score of a suite that is worse by no more than a
bound; then the lower of the two order medians of the speed ratio has to be above a tie, and neither the 99th percentile
of the time an answer takes nor the cache-hit rate may become worse than a limit. Whatever is not clearly better leaves
the baseline where it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from appliance.bench.intent import Intent, stated
from appliance.bench.quality import STRICT_LOSS_AT_MOST, Scores, compare, scored
from appliance.bench.runs import Arm, Order, Run, hit_rate, percentile

ROUNDS_AT_LEAST = 2
SAMPLES_AT_LEAST = 32
P99_RATIO_AT_MOST = 1.20
HIT_RATE_LOSS_AT_MOST = Fraction(5, 1000)
TIE_AT_MOST = 1.01
"""A ratio up to here is a tie: two runs of one configuration differ by as much."""


class Verdict(Enum):
    """What may become the default."""

    CANDIDATE = "candidate"
    TIE = "baseline: tie"
    SLOWER = "baseline: the candidate is slower"
    P99 = "baseline: the candidate's slowest answers are too slow"
    HIT_RATE = "baseline: the candidate reuses fewer prompts"
    OUTPUT = "rejected: output differs"
    QUALITY = "rejected: the candidate answers fewer questions rightly"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a caller chooses. `intent`: the output may differ by that, and the scores decide; None: it may not.

    `strict_loss`: so many more strict failures than the baseline's are let through.
    """

    intent: Intent | None = None
    strict_loss: int = STRICT_LOSS_AT_MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdict and every number it rests on. Ratios are candidate over baseline.

    `differing` of the `places` of the workload were not answered alike in every run of both;
    `baseline_repeats` says whether the baseline's own runs agreed, so that one knows whose fault it is. `stated` is
    what the receipts say of the difference that was intended, empty where none was. `scores`: None without a suite.
    """

    verdict: Verdict
    rules: Rules
    places: int
    stated: dict[Arm, str]
    scores: Scores | None
    order_medians: dict[Order, float]
    p99_s: dict[Arm, float]
    hit_rate: dict[Arm, Fraction]
    differing: int
    baseline_repeats: bool
    candidate_repeats: bool

    @property
    def gain(self) -> float:
        """The lower of the two order medians."""
        return min(self.order_medians.values())

    @property
    def orders_agree(self) -> bool:
        """Whether both orders say the same: faster, or not."""
        return len({median > TIE_AT_MOST for median in self.order_medians.values()}) == 1


def decide(runs: Sequence[Run], rules: Rules = Rules()) -> Decision:
    """Judge a comparison. Raises ValueError naming what is missing if it is too small to judge.

    Raises NothingStated where the output may differ by intent and the receipts show nothing of it.
    """
    check_complete(runs)
    if rules.intent is not None and not scored(runs):
        raise ValueError("output that may differ has to be judged by scores")
    baseline, candidate = (_of(runs, arm) for arm in Arm)
    medians = {order: statistics.median(_ratios(runs, order)) for order in Order}
    p99 = {arm: percentile([s.total_s for run in _of(runs, arm) for s in run.samples], 0.99) for arm in Arm}
    hits = {arm: hit_rate([s for run in _of(runs, arm) for s in run.samples]) for arm in Arm}
    differing = sum(len(set(digests)) > 1 for digests in _by_place(runs))
    scores = compare(runs, rules.strict_loss) if scored(runs) else None
    equal = not differing if rules.intent is None else repeats(candidate)
    return Decision(
        verdict=_verdict(equal=equal, scores=scores, gain=min(medians.values()), p99_s=p99, hits=hits),
        rules=rules,
        places=len(runs[0].samples),
        stated={} if rules.intent is None else stated(runs, rules.intent),
        scores=scores,
        order_medians=medians,
        p99_s=p99,
        hit_rate=hits,
        differing=differing,
        baseline_repeats=repeats(baseline),
        candidate_repeats=repeats(candidate),
    )


def repeats(runs: Sequence[Run]) -> bool:
    """Whether every run gave the same output."""
    return len({run.digest for run in runs}) <= 1


def check_complete(runs: Sequence[Run]) -> None:
    """Raises ValueError unless both arms ran in both orders, in at least two rounds of at least 32 equal places."""
    sizes = {len(run.samples) for run in runs}
    if len(sizes) != 1:
        raise ValueError(f"the runs have different numbers of samples: {sorted(sizes)}")
    if (size := sizes.pop()) < SAMPLES_AT_LEAST:
        raise ValueError(f"{size} samples a run: at least {SAMPLES_AT_LEAST} are needed")
    for order in Order:
        rounds = [sorted(run.round for run in _of(runs, arm) if run.order is order) for arm in Arm]
        if rounds[0] != rounds[1] or len(set(rounds[0])) != len(rounds[0]):
            raise ValueError(f"{order.value}: each round needs one run of either configuration")
        if len(rounds[0]) < ROUNDS_AT_LEAST:
            raise ValueError(f"{order.value}: {len(rounds[0])} rounds, at least {ROUNDS_AT_LEAST} are needed")


def _verdict(
    *, equal: bool, scores: Scores | None, gain: float, p99_s: dict[Arm, float], hits: dict[Arm, Fraction]
) -> Verdict:
    if not equal:
        return Verdict.OUTPUT
    if scores is not None and not scores.passed:
        return Verdict.QUALITY
    if gain < 1 / TIE_AT_MOST:
        return Verdict.SLOWER
    if p99_s[Arm.CANDIDATE] > P99_RATIO_AT_MOST * p99_s[Arm.BASELINE]:
        return Verdict.P99
    if hits[Arm.BASELINE] - hits[Arm.CANDIDATE] > HIT_RATE_LOSS_AT_MOST:
        return Verdict.HIT_RATE
    return Verdict.CANDIDATE if gain > TIE_AT_MOST else Verdict.TIE


def _of(runs: Sequence[Run], arm: Arm) -> list[Run]:
    return [run for run in runs if run.arm is arm]


def _ratios(runs: Sequence[Run], order: Order) -> Iterator[float]:
    """The ratio of request-wide throughput of each round of one order."""
    speed = {(run.arm, run.round): run.throughput for run in runs if run.order is order}
    for arm, number in speed:
        if arm is Arm.BASELINE:
            yield speed[Arm.CANDIDATE, number] / speed[Arm.BASELINE, number]


def _by_place(runs: Sequence[Run]) -> Iterator[list[bytes]]:
    for place in range(len(runs[0].samples)):
        yield [run.samples[place].digest for run in runs]
