"""What the ways off the network cost: against TCP on loopback, and the forwarder against socat, in the same run.

    python tests/bench/bench_vsock.py [--tokens 96] [--rounds 6]

Everything compared takes turns within a round, so that drift of a shared machine cancels out; a ratio is taken within
each round. Over vsock itself this runs only where the kernel has a transport, so it is not among the measures.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from client_sdk import Appliance
from tests.bench.harness import (
    COMPLETIONS,
    MODEL,
    ROOT,
    START_LIMIT_S,
    Figure,
    completion_request,
    cpu_s,
    environment,
    pulled_model,
    report,
)

BULK_BYTES = 1 << 30
PIECE = bytes(1 << 18)


@contextmanager
def running(arguments: Sequence[str], ready: Callable[[], bool], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program from its readiness to its orderly end."""
    with log.open("wb") as output:
        process = subprocess.Popen(list(arguments), stdout=output, stderr=output, env=environment(), cwd=ROOT)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{arguments[0]} did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(30)


def answers(address: str | tuple[str, int]) -> Callable[[], bool]:
    def ready() -> bool:
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as probe:
            return probe.connect_ex(address) == 0

    return ready


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


# -- the appliance, by three ways --------------------------------------------------------------------------------------


def first_answer_s(url: str, policy: Path) -> float:
    """Seconds from nothing to the first verified answer: connect, handshake, attestation, one token."""
    started = time.perf_counter()
    with Appliance(url, policy=policy) as client:
        client.http.post(COMPLETIONS, json=completion_request(1, stream=False)).raise_for_status()
        return time.perf_counter() - started


def stream_s(client: Appliance, tokens: int) -> float:
    """Seconds for a verified stream, from the request to its verified end."""
    started = time.perf_counter()
    with client.http.stream("POST", COMPLETIONS, json=completion_request(tokens)) as response:
        for _ in response.iter_raw():
            pass
    return time.perf_counter() - started


def measure_answers(urls: dict[str, str], policy: Path, tokens: int, rounds: int) -> list[Figure]:
    streams: dict[str, list[float]] = {way: [] for way in urls}
    firsts: dict[str, list[float]] = {way: [] for way in urls}
    order = [*urls, *reversed(urls)]
    with ExitStack() as stack:
        clients = {way: stack.enter_context(Appliance(url, policy=policy)) for way, url in urls.items()}
        for way, client in clients.items():
            stream_s(client, tokens)
            first_answer_s(urls[way], policy)
        for _ in range(rounds):
            turn = {way: [0.0, 0.0] for way in urls}
            for way in order:
                turn[way][0] += stream_s(clients[way], tokens)
                for _ in range(3):
                    turn[way][1] += first_answer_s(urls[way], policy)
            for way, (stream, first) in turn.items():
                streams[way].append(stream)
                firsts[way].append(first)
    figures = []
    for way in [way for way in urls if way != "tcp"]:
        ratios = [tcp / other for tcp, other in zip(streams["tcp"], streams[way], strict=True)]
        figures.append(
            Figure(name=f"streaming throughput, {way} / tcp", samples=ratios, unit="ratio", target=">= 0.95")
        )
        ratios = [other / tcp for tcp, other in zip(firsts["tcp"], firsts[way], strict=True)]
        figures.append(Figure(name=f"first answer, {way} / tcp", samples=ratios, unit="ratio", target="<= 1.2"))
    figures += [Figure(name=f"first answer, {w}", samples=[s / 6 * 1e3 for s in firsts[w]], unit="ms") for w in urls]
    return figures


# -- bulk --------------------------------------------------------------------------------------------------------------


class Sink:
    """Reads and forgets, on a unix socket; `finished` after every connection's end."""

    def __init__(self, path: str) -> None:
        self._listener = socket.create_server(path, family=socket.AF_UNIX)
        self.finished = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        buffer = bytearray(1 << 18)
        while True:
            sock, _ = self._listener.accept()
            with sock:
                total = 0
                while size := sock.recv_into(buffer):
                    total += size
            if total:
                self.finished.release()


