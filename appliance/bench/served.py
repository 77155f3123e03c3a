"""An appliance in processes of its own, on loopback, and the policy that accepts exactly it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import httpx

from appliance.bench.runs import Footprint
from appliance.config import toml as toml_text
from appliance.config.settings import Config, ModelConfig
from appliance.errors import BootError

_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 30.0
_POLL_S = 0.05
_SERVING = re.compile(rb"on\s+(https://127\.0\.0\.1:\d+)")
_METRICS_LIMIT_S = 30.0
_REPLAYED = re.compile(r"^appliance_engine_replayed_tokens(?:_total)?(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
_PAGE_BYTES = 4096
_LOG_SHOWN_BYTES = 2000


def measurable(config: Config) -> Config:
    """`config` as it is measured: on a free port of loopback alone, without API keys, with the attester `insecure`.

    What is measured is answers. They cost the same whoever vouches for the machine, and keys are compared once a
    request; leaving both out lets a measurement run anywhere. Metrics are read once, when all is answered. No other
    setting is touched. Raises BootError where there is no model to measure.
    """
    if not config.models:
        raise BootError("no model is configured: name one with --model or [[models]]")
    return replace(
        config,
        server=replace(config.server, listen=("127.0.0.1:0",), unsafe_plain_http_listen=()),
        attestation=replace(config.attestation, attester="insecure", devices="none", certificate_evidence=False),
        keys=replace(config.keys, file=""),
        receipts=replace(config.receipts, air=False),
        metrics=replace(config.metrics, listen=f"127.0.0.1:{_free_port()}"),
    )


def changed_settings(config: Config) -> str:
    """The file for another installation: what differs from the defaults here, so that its own hold for the rest."""
    ours, theirs = (tomllib.loads(each.to_toml()) for each in (Config(), config))
    lines: list[str] = []
    for section, values in theirs.items():
        if section != "models":
            changed = {key: value for key, value in values.items() if value != ours[section][key]}
            lines += [f"[{section}]", *toml_text.lines(changed)]
    defaults = tomllib.loads(Config(models=(ModelConfig(),)).to_toml())["models"][0]
    for model in theirs.get("models", ()):
        changed = {key: value for key, value in model.items() if value != defaults[key]}
        lines += ["[[models]]", *toml_text.lines(changed)]
    return "\n".join(lines) + "\n"


class ServedConfig:
    """`appliance serve` of one configuration. A context manager; raises BootError where it does not start.

    `environ` is what the processes get; settings in it would count twice, so it must have none (see `cli.bench`).
    `python`: the interpreter of another installation that serves it, with the engine that is installed there.
    """

    def __init__(self, config: Config, environ: Mapping[str, str], python: Path | None = None) -> None:
        self._config = measurable(config)
        self._python = python
        self._environ = dict(environ)
        self._folder = tempfile.TemporaryDirectory(prefix="appliance-bench-")
        folder = Path(self._folder.name)
        self._file, self._log, self.policy = folder / "config.toml", folder / "log", folder / "policy.toml"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> ServedConfig:
        try:
            text = self._config.to_toml() if self._python is None else changed_settings(self._config)
            self._file.write_text(text, "utf-8")
            self._make_policy()
            with self._log.open("wb") as log:
                command = [*interpreter(self._python), "-m", "appliance", "serve", "--config", str(self._file)]
                self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment())
            self.url = self._wait(self._process)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    def memory(self) -> Footprint:
        """Of the API process and its workers, now."""
        assert self._process is not None
        pids = [self._process.pid, *children(self._process.pid)]
        try:
            proportional = sum(_proportional(pid) for pid in pids)
        except PermissionError:
            return Footprint(proportional=None, resident=sum(resident(pid) for pid in pids))
        return Footprint(proportional=proportional, resident=sum(resident(pid) for pid in pids))

    def replayed_tokens(self) -> int | None:
        """Accepted tokens that were evaluated again, so far; None where the appliance has no such metric."""
        url = f"http://{self._config.metrics.listen}/metrics"
        try:
            text = httpx.get(url, trust_env=False, timeout=_METRICS_LIMIT_S).raise_for_status().text
        except httpx.HTTPError as error:
            raise BootError(f"the appliance's metrics cannot be read: {type(error).__name__}") from error
        found = _REPLAYED.search(text)
        return None if found is None else int(float(found[1]))

    def _environment(self) -> dict[str, str]:
        return dict(self._environ) if self._python is None else of_another_python(self._environ)

    def _make_policy(self) -> None:
        reference = self._file.with_name("reference-values.toml")
        served = [*interpreter(self._python), "-m", "appliance", "reference-values", "--config", str(self._file)]
        reference.write_text(self._run(served, self._environment()), "utf-8")
        choices = ["--from", str(reference), "-o", str(self.policy), "--unsafe-accept-insecure"]
        self._run([sys.executable, "-m", "client_sdk.cli.main", "policy", "init", *choices], self._environ)

    def _run(self, command: Sequence[str], environ: Mapping[str, str]) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=dict(environ), check=False)
        except OSError as error:
            raise BootError(f"cannot run {command[0]}: {error.strerror}") from error
        if done.returncode:
            raise BootError(f"cannot be measured: {_last_line(done.stderr)}")
        return done.stdout

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            if found := _SERVING.search(self._log.read_bytes()):
                return found[1].decode()
            time.sleep(_POLL_S)
        raise BootError(f"the appliance did not start: {_last_line(self._log.read_text('utf-8', 'replace'))}")

    def _close(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def interpreter(python: Path | None) -> list[str]:
    """What begins a command of an installation. Another one takes nothing from the working directory."""
    return [sys.executable] if python is None else [str(python), "-P"]


def of_another_python(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what would have another interpreter import this one's packages."""
    return {name: value for name, value in environ.items() if not name.startswith("PYTHON")}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that still run (proc_pid_stat(5): each names its parent)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has just ended
        if parent == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def resident(pid: int) -> int:
    """Bytes of memory a process has in core (proc_pid_statm(5)); anybody may read it."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def _proportional(pid: int) -> int:
    """Raises PermissionError: the processes cannot be dumped, which closes their maps to other users."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _last_line(text: str) -> str:
    lines = [line for line in text[-_LOG_SHOWN_BYTES:].splitlines() if line.strip()]
    return lines[-1].removeprefix("appliance: ") if lines else "it said nothing"
