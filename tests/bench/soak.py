"""Mixed load for minutes, and then: is everything back to where it was?

    python tests/bench/soak.py [--seconds 300] [--callers 6] [--seed 1] [--json FILE]

Six callers at a time ask for whole and streamed answers, two choices, answers held to a schema, long prompts; they
cancel streams, set short deadlines, and of twenty things in a row one is a client that vanishes (in the handshake, the
head, the body, while waiting, in the answer) and one is a bad request. All answers are verified by the SDK. On a slow
machine the load goes on until each caller has been through all of it (CYCLE things) once.

The appliance first warms up under the same load for a fifth of the time (at least 10 s), its callers leave, and when it
is idle its state is read. Then comes the load proper, and the state once it is idle again, within 20 s. What must hold,
decided before the first run:

- no answer fails verification, and nothing ends otherwise than its kind may end;
- requests in progress, jobs running and waiting, reserved and used cells, open connections: zero;
- the same worker process, no step of the engine interrupted;
- file descriptors of each process: open on nothing that was not open before;
- threads of each process: at most two more than before;
- resident memory: the API process at most 8 MiB more than before, a worker at most 16 MiB more. The stores that fill by
  design are bounded small for this: 8 MiB of prompt prefixes, 64 receipts an identity.

Exit status 1 if anything of this does not hold. File descriptors of a process that cannot be dumped are read with
CAP_SYS_PTRACE only; without it they are said to be unknown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from appliance.bench.served import resident
from tests.bench.soak_load import CYCLE, SECRET, Caller, Tally
from tests.e2e.programs import Served, make_policy

MIB = 1 << 20
API_GROWTH_MIB = 8.0
WORKER_GROWTH_MIB = 16.0
MORE_THREADS = 2
IDLE_WITHIN_S = 20.0
WARM_UP_AT_LEAST_S = 10.0
WARM_UP_THINGS = CYCLE // 2
BOUNDED = {"APPLIANCE_ENGINE_PREFIX_CACHE_MIB": "8", "APPLIANCE_RECEIPTS_STORED_PER_IDENTITY": "64"}
ZERO = (
    "appliance_active_requests",
    "appliance_engine_active_jobs",
    "appliance_engine_queued_jobs",
    "appliance_engine_cells_reserved",
    "appliance_engine_cells_used",
    "appliance_open_connections",
)
UNCHANGED = ("appliance_engine_restarts", "appliance_engine_failed_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process at a moment. `descriptors`: what each is open on; None where they may not be read."""

    pid: int
    resident: int
    threads: int
    descriptors: tuple[str, ...] | None

    @classmethod
    def of(cls, pid: int) -> Process:
        descriptors: tuple[str, ...] | None
        try:
            descriptors = tuple(sorted(_open_on(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()))
        except PermissionError:
            descriptors = None
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        return cls(pid=pid, resident=resident(pid), threads=threads, descriptors=descriptors)


def _open_on(entry: Path) -> str:
    """`socket`, `pipe`, `anon_inode:[eventpoll]` or the path: without the numbers that differ from run to run."""
    return re.sub(r":\[\d+\]$", "", str(entry.readlink()))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The appliance while nobody asks anything: its processes, the API process first, and its gauges."""

    processes: tuple[Process, ...]
    gauges: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold. `after` and `before` are shown as they are."""

    what: str
    before: float | None
    after: float | None
    bound: str
    holds: bool


def read_state(served: Served) -> State:
    """Wait until the gauges that must be zero are, for IDLE_WITHIN_S at most; then what there is, whatever it is."""
    deadline = time.monotonic() + IDLE_WITHIN_S
    while any(served.gauge(name) for name in ZERO) and time.monotonic() < deadline:
        time.sleep(0.1)
    gauges = {name: served.gauge(name) for name in (*ZERO, *UNCHANGED)}
    time.sleep(1.0)  # until the connections are gone that the gauges were asked on
    pids = (served.process.pid, *sorted(served.workers()))
    return State(processes=tuple(map(Process.of, pids)), gauges=gauges)


def compare(before: State, after: State) -> list[Check]:
    """Everything that must hold of the two idle states."""
    checks = [
        Check(what=name, before=before.gauges[name], after=after.gauges[name], bound="0", holds=not after.gauges[name])
        for name in ZERO
    ]
    for name in UNCHANGED:
        was, now = before.gauges[name], after.gauges[name]
        checks.append(Check(what=name, before=was, after=now, bound="the same", holds=was == now))
    same = [p.pid for p in before.processes] == [p.pid for p in after.processes]
    count = len(before.processes), len(after.processes)
    checks.append(Check(what="processes", before=count[0], after=count[1], bound="the same ones", holds=same))
    for index, (was_, now_) in enumerate(zip(before.processes, after.processes, strict=False)):
        checks += _compare_process("API process" if index == 0 else f"worker {index}", was_, now_, index == 0)
    return checks


def _compare_process(name: str, before: Process, after: Process, api: bool) -> list[Check]:
    limit = API_GROWTH_MIB if api else WORKER_GROWTH_MIB
    grown = (after.resident - before.resident) / MIB
    now, was = (None if p.descriptors is None else Counter(p.descriptors) for p in (after, before))
    more = None if now is None or was is None else now - was
    return [
        Check(
            what=f"{name}: resident MiB",
            before=round(before.resident / MIB, 1),
            after=round(after.resident / MIB, 1),
            bound=f"+{limit:g}",
            holds=grown <= limit,
        ),
        Check(
            what=f"{name}: file descriptors",
            before=None if was is None else was.total(),
            after=None if now is None else now.total(),
            bound="unknown here" if more is None else ("none new" + "".join(f", {name}" for name in more)),
            holds=not more,
        ),
        Check(
            what=f"{name}: threads",
            before=before.threads,
            after=after.threads,
            bound=f"+{MORE_THREADS}",
            holds=after.threads <= before.threads + MORE_THREADS,
        ),
    ]


async def load(served: Served, policy: Path, *, seconds: float, things: int, callers: int, seed: int) -> Tally:
    """Callers at work for so long, and until each has done so many things; what they have begun is finished."""
    tally = Tally()
    until = asyncio.get_running_loop().time() + seconds
    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(Caller(served.url, policy, number, seed, tally).run(until, things))
    return tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a whole run gave. `silent`: nothing of what was asked is in the appliance's log."""

    tally: Tally
    checks: tuple[Check, ...]
    silent: bool
    seconds: float

    @property
    def holds(self) -> bool:
        return self.silent and not self.tally.wrong and all(check.holds for check in self.checks)


def soak(folder: Path, *, seconds: float, callers: int, seed: int, say: Callable[[str], None]) -> Soaked:
    """Start an appliance in `folder`, warm it up, load it, compare."""
    with Served(folder / "appliance", environ=BOUNDED, metrics=True) as served:
        policy = make_policy(folder / "policy", environ=served.environ)
        warm_up = max(WARM_UP_AT_LEAST_S, seconds / 5)
        say(f"warming up for {warm_up:.0f} s")
        asyncio.run(load(served, policy, seconds=warm_up, things=WARM_UP_THINGS, callers=callers, seed=seed + 1))
        before = read_state(served)
        say(f"load for {seconds:.0f} s")
        start = time.monotonic()
        tally = asyncio.run(load(served, policy, seconds=seconds, things=CYCLE, callers=callers, seed=seed))
        elapsed = time.monotonic() - start
        checks = compare(before, read_state(served))
        return Soaked(tally=tally, checks=tuple(checks), silent=SECRET not in served.output(), seconds=elapsed)


def show(done: Soaked) -> None:
    tally = done.tally
    print(f"{'kind':<14} {'times':>6}  ends")
    for kind in sorted({kind for kind, _ in tally.ends}):
        ends = ", ".join(f"{end} {count}" for (name, end), count in sorted(tally.ends.items()) if name == kind)
        print(f"{kind:<14} {tally.of(kind):>6}  {ends}")
    print(f"{tally.total} things in {done.seconds:.0f} s, {tally.tokens} tokens of whole answers\n")
    print(f"{'after the load, idle':<36} {'before':>9} {'after':>9}  bound")
    for check in done.checks:
        before, after = ("-" if value is None else f"{value:g}" for value in (check.before, check.after))
        print(f"{check.what:<36} {before:>9} {after:>9}  {check.bound}{'' if check.holds else '  BROKEN'}")
    print(f"{'prompts in the log':<36} {'':>9} {0 if done.silent else 1:>9}  0{'' if done.silent else '  BROKEN'}")
    for wrong in tally.wrong[:20]:
        print(f"WRONG: {wrong}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--callers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        done = soak(
            Path(folder),
            seconds=options.seconds,
            callers=options.callers,
            seed=options.seed,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    show(done)
    if options.json:
        ends = [{"kind": kind, "end": end, "times": count} for (kind, end), count in sorted(done.tally.ends.items())]
        checks = [{name: getattr(check, name) for name in Check.__slots__} for check in done.checks]
        whole = {
            "seconds": round(done.seconds, 1),
            "callers": options.callers,
            "seed": options.seed,
            "tokens": done.tally.tokens,
            "holds": done.holds,
            "ends": ends,
            "wrong": done.tally.wrong,
            "checks": checks,
        }
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0 if done.holds else 1


if __name__ == "__main__":
    sys.exit(main())
