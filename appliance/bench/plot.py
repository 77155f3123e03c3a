"""The picture of a measurement: every run a point, so that one sees the spread a median hides. Extra `bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from appliance.bench.runs import Arm, Run, acceptance, hit_rate, tokens_per_pass
from appliance.errors import BootError

_COLOURS = {Arm.BASELINE: "#4c566a", Arm.CANDIDATE: "#2a7fb8"}
_MS = 1000.0
_MIB = 1 << 20
_DOTS_PER_INCH = 120
_HEADROOM = 1.08
_OUTLIERS_FROM = 5
"""Points above so many times the largest median lie outside: one stray number must not flatten all the others."""

_PANELS: Sequence[tuple[str, Callable[[Run], Sequence[float | None]]]] = (
    ("request-wide throughput [tokens/s]", lambda run: [run.throughput]),
    ("steady decode [tokens/s]", lambda run: [sample.decode for sample in run.samples]),
    ("time to first token [ms]", lambda run: [_MS * sample.first_s for sample in run.samples]),
    ("whole answer [s]", lambda run: [sample.total_s for sample in run.samples]),
    ("prompt tokens reused", lambda run: [float(hit_rate(run.samples))]),
    ("guesses accepted", lambda run: [acceptance(run.samples)]),
    ("tokens per target pass", lambda run: [tokens_per_pass(run.samples)]),
    ("memory [MiB]", lambda run: [(run.memory.proportional or run.memory.resident) / _MIB]),
)


def load_canvas() -> tuple[Any, Any]:
    """matplotlib's figure and the canvas that needs no display. Raises BootError where the extra is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BootError("--plot needs matplotlib: pip install 'attested-inference[bench]'") from None
    return Figure, FigureCanvasAgg


def draw(runs: Sequence[Run], path: Path, caption: str) -> None:
    """Write a PNG. Raises BootError where the extra is not installed or the file cannot be written."""
    make_figure, make_canvas = load_canvas()
    figure = make_figure(figsize=(13, 6.5), layout="constrained")
    for panel, (title, read) in zip(figure.subplots(2, 4).flat, _PANELS, strict=True):
        _draw_panel(panel, title, runs, read)
    figure.suptitle(f"{caption}\nruns from left to right: B baseline, C candidate", fontsize=9)
    try:
        make_canvas(figure).print_figure(str(path), dpi=_DOTS_PER_INCH, format="png")
    except OSError as error:
        raise BootError(f"cannot write {path}: {error.strerror}") from error


def _draw_panel(panel: Any, title: str, runs: Sequence[Run], read: Callable[[Run], Sequence[float | None]]) -> None:
    """Runs from left to right as they were made; a point for each number, a bar at the median of the run."""
    panel.set_title(title, fontsize=9)
    top = middle = 0.0
    for position, run in enumerate(runs):
        values = sorted(value for value in read(run) if value is not None)
        if not values:
            continue
        top, middle = max(top, values[-1]), max(middle, values[len(values) // 2])
        panel.plot([position] * len(values), values, "o", ms=3, alpha=0.45, color=_COLOURS[run.arm])
        panel.plot([position - 0.3, position + 0.3], [values[len(values) // 2]] * 2, lw=2, color=_COLOURS[run.arm])
    panel.set_xticks(range(len(runs)), [run.arm.value[0].upper() for run in runs], fontsize=7)
    if top:
        panel.set_ylim(0, min(top, middle * _OUTLIERS_FROM) * _HEADROOM)
    else:
        panel.text(0.5, 0.5, "none", ha="center", va="center", transform=panel.transAxes)
        panel.set_yticks([])
