"""`appliance bench`: measure a configuration, or decide between two."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from appliance.config import settings as configuration
from appliance.errors import BootError

if TYPE_CHECKING:
    from appliance.bench.decision import Decision, Rules
    from appliance.bench.measure import Plan
    from appliance.bench.runs import Arm
    from appliance.bench.suite import Suite
    from appliance.bench.workload import Workload
    from appliance.config.settings import Config
    from appliance.models.store import ModelStore

EXIT_BASELINE_STAYS = 3
EXIT_OUTPUT_DIFFERS = 10
EXIT_QUALITY_LOST = 11
_SETTINGS_PREFIX = "APPLIANCE_"
_FILE = click.Path(path_type=Path, dir_okay=False)
# As in `appliance.bench.decision`, which is not loaded for --help.
_SAMPLES_AT_LEAST = 32
_ROUNDS_AT_LEAST = 2
_STRICT_LOSS = 1
_ROUNDS_OF_A_SUITE = 3
_TOKENS = 48


@click.command("bench")
@click.option("--config", "config_path", type=_FILE, help="TOML configuration file to measure.")
@click.option("--baseline", type=_FILE, help="Compare: the configuration that is the default now.")
@click.option("--candidate", type=_FILE, help="Compare: the configuration that could become the default.")
@click.option(
    "--candidate-python",
    type=_FILE,
    help="Compare: the interpreter of another installation, which serves the candidate with its own engine.",
)
@click.option("--model", "model_names", multiple=True, help="Model to serve, by its name in the store.")
@click.option(
    "--quality",
    "suite_name",
    metavar="SUITE",
    help="Ask the questions of this file (JSON lines), or of `small`, which comes with the appliance, and score them.",
)
@click.option(
    "--strict-loss",
    type=click.IntRange(min=0),
    help=f"With --quality: so many more strict failures of the candidate are let through.  [default: {_STRICT_LOSS}]",
)
@click.option(
    "--outputs-may-differ",
    "intent",
    type=click.Choice(["arithmetic", "engine", "settings"]),
    help="With --quality: the output may differ by this, which receipts must show; the scores decide.",
)
@click.option("--samples", type=click.IntRange(_SAMPLES_AT_LEAST, 4096), help="Answers of a run.  [default: 32]")
@click.option(
    "--rounds", type=click.IntRange(_ROUNDS_AT_LEAST, 100), help="Of each order.  [default: 2, with --quality 3]"
)
@click.option("--streams", type=click.IntRange(1, 64), default=1, show_default=True, help="Requests at a time.")
@click.option("--tokens", type=click.IntRange(2, 4096), help="Tokens of an answer.  [default: 48]")
@click.option("--json", "json_path", type=_FILE, help="Write everything to this file.")
@click.option("--plot", "plot_path", type=_FILE, help="Draw every run into this PNG (extra `bench`).")
def bench(
    config_path: Path | None,
    baseline: Path | None,
    candidate: Path | None,
    candidate_python: Path | None,
    model_names: tuple[str, ...],
    suite_name: str | None,
    strict_loss: int | None,
    intent: str | None,
    samples: int | None,
    rounds: int | None,
    streams: int,
    tokens: int | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure a configuration, or decide between two.

    Appliances are started on loopback and asked through the verifying client, RA-TLS and receipts on. With --baseline
    and --candidate both orders are run, --rounds times each; exit status 0 only if the candidate may become the
    default, 3 if the baseline stays, 10 if their output differs, 11 if the candidate answers fewer questions of the
    suite rightly than --strict-loss allows. Both must run the same weights: what quantization makes is another model,
    not a setting.
    """
    from appliance.bench.decision import Rules
    from appliance.bench.intent import Intent
    from appliance.bench.measure import Plan
    from appliance.bench.quality import STRICT_LOSS_AT_MOST
    from appliance.bench.runs import Arm

    if (baseline is None) != (candidate is None) or (baseline is not None and config_path is not None):
        raise click.UsageError("give --config, or both --baseline and --candidate")
    _check_together(candidate, {"--candidate-python": candidate_python, "--outputs-may-differ": intent}, "--candidate")
    _check_together(suite_name, {"--strict-loss": strict_loss, "--outputs-may-differ": intent}, "--quality")
    if suite_name is not None and (samples is not None or tokens is not None):
        raise click.UsageError("--samples and --tokens are the suite's where there is --quality")
    environ = dict(os.environ)  # noqa: TID251 - composition root
    try:
        suite = _suite(suite_name, deciding=candidate is not None)
        workload = _workload(suite, samples, tokens, streams)
        rules = Rules(
            intent=None if intent is None else Intent(intent),
            strict_loss=STRICT_LOSS_AT_MOST if strict_loss is None else strict_loss,
        )
        plan = Plan(
            configs=_configs(config_path if candidate is None else baseline, candidate, model_names, environ),
            workload=workload,
            rounds=rounds or (_ROUNDS_AT_LEAST if suite is None else _ROUNDS_OF_A_SUITE),
            # What it says is in `configs` now; the appliances read it from there.
            environ={name: value for name, value in environ.items() if not name.startswith(_SETTINGS_PREFIX)},
            suite=suite,
            pythons={} if candidate_python is None else {Arm.CANDIDATE: candidate_python.absolute()},
            intent=rules.intent,
        )
        status = _bench(plan, rules, json_path, plot_path)
    except BootError as error:
        click.echo(f"appliance: {error}", err=True)
        status = 1
    sys.exit(status)


