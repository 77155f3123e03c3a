"""Follow the chains of receipts an appliance issues: no number twice, no link broken, and gaps told when asked.

Several connections share one chain and their answers end in any order, so receipts arrive out of order; other holders
of the same API key take numbers of the same chain. Two receipts that contradict each other are refused at once, a gap
is only reported (and refused where the policy asks for chains without gaps).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from client_sdk.errors import PolicyError, Rejection
from client_sdk.wire.receipt import ReceiptClaims

MAX_RUNS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Sequence numbers `first` to `last` of `chain` were never seen, though later ones were."""

    chain: bytes
    first: int
    last: int


@dataclass(slots=True)
class _Run:
    """Receipts seen without a gap. `previous` is the link of the first, `digest` that of the last."""

    start: int
    end: int
    previous: bytes | None
    digest: bytes


class ChainTracker:
    """Remembers runs of linked receipts per chain. Not thread-safe: its owner holds a lock or calls from one thread."""

    def __init__(self) -> None:
        self._chains: dict[bytes, list[_Run]] = {}

    def record(self, claims: ReceiptClaims, digest: bytes) -> None:
        """Add one verified receipt; `digest` is its link. Raises PolicyError RECEIPT_CHAIN_GAP on a contradiction."""
        runs = self._chains.setdefault(claims.chain, [])
        sequence = claims.sequence
        if any(run.start <= sequence <= run.end for run in runs):
            raise _contradiction(claims, "two receipts have the same place in one chain")
        before = next((run for run in runs if run.end == sequence - 1), None)
        after = next((run for run in runs if run.start == sequence + 1), None)
        if (before is not None and before.digest != claims.previous) or (
            after is not None and after.previous != digest
        ):
            raise _contradiction(claims, "a receipt does not link to its neighbour")
        new = _Run(start=sequence, end=sequence, previous=claims.previous, digest=digest)
        if before is not None:
            new.start, new.previous = before.start, before.previous
            runs.remove(before)
        if after is not None:
            new.end, new.digest = after.end, after.digest
            runs.remove(after)
        if len(runs) >= MAX_RUNS:
            raise _contradiction(claims, f"more than {MAX_RUNS} gaps in one chain")
        runs.append(new)
        runs.sort(key=lambda run: run.start)

    def gaps(self) -> tuple[Gap, ...]:
        """Numbers missing between the first and the last receipt seen of each chain."""
        return tuple(
            Gap(chain=chain, first=earlier.end + 1, last=later.start - 1)
            for chain, runs in self._chains.items()
            for earlier, later in itertools.pairwise(runs)
        )

    def require_no_gaps(self) -> None:
        """Raises PolicyError RECEIPT_CHAIN_GAP naming the first gap."""
        for gap in self.gaps():
            raise PolicyError(
                Rejection.RECEIPT_CHAIN_GAP,
                f"receipts {gap.first} to {gap.last} of chain {gap.chain.hex()} were never seen",
            )


def _contradiction(claims: ReceiptClaims, message: str) -> PolicyError:
    where = f"sequence {claims.sequence} of chain {claims.chain.hex()}"
    return PolicyError(Rejection.RECEIPT_CHAIN_GAP, f"{message}: {where}")
