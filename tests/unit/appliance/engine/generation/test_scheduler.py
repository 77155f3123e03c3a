"""The loop over a toy model: whatever runs beside a job and whatever fails, its answer is the one it gives alone."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Many
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.batch import EXACT, Exactness
from appliance.engine.generation.speculation import PromptLookup
from appliance.engine.phases import PHASES
from appliance.engine.stats import ENGINE_STATS
from appliance.engine.types import Begun, Delta, Finished, PromptReady, SamplingParams, TokenLogprob
from appliance.engine.weights.memory import JobMemory
from appliance.errors import ApplianceError, Unavailable
from tests.unit.appliance.engine.toy import Bench, alone

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=None)


def expected(bench: Bench, prompt: str, seed: int | None, max_tokens: int | None = None) -> list[int]:
    params = replace(GREEDY, temperature=0.0 if seed is None else 1.0, seed=seed or 0, max_tokens=max_tokens)
    return alone(prompt, params, bench.limits.context_length)


def test_every_job_ends_once_and_is_announced_before_its_turn() -> None:
    bench = Bench(slots=1)
    prompts = ("abcdefghij", "kl", "m")
    jobs = [bench.submit(number, prompt) for number, prompt in enumerate(prompts)]
    assert [type(events[0]) for events in bench.events.values()] == [PromptReady] * 3
    bench.drain()
    for job, prompt in zip(jobs, prompts, strict=True):
        assert bench.tokens(job) == expected(bench, prompt, None)
        assert len([event for event in bench.events[job] if isinstance(event, Finished)]) == 1
        assert isinstance(bench.events[job][-1], Finished)


def test_a_job_tells_how_much_of_its_prompt_was_kept_before_its_first_token_is_made() -> None:
    bench = Bench(context_length=200, kv_tokens=800, n_batch=8)
    prompt = "abcdabcdabcdabcdabcdabcd"
    bench.submit(1, prompt, scope=b"s", max_tokens=4)
    bench.drain()
    again = bench.submit(2, prompt + "xyzxyzxyzxyz", scope=b"s", max_tokens=4)
    assert [type(event) for event in bench.events[again]] == [PromptReady]
    bench.step()
    assert bench.events[again][1:] == [Begun(execution={"cached-prompt-tokens": 24})]
    bench.drain()
    last = bench.events[again][-1]
    assert isinstance(last, Finished)
    assert last.execution["cached-prompt-tokens"] == 24
    assert len([event for event in bench.events[again] if isinstance(event, Begun)]) == 1


def test_a_job_for_which_there_is_no_memory_is_refused_before_anything_of_it_exists() -> None:
    left = 1 << 30
    memory = JobMemory(bytes_per_cell=1 << 10, kv_tokens=256, row_bytes=0, available=lambda: left)
    bench = Bench(memory=memory)
    first = bench.submit(1, "abc", max_tokens=20)
    left = 3 << 20  # one job fits, two do not
    second = bench.submit(2, "abc", max_tokens=20)
    (refusal,) = bench.events[second]
    assert isinstance(refusal, Unavailable)
    assert refusal.code == "insufficient_memory"
    bench.drain()
    assert isinstance(bench.events[first][-1], Finished)
    third = bench.submit(3, "abc", max_tokens=20)
    bench.drain()
    assert isinstance(bench.events[third][-1], Finished)


def test_h07_reuse_spares_prefill_and_guessing_spares_passes_and_neither_the_other() -> None:
    prompt, counted = "abcabcabcabcabcabcabcabc", {}
    for drafter, scope in (("off", b""), ("off", b"s"), ("prompt-lookup", b"")):
        bench = Bench(drafter=drafter, n_batch=16, context_length=100, kv_tokens=400)
        for number in (1, 2):
            bench.submit(number, prompt, scope=scope, max_tokens=40)
            bench.drain()
        counters = bench.scheduler.counters
        counted[drafter, scope] = counters.prefill_tokens, counters.target_passes
    (prefill, passes), (reused_prefill, reused_passes) = counted["off", b""], counted["off", b"s"]
    guessed_prefill, guessed_passes = counted["prompt-lookup", b""]
    assert (reused_prefill < prefill, reused_passes == passes) == (True, True)
    assert (guessed_prefill == prefill, guessed_passes < passes) == (True, True)


def test_b139_h48_another_tenant_takes_the_same_steps_whatever_is_kept() -> None:
    prompt = "abcdabcdabcdabcdabcdabcdabcd"
    taken: list[list[list[tuple[int, int]]]] = []
    for others in ((), (b"tenant a",), (b"tenant a", b"tenant c")):
        bench = Bench(n_batch=8, context_length=100, kv_tokens=400)
        for number, scope in enumerate(others, 1):
            bench.submit(number, prompt, scope=scope, max_tokens=4)
            bench.drain()
        bench.runtime.batches.clear()
        probe = bench.submit(9, prompt, scope=b"tenant b", max_tokens=4)
        bench.drain()
        taken.append([[(len(segment.tokens), segment.outputs) for segment in batch] for batch in bench.runtime.batches])
        end = bench.events[probe][-1]
        assert isinstance(end, Finished)
        assert end.execution["cached-prompt-tokens"] == 0
    assert taken[0] == taken[1] == taken[2]


def test_h43_what_is_told_of_the_scheduler_is_counts_alone() -> None:
    bench = Bench()
    bench.submit(1, "abcabc", scope=b"secret", max_tokens=4)
    bench.step()
    stats = bench.scheduler.stats()
    assert set(stats) <= {"running", "waiting", *ENGINE_STATS}
    assert all(type(value) is int for value in stats.values())
    bench.drain()


@pytest.mark.parametrize(("size", "code"), [(7, None), (8, "context_length_exceeded"), (9, "context_length_exceeded")])
def test_b125_the_border_of_the_context(size: int, code: str | None) -> None:
    bench = Bench(context_length=8)
    job = bench.submit(1, "x" * size)
    bench.drain()
    last = bench.events[job][-1]
    assert (last.code if isinstance(last, ApplianceError) else None) == code
    if code is None:
        assert len(bench.tokens(job)) == 1


def test_h44_a_job_joins_at_the_next_step_and_shares_it() -> None:
    bench = Bench()
    bench.submit(1, "abcabc")
    bench.step()
    bench.submit(2, "xy")
    bench.step()
    assert [(len(segment.tokens), segment.outputs) for segment in bench.runtime.batches[-1]] == [(1, 1), (2, 1)]
    bench.drain()


def test_running_answers_keep_their_pace_and_a_short_prompt_overtakes_a_long_one() -> None:
    bench = Bench(context_length=200, kv_tokens=800, n_batch=8)
    answering = bench.submit(1, "ab", max_tokens=8)
    bench.step()
    bench.submit(2, "x" * 150, max_tokens=1)
    bench.submit(3, "yz", max_tokens=1)
    before = len(bench.tokens(answering))
    bench.step()
    assert len(bench.tokens(answering)) == before + 1
    batch = bench.runtime.batches[-1]
    assert sum(len(segment.tokens) for segment in batch) == 8
    assert [len(segment.tokens) for segment in batch] == [1, 5, 2]
    assert len(bench.tokens((3).to_bytes(16, "big"))) == 1
    bench.drain()


def test_more_answers_than_rows_take_turns() -> None:
    bench = Bench(n_batch=2, slots=4)
    jobs = {bench.submit(number, prompt, max_tokens=6): prompt for number, prompt in enumerate(("ab", "ba", "c", "d"))}
    for _ in range(12):
        bench.step()
    assert all(bench.tokens(job) for job in jobs)
    bench.drain()
    for job, prompt in jobs.items():
        assert bench.tokens(job) == expected(bench, prompt, None, 6)


def test_h46_a_job_waits_until_there_are_cells_for_all_it_may_come_to() -> None:
    bench = Bench(context_length=64, kv_tokens=100, slots=4)
    first, second = bench.submit(1, "a" * 40, max_tokens=20), bench.submit(2, "b" * 30, max_tokens=20)
    third = bench.submit(3, "c", max_tokens=2)
    bench.step()
    assert bench.scheduler.stats()["cells_reserved"] == 60
    assert bench.scheduler.stats()["waiting"] == 2  # first come, first served: the small one does not overtake
    bench.drain()
    assert all(isinstance(bench.events[job][-1], Finished) for job in (first, second, third))


@pytest.mark.parametrize("failure", ["before", "within", "drawing"])
@pytest.mark.parametrize("drafter", ["off", "prompt-lookup"])
def test_h45_a_failed_step_moves_nobody_and_its_repetition_gives_the_same_tokens(failure: str, drafter: str) -> None:
    bench = Bench(drafter=drafter)
    prompts = {bench.submit(number, prompt, seed=number): prompt for number, prompt in enumerate(("abab", "cdcdcd"), 1)}
    while not bench.scheduler.idle:
        counts = {job: len(bench.events[job]) for job in prompts}
        bench.runtime.failures = [failure]
        if not bench.step():
            assert {job: len(bench.events[job]) for job in prompts} == counts
            bench.step()
        bench.runtime.failures = []
    bench.drain()
    for job, prompt in prompts.items():
        assert bench.tokens(job) == expected(bench, prompt, int.from_bytes(job, "big"))


@pytest.mark.parametrize("failure", ["within", "drawing"])
def test_guesses_of_a_failed_step_are_dropped_where_another_answer_joins_its_repetition(failure: str) -> None:
    bench = Bench(drafter="prompt-lookup", n_batch=12)
    # All wrong but the first: what they leave free in the middle would be filled with newer tokens of the other answer.
    right = expected(bench, "abab", 1)[1]
    bench.make_drafter = lambda: Fixed([right, *[ord("z")] * 3])
    first = bench.submit(1, "abab", seed=1)
    bench.step()
    bench.runtime.failures = [failure]
    assert not bench.step()
    second = bench.submit(2, "cdcdcd", seed=2)
    bench.step()
    assert [segment.outputs for segment in bench.runtime.batches[-1]] == [1, 1]
    bench.drain()
    assert bench.tokens(first) == expected(bench, "abab", 1)
    assert bench.tokens(second) == expected(bench, "cdcdcd", 2)


class Fixed:
    """Proposes the same, whatever came before."""

    def __init__(self, proposal: list[int]) -> None:
        self._proposal = proposal

    def propose(self, tokens: object, width: int) -> list[int]:
        return self._proposal[:width]

    def rewind(self, length: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_h51_a_memory_that_cannot_be_cut_back_is_filled_again() -> None:
    bench = Bench(exactness=replace(EXACT, rollback=False))
    job = bench.submit(1, "abcdefghijkl", scope=b"s")
    for _ in range(3):
        bench.step()
        bench.runtime.failures = ["within"]
        assert not bench.step()
    bench.drain()
    assert bench.tokens(job) == expected(bench, "abcdefghijkl", None)
    assert bench.scheduler.counters.failed_steps == 3


def test_a_deterministic_job_shares_its_steps_only_where_that_is_exact() -> None:
    for exactness, together in ((EXACT, True), (replace(EXACT, batch=False), False)):
        bench = Bench(exactness=exactness)
        bench.submit(1, "abc", max_tokens=4)
        job = bench.submit(2, "def", max_tokens=4, deterministic=True)
        bench.submit(3, "ghi", max_tokens=4)
        bench.drain()
        assert any(len(batch) > 1 for batch in bench.runtime.batches) == together
        last = bench.events[job][-1]
        assert isinstance(last, Finished)
        assert last.execution["exact"] is True
        other = bench.events[(1).to_bytes(16, "big")][-1]
        assert isinstance(other, Finished)
        assert other.execution["exact"] is together


def leases_hold(bench: Bench) -> None:
    """What running jobs were lent is theirs alone, within one budget, and every cell in use is accounted for."""
    stats, running = bench.scheduler.stats(), bench.scheduler._running
    assert len({sequence.slot for sequence in running}) == len(running) == stats["running"] <= bench.limits.slots
    assert stats["cells_reserved"] == sum(sequence.cells for sequence in running) <= bench.limits.kv_tokens
    assert stats["cells_used"] == sum(map(len, bench.runtime.cells.values())) <= bench.limits.kv_tokens
    for sequence in running:
        assert bench.runtime.memory.get(sequence.slot, []) == sequence.tokens[: sequence.position]


actions = st.lists(
    st.tuples(st.sampled_from(["submit", "cancel", "step", "step", "fail"]), st.integers(0, 7)), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(
    actions,
    st.sampled_from(["off", "prompt-lookup", "n-gram"]),
    st.integers(2, 12),
    st.integers(1, 5),
    st.sampled_from([EXACT, replace(EXACT, rollback=False)]),
)
def test_h27_h34_h45_h46_any_order_of_jobs_cancels_and_failures(
    script: list[tuple[str, int]], drafter: str, n_batch: int, slots: int, exactness: Exactness
) -> None:
    bench = Bench(drafter=drafter, n_batch=n_batch, slots=slots, kv_tokens=130, exactness=exactness)
    cancelled: set[bytes] = set()
    jobs: dict[bytes, tuple[str, int | None]] = {}
    for index, (action, number) in enumerate(script):
        if action == "submit":
            prompt = "abcdabcdabcdabcdabcdabcd"[: 3 * number + 1] + "abcd"[number % 4]
            seed = None if number % 2 else index
            jobs[bench.submit(index, prompt, seed=seed, scope=bytes([number % 3]))] = prompt, seed
        elif action == "cancel" and jobs:
            job = list(jobs)[number % len(jobs)]
            cancelled.add(job)
            bench.scheduler.cancel(job)
        elif action == "fail":
            bench.runtime.failures.append(("before", "within", "drawing", "")[number % 4])
        else:
            bench.step()
        leases_hold(bench)
    bench.drain()
    for job, (prompt, seed) in jobs.items():
        ended = isinstance(bench.events[job][-1], Finished)
        assert ended or job in cancelled
        whole = expected(bench, prompt, seed)
        assert bench.tokens(job) == (whole if ended else whole[: len(bench.tokens(job))])


@pytest.mark.parametrize("failure", ["", "before", "within", "drawing"])
def test_the_tokens_of_a_prompt_are_measured_once_each_whatever_fails(failure: str) -> None:
    bench = Bench(n_batch=3)
    bench.runtime.failures = ["", failure, failure]
    prompt = "measured"
    others = [bench.submit(number, "beside", max_tokens=6) for number in (1, 2)]
    job = bench.submit(9, prompt, scope=b"s", score_prompt=True, logprobs=0, max_tokens=4)
    again = bench.submit(10, prompt, scope=b"s", score_prompt=True, logprobs=0, max_tokens=4)
    bench.drain()
    scores = [TokenLogprob(token=prompt[:1].encode(), logprob=None)]
    for index in range(1, len(prompt)):
        context = prompt[: index + 1].encode()
        scores.append(TokenLogprob(token=context[-1:], logprob=-float(zlib.crc32(context))))
    for measured in (job, again):
        first, *rest = [event for event in bench.events[measured] if isinstance(event, Delta)]
        assert list(first.prompt_logprobs) == scores
        assert not any(delta.prompt_logprobs for delta in rest)
        assert bench.tokens(measured) == alone(prompt, replace(GREEDY, max_tokens=4), 64)
    assert not any(event.prompt_logprobs for each in others for event in bench.events[each] if isinstance(event, Delta))


def test_a_prompt_is_copied_for_reuse_once_its_first_token_is_on_its_way() -> None:
    bench = Bench()
    first = bench.submit(1, "abcdefghijklmnopqrst", scope=b"a", max_tokens=8)
    while first not in bench.events or not bench.tokens(first):
        bench.step()
    assert len(bench.cache) == 0, "nobody's first token waits for a copy"
    bench.scheduler.settle()
    assert len(bench.cache) == 1
    bench.scheduler.settle()
    assert len(bench.cache) == 1
    # Who never settles finds it done by the next step; a job that left in between is not copied any more.
    second = bench.submit(2, "ABCDEFGHIJKLMNOPQRST", scope=b"b", max_tokens=8)
    while second not in bench.events or not bench.tokens(second):
        bench.step()
    bench.scheduler.cancel(second)
    bench.scheduler.settle()
    assert len(bench.cache) == 1
    bench.drain()


@pytest.mark.parametrize("exactness", [EXACT, replace(EXACT, rollback=False)])
def test_h40_every_moment_of_the_steps_is_in_one_phase_and_in_the_right_one(exactness: Exactness) -> None:
    bench = Bench(drafter="prompt-lookup", n_batch=32, exactness=exactness, context_length=100, kv_tokens=400)
    runtime, copies, guesses = bench.runtime, 0, 0
    runtime.costs_ns = {"decode": 10_000_000, "sample": 30_000, "save": 200_000}
    save, propose = runtime.save, PromptLookup.propose

    def saving(sequence: int) -> bytes:
        nonlocal copies
        copies += 1
        return save(sequence)

    class Slow(PromptLookup):
        def propose(self, tokens: Many[int], width: int) -> list[int]:
            nonlocal guesses
            guesses += 1
            runtime.now_ns += 5_000
            return propose(self, tokens, width)

    runtime.save, bench.make_drafter = saving, Slow  # type: ignore[method-assign]
    job = bench.submit(1, "abcdabcdabcdabcdabcd", scope=b"s", max_tokens=40)
    bench.step()
    bench.scheduler.settle()
    assert bench.scheduler.stats()["copy_us"] == 200, "the prompt, kept for reuse"
    bench.runtime.failures = ["", "before", "drawing"]
    bench.drain()
    made = len(bench.tokens(job))
    stats = bench.scheduler.stats()
    assert stats["evaluate_us"] == 10_000 * len(runtime.batches)
    assert stats["propose_us"] == 5 * guesses
    assert stats["draw_us"] + stats["commit_us"] - 200 == 30 * made, "and the answer, kept as it ends"
    assert stats["draw_us"] > stats["commit_us"] - 200 >= 0
    assert stats["copy_us"] == 200 * (copies - 1)
    assert (copies > 2) is not exactness.rollback
    assert sum(stats[phase] for phase in PHASES) == runtime.now_ns // 1000
