"""What a newcomer waits for: `make demo` in an empty folder, with empty caches, step by step.

    python tests/bench/bench_first_command.py [--command "make demo"] [--keep-downloads] [--json FILE]

The committed files are copied into a new folder and the command runs there with a home of its own, so that nothing is
compiled, downloaded or pulled before. What pip downloads counts as well, unless `--keep-downloads` lets it use this
user's cache of downloads. Each line that the command prints starts a step; shown are those that took a second and more.
Exit status 1 where the command fails or takes longer than the five minutes that it may on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import ROOT, Figure, report
from tests.bench.machine import processor

LIMIT_S = 300.0
_SHOWN_FROM_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """From the line `name` to the next one."""

    name: str
    seconds: float


def copied(to: Path) -> Path:
    """The files of the commit that is checked out here."""
    folder = to / "checkout"
    folder.mkdir()
    archive = subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE)
    subprocess.run(["tar", "x", "-C", str(folder)], stdin=archive.stdout, check=True)
    if archive.wait():
        raise SystemExit("git archive failed: this has to run in a clone of the repository")
    return folder


def fresh_environment(home: Path, *, keep_downloads: bool) -> dict[str, str]:
    """This environment with a home of its own, and without any virtual environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "VIRTUAL_ENV", "PYTHON"))}
    path = ":".join(part for part in kept["PATH"].split(":") if not Path(part, "activate").exists())
    if keep_downloads:
        cache = subprocess.run(
            [sys.executable, "-m", "pip", "cache", "dir"], check=True, capture_output=True, text=True
        )
        kept["PIP_CACHE_DIR"] = cache.stdout.strip()
    return {**kept, "HOME": str(home), "PATH": path}


def steps(command: str, folder: Path, environment: Mapping[str, str]) -> Iterator[Step]:
    """Run it. Raises SystemExit where it fails, with its last lines."""
    running = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    name, at = "(before the first line)", time.monotonic()
    last: list[str] = []
    for line in running.stdout:
        now = time.monotonic()
        yield Step(name=name, seconds=now - at)
        name, at = line.strip(), now
        last = [*last[-30:], line]
    yield Step(name=name, seconds=time.monotonic() - at)
    if running.wait():
        raise SystemExit(f"{command} failed with {running.returncode}:\n{''.join(last)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default="make demo")
    parser.add_argument("--keep-downloads", action="store_true", help="let pip use this user's cache of downloads")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    done: list[Step] = []
    with tempfile.TemporaryDirectory(prefix="first-command-") as folder:
        home = Path(folder, "home")
        home.mkdir()
        fresh = fresh_environment(home, keep_downloads=options.keep_downloads)
        start = time.monotonic()
        for step in steps(options.command, copied(Path(folder)), fresh):
            done.append(step)
            if step.seconds >= _SHOWN_FROM_S:
                print(f"{step.seconds:>7.1f} s  {step.name[:110]}", flush=True)
        total = time.monotonic() - start
    figure = Figure(name=options.command, samples=[total], unit="s", target=f"<= {LIMIT_S:.0f}")
    report("first command", [figure], **processor().as_json())
    if options.json:
        shown = [{"step": step.name, "seconds": round(step.seconds, 2)} for step in done]
        options.json.write_text(
            json.dumps({"total_s": total, **processor().as_json(), "steps": shown}, indent=1) + "\n"
        )
    return 0 if total <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
