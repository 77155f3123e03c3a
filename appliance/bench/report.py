"""What `appliance bench` says: a table for people, JSON for programs. Numbers and digests, no text of anybody."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from rich.table import Table

from appliance.bench.decision import (
    HIT_RATE_LOSS_AT_MOST,
    P99_RATIO_AT_MOST,
    TIE_AT_MOST,
    Decision,
    Verdict,
    repeats,
)
from appliance.bench.quality import Scores, passes, scored
from appliance.bench.runs import Arm, Run, Sample, acceptance, hit_rate, percentile, tokens_per_pass
from appliance.bench.suite import Suite
from appliance.bench.workload import Workload

VERSION = 2
_IDS_SHOWN = 12
MIB = 1 << 20
_MS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One configuration over all of its runs. A number that nobody could read or that does not exist is None.

    `strict` and `relaxed`: the share of the questions that most runs answered rightly; None without a suite.
    """

    strict: float | None
    relaxed: float | None
    throughput: float
    steady_decode: float | None
    ttft_p50_ms: float
    ttft_p99_ms: float
    verified_p50_ms: float
    answer_p50_s: float
    answer_p99_s: float
    acceptance: float | None
    tokens_per_pass: float | None
    replayed_tokens: float | None
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
    replayed = [run.replayed for run in runs if run.replayed is not None]
    digests = {run.digest.hex() for run in runs}
    return Summary(
        strict=_score(runs, relaxed=False),
        relaxed=_score(runs, relaxed=True),
        throughput=statistics.median(run.throughput for run in runs),
        steady_decode=statistics.median(decodes) if decodes else None,
        ttft_p50_ms=_MS * statistics.median(sample.first_s for sample in samples),
        ttft_p99_ms=_MS * percentile([sample.first_s for sample in samples], 0.99),
        verified_p50_ms=_MS * statistics.median(sample.verified_s for sample in samples),
        answer_p50_s=statistics.median(sample.total_s for sample in samples),
        answer_p99_s=percentile([sample.total_s for sample in samples], 0.99),
        acceptance=acceptance(samples),
        tokens_per_pass=tokens_per_pass(samples),
        replayed_tokens=statistics.median(replayed) if len(replayed) == len(runs) else None,
        cache_hit_rate=float(hit_rate(samples)),
        pss_mib=max(proportional) / MIB if len(proportional) == len(runs) else None,
        resident_mib=max(run.memory.resident for run in runs) / MIB,
        truncated=_share(samples, lambda sample: sample.truncated),
        exact=_share(samples, lambda sample: sample.exact),
        repeats=repeats(runs),
        output=digests.pop() if len(digests) == 1 else "",
    )


