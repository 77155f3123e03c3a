from __future__ import annotations

import pytest

from appliance.engine.settings import resolve_threads


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (16, 15)])
def test_auto_leaves_a_core_to_the_serving_process(cores: int, count: int) -> None:
    threads = resolve_threads("auto", set(range(cores)))
    assert threads.count == count
    assert str(cores) in threads.reason


def test_a_configured_count_is_taken_as_it_is() -> None:
    threads = resolve_threads(4, {0, 1})
    assert threads.count == 4
    assert threads.reason == "configured: 4 of 2 usable cores"
