"""Draw what compare_peers.py measured: how many times as fast as llama-server, row by row.

    python tests/bench/plot_peers.py RUN.json [RUN.json ...] [-o docs/peers.png] [--table]

`--table` prints the same, and what has no bar, as the table of docs/benchmarks.md.

Each run (one model and number of threads) has a colour. A dot is a sample of ours over the median of theirs, the bar
the ratio of medians, the tick what was asked for. The scale is logarithmic: half and double are as far from one.
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
    "1-stream": "one stream, greedy",
    "1-stream-sampled": "one stream, sampled",
    "4-streams": "4 streams together",
    "8-streams": "8 streams together",
    "16-streams-mixed": "16 streams, mixed prompts",
    "behind-1000": "one stream behind 1,000 tokens",
    "behind-3000": "one stream behind 3,000 tokens",
    "new-500": "first token, new prompt of 500",
    "new-1000": "first token, new prompt of 1,000",
    "new-3000": "first token, new prompt of 3,000",
    "4-long-prompts": "four prompts of 1,000 answered",
    "shared-prefix": "first token, prefix known",
    "during-prefill": "first token while a long\nprompt is read (p95)",
    "own-lookup": "prompt lookup over\nour own run without",
}
COLOURS = ("#1f4e79", "#c55a11", "#548235", "#7030a0")


def draw(runs: Sequence[Mapping[str, Any]], to: Path) -> None:
    figure = Figure(figsize=(8.5, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [name for name in TITLES if any(row["name"] == name for run in runs for row in run["rows"])]
    bar = 0.72 / len(runs)
    lowest = min(row["ratio"] for run in runs for row in run["rows"] if row["name"] in TITLES)
    for index, run in enumerate(runs):
        shift = (index - (len(runs) - 1) / 2) * bar
        rows = {row["name"]: row for row in run["rows"]}
        axes.barh(0, 0, left=1, color=COLOURS[index], alpha=0.75, label=title(run))
        for place, name in enumerate(names):
            if name not in rows:
                continue
            row, height = rows[name], place + shift
            axes.barh(height, row["ratio"] - 1, left=1, height=bar * 0.9, color=COLOURS[index], alpha=0.75)
            theirs = statistics.median(row["samples"]["theirs"])
            samples = [sample / theirs for sample in row["samples"]["ours"]]
            axes.plot(samples, [height] * len(samples), "o", color="black", markersize=2.5)
            axes.plot([row["target"]], [height], "|", color="red", markersize=14, markeredgewidth=2)
            axes.annotate(
                f"{row['ratio']:.2f}", (max(row["ratio"], *samples), height), (6, -3), textcoords="offset points"
            )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(0.5, lowest * 0.8), 24)
    axes.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axes.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as llama-server on plain HTTP (ours: RA-TLS, receipts on); red: asked for")
    axes.legend(loc="lower right")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(to, dpi=110, metadata={"Software": None})


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each row of the comparison, four columns for each run."""
    titles = {**TITLES, "own-prefix": "prefix known, over our own cold prompt", "memory": "memory, MB"}
    head = ["work"]
    for run in runs:
        head += [f"{title(run)}: ours", "theirs", "ratio (target)", "peak"]
    lines = [head, ["---"] * len(head)]
    for name, shown in titles.items():
        line = [shown.replace("\n", " ")]
        for run in runs:
            row = next((row for row in run["rows"] if row["name"] == name), None)
            line += ["", "", "", ""] if row is None else _cells(row)
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    missed = "" if row["met"] else ", missed"
    share = ""
    if row.get("peak"):
        letter, most = max(row["peak"].items(), key=lambda item: item[1])
        share = f"{most:.0%} {'of bytes' if letter == 'read' else 'of operations'}"
    ratio = f"{row['ratio']:.2f} ({row['target']:.2f}{missed})"
    return [f"{row['ours']:.3g}", f"{row['theirs']:.3g}", ratio, share]


def title(run: Mapping[str, Any]) -> str:
    threads = f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}"
    return f"{run['model']} {run['format']}, {threads}" if "model" in run else threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    runs = [json.loads(run.read_text()) for run in options.runs]
    if options.out:
        draw(runs, options.out)
    if options.table:
        print(table(runs))


if __name__ == "__main__":
    main()
