"""Guessing ahead: the transaction, the drafters, and the throttle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.generation.speculation import (
    DRAFTERS,
    LOSS_LIMIT,
    NARROW,
    WINDOW,
    Drafter,
    GuessCosts,
    NGramContext,
    PromptLookup,
    WidthController,
    committed,
)
from appliance.engine.generation.worker import _speculate
from appliance.engine.types import Finished, SamplingParams
from tests.unit.appliance.engine.toy import Bench, alone

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=None)


def test_h27_the_picture_commits_five_and_one_correction() -> None:
    candidates = [841, 298, 1973, 456, 62, 1401, 77]
    targets = [841, 298, 1973, 456, 62, 981, 77, 5]
    assert committed(candidates, targets) == [841, 298, 1973, 456, 62, 981]


def test_a_proposal_foreseen_whole_has_one_token_more_and_an_empty_one_just_that() -> None:
    assert committed([1, 2], [1, 2, 3]) == [1, 2, 3]
    assert committed([], [9]) == [9]
    assert committed([4], [9, 9]) == [9]


class Oracle:
    """Proposes what is right for a while, and wrong at one place."""

    def __init__(self, answer: list[int], wrong_at: int) -> None:
        self._answer, self._wrong_at = answer, wrong_at

    def propose(self, tokens: Sequence[int], width: int) -> list[int]:
        start = len(tokens) - 3
        return [
            token + (start + index == self._wrong_at) for index, token in enumerate(self._answer[start : start + width])
        ]

    def rewind(self, length: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_one_pass_commits_the_foreseen_prefix_and_the_models_own_token() -> None:
    whole = alone("abc", GREEDY, 64)
    assert len(whole) > 9
    bench = Bench(n_batch=16, width=7)
    bench.make_drafter = lambda: Oracle(whole, wrong_at=1 + NARROW + 1 + 5)
    job = bench.submit(1, "abc")
    bench.step()
    made = [len(bench.tokens(job))]
    while not bench.scheduler.idle:
        bench.step()
        made.append(len(bench.tokens(job)))
    # One by the prompt, the narrow proposal and one, then the wide one: five foreseen and a correction.
    assert [after - before for before, after in pairwise(made)][:2] == [NARROW + 1, 6]
    bench.drain()
    assert bench.tokens(job) == whole


@given(
    st.text("abcd", min_size=1, max_size=40),
    st.sampled_from(["prompt-lookup", "n-gram"]),
    st.one_of(st.none(), st.integers(1, 99)),
    st.integers(1, 12),
)
def test_h28_h29_answers_are_those_of_the_model_alone(prompt: str, drafter: str, seed: int | None, width: int) -> None:
    bench = Bench(drafter=drafter, n_batch=16, width=width)
    job = bench.submit(1, prompt, seed=seed)
    bench.drain()
    params = SamplingParams(
        temperature=0.0 if seed is None else 1.0, top_p=1.0, top_k=0, seed=seed or 0, max_tokens=None
    )
    assert bench.tokens(job) == alone(prompt, params, 64)


def test_h40_a_copied_text_takes_fewer_passes_and_the_end_tells_how_many() -> None:
    bench = Bench(drafter="prompt-lookup", n_batch=16, width=8, context_length=200, kv_tokens=200)
    job = bench.submit(1, "abca", max_tokens=60)  # the toy's answers end in a circle
    bench.drain()
    end = bench.events[job][-1]
    assert isinstance(end, Finished)
    facts = end.execution
    assert facts["speculation"] == "prompt-lookup"
    assert facts["exact"] is True
    made = len(bench.tokens(job))
    assert facts["accepted-tokens"] == made - int(str(facts["target-passes"]))
    assert int(str(facts["target-passes"])) < made


@pytest.mark.parametrize("make", [PromptLookup, NGramContext])
def test_drafters_go_by_what_was_seen_and_keep_to_the_width(make: type[PromptLookup | NGramContext]) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3]
    assert make().propose(tokens, 3) == [4, 5, 6]
    assert make().propose(tokens, 1) == [4]
    assert make().propose([1, 2, 3], 4) == []
    grown = make()
    assert grown.propose([1, 2, 3, 4], 4) == []
    assert grown.propose([1, 2, 3, 4, 2, 3], 2)[:1] == [4]


def test_a_repetition_goes_on_past_its_end() -> None:
    assert PromptLookup().propose([7, 8, 7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]


def test_ngrams_guess_what_most_often_followed() -> None:
    tokens = [1, 2, 5, 0, 1, 2, 6, 0, 3, 1, 2, 6, 4, 1, 2]
    assert NGramContext().propose(tokens, 1) == [6]


# -- the throttle ------------------------------------------------------------------------------------------------------


def test_h15_the_first_round_decides_about_the_wide_shape() -> None:
    opened = WidthController(wide=8)
    assert opened.width == NARROW
    opened.record(NARROW, NARROW)
    assert opened.width == 8
    opened.record(8, 7)
    assert opened.width == NARROW
    opened.record(NARROW, NARROW)
    assert opened.width == NARROW  # closed for good
    closed = WidthController(wide=8)
    closed.record(NARROW, 0)
    closed.record(NARROW, NARROW)
    assert closed.width == NARROW


def test_h16_too_little_for_a_window_is_the_end_of_it() -> None:
    poor = WidthController(wide=8)
    for accepted in [1, 0] * (WINDOW // 2):
        assert poor.active
        poor.record(NARROW, accepted)
    assert not poor.active
    fair = WidthController(wide=8)
    for accepted in [2, 0] * WINDOW:
        fair.record(NARROW, accepted)
    assert fair.active


@given(st.lists(st.integers(0, 8), max_size=80), st.integers(1, 64))
def test_h14_h16_h33_few_widths_within_bounds_and_no_way_back(script: list[int], wide: int) -> None:
    controller = WidthController(wide=wide)
    seen: list[int] = []
    for accepted in script:
        width = controller.width
        seen.append(width)
        controller.record(max(width, 1), min(accepted, max(width, 1)))
    assert all(0 <= width <= wide for width in seen)
    assert len({width for width in seen if width}) <= 2
    if 0 in seen:
        assert not any(seen[seen.index(0) :])


def test_h40_guesses_that_cost_more_than_they_bring_end() -> None:
    for row_cost, goes_on in ((0.3, True), (0.6, False)):
        controller = WidthController(wide=8, costs=GuessCosts(row=row_cost))
        for accepted in [2, 1, 1] * 5:  # 1.33 of 3 a round
            controller.record(NARROW, accepted)
        assert controller.active is goes_on


@given(st.lists(st.integers(0, 8), max_size=80), st.floats(0.0, 0.9), st.floats(0.0, 2.0))
def test_h13_h40_what_guessing_costs_an_answer_is_bounded(script: list[int], row: float, shape: float) -> None:
    """Changes of shape count too: rounds that were not right in all go back to one row."""
    controller = WidthController(wide=8, costs=GuessCosts(row=row, shape=shape))
    balance = 0.0
    for right in script:
        if not controller.active:
            break
        width = controller.width
        accepted = min(right, width)
        controller.record(width, accepted)
        balance += accepted - row * width - (0.0 if accepted == width else shape)
    worst_round = row * 8 + shape
    assert balance >= -LOSS_LIMIT - worst_round
    if balance < -LOSS_LIMIT:
        assert not controller.active


def test_h13_guesses_that_cannot_pay_however_right_they_are_are_not_made() -> None:
    assert WidthController(wide=8, costs=GuessCosts(row=0.99)).active
    assert not WidthController(wide=8, costs=GuessCosts(row=1.0)).active
    assert (
        WidthController(wide=8, costs=GuessCosts(row=1.4), adaptive=False).width == 8
    )  # who fixes the width decides himself


def test_h13_more_right_guesses_lose_where_every_round_changes_the_shape() -> None:
    """Two of three right each time is 67 %, all and none in turns 50 %; the first goes back to one row every round."""
    for shape, often_right_goes_on in ((0.0, True), (2.0, False)):
        often, whole = (WidthController(wide=NARROW, costs=GuessCosts(row=0.1, shape=shape)) for _ in range(2))
        for _ in range(WINDOW):
            for controller, accepted in ((often, (2, 2)), (whole, (NARROW, 0))):
                for count in accepted:
                    controller.record(NARROW, count)
        assert often.active is often_right_goes_on
        assert whole.active


@pytest.mark.parametrize("wide", [0, 65])
def test_h33_the_bounds_of_the_width(wide: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        WidthController(wide=wide)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("make", [*DRAFTERS.values(), lambda: Oracle([], 0)])
def test_h38_every_answer_has_a_width_of_its_own_whatever_guesses(adaptive: bool, make: Callable[[], Drafter]) -> None:
    costs = GuessCosts(row=0.25, shape=0.5)
    speculate = _speculate({"draft_tokens": 6, "adaptive": adaptive}, make, costs)
    first, second = speculate(), speculate()
    assert first is not None
    assert second is not None
    for controller in (first.controller, second.controller):
        assert (controller.wide, controller.adaptive, controller.costs) == (6, adaptive, costs)
    for _ in range(2 * WINDOW):
        first.controller.record(first.controller.width, 0)
    assert first.controller.active is not adaptive
    assert second.controller.active
    assert first.drafter is not second.drafter


def test_h38_a_fixed_width_stays() -> None:
    fixed = WidthController(wide=6, adaptive=False)
    for _ in range(40):
        fixed.record(6, 0)
    assert fixed.width == 6


def test_nothing_is_proposed_where_many_answers_share_the_rows() -> None:
    bench = Bench(drafter="prompt-lookup", n_batch=32, slots=4)
    for number in range(4):
        bench.submit(number, "abca", max_tokens=30 if number == 3 else 8)
    bench.step()
    while bench.scheduler.stats()["running"] > 2:
        bench.step()
        if bench.scheduler.stats()["running"] == 4:
            assert all(segment.outputs <= 1 for segment in bench.runtime.batches[-1])
    bench.drain()
    assert any(segment.outputs > 1 for batch in bench.runtime.batches for segment in batch)
