"""How many threads to compute with, measured on the loaded model beside an imitation of the serving process."""

from __future__ import annotations

import threading
import time
from functools import partial

from appliance.engine.batch import Segment
from appliance.engine.llama_cpp.allowance import Allowance
from appliance.engine.llama_cpp.runtime import LlamaRuntime
from appliance.engine.settings import Threads, choose_threads, thread_candidates

_STEPS = 10
_LIMIT_S = 1.0
_BUSY_S = 0.0008
_PAUSE_S = 0.006


def measure_threads(runtime: LlamaRuntime, cores: int, allowance: Allowance) -> Threads:
    """Time single decode steps with each candidate; leaves the context empty and the chosen count in force.

    Of one candidate nothing is timed. Raises Exhausted.
    """
    counts = thread_candidates(cores)
    if len(counts) == 1:
        runtime.use_threads(counts[0])
        return Threads(count=counts[0], reason=f"auto: the one choice on {cores} usable cores")
    served = threading.Event()
    imitation = threading.Thread(target=_serve, args=(served,), daemon=True)
    imitation.start()
    try:
        speeds = {count: _speed(runtime, count, allowance) for count in counts}
    finally:
        served.set()
        imitation.join()
    threads = choose_threads(speeds, cores)
    runtime.use_threads(threads.count)
    return threads


def _serve(end: threading.Event) -> None:
    """Wake up and compute about as often and as long as the serving process does for the tokens of one stream."""
    while not end.wait(_PAUSE_S):
        until = time.perf_counter() + _BUSY_S
        while time.perf_counter() < until:
            pass


def _speed(runtime: LlamaRuntime, count: int, allowance: Allowance) -> float:
    """Tokens per second of one sequence; the median step decides, for one that was disturbed says nothing."""
    runtime.use_threads(count)
    taken: list[float] = []
    start = time.perf_counter()
    try:
        for position in range(min(_STEPS, runtime.options.kv_tokens)):
            segment = Segment(sequence=0, position=position, tokens=[1], outputs=1)
            before = time.perf_counter()
            allowance.evaluate(partial(runtime.decode, [segment]))
            taken.append(time.perf_counter() - before)
            if time.perf_counter() - start > _LIMIT_S:
                break
    finally:
        runtime.forget(0)
    # The first steps warm the caches and the threads up.
    steady = sorted(taken[2:] or taken)
    return 1.0 / steady[len(steady) // 2]
