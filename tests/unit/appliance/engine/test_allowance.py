"""The measurements of a start where an evaluation takes seconds: they end, and the careful answer is taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from appliance.engine.batch import Segment
from appliance.engine.llama_cpp.allowance import Allowance, Exhausted
from appliance.engine.llama_cpp.measure import measure_threads
from appliance.engine.llama_cpp.runtime import Aborted, LlamaRuntime, RuntimeOptions
from appliance.engine.llama_cpp.selftest import NOT_EXACT, measure_exactness, measure_guess_costs
from appliance.engine.settings import Threads


class SlowRuntime:
    """What the measurements need of a runtime. A row takes `row_s` of a clock that only evaluations move."""

    def __init__(self, row_s: float) -> None:
        self.options = RuntimeOptions(fd=-1, kv_tokens=256, n_batch=63, n_sequences=9, threads=1)
        self.threads = 1
        self.vocabulary_size = 32
        self.row_s = row_s
        self.now = 0.0
        self.evaluations = 0
        self.held: set[int] = set()

    def decode(self, segments: Sequence[Segment]) -> None:
        self.evaluations += 1
        self.now += self.row_s * sum(len(segment.tokens) for segment in segments)
        self.held.update(segment.sequence for segment in segments)

    def logits(self, row: int) -> Any:
        return np.zeros(self.vocabulary_size, dtype=np.float32)

    def forget(self, sequence: int, *, start: int = 0) -> bool:
        if start == 0:
            self.held.discard(sequence)
        return True

    def save(self, sequence: int) -> bytes:
        return b""

    def restore(self, sequence: int, state: bytes) -> bool:
        self.held.add(sequence)
        return True

    def use_threads(self, count: int) -> None:
        self.threads = count

    def interrupt(self) -> None: ...

    def clear_interrupt(self) -> None: ...


def slow(row_s: float) -> tuple[SlowRuntime, LlamaRuntime]:
    runtime = SlowRuntime(row_s)
    return runtime, cast(LlamaRuntime, runtime)


def test_a_machine_of_eleven_seconds_a_row_gets_the_careful_answers_in_time() -> None:
    fake, runtime = slow(11.0)
    allowance = Allowance(60.0, clock=lambda: fake.now)
    one = Threads(count=1, reason="careful")
    threads = allowance.measured(
        "threads", lambda: measure_threads(runtime, 8, allowance), one, runtimes=(runtime,), share=0.25
    )
    exactness = allowance.measured(
        "exactness", lambda: measure_exactness(runtime, allowance), NOT_EXACT, runtimes=(runtime,), share=0.75
    )
    assert threads == one
    assert exactness == NOT_EXACT
    assert allowance.cut == ["threads", "exactness"]
    assert fake.evaluations <= 4
    assert not fake.held


def test_what_fits_is_measured_and_nothing_is_cut() -> None:
    fake, runtime = slow(0.01)
    allowance = Allowance(60.0, clock=lambda: fake.now)
    exactness = allowance.measured(
        "exactness", lambda: measure_exactness(runtime, allowance), NOT_EXACT, runtimes=(runtime,), share=0.75
    )
    assert exactness.batch
    assert exactness.verify
    assert exactness.chunk
    assert allowance.cut == []
    assert measure_guess_costs(runtime, allowance).row >= 0.0


def test_evaluations_are_bounded_too() -> None:
    fake, runtime = slow(0.0)
    allowance = Allowance(60.0, evaluations=5, clock=lambda: fake.now)
    with pytest.raises(Exhausted):
        measure_exactness(runtime, allowance)
    assert fake.evaluations == 5
    assert not fake.held


def test_an_evaluation_that_does_not_end_is_interrupted() -> None:
    """The clock here is the real one: an evaluation in progress ends when the time is over, not when it is done."""

    class Endless(SlowRuntime):
        def __init__(self) -> None:
            super().__init__(0.0)
            self.stop = threading.Event()

        def decode(self, segments: Sequence[Segment]) -> None:
            super().decode(segments)
            if self.stop.wait(30.0):
                raise Aborted

        def interrupt(self) -> None:
            self.stop.set()

        def clear_interrupt(self) -> None:
            self.stop.clear()

    fake = Endless()
    runtime = cast(LlamaRuntime, fake)
    began = time.monotonic()
    allowance = Allowance(0.4)
    found = allowance.measured(
        "exactness", lambda: measure_exactness(runtime, allowance), NOT_EXACT, runtimes=(runtime,), share=0.5
    )
    assert found == NOT_EXACT
    assert 0.1 < time.monotonic() - began < 5.0
    assert not fake.stop.is_set()
    assert not fake.held
