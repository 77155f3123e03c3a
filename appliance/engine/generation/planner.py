"""Which rows the next evaluation consists of. Pure: the same sequences give the same plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.engine.batch import Segment
from appliance.engine.generation.sequence import Sequence

SCORED_ROWS = 63
SPECULATE_UP_TO = 1
"""With more answers in progress rows are nearly as dear as passes. And what a wrong guess frees must be the last cells
in use (`cells.CellPool`): only a sequence that is evaluated by itself can promise that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`count` pending tokens of a sequence, its drafts behind them. It `draws` where nothing is pending after it."""

    sequence: Sequence
    count: int
    draws: bool

    @property
    def rows(self) -> int:
        return self.count + len(self.sequence.drafts) if self.draws else self.count

    def segment(self) -> Segment:
        sequence = self.sequence
        tokens = sequence.tokens[sequence.position : sequence.position + self.count]
        outputs = 1 + len(sequence.drafts) if self.draws else 0
        if sequence.scoring:
            outputs = self.count
        if self.draws:
            tokens += sequence.drafts
        return Segment(sequence=sequence.slot, position=sequence.position, tokens=tokens, outputs=outputs)


def plan(running: Iterable[Sequence], limit: int) -> list[Piece]:
    """One row (and drafts) for each answer in progress, prompts in what is left; at most `limit` rows.

    `running` is in order of arrival. Answers beyond `limit` wait for the next step, so rotate them (`rotated`).
    """
    everyone = list(running)
    answers = [sequence for sequence in everyone if sequence.pending == 1]
    prompts = [sequence for sequence in everyone if sequence.pending > 1]
    # Where prompts wait, some room is theirs however many answers there are.
    answers = answers[: limit if not prompts else max(1, limit - 1)]
    _propose(answers, prompts, limit)
    pieces = [Piece(sequence=sequence, count=1, draws=True) for sequence in answers]
    left = limit - sum(piece.rows for piece in pieces)
    for sequence, count in _share(prompts, left):
        pieces.append(Piece(sequence=sequence, count=count, draws=count == sequence.pending))
    return pieces


def _propose(answers: list[Sequence], prompts: list[Sequence], limit: int) -> None:
    """Ask the drafters, where it may pay and there is room. Drafts of a step that failed stay as they are."""
    if prompts or len(answers) > SPECULATE_UP_TO:
        for sequence in answers:
            sequence.drafts = []  # company came after a step that failed; what was drawn is still right
        return
    spare = limit - len(answers) - sum(len(sequence.drafts) for sequence in answers)
    for sequence in answers:
        speculation = sequence.speculation
        if speculation is None or sequence.drafts or sequence.drawn or not speculation.controller.active:
            continue
        if sequence.generated == 0:
            continue  # the prompt's own state is kept for reuse, without guesses behind it
        width = min(speculation.controller.width, spare, sequence.max_tokens - sequence.generated - 1)
        if width > 0:
            sequence.drafts = speculation.drafter.propose(sequence.tokens, width)[:width]
            spare -= len(sequence.drafts)


def _wanted(sequence: Sequence) -> int:
    """Pending rows of a prompt that one step may have: logits of every row are kept where each of them is scored."""
    return min(sequence.pending, SCORED_ROWS) if sequence.scoring else sequence.pending


def _share(prompts: list[Sequence], room: int) -> list[tuple[Sequence, int]]:
    """Half of the room to the oldest prompt, the rest to the shortest ones first, what remains to the oldest.

    So a short prompt does not wait behind a long one, and the long one is never overtaken for good.
    """
    if not prompts or room <= 0:
        return []
    oldest = prompts[0]
    others = sorted(prompts[1:], key=_wanted)
    reserved = min(_wanted(oldest), (room + 1) // 2 if others else room)
    left = room - reserved
    shares: list[tuple[Sequence, int]] = []
    for sequence in others:
        count = min(_wanted(sequence), left)
        if count > 0:
            shares.append((sequence, count))
            left -= count
    return [(oldest, min(_wanted(oldest), reserved + left)), *shares]
