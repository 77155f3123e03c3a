"""Prove an engine before it is used: every variant of its kernels that this processor has, in a process of its own.

Each evaluates tiny models in every format and shape, and its digests are compared with those that the project holds
(native/attested-1.json). The smallest variant comes first. One whose process is ended by a signal is the end: the one
before it is the limit, which the run time respects. Other bits are an error, as is the death of the smallest variant.
Standard library alone; the processes it starts need NumPy and what llama_cpp imports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "native" / "attested-1.json"
MODULE = "appliance.engine.llama_cpp.proof"
_ENVIRON = os.environ  # noqa: TID251 - composition root
_LIMIT_S = 600.0
UNSUPPORTED = 3  # the module's status on a processor that lacks what everything is compiled for
_UNPROVEN = "plain"  # C++ without intrinsics: the definition, for tests


class ProofError(Exception):
    """Why this build of the engine is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`limit`: the largest variant that may be used, None for a build without kernels. `died`: the one after it."""

    arithmetic: str
    limit: str | None
    proven: tuple[str, ...]
    died: str | None

    def record(self) -> dict[str, object]:
        return {"arithmetic": self.arithmetic, "limit": self.limit, "proven": self.proven, "died": self.died}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    status: int
    out: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What is proven: where llama_cpp is imported from, by which interpreter, and what the errors name."""

    site: Path
    compiler: str
    processor: str
    python: str = sys.executable


def prove(engine: Engine, golden: Mapping[str, str], say: Callable[[str], None]) -> Proof:
    """Raises ProofError."""
    where = f"on {engine.processor}, compiled by {engine.compiler}"
    first = _start(engine, ())
    if first.status == UNSUPPORTED:
        raise ProofError(f"{first.last} ({engine.processor})")
    if first.status != 0:
        raise ProofError(f"the engine's library cannot be loaded: {_ending(first)} {where}. {_REMEDY}")
    told = json.loads(first.out)
    variants = [name for name in told["variants"] if name != _UNPROVEN]
    proven: list[str] = []
    died: str | None = None
    for variant in variants or [""]:
        say(f"Proving the engine: {variant or 'llama.cpp without kernels'}")
        ended = _start(engine, ("--variant", variant))
        if ended.status < 0 and proven:
            died = variant
            say(f"{variant} {_ending(ended)} {where}: {proven[-1]} is used, with the same bits and slower.")
            break
        if ended.status != 0:
            raise ProofError(f"the engine {_ending(ended)} {where}. {_REMEDY}")
        if variant:
            _compare(json.loads(ended.out)["digests"], golden, f"{variant} {where}")
            proven.append(variant)
    return Proof(
        arithmetic=str(told["arithmetic"]), limit=proven[-1] if proven else None, proven=tuple(proven), died=died
    )


_REMEDY = (
    "Compile it with another compiler (CC and CXX, for example clang and clang++), then make clean and make venv; "
    "where that gives the same, please report both"
)


def _compare(found: Mapping[str, str], golden: Mapping[str, str], where: str) -> None:
    for name, digest in golden.items():
        if found.get(name) != digest:
            raise ProofError(
                f"the engine computes other bits than other builds for {name} ({found.get(name, 'nothing')}) "
                f"with {where}. {_REMEDY}"
            )


def _ending(ended: _Ended) -> str:
    doing = f" at {ended.last!r}" if ended.last else ""
    if ended.status >= 0:
        return f"ended with status {ended.status}{doing}"
    try:
        name = signal.Signals(-ended.status).name
    except ValueError:
        name = "an unknown signal"
    return f"died of {name} (signal {-ended.status}){doing}"


def _start(engine: Engine, arguments: Sequence[str]) -> _Ended:
    path = os.pathsep.join([str(engine.site), str(ROOT)])
    environment = {**_ENVIRON, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [engine.python, "-s", "-m", MODULE, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProofError(f"the engine's proof came to no end within {_LIMIT_S:.0f} s") from error
    lines = done.stderr.strip().splitlines()
    return _Ended(status=done.returncode, out=done.stdout, last=lines[-1] if lines else "")


def processor_name(cpuinfo: str) -> str:
    """As the kernel tells it, with nothing that changes from boot to boot."""
    names = (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(names, "an unknown processor")


def golden() -> Mapping[str, str]:
    """The digests that every build has to come to, by name."""
    held: dict[str, str] = json.loads(GOLDEN.read_text(encoding="utf-8"))["digests"]
    return held


def main() -> int:
    """Hold what this environment's engine computes as golden, where all variants agree and all shapes are exact."""
    engine = Engine(site=ROOT, compiler="", processor="")
    found: dict[str, dict[str, str]] = {}
    for variant in json.loads(_start(engine, ()).out)["variants"]:
        found[variant] = json.loads(_start(engine, ("--variant", variant)).out)["digests"]
    same = {name: digest for name, digest in found["plain"].items() if len(digest) == 64}
    same = {name: digest for name, digest in same.items() if all(one[name] == digest for one in found.values())}
    for variant, digests in found.items():
        for name in sorted(digests.keys() - same.keys()):
            print(f"left out: {name} with {variant}: {digests[name]}", file=sys.stderr)
    GOLDEN.write_text(json.dumps({"arithmetic": "attested-1", "digests": same}, indent=1, sort_keys=True) + "\n")
    return 0 if len(same) == len(found["plain"]) else 1


if __name__ == "__main__":
    sys.exit(main())
