"""What one evaluation is made of. Free of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one sequence, each a row of the batch; logits are wanted for the last `outputs` rows."""

    sequence: int
    position: int
    tokens: Sequence[int]
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Which shapes of evaluation gave the same bits as a sequence evaluated alone, one token at a time.

    `batch`: several sequences in one batch, and other sequences in the context. `verify`: several tokens of one
    sequence with logits for each. `chunk`: a prompt in pieces of any size. `rollback`: a sequence can be cut back.
    """

    batch: bool
    verify: bool
    chunk: bool
    rollback: bool

    def facts(self) -> dict[str, object]:
        """For the execution facts of receipts."""
        return {"exact-batch": self.batch, "exact-verify": self.verify, "exact-chunk": self.chunk}

    def describe(self) -> str:
        """For the log."""
        names = [name for name in ("batch", "verify", "chunk", "rollback") if getattr(self, name)]
        return ", ".join(names) or "none"


EXACT = Exactness(batch=True, verify=True, chunk=True, rollback=True)
