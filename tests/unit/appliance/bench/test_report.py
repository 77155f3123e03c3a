"""What is said about a measurement: numbers, in a table, in JSON and in a picture, and no text of anybody."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from appliance.bench import plot, report
from appliance.bench.decision import decide
from appliance.bench.environment import describe, source_revision
from appliance.bench.runs import Arm, Footprint, Order, Run, acceptance, hit_rate, percentile, tokens_per_pass
from appliance.bench.suite import SHIPPED, Suite, load_suite
from appliance.bench.workload import Workload, lane, messages, parameters
from appliance.cli import bench as cli_bench
from appliance.config.settings import load
from appliance.errors import BootError
from tests.unit.appliance.bench.test_decision import SAMPLE, comparison, run, with_samples
from tests.unit.appliance.bench.test_quality import BY_ARITHMETIC, of_a_suite

WORKLOAD = Workload(samples=32, tokens=48, streams=3)


def rendered(arms: dict[Arm, list[Run]]) -> str:
    text = io.StringIO()
    summaries = {arm: report.summarize(runs) for arm, runs in arms.items()}
    Console(file=text, width=160, markup=False).print(report.table(summaries))
    return text.getvalue()


def by_arm(runs: list[Run]) -> dict[Arm, list[Run]]:
    return {arm: [each for each in runs if each.arm is arm] for arm in Arm}


def setting(suite: Suite | None = None) -> report.Setting:
    return report.Setting(workload=WORKLOAD, environment=describe(), suite=suite)


def test_h40_the_table_has_every_measure_side_by_side() -> None:
    guessing = with_samples(lambda sample: replace(sample, drafted=40, accepted=30, passes=16))
    text = rendered(by_arm(comparison(1.5, candidate=guessing)))
    for _, label, _ in report.ROWS:
        assert label in text
    assert [line.split()[-3:] for line in text.splitlines() if "throughput" in line] == [["100.0", "150.0", "1.500"]]
    assert [line.split()[-2:] for line in text.splitlines() if "guesses" in line] == [["-", "75.0%"]]
    assert [line.split()[-3:] for line in text.splitlines() if "per target pass" in line] == [["1.00", "3.00", "3.000"]]


def test_one_configuration_has_no_ratio() -> None:
    text = rendered({Arm.BASELINE: [run(Arm.BASELINE, Order.BASELINE_FIRST, number) for number in range(2)]})
    assert "measured" in text
    assert "ratio" not in text


def test_memory_that_may_not_be_read_is_not_made_up() -> None:
    runs = [run(Arm.BASELINE, Order.BASELINE_FIRST, number) for number in range(2)]
    runs[1] = replace(runs[1], memory=Footprint(proportional=None, resident=5 << 20))
    summary = report.summarize(runs)
    assert summary.pss_mib is None
    assert summary.resident_mib == 5.0


def test_output_that_changes_from_run_to_run_has_no_digest() -> None:
    runs = [run(Arm.BASELINE, Order.BASELINE_FIRST, number) for number in range(2)]
    assert report.summarize(runs).output == runs[0].digest.hex()
    changed = with_samples(lambda sample: replace(sample, digest=b"\xff" * 32))(runs[1])
    summary = report.summarize([runs[0], changed])
    assert (summary.output, summary.repeats) == ("", False)


def test_the_json_says_what_the_speed_is_bound_to_and_holds_no_text() -> None:
    runs = comparison(1.5)
    whole = report.to_json(runs, setting(), decide(runs))
    text = json.dumps(whole)
    read = json.loads(text)
    assert read["workload"] == {"samples": 32, "tokens": 48, "streams": 3}
    assert read["decision"]["verdict"] == "candidate"
    assert read["decision"]["limits"] == {"p99_ratio": 1.2, "cache_hit_rate_loss": 0.005, "tie_ratio": 1.01}
    assert {"cpu", "cores", "memory_bytes", "system", "python", "version", "source", "load"} == read[
        "environment"
    ].keys()
    for name in ("baseline", "candidate"):
        measured = read["configurations"][name]
        for field in fields(report.Summary):
            assert field.name in measured, "a published speed comes with everything it is bound to"
        assert len(measured["runs"]) == 4
        assert measured["runs"][0]["samples"][0].keys() == {field.name for field in fields(SAMPLE)}
    for place in range(8):
        for message in messages(place):
            assert message["content"] not in text
            assert message["content"][:20] not in text


def test_the_score_stands_beside_the_speed_in_the_table() -> None:
    text = rendered(by_arm(of_a_suite(1.5, strict=58)))
    assert [line.split()[-3:] for line in text.splitlines() if "strict" in line] == [["60.0%", "58.0%", "0.967"]]
    assert "tokens replayed" in text


def test_the_explanation_names_what_was_lost_and_gained_and_how_many_outputs_agree() -> None:
    suite = load_suite(SHIPPED)
    lines = report.explain(decide(of_a_suite(9.0, strict=58, first=1), BY_ARITHMETIC), suite)
    assert "output may differ by arithmetic, by the receipts llama.cpp and attested-1" in lines
    assert "full outputs: 0 of 100 agree in every run of both" in lines
    assert "strict score: baseline 60, candidate 58 of 100; relaxed: baseline 60, candidate 58" in lines
    assert f"answered by the baseline alone: 2 {suite.questions[0].id} {suite.questions[59].id}" in lines
    assert "answered by the candidate alone: 0" in lines
    assert any("strict failures more: 2, at most 1" in line and "0.25" in line for line in lines)
    assert lines[-1] == "default: rejected: the candidate answers fewer questions rightly"


def test_what_computed_is_a_line_for_each_configuration_that_differs() -> None:
    runs = of_a_suite(1.5, strict=60)
    both = {arm: taken[0] for arm, taken in by_arm(runs).items()}
    lines = report.where(both, setting())
    assert len(lines) == 2
    assert "arithmetic llama.cpp, kernels avx2" in lines[0]
    assert "arithmetic attested-1" in lines[1]
    assert len(report.where({Arm.BASELINE: runs[0]}, setting())) == 1


def test_h93_no_speed_is_published_without_what_it_is_bound_to() -> None:
    runs = of_a_suite(1.5, strict=60)
    whole = report.to_json(runs, setting(load_suite(SHIPPED)), decide(runs, BY_ARITHMETIC))
    report.check_published(whole)
    for path in report.PUBLISHED:
        cut = json.loads(json.dumps(whole))
        holder = cut
        for name in path[:-1]:
            holder = holder[name]
        del holder[path[-1]]
        with pytest.raises(ValueError, match=f"no {' '.join(path)}"):
            report.check_published(cut)


@pytest.mark.parametrize(
    ("strict", "gate", "default"),
    [(60, "passed", "candidate"), (59, "passed", "candidate"), (58, "failed", "baseline")],
)
def test_h17_h101_quality_that_is_lost_keeps_the_baseline(strict: int, gate: str, default: str) -> None:
    runs = of_a_suite(1.74, strict=strict)
    read = report.to_json(runs, setting(load_suite(SHIPPED)), decide(runs, BY_ARITHMETIC))["decision"]
    assert isinstance(read, dict)
    assert (read["quality_gate"], read["default"]) == (gate, default)
    assert read["outputs_may_differ"] == "arithmetic"
    assert read["stated"] == {"baseline": "llama.cpp", "candidate": "attested-1"}
    assert read["scores"]["strict_loss"] == 60 - strict


def test_the_explanation_says_whose_output_changed() -> None:
    changed = with_samples(lambda sample: replace(sample, digest=b"\xff" * 32))
    lines = report.explain(decide(comparison(3.0, candidate=changed)))
    assert "the runs of the baseline alone agree" in lines
    assert lines[-1] == "default: rejected: output differs"


def test_the_explanation_says_when_the_orders_disagree() -> None:
    ratios = {(order, number): 1.5 if order is Order.BASELINE_FIRST else 0.9 for order in Order for number in range(2)}
    lines = report.explain(decide(comparison(ratios)))
    assert any("orders disagree" in line for line in lines)
    assert lines[-1] == "default: baseline: the candidate is slower"


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot.draw(comparison(1.5), path, "a caption")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000
    assert height > 500


def test_a_plot_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BootError, match="cannot write"):
        plot.draw(comparison(1.5), tmp_path / "nowhere" / "plot.png", "")


def test_h17_the_exit_status_is_zero_only_where_the_candidate_may_become_the_default() -> None:
    changed = with_samples(lambda sample: replace(sample, digest=b"\xff" * 32))
    slow = with_samples(lambda sample: replace(sample, total_s=9.0))
    forgetful = with_samples(lambda sample: replace(sample, cached_tokens=0))
    assert cli_bench.exit_status(None) == 0
    assert cli_bench.exit_status(decide(comparison(1.5))) == 0
    for runs in (
        comparison(1.0),
        comparison(0.5),
        comparison(1.5, candidate=slow),
        comparison(1.5, candidate=forgetful),
    ):
        assert cli_bench.exit_status(decide(runs)) == cli_bench.EXIT_BASELINE_STAYS == 3
    assert cli_bench.exit_status(decide(comparison(9.0, candidate=changed))) == cli_bench.EXIT_OUTPUT_DIFFERS == 10
    worse = decide(of_a_suite(9.0, strict=58), BY_ARITHMETIC)
    assert cli_bench.exit_status(worse) == cli_bench.EXIT_QUALITY_LOST == 11
    assert cli_bench.exit_status(decide(of_a_suite(9.0, strict=58))) == cli_bench.EXIT_OUTPUT_DIFFERS


def test_numbers_that_do_not_exist() -> None:
    assert acceptance([SAMPLE]) is None
    assert tokens_per_pass([replace(SAMPLE, passes=0)]) is None
    assert hit_rate([replace(SAMPLE, prompt_tokens=0, cached_tokens=0)]) == 0
    assert replace(SAMPLE, tokens=1).decode is None
    assert replace(SAMPLE, last_s=SAMPLE.first_s).decode is None
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="no runs"):
        report.summarize([])


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100)])
def test_a_percentile_is_a_value_that_was_measured(share: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value


def test_the_lanes_ask_every_place_once_and_greedily() -> None:
    places = sorted(place for number in range(WORKLOAD.streams) for place in lane(number, WORKLOAD))
    assert places == list(range(32))
    assert parameters(7, WORKLOAD) == {"max_tokens": 48, "temperature": 0, "seed": 7}
    assert len({json.dumps(messages(place)) for place in places}) == 32


def test_source_revisions(tmp_path: Path) -> None:
    assert source_revision(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    clean = source_revision(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert source_revision(tmp_path) == f"{clean}-dirty"


def test_what_is_measured_differs_only_where_it_must() -> None:
    from appliance.bench.served import measurable

    text = '[server]\nlisten = ["0.0.0.0:1"]\n[keys]\nfile = "keys"\n[engine]\nslots = 3\n[[models]]\nname = "m"\n'
    config = load(text, environ={})
    served = measurable(config)
    assert served.server.listen == ("127.0.0.1:0",)
    assert (served.keys.file, served.attestation.attester) == ("", "insecure")
    assert (served.engine, served.models, served.limits) == (config.engine, config.models, config.limits)
    with pytest.raises(BootError, match="no model"):
        measurable(load("", environ={}))


def test_serving_loads_nothing_of_the_benchmark_and_nothing_of_the_client() -> None:
    code = (
        "import sys\nimport appliance.cli.main, appliance.boot.boot, appliance.boot.serve\n"
        "late = ('appliance.bench', 'client_sdk.client.client', 'matplotlib')\n"
        "print([name for name in sys.modules if name.startswith(late)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
