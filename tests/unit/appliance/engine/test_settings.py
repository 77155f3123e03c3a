from __future__ import annotations

import pytest

from appliance.engine.settings import choose_threads, resolve_cells, thread_candidates
from appliance.errors import BootError


@pytest.mark.parametrize(
    ("speeds", "count"),
    [({1: 80.0, 2: 118.0}, 2), ({1: 74.0, 2: 12.0}, 1), ({1: 80.0, 2: 85.0}, 1), ({1: 8.0, 4: 30.0, 8: 31.0}, 4)],
)
def test_the_fewest_threads_that_are_about_as_fast(speeds: dict[int, float], count: int) -> None:
    threads = choose_threads(speeds, 8)
    assert threads.count == count
    assert "8 usable cores" in threads.reason
    assert all(f"{number}: " in threads.reason for number in speeds)


@pytest.mark.parametrize(
    ("cores", "counts"),
    [
        (1, [1]),
        (2, [1]),
        (3, [1, 2]),
        (4, [1, 2, 3]),
        (8, [1, 2, 3, 4, 6, 7]),
        (32, [1, 2, 3, 4, 6, 8, 12, 16, 24, 31]),
    ],
)
def test_a_core_is_left_to_the_api_process_where_there_are_two(cores: int, counts: list[int]) -> None:
    assert thread_candidates(cores) == counts


def test_cells() -> None:
    assert resolve_cells("auto", context_length=4096, slots=16) == 16384
    assert resolve_cells("auto", context_length=512, slots=16) == 8192
    assert resolve_cells("auto", context_length=4096, slots=1) == 4096
    assert resolve_cells(5000, context_length=4096, slots=16) == 5000
    with pytest.raises(BootError, match=r"4095.*4096"):
        resolve_cells(4095, context_length=4096, slots=16)
