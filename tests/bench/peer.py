"""A llama-server on loopback, with the settings with which it is fastest."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.bench.harness import environment

START_LIMIT_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Repacking:
    """Whether repacked weights are faster for a model, the tokens a second that say so, and MiB repacked for AMX.

    `tokens_s` has (prompt of 512, generation of 32) for weights as they are in the file, and repacked.
    """

    faster: bool
    amx_mib: float
    tokens_s: Mapping[str, tuple[float, float]]

    @classmethod
    def measured(cls, binary: Path, model: Path, *, threads: int) -> Repacking | None:
        """By llama-bench, which is built beside llama-server; None for a server that came without it."""
        program = binary.with_name("llama-bench")
        if not program.exists():
            return None
        base = [str(program), "-m", str(model), "-t", str(threads), "-fa", "1"]
        found: dict[str, tuple[float, float]] = {}
        for name, chosen in (("as in the file", "0"), ("repacked", "1")):
            command = [*base, "-p", "512", "-n", "32", "-r", "2", "-o", "json", "--repack", chosen]
            done = subprocess.run(command, env=environment(), check=True, capture_output=True)
            prompt, generation = (max(each["samples_ts"]) for each in json.loads(done.stdout))
            found[name] = (prompt, generation)
        told = [*base, "-v", "-p", "1", "-n", "0", "-r", "1", "--no-warmup"]
        done = subprocess.run(told, env=environment(), check=True, capture_output=True)
        sizes = re.findall(rb"AMX model buffer size *= *([0-9.]+) MiB", done.stdout + done.stderr)
        plain, repacked = found.values()
        faster = repacked[0] * repacked[1] >= plain[0] * plain[1]
        return cls(faster=faster, amx_mib=sum(map(float, sizes)), tokens_s=found)

    def as_json(self) -> dict[str, object]:
        return {"repacked": self.faster, "amx_mib": self.amx_mib, "tokens_s": dict(self.tokens_s)}


class Peer:
    """A running llama-server: plain HTTP, no keys, threads, cells and slots as the appliance has them.

    The rest is what is fastest: flash attention on, micro-batches of 512 tokens, prompts kept where they were
    evaluated, and weights repacked (AMX included) unless `repacked` is off.
    """

    def __init__(
        self, binary: Path, model: Path, *, threads: int, cells: int, slots: int, repacked: bool = True
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        chosen = ["-t", threads, "-tb", threads, "-c", cells, "-np", slots, "-fa", "on", "--no-webui", "--kv-unified"]
        chosen += [] if repacked else ["--no-repack"]
        self._folder = tempfile.TemporaryDirectory(prefix="bench-peer-")
        self._log = Path(self._folder.name, "log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(binary), "-m", str(model), "--port", str(self.port), "--host", "127.0.0.1", *map(str, chosen)],
                stdout=log,
                stderr=log,
                env=environment(),
            )

    def __enter__(self) -> Peer:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._healthy():
                return self
            time.sleep(0.1)
        self._stop()
        raise SystemExit(f"llama-server did not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _healthy(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
                return b" 200 " in connection.recv(4096)
        except OSError:
            return False

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
