"""What the engine is told at construction: one frozen value, no files and no environment read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from appliance.engine.generation.draft import DraftWeights
from appliance.engine.generation.prefix_cache import CacheLimits
from appliance.errors import BootError


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


SMALL_STEP = 63
"""Rows of the steps that the self-test's verdict is about; it then says up to how many more they stay exact."""

VARIANTS = ("plain", "avx2", "avx-vnni", "avx512-vnni", "amx-int8")
"""Of this project's kernels, the smallest first (native/llama_cpp/variants.h). Every one gives the same bits."""

DRAFT_MODEL = "draft-model"
SPECULATIONS = ("auto", "off", "prompt-lookup", "n-gram", DRAFT_MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """`kind` is one of SPECULATIONS; "auto" is prompt lookup where verification is exact and rows are cheap, else off.

    "draft-model" asks the draft model of the settings. `draft_tokens` bounds a proposal: 7 and the token before them
    are eight rows, and kernels that share the reading of weights do so among four. `adaptive` lets each answer find
    its width and give up.
    """

    kind: str = "auto"
    draft_tokens: int = 7
    adaptive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One model and how to run it.

    `model_paths` are concatenated in order; the result must have `size_bytes` bytes and SHA-256 `sha256`.
    `context_length` None takes the length the model was trained with. `chat_template` replaces the one in the GGUF.
    `draft` is a second model that guesses ahead, for the speculation "draft-model" and for no other.
    `reasoning` is the tags around it, or whether they are looked for in the template. Without `template_tools` tools
    are told about in words, as for a template that does not take any.
    `n_batch` is the most rows of one step, `slots` the most answers in progress, `kv_tokens` the cells they share.
    `pooling`: how vectors are made, see `pooling.resolve_pooling`.
    `kernels` is one of VARIANTS, or "auto": the largest that this processor has. `selftest_limit_s` is the most that
    all measurements of a start take together; what they did not come to gets the careful answer.
    """

    model_paths: tuple[Path, ...]
    sha256: bytes
    size_bytes: int
    worker_python: str
    context_length: int | None = None
    threads: int | Literal["auto"] = "auto"
    n_batch: int = 63
    slots: int = 16
    kv_tokens: int | Literal["auto"] = "auto"
    cache: CacheLimits = field(default_factory=CacheLimits)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    draft: DraftWeights | None = None
    deterministic: bool = False
    chat_template: str | None = None
    reasoning: tuple[str, str] | Literal["auto", "none"] = "auto"
    template_tools: bool = True
    restart: RestartPolicy = RestartPolicy()
    pooling: str = "auto"
    kernels: str = "auto"
    selftest_limit_s: float = 60.0


def check_lengths(settings: EngineSettings, *, wanted: int, trained: int) -> None:
    """Raises BootError for a context length, a batch or a speculation that cannot be."""
    if not 1 < wanted <= trained:
        raise BootError(f"context_length {wanted} is outside 2..{trained}, the length of training")
    speculation, name = settings.speculation, settings.model_paths[0].name
    if (speculation.kind == DRAFT_MODEL) and settings.draft is None:
        raise BootError(f"engine.speculation is {DRAFT_MODEL!r} and the model {name} has no draft model")
    if settings.draft is not None and speculation.kind != DRAFT_MODEL:  # nothing would ask it: as much of a mistake
        raise BootError(f"the model {name} has a draft model: set engine.speculation to {DRAFT_MODEL!r}")
    if settings.n_batch < 1 or settings.slots < 1 or (settings.threads != "auto" and settings.threads < 1):
        raise BootError("the engine's batch size, slots and thread count must be at least 1")
    if speculation.kind not in SPECULATIONS:
        raise BootError(f"engine.speculation {speculation.kind!r} is none of {', '.join(SPECULATIONS)}")
    rows = speculation.draft_tokens + 2  # what was drawn last, the drafts, and one more
    if speculation.kind not in ("auto", "off") and settings.n_batch < rows:
        raise BootError(
            f"engine.batch_tokens {settings.n_batch} is too few to verify {speculation.draft_tokens} drafts: "
            f"that takes {rows}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """A resolved thread count and why it was chosen."""

    count: int
    reason: str


def most_threads(configured: int | Literal["auto"], cores: int) -> int:
    """Those that are configured, or that a measurement at the start may choose."""
    return cores if configured == "auto" else configured


def thread_candidates(cores: int) -> list[int]:
    """1 to 4 one by one, then in steps that keep it short, and all cores but one, which is left to the API process.

    With all of them a single busy thread more makes the others wait for the one that it displaces, at every barrier of
    an evaluation: on two cores 5 tokens a second were left of 190, and 150 with one thread. No measurement at the start
    can see that coming.
    """
    most = max(1, cores - 1)
    wanted = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, most}
    return sorted(count for count in wanted if 1 <= count <= most)


def choose_threads(speeds: Mapping[int, float], cores: int) -> Threads:
    """The fewest threads within a tenth of the fastest; `speeds` is tokens per second by thread count.

    ggml's barriers spin: one thread more than there are free cores costs up to 90 % of the speed, so a tie goes to the
    count that leaves more cores to others.
    """
    best = max(speeds.values())
    count = min(count for count, speed in speeds.items() if speed >= 0.9 * best)
    measured = ", ".join(f"{threads}: {speed:.0f}/s" for threads, speed in sorted(speeds.items()))
    return Threads(count=count, reason=f"auto: measured on {cores} usable cores ({measured})")


def resolve_cells(configured: int | Literal["auto"], *, context_length: int, slots: int) -> int:
    """Cells of the context. "auto": four whole contexts, and 512 for each slot. Raises BootError."""
    if configured == "auto":
        return max(min(slots, 4) * context_length, slots * min(512, context_length))
    if configured < context_length:
        raise BootError(
            f"engine.kv_tokens {configured} is less than the context length {context_length}: an answer could never fit"
        )
    return configured
