"""`appliance bench`: measure a configuration, or decide between two."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from appliance import config as configuration
from appliance.errors import BootError

if TYPE_CHECKING:
    from appliance.bench.decision import Decision
    from appliance.bench.measure import Plan
    from appliance.bench.runs import Run
    from appliance.config import Config
    from appliance.models.store import ModelStore

EXIT_BASELINE_STAYS = 3
EXIT_OUTPUT_DIFFERS = 10
_SETTINGS_PREFIX = "APPLIANCE_"
_FILE = click.Path(path_type=Path, dir_okay=False)
# As in `appliance.bench.decision`, which is not loaded for --help.
_SAMPLES_AT_LEAST = 32
_ROUNDS_AT_LEAST = 2


@click.command("bench")
@click.option("--config", "config_path", type=_FILE, help="TOML configuration file to measure.")
@click.option("--baseline", type=_FILE, help="Compare: the configuration that is the default now.")
@click.option("--candidate", type=_FILE, help="Compare: the configuration that could become the default.")
@click.option("--model", "model_names", multiple=True, help="Model to serve, by its name in the store.")
@click.option("--samples", type=click.IntRange(_SAMPLES_AT_LEAST, 4096), default=_SAMPLES_AT_LEAST, show_default=True)
@click.option("--rounds", type=click.IntRange(_ROUNDS_AT_LEAST, 100), default=_ROUNDS_AT_LEAST, show_default=True)
@click.option("--streams", type=click.IntRange(1, 64), default=1, show_default=True, help="Requests at a time.")
@click.option("--tokens", type=click.IntRange(2, 4096), default=48, show_default=True, help="Tokens of an answer.")
@click.option("--json", "json_path", type=_FILE, help="Write everything to this file.")
@click.option("--plot", "plot_path", type=_FILE, help="Draw every run into this PNG (extra `bench`).")
def bench(
    config_path: Path | None,
    baseline: Path | None,
    candidate: Path | None,
    model_names: tuple[str, ...],
    samples: int,
    rounds: int,
    streams: int,
    tokens: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure a configuration, or decide between two.

    Appliances are started on loopback and asked through the verifying client, RA-TLS and receipts on. With --baseline
    and --candidate both orders are run, --rounds times each; exit status 0 only if the candidate may become the
    default, 3 if the baseline stays, 10 if their output differs. Both must run the same weights: what quantization
    makes is another model, not a setting.
    """
    from appliance.bench.measure import Plan
    from appliance.bench.runs import Arm
    from appliance.bench.same_model import check_same_model
    from appliance.bench.workload import Workload

    if (baseline is None) != (candidate is None) or (baseline is not None and config_path is not None):
        raise click.UsageError("give --config, or both --baseline and --candidate")
    environ = dict(os.environ)  # noqa: TID251 - composition root
    paths = {Arm.BASELINE: config_path} if candidate is None else {Arm.BASELINE: baseline, Arm.CANDIDATE: candidate}
    try:
        configs = {
            arm: configuration.load_file(path, environ=environ, models=model_names) for arm, path in paths.items()
        }
        check_same_model(configs, {arm: _store(config, environ) for arm, config in configs.items()})
        plan = Plan(
            configs=configs,
            workload=Workload(samples=samples, tokens=tokens, streams=streams),
            rounds=rounds,
            # What it says is in `configs` now; the appliances read it from there.
            environ={name: value for name, value in environ.items() if not name.startswith(_SETTINGS_PREFIX)},
        )
        status = _bench(plan, json_path, plot_path)
    except BootError as error:
        click.echo(f"appliance: {error}", err=True)
        status = 1
    sys.exit(status)


def _store(config: Config, environ: Mapping[str, str]) -> ModelStore:
    """The store that an appliance of this configuration will take its model from."""
    from appliance.models.store import ModelStore, default_store_root

    directory = config.store.models_dir
    return ModelStore(Path(directory or default_store_root(environ.get("XDG_DATA_HOME"), environ.get("HOME"))))


def _bench(plan: Plan, json_path: Path | None, plot_path: Path | None) -> int:
    """Measure, report, and return the exit status."""
    from appliance.bench import plot, report
    from appliance.bench.decision import decide
    from appliance.bench.environment import describe
    from appliance.bench.measure import measure
    from appliance.bench.runs import Arm

    if plot_path is not None:
        plot.load_canvas()  # what is missing is told before minutes are spent
    for path in filter(None, (json_path, plot_path)):
        if not path.absolute().parent.is_dir():
            raise BootError(f"cannot write {path}: there is no such directory")
    for chatty in ("httpx", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    environment = describe()
    notes = Console(stderr=True)
    runs = measure(plan, lambda text: notes.print(text, style="dim", highlight=False))
    decision = decide(runs) if Arm.CANDIDATE in plan.configs else None
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    summaries = {arm: report.summarize([run for run in runs if run.arm is arm]) for arm in plan.configs}
    console.print(report.table(summaries))
    console.print(f"device: {_device(runs)}; source: {environment['source'] or environment['version']}", soft_wrap=True)
    for line in report.explain(decision) if decision is not None else ():
        console.print(line, soft_wrap=True)
    if json_path is not None:
        whole = report.to_json(runs, plan.workload, decision, environment)
        json_path.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    if plot_path is not None:
        plot.draw(runs, plot_path, _caption(runs, environment, decision))
    return exit_status(decision)


def exit_status(decision: Decision | None) -> int:
    """0 where there was nothing to decide or the candidate won; else one of the two numbers above."""
    from appliance.bench.decision import Verdict

    if decision is None or decision.verdict is Verdict.CANDIDATE:
        return 0
    return EXIT_OUTPUT_DIFFERS if decision.verdict is Verdict.OUTPUT else EXIT_BASELINE_STAYS


def _device(runs: Sequence[Run]) -> str:
    identity = runs[0].identity
    engine = f"{_part(identity, 'engine', 'name')} {_part(identity, 'engine', 'version')}"
    return f"{_part(identity, 'device', 'kind')}, {engine}"


def _part(identity: dict[str, object], section: str, name: str) -> str:
    values = identity.get(section)
    return str(values.get(name, "")) if isinstance(values, dict) else ""


def _caption(runs: Sequence[Run], environment: dict[str, object], decision: Decision | None) -> str:
    source = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", str(environment["source"] or environment["version"]))
    verdict = "" if decision is None else f" - default: {decision.verdict.value}"
    return f"{environment['cpu']}, {environment['cores']} cores, {_device(runs)}, source {source}{verdict}"