ROWS: Sequence[tuple[str, str, str]] = (
    ("strict", "questions answered rightly, strict", ".1%"),
    ("relaxed", "questions answered rightly, relaxed", ".1%"),
    ("throughput", "request-wide throughput [tokens/s]", ".1f"),
    ("steady_decode", "steady decode [tokens/s]", ".1f"),
    ("ttft_p50_ms", "time to first token, median [ms]", ".0f"),
    ("ttft_p99_ms", "time to first token, p99 [ms]", ".0f"),
    ("verified_p50_ms", "time to first verified token, median [ms]", ".0f"),
    ("answer_p50_s", "whole answer, median [s]", ".3f"),
    ("answer_p99_s", "whole answer, p99 [s]", ".3f"),
    ("acceptance", "guesses accepted", ".1%"),
    ("tokens_per_pass", "tokens per target pass", ".2f"),
    ("replayed_tokens", "tokens replayed, a run", ".0f"),
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


def explain(decision: Decision, suite: Suite | None = None) -> list[str]:
    """The verdict and what it rests on, a line each; `suite` names questions by their ids."""
    medians = ", ".join(f"{order.value} {median:.3f}" for order, median in decision.order_medians.items())
    lines = [f"throughput, candidate over baseline, median of each order: {medians}; the lower decides"]
    if not decision.orders_agree:
        lines.append("the orders disagree: the difference is not larger than the drift of this machine")
    agreeing = decision.places - decision.differing
    if decision.rules.intent is not None:
        difference = " and ".join(decision.stated.values())
        lines.append(f"output may differ by {decision.rules.intent.value}, by the receipts {difference}")
        lines.append(f"full outputs: {agreeing} of {decision.places} agree in every run of both")
    elif decision.differing:
        lines.append(f"{decision.differing} of {decision.places} full outputs were not alike in every run of both")
    if decision.differing:
        for name, same in (("baseline", decision.baseline_repeats), ("candidate", decision.candidate_repeats)):
            lines.append(f"the runs of the {name} alone {'agree' if same else 'DIFFER'}")
    if decision.scores is not None:
        lines += _explain_scores(decision.scores, suite)
    return [*lines, f"default: {decision.verdict.value}"]


def _explain_scores(scores: Scores, suite: Suite | None) -> list[str]:
    def named(places: Sequence[int]) -> str:
        ids = [suite.questions[place].id if suite else str(place) for place in places[:_IDS_SHOWN]]
        return "".join(f" {name}" for name in ids) + (" ..." if len(places) > _IDS_SHOWN else "")

    strict, relaxed = (
        ", ".join(f"{arm.value} {counts[arm]}" for arm in Arm) for counts in (scores.strict, scores.relaxed)
    )
    return [
        f"strict score: {strict} of {scores.questions}; relaxed: {relaxed}",
        f"answered by the baseline alone: {len(scores.lost)}{named(scores.lost)}",
        f"answered by the candidate alone: {len(scores.gained)}{named(scores.gained)}",
        f"strict failures more: {scores.loss}, at most {scores.bound} let through; "
        f"probability of losing as many by chance, were both as good: {scores.chance:.2f}",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was asked, and where. `installations`: that of each configuration, as `environment.describe` has it."""

    workload: Workload
    environment: Mapping[str, object]
    suite: Suite | None = None
    installations: Mapping[Arm, Mapping[str, object]] = field(default_factory=dict)


def to_json(runs: Sequence[Run], setting: Setting, decision: Decision | None) -> dict[str, object]:
    """Everything as one JSON object; the samples too, so that a reader can compute with them."""
    arms = {arm: [run for run in runs if run.arm is arm] for arm in Arm}
    workload, suite = setting.workload, setting.suite
    return {
        "version": VERSION,
        "workload": {"samples": workload.samples, "tokens": workload.tokens, "streams": workload.streams},
        "suite": suite
        and {"name": suite.name, "sha256": suite.digest.hex(), "questions": [q.id for q in suite.questions]},
        "environment": dict(setting.environment),
        "configurations": {
            arm.value: {
                "identity": taken[0].identity,
                "installation": _installation(setting.installations.get(arm, setting.environment)),
                **_fields(summarize(taken)),
                "runs": [_run(run) for run in taken],
            }
            for arm, taken in arms.items()
            if taken
        },
        "decision": None if decision is None else _decision(decision),
    }


_CONFIGURATION = (
    ("identity", "device"),
    ("identity", "engine"),
    ("identity", "config"),
    ("installation", "source"),
    *((entry.name,) for entry in fields(Summary)),
)
PUBLISHED: Sequence[tuple[str, ...]] = (
    ("environment", "cpu"),
    ("environment", "source"),
    ("workload",),
    *(("configurations", arm.value, *path) for arm in Arm for path in _CONFIGURATION),
    ("decision", "verdict"),
    ("decision", "default"),
    ("decision", "quality_gate"),
    ("decision", "agreeing_outputs"),
)
"""What a speed is bound to: where it was measured, the output, its quality, and what it took."""


def check_published(whole: Mapping[str, object]) -> None:
    """Raises ValueError naming what a report lacks; of a configuration that was not measured it need say nothing."""
    configurations = whole.get("configurations")
    measured = configurations if isinstance(configurations, dict) else {}
    for path in PUBLISHED:
        absent = path[0] == "configurations" and path[1] not in measured
        undecided = path[0] == "decision" and len(measured) < len(Arm)
        value: object = whole
        for name in () if absent or undecided else path:
            if not isinstance(value, dict) or name not in value:
                raise ValueError(f"a report with no {' '.join(path)} binds its speed to nothing")
            value = value[name]


def where(runs: Mapping[Arm, Run], setting: Setting) -> list[str]:
    """What computed, by the receipts of a run of each configuration: a line for each, one where they are the same."""
    lines = {
        arm: _machine(run, setting, setting.installations.get(arm, setting.environment)) for arm, run in runs.items()
    }
    if len(set(lines.values())) == 1:
        return [f"measured on {next(iter(lines.values()))}"]
    return [f"{arm.value} on {line}" for arm, line in lines.items()]


def caption(run: Run, setting: Setting, decision: Decision | None) -> str:
    verdict = "" if decision is None else f" - default: {decision.verdict.value}"
    return f"{_machine(run, setting, setting.environment)}{verdict}"


def _machine(run: Run, setting: Setting, installation: Mapping[str, object]) -> str:
    engine = run.identity.get("engine")
    facts: Mapping[str, object] = engine if isinstance(engine, dict) else {}
    device = run.identity.get("device")
    parts = [
        f"{setting.environment['cpu']} ({setting.environment['cores']} cores, {_kind(device)})",
        f"{facts.get('name', '')} {facts.get('version', '')}",
        *(f"{name} {facts[name]}" for name in ("arithmetic", "kernels") if name in facts),
        f"source {installation['source'] or installation['version']}",
    ]
    return ", ".join(parts)


def _kind(device: object) -> str:
    return str(device.get("kind", "")) if isinstance(device, dict) else ""


def _installation(described: Mapping[str, object]) -> dict[str, object]:
    return {name: described.get(name, "") for name in ("version", "source", "python")}


def _decision(decision: Decision) -> dict[str, object]:
    return {
        "verdict": decision.verdict.name.lower(),
        "text": decision.verdict.value,
        "default": "candidate" if decision.verdict is Verdict.CANDIDATE else "baseline",
        "quality_gate": "not run" if decision.scores is None else "passed" if decision.scores.passed else "failed",
        "scores": None if decision.scores is None else _scores(decision.scores),
        "outputs_may_differ": None if decision.rules.intent is None else decision.rules.intent.value,
        "stated": {arm.value: words for arm, words in decision.stated.items()},
        "agreeing_outputs": decision.places - decision.differing,
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


def _scores(scores: Scores) -> dict[str, object]:
    return {
        "questions": scores.questions,
        "strict": {arm.value: count for arm, count in scores.strict.items()},
        "relaxed": {arm.value: count for arm, count in scores.relaxed.items()},
        "lost": list(scores.lost),
        "gained": list(scores.gained),
        "strict_loss": scores.loss,
        "strict_loss_at_most": scores.bound,
        "chance_if_equal": scores.chance,
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
        "replayed_tokens": run.replayed,
        "samples": [_fields(sample) for sample in run.samples],
    }


def _fields(value: object) -> dict[str, object]:
    """The fields of one of our frozen dataclasses, digests in hex."""
    names: tuple[str, ...] = type(value).__slots__  # type: ignore[attr-defined]
    taken = {name: getattr(value, name) for name in names}
    return {name: item.hex() if isinstance(item, bytes) else item for name, item in taken.items()}


def _score(runs: Sequence[Run], *, relaxed: bool) -> float | None:
    if not scored(runs):
        return None
    right = passes(runs, runs[0].arm, relaxed=relaxed)
    return sum(right) / len(right)


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
