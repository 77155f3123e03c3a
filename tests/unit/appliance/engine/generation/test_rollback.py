"""Guesses in a memory that cannot be cut: a copy from before is put back, and what was right is evaluated again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from appliance.engine.batch import EXACT
from appliance.engine.generation.speculation import NARROW, GuessCosts, WidthController
from appliance.engine.types import Finished, SamplingParams
from appliance.engine.weights.memory import JobMemory
from appliance.errors import Unavailable
from tests.unit.appliance.engine.toy import Bench, alone

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=None)
PROMPT = "abc"
RECURRENT = replace(EXACT, rollback=False)
MIB = 1 << 20


class Oracle:
    """Proposes what is right, and wrong at some places of the answer."""

    def __init__(self, answer: list[int], wrong_at: set[int]) -> None:
        self._answer, self._wrong_at = answer, wrong_at

    def propose(self, tokens: Sequence[int], width: int) -> list[int]:
        start = len(tokens) - len(PROMPT)
        guesses = enumerate(self._answer[start : start + width], start)
        return [token + (index in self._wrong_at) for index, token in guesses]

    def rewind(self, length: int) -> None:
        pass

    def close(self) -> None:
        pass


def guessing(wrong_at: set[int], *, n_batch: int = 16, **options: int) -> tuple[Bench, list[int]]:
    whole = alone(PROMPT, GREEDY, 64)
    assert len(whole) > 12
    bench = Bench(n_batch=n_batch, width=NARROW, exactness=RECURRENT, drafter="prompt-lookup", **options)
    bench.make_drafter = lambda: Oracle(whole, wrong_at)
    return bench, whole


def test_h34_what_was_right_is_evaluated_again_with_the_next_step_and_counted() -> None:
    bench, whole = guessing({3})
    job = bench.submit(1, PROMPT)
    bench.step()  # the prompt, and its first token
    bench.step()  # guesses 1, 2 and 3, the last of them wrong
    assert bench.tokens(job) == whole[:4]
    stats = bench.scheduler.stats()
    assert stats["replayed_tokens"] == 3  # the token before the guesses, and the two that were right
    assert stats["cells_used"] == len(PROMPT)
    bench.step()
    (segment,) = bench.runtime.batches[-1]
    assert (list(segment.tokens), segment.position, segment.outputs) == (whole[:4], len(PROMPT), 1)
    assert bench.tokens(job) == whole[:5]
    bench.drain()
    assert bench.tokens(job) == whole
    end = bench.events[job][-1]
    assert isinstance(end, Finished)
    assert end.execution["target-passes"] == len(whole) - int(str(end.execution["accepted-tokens"]))
    assert bench.scheduler.stats()["replayed_tokens"] == 3


def test_h34_guesses_that_are_right_in_all_cost_no_replay() -> None:
    bench, whole = guessing(set())
    job = bench.submit(1, PROMPT)
    bench.drain()
    assert bench.tokens(job) == whole
    stats = bench.scheduler.stats()
    assert (stats["replayed_tokens"], stats["accepted_tokens"] > 8) == (0, True)


@pytest.mark.parametrize("failure", ["within", "drawing"])
def test_h27_h34_a_step_with_guesses_that_failed_is_repeated_from_the_copy_and_not_from_the_start(failure: str) -> None:
    bench, whole = guessing({3, 7, 8})
    job = bench.submit(1, PROMPT)
    bench.step()
    repeated = 0
    while not bench.scheduler.idle:
        before = len(bench.tokens(job))
        bench.runtime.failures = [failure]
        if not bench.step():
            assert len(bench.tokens(job)) == before
            (failed,) = bench.runtime.batches[-1]
            bench.step()
            if failed.outputs > 1:
                assert bench.runtime.batches[-1] == [failed]
                repeated += 1
        bench.runtime.failures = []
    assert repeated > 2
    bench.drain()
    assert bench.tokens(job) == whole


@pytest.mark.parametrize("failures", [[], ["", "within", "", "", "", "within", "drawing"]])
def test_h34_a_copy_that_cannot_be_put_back_means_evaluating_from_the_start(failures: list[str]) -> None:
    bench, whole = guessing({3, 9}, n_batch=NARROW + 1)
    bench.runtime.restores = False
    bench.runtime.failures = failures
    job = bench.submit(1, PROMPT)
    bench.drain()
    assert bench.tokens(job) == whole
    assert any(batch[0].position == 0 for batch in bench.runtime.batches[1:])


@pytest.mark.parametrize("adaptive", [True, False])
def test_h34_a_state_larger_than_the_bound_ends_guessing_for_good(adaptive: bool) -> None:
    bench, whole = guessing({3}, rollback_bytes=len(PROMPT) + 2)
    job = bench.submit(1, PROMPT)
    bench.drain()
    assert bench.tokens(job) == whole
    outputs = [segment.outputs for batch in bench.runtime.batches for segment in batch]
    assert outputs[1] == NARROW + 1, "three tokens of prompt: the copy has room"
    assert set(outputs[2:]) == {1}, "and then it has not"
    controller = WidthController(wide=5, adaptive=adaptive)
    controller.stop()
    controller.record(5, 5)
    assert (controller.width, controller.active) == (0, False)


def test_h34_the_copy_is_part_of_what_a_job_is_admitted_by() -> None:
    available = 6 * MIB
    memory = JobMemory(bytes_per_cell=1, kv_tokens=64, row_bytes=0, available=lambda: available)
    memory.check(cells=64, jobs=1, cache_room=0)
    copying = JobMemory(
        bytes_per_cell=1, kv_tokens=64, row_bytes=0, available=lambda: available, rollback_bytes=4 * MIB
    )
    with pytest.raises(Unavailable, match="7 MiB of their own, and 6 MiB are available"):
        copying.check(cells=64, jobs=1, cache_room=0)
    available = 8 * MIB
    copying.check(cells=64, jobs=1, cache_room=0)


def test_h34_h40_what_is_evaluated_again_is_part_of_what_guessing_costs() -> None:
    for replay, goes_on in ((0.0, True), (0.5, False)):
        controller = WidthController(wide=8, costs=GuessCosts(row=0.5, replay=replay))
        for accepted in [2, 2, 1] * 5:
            controller.record(NARROW, accepted)
        assert controller.active is goes_on


def test_h34_a_deterministic_answer_guesses_only_where_the_replay_is_exact_too() -> None:
    for exactness, guesses in ((RECURRENT, True), (replace(RECURRENT, chunk=False), False)):
        bench = Bench(exactness=exactness, drafter="prompt-lookup", n_batch=16)
        job = bench.submit(1, "abcabcabc", deterministic=True)
        bench.drain()
        end = bench.events[job][-1]
        assert isinstance(end, Finished)
        assert ("speculation" in end.execution) is guesses
        assert end.execution["exact"] is True
