"""What is measured on the loaded model, on machines whose clocks are not like this one's."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from appliance.engine.batch import EXACT
from appliance.engine.llama_cpp.allowance import Allowance
from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions
from appliance.engine.llama_cpp.selftest import (
    measure_draft_cost,
    measure_exactness,
    measure_guess_costs,
    measure_steps,
)

pytestmark = pytest.mark.model


@pytest.mark.parametrize("tick_s", [None, 0.004, 3600.0])
def test_costs_are_measured_by_a_clock_that_moves(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, tick_s: float | None
) -> None:
    """User Mode Linux counts a thread's time in ticks: an evaluation may take none."""
    fd = os.open(smollm2, os.O_RDONLY)
    runtime = LlamaRuntime(
        RuntimeOptions(fd=fd, kv_tokens=256, n_batch=63, n_sequences=1, threads=1), progress=lambda _: None
    )
    os.close(fd)
    exact = time.thread_time
    if tick_s is not None:
        monkeypatch.setattr(time, "thread_time", lambda: math.floor(exact() / tick_s) * tick_s)
    allowance = Allowance(600.0)
    costs = measure_guess_costs(runtime, allowance)
    for cost in (costs.row, costs.shape, measure_draft_cost(runtime, runtime, allowance)):
        assert math.isfinite(cost)
        assert cost >= 0.0


@pytest.mark.parametrize("rows", [63, 512])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_shape_is_exact(smollm2: Path, threads: int, rows: int) -> None:
    """llama.cpp's attention tiles from 64 rows on and splits a row among threads; native/llama_cpp's does not."""
    fd = os.open(smollm2, os.O_RDONLY)
    options = RuntimeOptions(fd=fd, kv_tokens=4096, n_batch=rows, n_sequences=9, threads=threads)
    runtime = LlamaRuntime(options, progress=lambda _: None)
    os.close(fd)
    assert measure_exactness(runtime, Allowance(600.0)) == EXACT


@pytest.mark.parametrize("slots", [1, 16])
def test_long_steps_are_used_as_far_as_they_are_exact(smollm2: Path, slots: int) -> None:
    """The verdict is about steps of up to 63 rows; that more keep it is found apart. Ours are exact at every length."""
    fd = os.open(smollm2, os.O_RDONLY)
    options = RuntimeOptions(fd=fd, kv_tokens=4096, n_batch=256, n_sequences=2 * slots + 1, threads=1)
    runtime = LlamaRuntime(options, progress=lambda _: None)
    os.close(fd)
    allowance, proven = Allowance(600.0), list[int]()
    assert measure_exactness(runtime, allowance) == EXACT
    measure_steps(runtime, allowance, proven)
    assert proven == [63, 72, 136, 256]
