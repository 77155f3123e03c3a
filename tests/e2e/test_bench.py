"""`appliance bench` on real appliances: what is measured was verified, and other output is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.bench import suite as suites
from appliance.bench.measure import Plan, measure
from appliance.bench.runs import Arm, Order
from appliance.bench.suite import load_suite
from appliance.bench.workload import Workload
from appliance.config.settings import Config, load
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


PARROT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def written_suite(path: Path) -> Path:
    """32 questions that take a token or two each: half are answered in the model's own template and not without it."""
    asked = []
    for number in range(8):
        chat = {"score": "contains", "answers": ["Yes", "No", "yes", "no"], "tokens": 2}
        asked += [
            {"id": f"yes-no-{number}", "prompt": f"Is {number} a number? Answer with Yes or No only.", **chat},
            {
                "id": f"snow-{number}",
                "prompt": f"Is snow black {'?' * (number + 1)} Answer with Yes or No only.",
                **chat,
            },
            {
                "id": f"choice-{number}",
                "prompt": f"Number {number}: the dog wagged its",
                "score": "choice",
                "choices": ["tail", "window"],
                "answers": ["tail"],
            },
            {
                "id": f"sum-{number}",
                "prompt": f"{number} + 1 =",
                "score": "number",
                "answers": [number + 1],
                "tokens": 4,
            },
        ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in asked))
    return path


def bench(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """`appliance bench` with these arguments, and what it wrote."""
    written = folder / "bench.json"
    command = [sys.executable, "-m", "appliance", "bench", *arguments, "--json", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=550, check=False)
    return done, json.loads(written.read_text()) if written.exists() else {}


def test_a_worse_candidate_is_refused_by_its_score_however_fast_it_is(workspace: Path) -> None:
    """Its chat template leaves out whose turn it is: shorter prompts, and answers that are none."""
    folder = workspace / "quality"
    folder.mkdir()
    suite, template = written_suite(folder / "suite.jsonl"), folder / "parrot.jinja"
    template.write_text(PARROT)
    baseline, candidate = folder / "baseline.toml", folder / "candidate.toml"
    model = f'[engine]\nthreads = 1\n[[models]]\nname = "{MODEL}"\n'
    baseline.write_text(model)
    candidate.write_text(f'{model}chat_template_file = "{template}"\n')
    both = ["--baseline", str(baseline), "--candidate", str(candidate), "--quality", str(suite), "--rounds", "2"]
    done, whole = bench(folder, *both, "--outputs-may-differ", "settings")
    assert done.returncode == 11, done.stderr
    decision, scores = whole["decision"], whole["decision"]["scores"]
    assert (decision["verdict"], decision["quality_gate"], decision["default"]) == ("quality", "failed", "baseline")
    assert scores["questions"] == 32
    assert scores["strict_loss"] > scores["strict_loss_at_most"] == 1
    assert decision["baseline_repeats"]
    assert decision["candidate_repeats"]
    assert 8 <= decision["agreeing_outputs"] < 32, "no template is around the choices"
    assert "rejected: the candidate answers fewer questions rightly" in done.stdout
    assert "yes-no-0" in done.stdout, "what was lost is named"
    for arm in ("baseline", "candidate"):
        measured = whole["configurations"][arm]
        assert measured["replayed_tokens"] == 0
        assert {sample["strict"] for run in measured["runs"] for sample in run["samples"]} <= {True, False}
        assert measured["identity"]["engine"]["arithmetic"]
    assert "Answer with Yes" not in json.dumps(whole)


def test_h102_one_configuration_is_scored_and_the_profile_for_one_caller_answers_alike(workspace: Path) -> None:
    folder = workspace / "scored"
    folder.mkdir()
    suite = folder / "suite.jsonl"
    suite.write_text("".join(written_suite(folder / "whole.jsonl").read_text().splitlines(keepends=True)[:4]))
    config = folder / "config.toml"
    config.write_text(f'[engine]\nthreads = 1\n[[models]]\nname = "{MODEL}"\n')
    done, whole = bench(folder, "--config", str(config), "--quality", str(suite), "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert "questions answered rightly, strict" in done.stdout
    measured = whole["configurations"]["baseline"]
    assert measured["repeats"]
    assert measured["strict"] >= 0.5
    assert measured["relaxed"] >= measured["strict"]
    assert whole["suite"]["questions"] == ["yes-no-0", "snow-0", "choice-0", "sum-0"]
    choice = measured["runs"][0]["samples"][2]
    assert (choice["tokens"], choice["strict"], choice["truncated"]) == (2, True, False)
    profile = (Path(suites.__file__).with_name("profiles") / "one-stream.toml").read_text()
    plan = Plan(
        configs={
            Arm.BASELINE: load(config.read_text(), environ={}),
            Arm.CANDIDATE: load(f'{profile}[[models]]\nname = "{MODEL}"\n', environ={}),
        },
        workload=Workload(samples=4, tokens=4, streams=1),
        rounds=1,
        environ=environment(),
        suite=load_suite(str(suite)),
        pythons={Arm.CANDIDATE: Path(sys.executable)},
    )
    runs = measure(plan, silent)
    assert len({run.digest for run in runs}) == 1, "other settings and another installation of the same engine"
    assert runs[0].identity["config"] != runs[1].identity["config"], "it is not the default"


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
        (["--outputs-may-differ", "engine", "--quality", "small", "--model", MODEL], 2, "needs --candidate"),
        (["--candidate-python", "p", "--model", MODEL], 2, "--candidate-python needs --candidate"),
        (["--strict-loss", "3", "--model", MODEL], 2, "--strict-loss needs --quality"),
        (["--quality", "small", "--samples", "40", "--model", MODEL], 2, "are the suite's"),
        (["--quality", "small", "--strict-loss", "-1", "--model", MODEL], 2, "-1 is not in the range"),
        (["--quality", "missing.jsonl", "--model", MODEL], 1, "suite missing.jsonl: cannot be read"),
        (["--quality", "bad.jsonl", "--model", MODEL], 1, "suite bad.jsonl, line 2: is not JSON"),
        (["--baseline", "a.toml", "--candidate", "b.toml", "--quality", "tiny.jsonl"], 1, "at least 32 are needed"),
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
    tiny = json.dumps({"id": "a", "prompt": "Hi", "score": "exact", "answers": ["Hi"]})
    (tmp_path / "tiny.jsonl").write_text(tiny)
    (tmp_path / "bad.jsonl").write_text(f"{tiny}\n{tiny[:-1]}\n")
    done = run_program("appliance", "bench", *arguments, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
