"""The two programs as a user starts them: real processes, real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

MODEL = "smollm2-135m-instruct"
SLOW = int(os.environ.get("TEST_SLOW") or 1)
"""How many times slower than a processor this machine may be: an emulated one."""
START_LIMIT_S = 60.0
_SERVING = re.compile(r"on\s+(https://127\.0\.0\.1:(\d+))")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without what tests were started with: settings of an appliance come from the test alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("APPLIANCE_", "PYTHON"))}
    return {**kept, **(extra or {})}


def run_program(
    module: str, *arguments: str, stdin: str = "", cwd: Path | None = None, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(environ),
        timeout=120 * SLOW,
        check=False,
    )


def run_client(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`appliance-client ARGUMENTS`."""
    return run_program("client_sdk.cli.main", *arguments, **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], Any], *, limit_s: float, what: str) -> Any:
    """The first truthy value of `condition`, asked every 20 ms."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {limit_s} s: {what}")


@dataclass
class Served:
    """A running `appliance serve`. `metrics_url` is "" unless it was started with a metrics listener."""

    directory: Path
    arguments: Sequence[str] = ("--model", MODEL, "--attester", "insecure")
    environ: Mapping[str, str] = field(default_factory=dict)
    listen: str = "127.0.0.1:0"
    metrics: bool = False
    url: str = ""
    port: int = 0
    metrics_url: str = ""

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.metrics:
            address = f"127.0.0.1:{free_port()}"
            self.environ = {**self.environ, "APPLIANCE_METRICS_LISTEN": address}
            self.metrics_url = f"http://{address}/metrics"
        self.log = self.directory / "appliance.log"
        self.start()

    def start(self) -> None:
        """Start it (again: on the port it had, with new keys)."""
        listen = f"127.0.0.1:{self.port}" if self.port else self.listen
        command = [sys.executable, "-m", "appliance", "serve", *self.arguments, "--listen", listen]
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(self.environ))

        def serving() -> re.Match[str] | None:
            assert self.process.poll() is None, self.output()
            return _SERVING.search(self.log.read_bytes()[offset:].decode())

        found = wait_for(serving, limit_s=START_LIMIT_S, what="the appliance serves")
        self.url, self.port = found[1], int(found[2])

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and wait for the end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        assert self.process.returncode is not None
        return self.process.returncode

    def output(self) -> str:
        """Everything it has ever written to stdout and stderr."""
        return self.log.read_text("utf-8", "replace")

    def workers(self) -> list[int]:
        """Process ids of its engine workers, by the parent each process names (proc_pid_stat(5))."""
        return [
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == self.process.pid
        ]

    def gauge(self, name: str) -> float:
        """The value of one metric, such as `appliance_engine_active_jobs`; 0 if it was never counted."""
        text = httpx.get(self.metrics_url, trust_env=False).raise_for_status().text
        found = [
            line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}_total ", f"{name}_total{{"))
        ]
        return sum(float(line.rpartition(" ")[2]) for line in found)


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0  # it has just ended


def make_policy(
    directory: Path,
    arguments: Sequence[str] = ("--model", MODEL, "--attester", "insecure"),
    environ: Mapping[str, str] | None = None,
) -> Path:
    """A policy file, made the way a builder and a caller make it."""
    directory.mkdir(parents=True, exist_ok=True)
    reference, policy = directory / "reference-values.toml", directory / "policy.toml"
    printed = run_program("appliance", "reference-values", *arguments, environ=environ)
    assert printed.returncode == 0, printed.stderr
    reference.write_text(printed.stdout)
    made = run_client("policy", "init", "--from", str(reference), "-o", str(policy), "--unsafe-accept-insecure")
    assert made.returncode == 0, made.stderr
    return policy


def outcome(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON object that `--json` prints."""
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value
