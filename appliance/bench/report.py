"""What `appliance bench` says: a table for people, JSON for programs. Numbers and digests, no text of anybody."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from appliance.bench.decision import (
    HIT_RATE_LOSS_AT_MOST,
    P99_RATIO_AT_MOST,
    TIE_AT_MOST,
    Decision,
    repeats,
)
from appliance.bench.runs import Arm, Run, Sample, acceptance, hit_rate, percentile, tokens_per_pass
from appliance.bench.workload import Workload

VERSION = 1
MIB = 1 << 20
_MS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One configuration over all of its runs. A number that nobody could read or that does not exist is None."""

    throughput: float
    steady_decode: float | None
    ttft_p50_ms: float
    ttft_p99_ms: float
    verified_p50_ms: float
    answer_p50_s: float
    answer_p99_s: float
    acceptance: float | None
    tokens_per_pass: float | None
    cache_hit_rate: float
    pss_mib: float | None
    resident_mib: float
    truncated: float
    exact: float
    repeats: bool
    output: str


def summarize(runs: Sequence[Run]) -> Summary:
    """Medians over the runs, percentiles over all samples. Raises ValueError for no runs."""
    if not runs:
        raise ValueError("no runs")
    samples = [sample for run in runs for sample in run.samples]
    decodes = [rate for run in runs if (rate := run.steady_decode) is not None]
    proportional = [run.memory.proportional for run in runs if run.memory.proportional is not None]
    digests = {run.digest.hex() for run in runs}
    return Summary(
        throughput=statistics.median(run.throughput for run in runs),
        steady_decode=statistics.median(decodes) if decodes else None,
        ttft_p50_ms=_MS * statistics.median(sample.first_s for sample in samples),
        ttft_p99_ms=_MS * percentile([sample.first_s for sample in samples], 0.99),
        verified_p50_ms=_MS * statistics.median(sample.verified_s for sample in samples),
        answer_p50_s=statistics.median(sample.total_s for sample in samples),
        answer_p99_s=percentile([sample.total_s for sample in samples], 0.99),
        acceptance=acceptance(samples),
        tokens_per_pass=tokens_per_pass(samples),
        cache_hit_rate=float(hit_rate(samples)),
        pss_mib=max(proportional) / MIB if len(proportional) == len(runs) else None,
        resident_mib=max(run.memory.resident for run in runs) / MIB,
        truncated=_share(samples, lambda sample: sample.truncated),
        exact=_share(samples, lambda sample: sample.exact),
        repeats=repeats(runs),
        output=digests.pop() if len(digests) == 1 else "",
    )


ROWS: Sequence[tuple[str, str, str]] = (
    ("throughput", "request-wide throughput [tokens/s]", ".1f"),
    ("steady_decode", "steady decode [tokens/s]", ".1f"),
    ("ttft_p50_ms", "time to first token, median [ms]", ".0f"),
    ("ttft_p99_ms", "time to first token, p99 [ms]", ".0f"),
    ("verified_p50_ms", "time to first verified token, median [ms]", ".0f"),
    ("answer_p50_s", "whole answer, median [s]", ".3f"),
    ("answer_p99_s", "whole answer, p99 [s]", ".3f"),
    ("acceptance", "guesses accepted", ".1%"),
    ("tokens_per_pass", "tokens per target pass", ".2f"),
    ("cache_hit_rate", "prompt tokens reused", ".1%"),
    ("pss_mib", "memory, proportional [MiB]", ".0f"),
    ("resident_mib", "memory, resident [MiB]", ".0f"),
    ("truncated", "answers cut at their limit", ".0%"),
    ("exact", "answers that were exact", ".0%"),
    ("repeats", "same output in every run", ""),
)