def _check_together(wanted: object, options: Mapping[str, object], name: str) -> None:
    for option, value in options.items():
        if value is not None and wanted is None:
            raise click.UsageError(f"{option} needs {name}")


def _suite(name: str | None, *, deciding: bool) -> Suite | None:
    """Raises SuiteError, also for one that is too small to decide by."""
    from appliance.bench.suite import SuiteError, load_suite

    if name is None:
        return None
    suite = load_suite(name)
    if deciding and len(suite.questions) < _SAMPLES_AT_LEAST:
        raise SuiteError(
            suite.name, 0, f"has {len(suite.questions)} questions, at least {_SAMPLES_AT_LEAST} are needed to decide"
        )
    return suite


def _workload(suite: Suite | None, samples: int | None, tokens: int | None, streams: int) -> Workload:
    from appliance.bench.workload import Workload

    if suite is None:
        return Workload(samples=samples or _SAMPLES_AT_LEAST, tokens=tokens or _TOKENS, streams=streams)
    most = max(question.tokens for question in suite.questions)
    return Workload(samples=len(suite.questions), tokens=most, streams=streams)


def _configs(
    baseline: Path | None, candidate: Path | None, model_names: tuple[str, ...], environ: Mapping[str, str]
) -> dict[Arm, Config]:
    """Raises BootError, also for two configurations of different weights."""
    from appliance.bench.runs import Arm
    from appliance.bench.same_model import check_same_model

    paths = {Arm.BASELINE: baseline} if candidate is None else {Arm.BASELINE: baseline, Arm.CANDIDATE: candidate}
    configs = {arm: configuration.load_file(path, environ=environ, models=model_names) for arm, path in paths.items()}
    check_same_model(configs, {arm: _store(config, environ) for arm, config in configs.items()})
    return configs


def _store(config: Config, environ: Mapping[str, str]) -> ModelStore:
    """The store that an appliance of this configuration will take its model from."""
    from appliance.models.store import ModelStore, default_store_root

    directory = config.store.models_dir
    return ModelStore(Path(directory or default_store_root(environ.get("XDG_DATA_HOME"), environ.get("HOME"))))


def _bench(plan: Plan, rules: Rules, json_path: Path | None, plot_path: Path | None) -> int:
    """Measure, report, and return the exit status."""
    from appliance.bench import plot, report
    from appliance.bench.decision import decide
    from appliance.bench.environment import describe, describe_installation
    from appliance.bench.measure import measure
    from appliance.bench.runs import Arm

    if plot_path is not None:
        plot.load_canvas()  # what is missing is told before minutes are spent
    for path in filter(None, (json_path, plot_path)):
        if not path.absolute().parent.is_dir():
            raise BootError(f"cannot write {path}: there is no such directory")
    for chatty in ("httpx", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    setting = report.Setting(
        workload=plan.workload,
        environment=describe(),
        suite=plan.suite,
        installations={arm: describe_installation(python, plan.environ) for arm, python in plan.pythons.items()},
    )
    notes = Console(stderr=True)
    runs = measure(plan, lambda text: notes.print(text, style="dim", highlight=False))
    decision = decide(runs, rules) if Arm.CANDIDATE in plan.configs else None
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    by_arm = {arm: [run for run in runs if run.arm is arm] for arm in plan.configs}
    console.print(report.table({arm: report.summarize(taken) for arm, taken in by_arm.items()}))
    lines = report.where({arm: taken[0] for arm, taken in by_arm.items()}, setting)
    for line in [*lines, *(report.explain(decision, plan.suite) if decision is not None else ())]:
        console.print(line, soft_wrap=True)
    if json_path is not None:
        whole = report.to_json(runs, setting, decision)
        report.check_published(whole)
        json_path.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    if plot_path is not None:
        plot.draw(runs, plot_path, report.caption(runs[0], setting, decision))
    return exit_status(decision)


def exit_status(decision: Decision | None) -> int:
    """0 where there was nothing to decide or the candidate won; else one of the three numbers above."""
    from appliance.bench.decision import Verdict

    if decision is None or decision.verdict is Verdict.CANDIDATE:
        return 0
    refused = {Verdict.OUTPUT: EXIT_OUTPUT_DIFFERS, Verdict.QUALITY: EXIT_QUALITY_LOST}
    return refused.get(decision.verdict, EXIT_BASELINE_STAYS)
