"""What is kept of prompts: exact prefixes of one's own, within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.batch import EXACT, Exactness
from appliance.engine.generation.prefix_cache import MIN_TOKENS, CacheLimits, PrefixCache
from appliance.engine.types import Finished, SamplingParams
from tests.unit.appliance.engine.toy import Bench, alone

BASE = list(range(100, 130))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(
    *, entries: int = 4, limit_bytes: int = 1000, ttl_s: float = 60.0, cuttable: bool = True
) -> tuple[PrefixCache, Clock]:
    clock = Clock()
    limits = CacheLimits(entries=entries, limit_bytes=limit_bytes, ttl_s=ttl_s)
    return PrefixCache(limits, clock, cuttable=cuttable), clock


def test_the_longest_prefix_one_token_short_of_the_prompt() -> None:
    cache, _ = made()
    cache.put(b"s", [*BASE[:20], 1], b"first")
    cache.put(b"s", [*BASE[:25], 2], b"second")
    found = cache.find(b"s", BASE, room=100)
    assert found is not None
    assert (found.state, found.length, found.size) == (b"second", 25, 26)
    found = cache.find(b"s", BASE[:20], room=100)
    assert found is not None
    assert found.length == 19
    assert cache.find(b"s", BASE[: MIN_TOKENS - 1], room=100) is None
    assert (cache.counters.hits, cache.counters.misses, cache.counters.reused_tokens) == (2, 1, 44)


def test_b139_a_scope_sees_its_own_only() -> None:
    cache, _ = made()
    cache.put(b"a", BASE, b"x")
    assert cache.find(b"b", [*BASE, 1], room=100) is None
    assert cache.find(b"", [*BASE, 1], room=100) is None
    assert cache.find(b"a", [*BASE, 1], room=100) is not None


def test_h51_without_exact_rollback_only_a_whole_entry_is_a_hit() -> None:
    cache, _ = made(cuttable=False)
    cache.put(b"s", BASE, b"x")
    assert cache.find(b"s", [*BASE[:25], 1, 2], room=100) is None
    assert cache.find(b"s", [*BASE, 1, 2], room=100) is not None


def test_h51_where_nothing_can_be_cut_a_longer_entry_does_not_stand_for_a_shorter_one() -> None:
    cache, _ = made(cuttable=False)
    cache.put(b"s", BASE[:20], b"short")
    assert not cache.wants(b"s", BASE[:20])
    cache.put(b"s", BASE, b"long")
    assert cache.wants(b"s", BASE[:25])
    assert len(cache) == 2
    for continued, state in (([*BASE[:20], 1], b"short"), ([*BASE, 1], b"long")):
        found = cache.find(b"s", continued, room=100)
        assert found is not None
        assert (found.state, found.length) == (state, found.size)
    cache.put(b"s", BASE, b"again")
    assert (len(cache), cache.counters.evictions) == (2, 0)


def test_an_entry_needs_room_for_all_of_it() -> None:
    cache, _ = made()
    cache.put(b"s", BASE, b"x")
    assert cache.find(b"s", [*BASE[:20], 1], room=29) is None
    assert cache.find(b"s", [*BASE[:20], 1], room=30) is not None


def test_h50_bounds_by_entries_bytes_and_time_least_recently_used_first() -> None:
    cache, clock = made(entries=2)
    for scope in (b"1", b"2"):
        cache.put(scope, BASE, b"x" * 10)
    assert cache.find(b"1", [*BASE, 0], room=100)
    cache.put(b"3", BASE, b"x" * 10)
    assert cache.find(b"2", [*BASE, 0], room=100) is None
    assert cache.find(b"1", [*BASE, 0], room=100)
    assert (len(cache), cache.size_bytes, cache.counters.evictions) == (2, 20, 1)
    cache.put(b"4", BASE, b"x" * 995)
    assert (len(cache), cache.size_bytes) == (1, 995)
    cache.put(b"5", BASE, b"x" * 1001)  # larger than all there is
    assert cache.find(b"5", [*BASE, 0], room=100) is None
    clock.now = 60.0
    assert cache.find(b"4", [*BASE, 0], room=100) is None
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_a_longer_one_supersedes_what_it_extends() -> None:
    cache, _ = made()
    cache.put(b"s", BASE[:20], b"x")
    assert not cache.wants(b"s", BASE[:20])
    assert not cache.wants(b"s", BASE[:18])
    assert cache.wants(b"s", BASE)
    cache.put(b"s", BASE, b"y")
    assert len(cache) == 1
    assert cache.counters.evictions == 0


def test_no_entries_no_reuse() -> None:
    cache, _ = made(entries=0)
    cache.put(b"s", BASE, b"x")
    assert (cache.enabled, len(cache), cache.wants(b"s", BASE)) == (False, 0, False)


tokens = st.lists(st.integers(0, 2), min_size=MIN_TOKENS, max_size=MIN_TOKENS + 6)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=1), tokens), max_size=12), tokens)
def test_what_is_found_is_a_prefix_of_the_scope(entries: list[tuple[bytes, list[int]]], wanted: list[int]) -> None:
    cache, _ = made(entries=5)
    for scope, kept in entries:
        cache.put(scope, kept, bytes(kept))
    for scope in {scope for scope, _ in entries}:
        found = cache.find(scope, wanted, room=99)
        if found is not None:
            assert list(found.state[: found.length]) == wanted[: found.length]
            assert (scope, list(found.state)) in entries
            assert found.length < len(wanted)
    assert cache.size_bytes <= 1000
    assert len(cache) <= 5


# -- in the scheduler --------------------------------------------------------------------------------------------------

LONG = "abcdabcddcbaabcdabcd"


def cached(bench: Bench, number: int, prompt: str, scope: bytes) -> tuple[object, list[int]]:
    job = bench.submit(number, prompt, scope=scope, max_tokens=4)
    bench.drain()
    end = bench.events[job][-1]
    assert isinstance(end, Finished)
    return end.execution["cached-prompt-tokens"], bench.tokens(job)


def test_the_next_turn_starts_where_the_last_answer_ended_and_says_the_same() -> None:
    bench = Bench()
    assert cached(bench, 1, LONG, b"s")[0] == 0
    answer = bench.tokens((1).to_bytes(16, "big"))
    turn = LONG + bytes(answer).decode() + "ddd"
    reused, tokens = cached(bench, 2, turn, b"s")
    assert reused == len(LONG) + 3  # the last token was never evaluated
    assert tokens == cached(bench, 3, turn, b"other")[1]
    assert bench.scheduler.stats()["cache_reused_tokens"] == reused


def test_b139_a_timing_probe_of_another_tenant_evaluates_all_of_its_prompt() -> None:
    bench = Bench()
    cached(bench, 1, LONG, b"tenant a")
    before = len(bench.runtime.batches)
    assert cached(bench, 2, LONG, b"tenant b")[0] == 0
    probe = len(bench.runtime.batches) - before
    fresh = Bench()
    cached(fresh, 1, LONG, b"tenant b")
    assert probe == len(fresh.runtime.batches)
    assert cached(bench, 3, LONG, b"")[0] == 0
    assert cached(bench, 4, LONG, b"tenant a")[0] == len(LONG) - 1


@pytest.mark.parametrize("exactness", [EXACT, replace(EXACT, rollback=False)])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "n-gram"])
@given(st.text("ab", min_size=20, max_size=40), st.integers(0, 1), st.one_of(st.none(), st.integers(1, 99)))
def test_h52_guessing_behind_a_kept_prefix_gives_the_answer_of_the_model_alone(
    drafter: str, exactness: Exactness, prompt: str, more: int, seed: int | None
) -> None:
    bench = Bench(drafter=drafter, n_batch=16, context_length=100, kv_tokens=400, exactness=exactness)
    bench.submit(1, prompt, scope=b"s", max_tokens=1)
    bench.drain()
    longer = prompt + "ab" * more + "b"
    job = bench.submit(2, longer, scope=b"s", seed=seed)
    bench.drain()
    end = bench.events[job][-1]
    assert isinstance(end, Finished)
    assert end.execution["cached-prompt-tokens"] == len(prompt)
    assert end.execution["speculation"] == drafter
    assert end.execution["exact"] is True
    params = SamplingParams(
        temperature=0.0 if seed is None else 1.0, top_p=1.0, top_k=0, seed=seed or 0, max_tokens=None
    )
    assert bench.tokens(job) == alone(longer, params, 100)


def test_h52_both_bring_what_they_bring_alone() -> None:
    counted = {}
    for drafter in ("off", "prompt-lookup"):
        for scope in (b"", b"s"):
            bench = Bench(drafter=drafter, n_batch=16, context_length=200, kv_tokens=800)
            for number in (1, 2):
                bench.submit(number, "abcabcabcabcabcabcabcabc", scope=scope, max_tokens=60)
                bench.drain()
            counters = bench.scheduler.counters
            counted[drafter, scope] = counters.prefill_tokens, counters.target_passes
    (_, plain_passes), (reused, _) = counted["off", b""], counted["off", b"s"]
    prefill, passes = counted["prompt-lookup", b"s"]
    assert (prefill, passes) == (reused, counted["prompt-lookup", b""][1])
    assert passes < plain_passes


def test_a_job_that_must_be_alone_reuses_nothing() -> None:
    bench = Bench(exactness=replace(EXACT, chunk=False), deterministic=True)
    cached(bench, 1, LONG, b"s")
    assert cached(bench, 2, LONG, b"s")[0] == 0
