"""Draw what compare_peers.py measured: how many times as fast as llama-server, row by row.

    python tests/bench/plot_peers.py RUN.json [RUN.json ...] -o docs/peers.png

Each run (one number of threads) has a colour. A dot is a sample of ours over the median of theirs, the bar the ratio of
medians, the tick what was asked for. The scale is logarithmic: half and double are as far from one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TITLES = {
    "1-stream": "one stream",
    "4-streams": "4 streams together",
    "8-streams": "8 streams together",
    "16-streams-mixed": "16 streams, mixed prompts",
    "shared-prefix": "first token, prefix known",
    "during-prefill": "first token while a long\nprompt is read (p95)",
    "own-lookup": "prompt lookup over\nour own run without",
}
COLOURS = ("#1f4e79", "#c55a11", "#548235")
BAR = 0.36


def draw(runs: Sequence[Mapping[str, Any]], to: Path) -> None:
    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [name for name in TITLES if any(row["name"] == name for run in runs for row in run["rows"])]
    for index, run in enumerate(runs):
        shift = (index - (len(runs) - 1) / 2) * BAR
        rows = {row["name"]: row for row in run["rows"]}
        for place, name in enumerate(names):
            if name not in rows:
                continue
            row, height = rows[name], place + shift
            label = f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}" if place == 0 else None
            axes.barh(height, row["ratio"] - 1, left=1, height=BAR * 0.9, color=COLOURS[index], alpha=0.75, label=label)
            theirs = statistics.median(row["samples"]["theirs"])
            samples = [sample / theirs for sample in row["samples"]["ours"]]
            axes.plot(samples, [height] * len(samples), "o", color="black", markersize=2.5)
            axes.plot([row["target"]], [height], "|", color="red", markersize=14, markeredgewidth=2)
            axes.annotate(
                f"{row['ratio']:.2f}", (max(row["ratio"], *samples), height), (6, -3), textcoords="offset points"
            )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.5, 24)
    axes.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axes.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as llama-server on plain HTTP (ours: RA-TLS, receipts on); red: asked for")
    axes.legend(loc="lower right")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(to, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    draw([json.loads(run.read_text()) for run in options.runs], options.out)


if __name__ == "__main__":
    main()
