"""`appliance bench` on real appliances: what is measured was verified, and other output is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.bench.measure import Plan, measure
from appliance.bench.runs import Arm, Order
from appliance.bench.workload import Workload
from appliance.config import Config, load
from appliance.errors import BootError
from tests.e2e.programs import MODEL, environment, run_program

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
TINY = Workload(samples=4, tokens=6, streams=2)


def configured(extra: str = "", **model: str) -> Config:
    lines = [f'{key} = "{value}"' for key, value in {"name": MODEL, **model}.items()]
    return load("\n".join([extra, "[[models]]", *lines]), environ={})


def silent(_text: str) -> None:
    pass


def test_one_configuration_measured_from_the_command_line(workspace: Path) -> None:
    folder = workspace / "bench"
    folder.mkdir()
    config = folder / "config.toml"
    config.write_text(f'[engine]\nthreads = 1\n[[models]]\nname = "{MODEL}"\n')
    written, drawn = folder / "bench.json", folder / "bench.png"
    chosen = ["--config", str(config), "--tokens", "2", "--streams", "4"]
    command = [sys.executable, "-m", "appliance", "bench", *chosen, "--json", str(written), "--plot", str(drawn)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "request-wide throughput [tokens/s]" in done.stdout
    whole = json.loads(written.read_text())
    measured = whole["configurations"]["baseline"]
    assert measured["repeats"], "greedy answers on an exact engine are the same in every run"
    assert measured["exact"] == 1.0
    assert [len(run["samples"]) for run in measured["runs"]] == [32, 32]
    assert {sample["tokens"] for run in measured["runs"] for sample in run["samples"]} == {2}
    assert measured["cache_hit_rate"] > 0.2, "a quarter of the prompts share a long beginning"
    assert measured["identity"]["model"]["name"] == MODEL
    assert measured["identity"]["execution"]["threads"] == 1
    assert whole["decision"] is None
    assert drawn.read_bytes()[:4] == b"\x89PNG"


def test_two_configurations_take_turns_and_other_output_is_noticed(workspace: Path) -> None:
    template = workspace / "terse.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    plan = Plan(
        configs={Arm.BASELINE: configured(), Arm.CANDIDATE: configured(chat_template_file=str(template))},
        workload=TINY,
        rounds=1,
        environ=environment(),
    )
    runs = measure(plan, silent)
    turns = [(run.order, run.arm) for run in runs]
    assert turns == [
        (Order.BASELINE_FIRST, Arm.BASELINE),
        (Order.BASELINE_FIRST, Arm.CANDIDATE),
        (Order.CANDIDATE_FIRST, Arm.CANDIDATE),
        (Order.CANDIDATE_FIRST, Arm.BASELINE),
    ]
    assert runs[0].digest == runs[3].digest
    assert runs[1].digest == runs[2].digest
    assert runs[0].digest != runs[1].digest
    for run in runs:
        assert [sample.tokens for sample in run.samples] == [6, 6, 6, 6]
        assert all(0 < sample.first_s <= sample.last_s <= sample.total_s for sample in run.samples)
        assert all(sample.first_s <= sample.verified_s for sample in run.samples)
        assert run.throughput > 0
        assert run.memory.resident > 90 << 20
        assert [size for size, _ in run.weights] == [98_362_432], "what was measured is told by its receipts"


def test_what_cannot_be_served_or_answered_is_one_line(workspace: Path) -> None:
    plan = Plan(configs={Arm.BASELINE: configured()}, workload=TINY, rounds=1, environ=environment())
    unknown = replace(plan, configs={Arm.BASELINE: load('[[models]]\nname = "unknown"\n', environ={})})
    with pytest.raises(BootError, match="unknown"):
        measure(unknown, silent)
    cramped = replace(plan, configs={Arm.BASELINE: configured("[engine]\nmax_active = 1\n")})
    with pytest.raises(BootError, match="an answer failed"):
        measure(cramped, silent)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--baseline", "a.toml"], 2, "both --baseline and --candidate"),
        (["--config", "a.toml", "--baseline", "a.toml", "--candidate", "b.toml"], 2, "give --config, or both"),
        (["--samples", "31", "--model", MODEL], 2, "31 is not in the range"),
        (["--rounds", "1", "--model", MODEL], 2, "1 is not in the range"),
        (["--config", "missing.toml", "--model", MODEL], 1, "missing.toml cannot be read"),
        (["--model", MODEL, "--json", "nowhere/x.json"], 1, "there is no such directory"),
        ([], 1, "no model is configured"),
        (["--baseline", "a.toml", "--candidate", "b.toml"], 1, "different models"),
    ],
)
def test_wrong_usage_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    (tmp_path / "a.toml").write_text('[[models]]\nname = "one"\n')
    (tmp_path / "b.toml").write_text('[[models]]\nname = "two"\n')
    done = run_program("appliance", "bench", *arguments, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
