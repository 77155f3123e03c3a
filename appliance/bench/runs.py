"""The nouns of `appliance bench`: one sample is one verified answer, one run is one pass over the whole workload.

Nothing here holds text of a prompt or an answer: an answer is its SHA-256 and its numbers.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction


class Arm(Enum):
    """Which of two configurations a run was of. A single measured configuration is the baseline."""

    BASELINE = "baseline"
    CANDIDATE = "candidate"


class Order(Enum):
    """Who went first in a round. Both orders are run, so that a drift of the machine helps neither."""

    BASELINE_FIRST = "baseline first"
    CANDIDATE_FIRST = "candidate first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer, by its verified receipt and the client's clock. Times are seconds from the request.

    `first_s` and `last_s`: arrival of the first and the last text. `verified_s`: when the first text was verified.
    `total_s`: the verified end. `digest` is SHA-256 over the generated text and the finish reason. `strict` and
    `relaxed` are the scores of an answer to a question of a suite, None where nothing is scored.
    """

    digest: bytes
    first_s: float
    verified_s: float
    last_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    passes: int
    drafted: int
    accepted: int
    truncated: bool
    exact: bool
    strict: bool | None = None
    relaxed: bool | None = None

    @property
    def decode(self) -> float | None:
        """Tokens per second between the first and the last text; None where there is no between."""
        if self.tokens < 2 or self.last_s <= self.first_s:
            return None
        return (self.tokens - 1) / (self.last_s - self.first_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of all processes of the appliance. `proportional` takes CAP_SYS_PTRACE to read (proc(5)), else None."""

    proportional: int | None
    resident: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass over the workload on an appliance started for it. `wall_s`: first request to last verified end.

    `identity` is what the receipts say of where it ran: device, engine, model, threads and the like. `weights` are
    (bytes, SHA-256) of the model's weights, by the receipts too. `replayed` tokens were evaluated again, where wrong
    draft tokens could not be cut off behind them; None where the appliance did not say.
    """

    arm: Arm
    order: Order
    round: int
    wall_s: float
    samples: tuple[Sample, ...]
    memory: Footprint
    identity: dict[str, object] = field(default_factory=dict)
    weights: tuple[tuple[int, bytes], ...] = ()
    replayed: int | None = None

    @property
    def throughput(self) -> float:
        """Tokens per second over everything: waiting for turns, prompts, decoding, receipts and their verification."""
        return sum(sample.tokens for sample in self.samples) / self.wall_s

    @property
    def steady_decode(self) -> float | None:
        """Median over the samples of the tokens per second once an answer has begun."""
        rates = [rate for sample in self.samples if (rate := sample.decode) is not None]
        return statistics.median(rates) if rates else None

    @property
    def digest(self) -> bytes:
        """Identifies the whole output of the run: SHA-256 over the digests of its samples in order."""
        return hashlib.sha256(b"".join(sample.digest for sample in self.samples)).digest()


def hit_rate(samples: Sequence[Sample]) -> Fraction:
    """Share of the prompt tokens that were not evaluated again, 0 to 1, exactly: it is held to a limit."""
    total = sum(sample.prompt_tokens for sample in samples)
    return Fraction(sum(sample.cached_tokens for sample in samples), total) if total else Fraction(0)


def acceptance(samples: Sequence[Sample]) -> float | None:
    """Share of the tokens guessed ahead that were right, 0 to 1; None where nothing was guessed."""
    drafted = sum(sample.drafted for sample in samples)
    return sum(sample.accepted for sample in samples) / drafted if drafted else None


def tokens_per_pass(samples: Sequence[Sample]) -> float | None:
    """Tokens of an answer that one evaluation of the model gave it; None where receipts do not tell passes."""
    passes = sum(sample.passes for sample in samples)
    return sum(sample.tokens for sample in samples) / passes if passes else None


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` (0 to 1) of the values do not exceed.

    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
