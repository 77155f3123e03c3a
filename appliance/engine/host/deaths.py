"""What the death of a worker by a signal means: which library did what on which processor, and what to do about it."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import BootError

_CPUINFO = Path("/proc/cpuinfo")
_FAULTS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP})
_MEANING = {
    signal.SIGILL: "it met an instruction that this processor does not have",
    signal.SIGSEGV: "it touched memory that is not its own",
    signal.SIGBUS: "it touched memory that cannot be read",
    signal.SIGFPE: "it met an arithmetic fault",
    signal.SIGABRT: "it gave up at a check of its own",
    signal.SIGTRAP: "it met a trap",
    signal.SIGKILL: "it was killed, most often because memory ran out",
}
_REBUILD = "build the engine again on this processor (make venv), or set engine.kernels to a smaller variant"
_MEMORY = "look for the kernel's out-of-memory killer in its log, and lower engine.kv_tokens or engine.slots"


class WorkerDied(BootError):
    """A worker was ended by a signal before it had loaded and proved the model. `faulted`: by its own native code."""

    def __init__(self, message: str, *, faulted: bool, build: Build | None) -> None:
        super().__init__(message)
        self.faulted = faulted
        self.build = build


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What a worker computes with, stated before it computes anything.

    `kernels` is the variant in use, None in a build without this project's kernels; `variants` are all that the
    processor has, the smallest first.
    """

    library: str
    version: str
    kernels: str | None
    variants: tuple[str, ...]

    def smaller(self) -> str | None:
        """The variant to try after this one; None where there is none. C++ without intrinsics is for tests."""
        names = [name for name in self.variants if name != "plain"]
        place = names.index(self.kernels) if self.kernels in names else 0
        return names[place - 1] if place > 0 else None


class KernelChoice:
    """Which variant the workers of one engine are started with: the configured one, or one smaller than what died."""

    def __init__(self, configured: str) -> None:
        """`configured` is a variant, or "auto" for the largest that the processor has."""
        self._automatic = configured == "auto"
        self.name = "" if self._automatic else configured
        """For the worker; empty: the largest."""
        self._passed_over: str | None = None

    def pass_over(self, died: WorkerDied) -> bool:
        """After a death at the start: whether a smaller variant is to be tried. Once: two that die are no accident."""
        build = died.build
        smaller = None if build is None or not died.faulted else build.smaller()
        if build is None or smaller is None or not self._automatic or self._passed_over is not None:
            return False
        self._passed_over, self.name = build.kernels, smaller
        return True

    def facts(self) -> dict[str, object]:
        """For the execution facts of receipts."""
        return {} if self._passed_over is None else {"kernels-passed-over": self._passed_over}


def faulted(number: int) -> bool:
    """Whether a signal is one that a fault in native code ends a process with."""
    return number in _FAULTS


def describe_death(number: int, build: Build | None) -> str:
    """One sentence for logs and errors. `build` None: it died before it could say what it computes with."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    meaning = f", {_MEANING[signal.Signals(number)]}" if number in _MEANING else ""
    remedy = _MEMORY if number == signal.SIGKILL else _REBUILD
    return f"it died of {name} (signal {number}){meaning}: {_what(build)} on {processor_name()}; {remedy}"


def _what(build: Build | None) -> str:
    if build is None:
        return f"{installed_library()}, before it had said which kernels it uses,"
    kernels = "without this project's kernels" if build.kernels is None else f"with the kernels {build.kernels}"
    return f"{build.library} of llama.cpp {build.version}, {kernels},"


def installed_library() -> str:
    """Where the engine's library lies, found without loading it."""
    spec = importlib.util.find_spec("llama_cpp")
    folders: Sequence[str] = () if spec is None else spec.submodule_search_locations or ()
    found = [path for folder in folders for path in sorted(Path(folder, "lib").glob("libggml-cpu*.so*"))]
    return str(found[0]) if found else "llama.cpp's library"


def processor_name() -> str:
    """The processor's own name, "unknown" where the kernel tells none."""
    try:
        lines = _CPUINFO.read_text("utf-8", "replace").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
