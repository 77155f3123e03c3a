"""What the installed engine computes with on this machine, found by a process of its own: `appliance doctor`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

from appliance.engine.host.deaths import describe_death, processor_name

_MODULE = "appliance.engine.llama_cpp.proof"
_LIMIT_S = 60.0


def engine_lines(python: str) -> Iterator[tuple[str, str]]:
    """(what, finding) for each line of a table. `python` is the interpreter in which the engine is installed."""
    yield "processor", processor_name()
    try:
        done = subprocess.run(
            [python, "-s", "-m", _MODULE], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield "engine", f"cannot be asked: {error}"
        return
    if done.returncode < 0:
        yield "engine", describe_death(-done.returncode, None)
        return
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        yield "engine", f"cannot be loaded: {lines[-1]}"
        return
    told = json.loads(done.stdout)
    yield "engine", f"llama.cpp {told['version']}, {told['library']}"
    yield "arithmetic", told["arithmetic"]
    if told["in_use"] is None:
        yield "kernels", "none: a build without this project's, or another architecture than x86-64"
        return
    yield "kernels", f"{told['in_use']} of {', '.join(told['variants'])}"
    yield "proof of the kernels", _proof(told["proof"])


def _proof(found: dict[str, object]) -> str:
    if not found:
        return "none for this library on this processor: make venv proves it, and serve does with the model at hand"
    proven = found.get("proven")
    names = ", ".join(map(str, proven)) if isinstance(proven, list) else "nothing"
    died = found.get("died")
    return f"{names}; {died} is off: its process died when it was proven" if died else names
