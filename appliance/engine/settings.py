"""What the engine is told at construction: one frozen value, no files and no environment read here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How a lost worker comes back. All times in seconds.

    The n-th crash in a row waits `initial_s * 2**n`, at most `max_s`; a worker that lived `stable_s` starts the count
    anew. `wait_s` is how long a new job waits for a restart before it is refused with 503. `stall_s` without any
    message from a worker that was asked for one means that it is wedged: it must be longer than one prefill batch.
    """

    initial_s: float = 0.1
    max_s: float = 30.0
    stable_s: float = 60.0
    wait_s: float = 15.0
    stall_s: float = 30.0
    load_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One model and how to run it.

    `model_paths` are concatenated in order; the result must have `size_bytes` bytes and SHA-256 `sha256`.
    `context_length` None takes the length the model was trained with. `chat_template` replaces the one in the GGUF.
    """

    model_paths: tuple[Path, ...]
    sha256: bytes
    size_bytes: int
    worker_python: str
    context_length: int | None = None
    threads: int | Literal["auto"] = "auto"
    n_batch: int = 256
    chat_template: str | None = None
    restart: RestartPolicy = RestartPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """A resolved thread count and why it was chosen."""

    count: int
    reason: str


def resolve_threads(configured: int | Literal["auto"], usable_cores: Sequence[int] | set[int]) -> Threads:
    """Pick the number of compute threads.

    ggml's barriers spin: one thread more than there are free cores costs up to 90 % of the speed, so "auto" leaves one
    core to the process that serves HTTP.
    """
    cores = len(usable_cores)
    if configured == "auto":
        count = max(1, cores - 1)
        return Threads(count=count, reason=f"auto: {cores} usable cores, one left to the serving process")
    return Threads(count=configured, reason=f"configured: {configured} of {cores} usable cores")
