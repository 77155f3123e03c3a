"""The gate where the output may differ by intent: the scores decide, however fast a candidate is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.decision import Rules, Verdict, decide
from appliance.bench.intent import Intent, NothingStated, stated
from appliance.bench.quality import STRICT_LOSS_AT_MOST, Scores, compare, passes
from appliance.bench.runs import Arm, Run
from tests.unit.appliance.bench.test_decision import comparison, with_samples


def answered(strict: int, *, of: int = 100, relaxed: int | None = None, first: int = 0) -> Callable[[Run], Run]:
    """Runs of a suite whose questions `first` to `strict` are answered rightly, and with other output than without."""

    def change(each: Run) -> Run:
        samples = [
            replace(
                sample,
                strict=first <= place < first + strict,
                relaxed=first <= place < first + (strict if relaxed is None else relaxed),
                digest=bytes([place, first, strict]).ljust(32, b"\0"),
            )
            for place, sample in enumerate(each.samples)
        ]
        return replace(each, samples=tuple(samples))

    return change


def of_a_suite(ratio: float, *, strict: int, first: int = 0) -> list[Run]:
    """A baseline that answers 60 of 100 rightly with llama.cpp's arithmetic, and a candidate with another."""
    runs = comparison(ratio, rounds=3, size=100, candidate=answered(strict, first=first))
    baseline = answered(60)
    named = [each if each.arm is Arm.CANDIDATE else baseline(each) for each in runs]
    return [
        replace(each, identity=identity("llama.cpp" if each.arm is Arm.BASELINE else "attested-1")) for each in named
    ]


def identity(arithmetic: str) -> dict[str, object]:
    engine = {"name": "llama.cpp", "version": "1", "digest": "00" * 32, "arithmetic": arithmetic, "kernels": "avx2"}
    return {"config": "11" * 32, "device": {"kind": "cpu"}, "engine": engine, "model": {"identity": "22" * 32}}


BY_ARITHMETIC = Rules(intent=Intent.ARITHMETIC)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.74, 100.0])
@pytest.mark.parametrize("strict", [0, 30, 58])
def test_h17_h101_however_fast_a_candidate_that_answers_fewer_is_refused(ratio: float, strict: int) -> None:
    decision = decide(of_a_suite(ratio, strict=strict), BY_ARITHMETIC)
    assert decision.verdict is Verdict.QUALITY
    assert decision.scores is not None
    assert decision.scores.loss == 60 - strict


@pytest.mark.parametrize(
    ("ratio", "strict", "verdict"),
    [
        (1.5, 59, Verdict.CANDIDATE),
        (1.5, 60, Verdict.CANDIDATE),
        (1.5, 100, Verdict.CANDIDATE),
        (1.0, 100, Verdict.TIE),
        (0.9, 100, Verdict.SLOWER),
    ],
)
def test_a_score_within_the_bound_buys_no_speed(ratio: float, strict: int, verdict: Verdict) -> None:
    assert decide(of_a_suite(ratio, strict=strict), BY_ARITHMETIC).verdict is verdict


@pytest.mark.parametrize(("bound", "verdict"), [(0, Verdict.QUALITY), (4, Verdict.QUALITY), (5, Verdict.CANDIDATE)])
def test_the_bound_is_the_callers(bound: int, verdict: Verdict) -> None:
    rules = Rules(intent=Intent.ARITHMETIC, strict_loss=bound)
    assert decide(of_a_suite(1.5, strict=55), rules).verdict is verdict


def test_what_is_gained_pays_for_what_is_lost() -> None:
    decision = decide(of_a_suite(1.5, strict=60, first=30), BY_ARITHMETIC)
    assert decision.verdict is Verdict.CANDIDATE
    assert decision.scores is not None
    assert (len(decision.scores.lost), len(decision.scores.gained), decision.scores.loss) == (30, 30, 0)
    assert decision.scores.lost == tuple(range(30))


def test_a_relaxed_score_decides_nothing() -> None:
    runs = [
        with_samples(lambda sample: replace(sample, relaxed=False))(each) if each.arm is Arm.CANDIDATE else each
        for each in of_a_suite(1.5, strict=60)
    ]
    decision = decide(runs, BY_ARITHMETIC)
    assert decision.verdict is Verdict.CANDIDATE
    assert decision.scores is not None
    assert decision.scores.relaxed == {Arm.BASELINE: 60, Arm.CANDIDATE: 0}


def test_without_an_intent_equal_scores_do_not_excuse_other_output() -> None:
    decision = decide(of_a_suite(9.0, strict=60, first=1))
    assert decision.verdict is Verdict.OUTPUT
    assert decision.scores is not None
    assert decision.scores.passed


