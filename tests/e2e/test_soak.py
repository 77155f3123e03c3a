"""Twenty seconds of the soak test: mixed load with clients that vanish and bad requests, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.soak import MIB, UNCHANGED, ZERO, Process, State, compare, soak

GOOD = ("whole", "stream", "two choices", "json schema", "long prompt", "cancelled", "timeout", "sampled")
CALLERS = 3
IDLE = State(
    processes=tuple(
        Process(pid=pid, resident=100 * MIB, threads=4, descriptors=("pipe", "socket", "socket")) for pid in (7, 8)
    ),
    gauges=dict.fromkeys((*ZERO, *UNCHANGED), 0.0),
)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_mixed_load_leaves_nothing_behind(smollm2: Path, tmp_path: Path) -> None:
    assert smollm2.exists()
    done = soak(tmp_path, seconds=20, callers=CALLERS, seed=4, say=lambda _text: None)
    assert done.tally.wrong == []
    assert done.silent, "the log holds something of a prompt"
    assert [check for check in done.checks if not check.holds] == []
    assert done.tally.of("disconnect") >= CALLERS
    assert done.tally.of("bad request") >= CALLERS
    assert sum(done.tally.of(kind) for kind in GOOD) >= 18 * CALLERS
    assert done.tally.tokens > 0


def test_two_idle_states_that_are_alike_hold() -> None:
    assert all(check.holds for check in compare(IDLE, IDLE))


def test_descriptors_that_may_not_be_read_are_said_to_be_unknown() -> None:
    unknown = changed(0, descriptors=None)
    for before, after in ((unknown, unknown), (IDLE, unknown), (unknown, IDLE)):
        told = {check.what: check.bound for check in compare(before, after)}
        assert told["API process: file descriptors"] == "unknown here"
        assert told["worker 1: file descriptors"] == "none new"


def changed(index: int, **changes: object) -> State:
    processes = list(IDLE.processes)
    processes[index] = replace(processes[index], **changes)  # type: ignore[arg-type]
    return replace(IDLE, processes=tuple(processes))


@pytest.mark.parametrize(
    ("after", "what"),
    [
        *((replace(IDLE, gauges={**IDLE.gauges, name: 1.0}), name) for name in (*ZERO, *UNCHANGED)),
        (changed(0, resident=100 * MIB + 8 * MIB + 1), "API process: resident MiB"),
        (changed(1, resident=100 * MIB + 16 * MIB + 1), "worker 1: resident MiB"),
        (changed(0, descriptors=("pipe", "socket", "socket", "socket")), "API process: file descriptors"),
        (changed(1, descriptors=("pipe", "pipe", "socket")), "worker 1: file descriptors"),
        (changed(0, threads=7), "API process: threads"),
        (changed(1, pid=9), "processes"),
        (replace(IDLE, processes=IDLE.processes[:1]), "processes"),
    ],
)
def test_each_thing_left_behind_is_found(after: State, what: str) -> None:
    assert [check.what for check in compare(IDLE, after) if not check.holds] == [what]


@pytest.mark.parametrize("grown", [lambda: changed(0, resident=108 * MIB), lambda: changed(1, resident=116 * MIB)])
def test_what_is_inside_the_bound_holds(grown: Callable[[], State]) -> None:
    assert all(check.holds for check in compare(IDLE, grown()))