def bulk(path: str, sink: Sink, process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """(MB/s, MB per CPU second of the process in the middle) for one connection through `path`."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        before, started = cpu_s(process.pid), time.perf_counter()
        for _ in range(BULK_BYTES // len(PIECE)):
            sock.sendall(PIECE)
        sock.shutdown(socket.SHUT_WR)
        sink.finished.acquire()
        elapsed = time.perf_counter() - started
        used = cpu_s(process.pid) - before  # socat works in a process of its own for each connection, and shows 0
    return BULK_BYTES / elapsed / 1e6, BULK_BYTES / used / 1e6 if used else 0.0


def measure_bulk(folder: Path, rounds: int) -> list[Figure]:
    sink = Sink(f"{folder}/sink")
    ways = {"forwarder": [sys.executable, "-m", "appliance", "vsock-forward", "--listen", f"unix:{folder}/forwarder"]}
    ways["forwarder"] += ["--to", f"unix:{folder}/sink"]
    if shutil.which("socat"):
        ways["socat"] = ["socat", "-b", "262144", f"UNIX-LISTEN:{folder}/socat,fork", f"UNIX-CONNECT:{folder}/sink"]
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    per_core: list[float] = []
    with ExitStack() as stack:
        processes = {
            way: stack.enter_context(running(arguments, answers(f"{folder}/{way}"), folder / f"{way}.log"))
            for way, arguments in ways.items()
        }
        for number in range(rounds + 1):
            for way, process in processes.items():
                speed, on_a_core = bulk(f"{folder}/{way}", sink, process)
                if number:  # the first one warms up
                    speeds[way].append(speed)
                    if way == "forwarder":
                        per_core.append(on_a_core)
    figures = [
        Figure(name="forwarder, bulk", samples=speeds["forwarder"], unit="MB/s"),
        Figure(name="forwarder, bulk per CPU second", samples=per_core, unit="MB/s", target=">= 500"),
    ]
    if "socat" in ways:
        ratios = [ours / theirs for ours, theirs in zip(speeds["forwarder"], speeds["socat"], strict=True)]
        figures.append(Figure(name="forwarder / socat, bulk", samples=ratios, unit="ratio", target=">= 0.5"))
        figures.append(Figure(name="socat, bulk", samples=speeds["socat"], unit="MB/s"))
    return figures


# -- all of it ---------------------------------------------------------------------------------------------------------


def make_policy(folder: Path) -> Path:
    reference, policy = folder / "reference.toml", folder / "policy.toml"
    program = [sys.executable, "-m", "appliance", "reference-values", "--model", MODEL, "--attester", "insecure"]
    reference.write_bytes(
        subprocess.run(
            program, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(), cwd=ROOT
        ).stdout
    )
    made = [sys.executable, "-m", "client_sdk.cli.main", "policy", "init", "--unsafe-accept-insecure"]
    made += ["--from", str(reference), "-o", str(policy)]
    subprocess.run(made, check=True, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    pulled_model()
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as stack:
        folder = Path(name)
        bulk_figures = measure_bulk(folder, options.rounds)
        policy = make_policy(folder)
        tcp, forward = free_port(), free_port()
        serve = [sys.executable, "-m", "appliance", "serve", "--model", MODEL, "--attester", "insecure"]
        serve += ["--listen", f"127.0.0.1:{tcp}", "--listen", f"unix:{folder}/appliance"]
        stack.enter_context(running(serve, answers(("127.0.0.1", tcp)), folder / "serve.log"))
        between = [sys.executable, "-m", "appliance", "vsock-forward", "--listen", f"127.0.0.1:{forward}"]
        between += ["--to", f"unix:{folder}/appliance"]
        stack.enter_context(running(between, answers(("127.0.0.1", forward)), folder / "forward.log"))
        urls = {
            "tcp": f"https://127.0.0.1:{tcp}",
            "unix": f"unix://{folder}/appliance",
            "forwarder": f"https://127.0.0.1:{forward}",
        }
        figures = measure_answers(urls, policy, options.tokens, options.rounds)
    report("vsock", [*figures, *bulk_figures], tokens=options.tokens, cores=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main()