def test_an_intent_that_receipts_do_not_show_is_none() -> None:
    runs = [replace(each, identity=identity("attested-1")) for each in of_a_suite(9.0, strict=60)]
    for intent in Intent:
        with pytest.raises(NothingStated, match=f"differ by {intent.value}"):
            decide(runs, Rules(intent=intent))


def test_what_receipts_have_to_show_of_each_intent() -> None:
    def other(each: Run, section: str, name: str, value: str) -> Run:
        if each.arm is Arm.BASELINE:
            return each
        holder = each.identity if not section else {**each.identity[section]}  # type: ignore[dict-item]
        changed = {**holder, name: value}
        return replace(each, identity=changed if not section else {**each.identity, section: changed})

    runs = [replace(each, identity=identity("attested-1")) for each in comparison(1.5)]
    found = stated([other(each, "engine", "digest", "ff" * 32) for each in runs], Intent.ENGINE)
    assert found == {Arm.BASELINE: "llama.cpp 1 (000000000000)", Arm.CANDIDATE: "llama.cpp 1 (ffffffffffff)"}
    assert (
        "configuration ffffffffffff"
        in stated([other(each, "", "config", "ff" * 32) for each in runs], Intent.SETTINGS)[Arm.CANDIDATE]
    )
    assert (
        "model ffffffffffff"
        in stated([other(each, "model", "identity", "ff" * 32) for each in runs], Intent.SETTINGS)[Arm.CANDIDATE]
    )
    unstated = [each if each.arm is Arm.CANDIDATE else replace(each, identity={}) for each in runs]
    assert stated(unstated, Intent.ARITHMETIC) == {Arm.BASELINE: "not stated", Arm.CANDIDATE: "attested-1"}


@pytest.mark.parametrize(("arm", "verdict"), [(Arm.BASELINE, Verdict.CANDIDATE), (Arm.CANDIDATE, Verdict.OUTPUT)])
def test_a_candidate_that_disagrees_with_itself_has_no_intent(arm: Arm, verdict: Verdict) -> None:
    runs = of_a_suite(1.5, strict=60)
    index = next(i for i, each in enumerate(runs) if each.arm is arm)
    first = replace(runs[index].samples[0], digest=b"\xfe" * 32)
    runs[index] = replace(runs[index], samples=(first, *runs[index].samples[1:]))
    assert decide(runs, BY_ARITHMETIC).verdict is verdict


@pytest.mark.parametrize(("right", "passed"), [(0, False), (3, False), (4, True), (6, True)])
def test_an_answer_counts_that_most_runs_gave(right: int, passed: bool) -> None:
    changed = itertools.count()

    def candidate(each: Run) -> Run:
        return (
            with_samples(lambda sample: replace(sample, strict=True, relaxed=True))(each)
            if next(changed) < right
            else each
        )

    runs = comparison(1.5, rounds=3, candidate=candidate)
    assert passes(runs, Arm.CANDIDATE, relaxed=False) == [passed] * 32


def test_scores_are_needed_where_output_may_differ() -> None:
    with pytest.raises(ValueError, match="judged by scores"):
        decide(comparison(1.5), BY_ARITHMETIC)
    with pytest.raises(ValueError, match="both configurations"):
        compare(of_a_suite(1.5, strict=60)[:1], 1)
    with pytest.raises(ValueError, match="negative"):
        compare(of_a_suite(1.5, strict=60), -1)


@pytest.mark.parametrize(
    ("lost", "gained", "chance"), [(0, 0, 1.0), (0, 4, 1.0), (1, 0, 0.5), (2, 0, 0.25), (3, 1, 5 / 16), (5, 0, 1 / 32)]
)
def test_the_chance_is_an_exact_sign_test(lost: int, gained: int, chance: float) -> None:
    counts = dict.fromkeys(Arm, 50)
    scores = Scores(
        questions=100, strict=counts, relaxed=counts, lost=(1,) * lost, gained=(2,) * gained, bound=STRICT_LOSS_AT_MOST
    )
    assert scores.chance == pytest.approx(chance)


@given(strict=st.integers(0, 100), bound=st.integers(0, 100), ratio=st.floats(0.05, 20.0))
def test_no_candidate_wins_beyond_the_bound(strict: int, bound: int, ratio: float) -> None:
    decision = decide(of_a_suite(ratio, strict=strict), Rules(intent=Intent.ARITHMETIC, strict_loss=bound))
    assert (decision.verdict is Verdict.QUALITY) is (60 - strict > bound)
    if decision.verdict is Verdict.CANDIDATE:
        assert decision.gain > 1.01
