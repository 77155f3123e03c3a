"""The rule that lets a setting become default, at and around each of its limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.decision import TIE_AT_MOST, Verdict, decide
from appliance.bench.runs import Arm, Footprint, Order, Run, Sample

SAMPLE = Sample(
    digest=b"\x01" * 32,
    first_s=0.1,
    verified_s=0.11,
    last_s=0.9,
    total_s=1.0,
    prompt_tokens=1000,
    cached_tokens=200,
    tokens=48,
    passes=48,
    drafted=0,
    accepted=0,
    truncated=True,
    exact=True,
)
BASE = 100.0
Speeds = Mapping[tuple[Order, int], float]


def run(arm: Arm, order: Order, number: int, *, speed: float = BASE, sample: Sample = SAMPLE, size: int = 32) -> Run:
    samples = tuple(replace(sample, digest=bytes([place]) * 32) for place in range(size))
    wall_s = sum(each.tokens for each in samples) / speed
    memory = Footprint(proportional=1 << 20, resident=1 << 21)
    return Run(arm=arm, order=order, round=number, wall_s=wall_s, samples=samples, memory=memory)


def comparison(
    ratios: Speeds | float, *, rounds: int = 2, candidate: Callable[[Run], Run] = lambda each: each, size: int = 32
) -> list[Run]:
    """Runs whose candidate is `ratios` times as fast, each changed by `candidate`."""
    runs = []
    for order, number in itertools.product(Order, range(rounds)):
        ratio = ratios if isinstance(ratios, float) else ratios[order, number]
        runs.append(run(Arm.BASELINE, order, number, size=size))
        runs.append(candidate(run(Arm.CANDIDATE, order, number, speed=BASE * ratio, size=size)))
    return runs


def with_samples(change: Callable[[Sample], Sample]) -> Callable[[Run], Run]:
    return lambda each: replace(each, samples=tuple(map(change, each.samples)))


def speeds(baseline_first: tuple[float, float], candidate_first: tuple[float, float]) -> Speeds:
    both = {Order.BASELINE_FIRST: baseline_first, Order.CANDIDATE_FIRST: candidate_first}
    return {(order, number): both[order][number] for order in both for number in range(2)}


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (2.0, Verdict.CANDIDATE),
        (1.02, Verdict.CANDIDATE),
        (1.009, Verdict.TIE),
        (1.0, Verdict.TIE),
        (0.991, Verdict.TIE),
        (0.98, Verdict.SLOWER),
        (0.1, Verdict.SLOWER),
    ],
)
def test_only_what_is_clearly_faster_replaces_the_baseline(ratio: float, verdict: Verdict) -> None:
    decision = decide(comparison(ratio))
    assert decision.verdict is verdict
    assert decision.gain == pytest.approx(ratio)
    assert decision.orders_agree


@pytest.mark.parametrize(
    ("ratios", "verdict", "gain"),
    [
        (speeds((1.5, 1.5), (1.0, 1.0)), Verdict.TIE, 1.0),
        (speeds((1.0, 1.0), (1.5, 1.5)), Verdict.TIE, 1.0),
        (speeds((1.5, 1.5), (0.8, 0.8)), Verdict.SLOWER, 0.8),
        (speeds((1.5, 1.3), (1.1, 1.2)), Verdict.CANDIDATE, 1.15),
    ],
)
def test_the_lower_of_the_two_order_medians_decides(ratios: Speeds, verdict: Verdict, gain: float) -> None:
    decision = decide(comparison(ratios))
    assert decision.verdict is verdict
    assert decision.gain == pytest.approx(gain)
    assert decision.orders_agree is (verdict is Verdict.CANDIDATE)


def test_a_median_forgives_one_bad_round_of_three() -> None:
    ratios = {(order, number): (0.2 if number == 1 else 1.3) for order in Order for number in range(3)}
    assert decide(comparison(ratios, rounds=3)).verdict is Verdict.CANDIDATE


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("place", [0, 17, 31])
def test_h17_however_fast_a_candidate_with_other_output_is_rejected(ratio: float, place: int) -> None:
    def differs(each: Run) -> Run:
        samples = list(each.samples)
        samples[place] = replace(samples[place], digest=b"\xff" * 32)
        return replace(each, samples=tuple(samples))

    decision = decide(comparison(ratio, candidate=differs))
    assert decision.verdict is Verdict.OUTPUT
    assert decision.differing == 1
    assert decision.baseline_repeats
    assert decision.candidate_repeats


@pytest.mark.parametrize("arm", list(Arm))
def test_one_run_with_other_output_is_enough(arm: Arm) -> None:
    runs = comparison(2.0)
    index = next(i for i, each in enumerate(runs) if each.arm is arm)
    first = replace(runs[index].samples[0], digest=b"\xfe" * 32)
    runs[index] = replace(runs[index], samples=(first, *runs[index].samples[1:]))
    decision = decide(runs)
    assert decision.verdict is Verdict.OUTPUT
    assert (decision.baseline_repeats, decision.candidate_repeats) == (arm is not Arm.BASELINE, arm is Arm.BASELINE)


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, Verdict.CANDIDATE), (1.2001, Verdict.P99), (5.0, Verdict.P99)])
def test_the_slowest_answers_may_be_a_fifth_slower_and_no_more(factor: float, verdict: Verdict) -> None:
    slow = with_samples(lambda sample: replace(sample, total_s=sample.total_s * factor))
    assert decide(comparison(1.5, candidate=slow)).verdict is verdict


def test_one_slow_answer_in_a_hundred_is_inside_the_99th_percentile_and_two_are_not() -> None:
    def slow(count: int) -> Callable[[Run], Run]:
        def change(each: Run) -> Run:
            if (each.order, each.round) != (Order.BASELINE_FIRST, 0):
                return each
            samples = [replace(s, total_s=9.0) if i < count else s for i, s in enumerate(each.samples)]
            return replace(each, samples=tuple(samples))

        return change

    assert decide(comparison(1.5, candidate=slow(1), size=32)).verdict is Verdict.CANDIDATE
    assert decide(comparison(1.5, candidate=slow(2), size=32)).verdict is Verdict.P99


@pytest.mark.parametrize(
    ("cached", "verdict"),
    [(1000, Verdict.CANDIDATE), (200, Verdict.CANDIDATE), (195, Verdict.CANDIDATE), (194, Verdict.HIT_RATE)],
)
def test_half_a_point_of_cache_hits_may_be_lost(cached: int, verdict: Verdict) -> None:
    fewer = with_samples(lambda sample: replace(sample, cached_tokens=cached))
    decision = decide(comparison(1.5, candidate=fewer))
    assert decision.verdict is verdict
    assert decision.hit_rate == {Arm.BASELINE: Fraction(1, 5), Arm.CANDIDATE: Fraction(cached, 1000)}


def test_a_slow_candidate_is_called_slow_before_anything_but_other_output() -> None:
    worse = with_samples(lambda sample: replace(sample, total_s=9.0, cached_tokens=0))
    assert decide(comparison(0.5, candidate=worse)).verdict is Verdict.SLOWER


@given(
    ratios=st.lists(st.floats(0.05, 20.0), min_size=4, max_size=4),
    slow=st.floats(0.5, 3.0),
    cached=st.integers(0, 1000),
    differs=st.booleans(),
)
def test_a_candidate_wins_only_if_every_condition_holds(
    ratios: list[float], slow: float, cached: int, differs: bool
) -> None:
    def change(sample: Sample) -> Sample:
        digest = b"\xff" * 32 if differs else sample.digest
        return replace(sample, total_s=sample.total_s * slow, cached_tokens=cached, digest=digest)

    runs = comparison(speeds((ratios[0], ratios[1]), (ratios[2], ratios[3])), candidate=with_samples(change))
    decision = decide(runs)
    wins = not differs and min(decision.order_medians.values()) > TIE_AT_MOST and slow <= 1.2 and 200 - cached <= 5
    assert (decision.verdict is Verdict.CANDIDATE) is wins
    assert decide(list(reversed(runs))) == decision


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (comparison(1.5, rounds=1), "1 rounds"),
        (comparison(1.5, size=31), "31 samples"),
        (comparison(1.5)[:-1], "candidate first"),
        (comparison(1.5)[1:], "baseline first"),
        ([*comparison(1.5), run(Arm.BASELINE, Order.CANDIDATE_FIRST, 0)], "one run of either"),
        ([*comparison(1.5)[:-1], run(Arm.CANDIDATE, Order.CANDIDATE_FIRST, 1, size=33)], "different numbers"),
        ([each for each in comparison(1.5) if each.order is Order.BASELINE_FIRST], "candidate first: 0 rounds"),
        ([each for each in comparison(1.5) if each.arm is Arm.BASELINE], "one run of either"),
    ],
)
def test_a_comparison_with_holes_decides_nothing(runs: list[Run], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decide(runs)
