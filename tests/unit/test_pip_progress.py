"""The filter that `make venv` puts between pip and the reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "pip_progress.py"


def test_ninja_steps_become_tenths_and_the_log_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    steps = "".join(f"  [{n}/200] Building CXX object {n}.o\n" for n in range(1, 201))
    steps = f"  [0/2] cmake -P /tmp/VerifyGlobs.cmake\n{steps}"
    said = f"Collecting x\n  Building wheel for llama-cpp-python (pyproject.toml): started\n{steps}  ERROR: bad\n"
    done = subprocess.run([sys.executable, SCRIPT, log], input=said, capture_output=True, text=True, check=True)
    shown = done.stdout.splitlines()
    assert shown[0].startswith("llama.cpp is compiled from source")
    assert [line for line in shown if "compiling:" in line] == [
        "  compiling: 0 % (1/200)",
        *(f"  compiling: {10 * n} % ({20 * n}/200)" for n in range(1, 11)),
    ]
    assert shown[-1] == "ERROR: bad"
    assert log.read_text() == said


def test_wrong_use_is_a_usage_error() -> None:
    done = subprocess.run([sys.executable, SCRIPT], input="", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "LOGFILE" in done.stderr