def table(summaries: Mapping[Arm, Summary]) -> Table:
    """One row for each measure, one column for each configuration, and their ratio where there are two."""
    shown = Table("measure", box=None, pad_edge=False)
    for arm in summaries:
        shown.add_column(arm.value if len(summaries) > 1 else "measured", justify="right")
    if len(summaries) > 1:
        shown.add_column("ratio", justify="right")
    for name, label, form in ROWS:
        values = [getattr(summary, name) for summary in summaries.values()]
        cells = [_cell(value, form) for value in values]
        if len(values) > 1:
            cells.append(_ratio(*values))
        shown.add_row(label, *cells)
    return shown


def explain(decision: Decision) -> list[str]:
    """The verdict and what it rests on, a line each."""
    medians = ", ".join(f"{order.value} {median:.3f}" for order, median in decision.order_medians.items())
    lines = [f"throughput, candidate over baseline, median of each order: {medians}; the lower decides"]
    if not decision.orders_agree:
        lines.append("the orders disagree: the difference is not larger than the drift of this machine")
    if decision.differing:
        lines.append(f"{decision.differing} places of the workload were not answered alike in every run")
        for name, same in (("baseline", decision.baseline_repeats), ("candidate", decision.candidate_repeats)):
            lines.append(f"the runs of the {name} alone {'agree' if same else 'DIFFER'}")
    return [*lines, f"default: {decision.verdict.value}"]


def to_json(
    runs: Sequence[Run],
    workload: Workload,
    decision: Decision | None,
    environment: Mapping[str, object],
) -> dict[str, object]:
    """Everything as one JSON object; the samples too, so that a reader can compute with them."""
    arms = {arm.value: [run for run in runs if run.arm is arm] for arm in Arm}
    return {
        "version": VERSION,
        "workload": {"samples": workload.samples, "tokens": workload.tokens, "streams": workload.streams},
        "environment": dict(environment),
        "configurations": {
            name: {"identity": taken[0].identity, **_fields(summarize(taken)), "runs": [_run(run) for run in taken]}
            for name, taken in arms.items()
            if taken
        },
        "decision": None if decision is None else _decision(decision),
    }


def _decision(decision: Decision) -> dict[str, object]:
    return {
        "verdict": decision.verdict.name.lower(),
        "text": decision.verdict.value,
        "gain": decision.gain,
        "order_medians": {order.name.lower(): median for order, median in decision.order_medians.items()},
        "orders_agree": decision.orders_agree,
        "answer_p99_s": {arm.value: value for arm, value in decision.p99_s.items()},
        "cache_hit_rate": {arm.value: float(value) for arm, value in decision.hit_rate.items()},
        "differing_places": decision.differing,
        "baseline_repeats": decision.baseline_repeats,
        "candidate_repeats": decision.candidate_repeats,
        "limits": {
            "p99_ratio": P99_RATIO_AT_MOST,
            "cache_hit_rate_loss": float(HIT_RATE_LOSS_AT_MOST),
            "tie_ratio": TIE_AT_MOST,
        },
    }


def _run(run: Run) -> dict[str, object]:
    return {
        "order": run.order.name.lower(),
        "round": run.round,
        "wall_s": run.wall_s,
        "throughput": run.throughput,
        "steady_decode": run.steady_decode,
        "output": run.digest.hex(),
        "pss_bytes": run.memory.proportional,
        "resident_bytes": run.memory.resident,
        "samples": [_fields(sample) for sample in run.samples],
    }


def _fields(value: object) -> dict[str, object]:
    """The fields of one of our frozen dataclasses, digests in hex."""
    names: tuple[str, ...] = type(value).__slots__  # type: ignore[attr-defined]
    taken = {name: getattr(value, name) for name in names}
    return {name: item.hex() if isinstance(item, bytes) else item for name, item in taken.items()}


def _share(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> float:
    return sum(map(holds, samples)) / len(samples)


def _cell(value: object, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return format(value, form)


def _ratio(baseline: object, candidate: object) -> str:
    if isinstance(baseline, float) and isinstance(candidate, float) and baseline:
        return f"{candidate / baseline:.3f}"
    return ""
