"""How many rows a step may have: learned, bounded, and of no consequence for answers."""

from __future__ import annotations

from appliance.engine.generation.pace import BESIDE_S, LEAST_ROWS, LONE_S, UNLEARNED_ROWS, Pace


def test_a_first_step_is_small_and_a_lone_prompt_then_gets_the_machine() -> None:
    pace = Pace(512)
    assert pace.rows(answering=False) == UNLEARNED_ROWS
    pace.note(64, 64 * 0.0005)
    assert pace.rows(answering=False) == 512
    assert pace.rows(answering=True) == int(BESIDE_S / 0.0005)


def test_a_step_takes_about_as_long_as_it_may_however_deep_the_prompt() -> None:
    pace = Pace(512)
    for row_s in (0.001, 0.002, 0.004, 0.008):
        for _ in range(8):
            pace.note(64, 64 * row_s)
        for answering, limit_s in ((False, LONE_S), (True, BESIDE_S)):
            taken = pace.rows(answering=answering) * row_s
            assert taken <= limit_s * 1.1 or pace.rows(answering=answering) == LEAST_ROWS


def test_the_bounds_hold() -> None:
    pace = Pace(512)
    for _ in range(20):
        pace.note(16, 16 * 11.0)  # an emulated machine
    assert pace.rows(answering=True) == LEAST_ROWS
    assert Pace(8).rows(answering=False) == 8
    few = Pace(8)
    few.note(64, 1000.0)
    assert few.rows(answering=True) == 8


def test_single_rows_and_clocks_that_stand_still_teach_nothing() -> None:
    pace = Pace(512)
    pace.note(1, 5.0)
    pace.note(512, 0.0)
    assert pace.rows(answering=False) == UNLEARNED_ROWS
