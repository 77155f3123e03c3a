"""Which shapes of evaluation give the same bits, measured on the loaded model: nothing about it is assumed.

Every comparison is of whole rows of logits, bit for bit, with the sequence evaluated alone. Kernels change with the
number of rows (64, 128), with the cells in use (from 512 on a single row is split among the threads) and with the
build, so the test visits both sides of those borders as far as the context allows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from appliance.engine.batch import Exactness, Segment
from appliance.engine.generation.speculation import GuessCosts
from appliance.engine.llama_cpp.allowance import Allowance
from appliance.engine.llama_cpp.runtime import LlamaRuntime
from appliance.engine.settings import SMALL_STEP

# Tokens of the prompt.
_SHORT, _MIDDLE = 32, 48
_CROWDED_CELLS = 640
_STEPS = 4
_CHUNK = 7
ROWS = 4  # a narrow proposal and the token before it


# Rows on the far side of the borders where kernels change (64, 128), and as many as a step gains anything from.
_LONG_STEPS = (72, 136, 512)
_PIECE = 61
_STEP_TEST_S = 4.0  # a size that takes longer to prove is not worth it: past 128 rows little is gained

NOT_EXACT = Exactness(batch=False, verify=False, chunk=False, rollback=False)
"""What is taken where the self-test came to no end."""


def measure_exactness(runtime: LlamaRuntime, allowance: Allowance) -> Exactness:
    """Run the shapes and compare; leaves the context empty. Takes about as long as 90 to 140 prompt tokens.

    Raises Exhausted.
    """
    test = _SelfTest(runtime, allowance)
    try:
        return test.run()
    finally:
        for sequence in range(runtime.options.n_sequences):
            runtime.forget(sequence)


def measure_steps(runtime: LlamaRuntime, allowance: Allowance, proven: list[int]) -> None:
    """Append to `proven` how many rows a step may have and be exact, one size after another, as far as they are.

    A prompt in one piece, beside a row of another sequence, against the same prompt in pieces of `SMALL_STEP` rows and
    that row by itself. Leaves the context empty. Raises Exhausted, then what was appended holds all the same.
    Sizes whose proof would take long are left out.
    """
    options = runtime.options
    proven.append(min(SMALL_STEP, options.n_batch))
    sizes = sorted({min(size, options.n_batch) for size in (*_LONG_STEPS, options.n_batch)})
    row_s = 0.0
    try:
        for size in sizes:
            fits = 2 * size <= options.kv_tokens and options.n_sequences > 1 and 2 * size * row_s < _STEP_TEST_S
            if size > SMALL_STEP and fits:
                start = time.perf_counter()
                if not _StepTest(runtime, allowance, size).run():
                    return
                row_s = (time.perf_counter() - start) / (2 * size)
                proven.append(size)
    finally:
        for sequence in range(min(2, options.n_sequences)):
            runtime.forget(sequence)


class _StepTest:
    """One size of step. Two sequences: 0 holds a few tokens, 1 the prompt."""

    def __init__(self, runtime: LlamaRuntime, allowance: Allowance, size: int) -> None:
        self._runtime = runtime
        self._allowance = allowance
        self._prompt = [(1 + index * 7919) % runtime.vocabulary_size for index in range(size - 1)]

    def run(self) -> bool:
        """Whether all bits are equal. Raises Exhausted."""
        few, row = self._prompt[:8], self._segment(0, 8, self._prompt[8:9])
        self._decode([self._segment(0, 0, few)])
        self._decode([row])
        alone = self._runtime.logits(0).tobytes()
        self._runtime.forget(0)
        for start in range(0, len(self._prompt), _PIECE):
            piece = self._segment(1, start, self._prompt[start : start + _PIECE])
            self._decode([piece])
        expected = self._runtime.logits(len(piece.tokens) - 1).tobytes()
        self._runtime.forget(1)
        self._decode([self._segment(0, 0, few)])
        self._decode([row, self._segment(1, 0, self._prompt)])
        same = self._runtime.logits(0).tobytes() == alone
        same = same and self._runtime.logits(len(self._prompt)).tobytes() == expected
        self._runtime.forget(0)
        self._runtime.forget(1)
        return same

    @staticmethod
    def _segment(sequence: int, position: int, tokens: list[int]) -> Segment:
        return Segment(sequence=sequence, position=position, tokens=tokens, outputs=1)

    def _decode(self, segments: Sequence[Segment]) -> None:
        self._allowance.evaluate(partial(self._runtime.decode, segments))


def measure_guess_costs(runtime: LlamaRuntime, allowance: Allowance) -> GuessCosts:
    """What rows of guesses add where the shape stays, and what changing it adds; leaves the context empty.

    Raises Exhausted.
    """
    many = min(ROWS, runtime.options.n_batch)
    if many == 1:
        return GuessCosts(row=1.0)
    (one,) = _least_seconds(allowance, (runtime, 1))
    (several,) = _least_seconds(allowance, (runtime, many))
    changing = sum(_least_seconds(allowance, (runtime, 1), (runtime, many)))
    return GuessCosts(
        row=max(0.0, (several / one - 1) / (many - 1)),
        shape=max(0.0, (changing - one - several) / one),
    )


def measure_draft_cost(runtime: LlamaRuntime, draft: LlamaRuntime, allowance: Allowance) -> float:
    """What evaluating one row with the draft model takes, in evaluations of one row; leaves both contexts empty.

    Several rows of the draft are evaluated too, and not timed: prompts come in them. Raises Exhausted.
    """
    _least_seconds(allowance, (draft, min(ROWS, draft.options.n_batch)), times=1)
    target_s, draft_s = _least_seconds(allowance, (runtime, 1), (draft, 1))
    return draft_s / target_s


def _least_seconds(allowance: Allowance, *evaluations: tuple[LlamaRuntime, int], times: int = 3) -> list[float]:
    """The least that evaluating so many rows took of all `times`, in turns: what disturbs one disturbs the other.

    One thread's own time does not count what others do on its core; several threads wait for each other. A clock
    that counts ticks, as User Mode Linux has for threads, stands still for an evaluation: then it is not used.
    """
    own: list[list[float]] = [[] for _ in evaluations]
    wall: list[list[float]] = [[] for _ in evaluations]
    for _ in range(times):
        for index, (runtime, rows) in enumerate(evaluations):
            segment = Segment(sequence=0, position=0, tokens=[1] * rows, outputs=rows)
            own_start, start = time.thread_time(), time.perf_counter()
            try:
                allowance.evaluate(partial(runtime.decode, [segment]))
            finally:
                runtime.forget(0)
            wall[index].append(time.perf_counter() - start)
            own[index].append(time.thread_time() - own_start)
    alone = all(runtime.threads == 1 for runtime, _ in evaluations)
    counted = own if alone and min(map(min, own)) > 0 else wall
    return [min(times) for times in counted]


class _SelfTest:
    def __init__(self, runtime: LlamaRuntime, allowance: Allowance) -> None:
        self._runtime = runtime
        self._allowance = allowance
        options = runtime.options
        # Long enough that so many sequences fill the cells past the border, as far as they can.
        filling = -(-_CROWDED_CELLS // max(1, options.n_sequences - 2))
        wanted = max(_SHORT, min(filling, _MIDDLE))
        self._size = max(1, min(wanted, options.n_batch, options.kv_tokens // 2 - _STEPS))
        # Fixed ids, spread over the vocabulary: what they mean does not matter.
        self._prompt = self._ids(self._size, 7919)
        self._next = self._ids(_STEPS, 104729)

    def _ids(self, count: int, stride: int) -> list[int]:
        return [(1 + index * stride) % self._runtime.vocabulary_size for index in range(count)]

    def run(self) -> Exactness:
        start = self._prefill(0, self._size)
        state = self._runtime.save(0)
        alone = self._one_by_one(0)
        rollback = self._runtime.forget(0, start=self._size)
        if not rollback:
            return NOT_EXACT
        verify = self._together(0) == alone
        self._runtime.forget(0, start=self._size)
        crowd = self._crowd(state)
        # A row split among threads differs here from one that is not, although it is computed alone both times.
        crowded = self._one_by_one(0)
        batch = crowded == alone
        self._runtime.forget(0, start=self._size)
        verify = verify and self._together(0) == crowded
        self._runtime.forget(0, start=self._size)
        batch = batch and self._packed(crowd, alone[0])
        row, prompt = self._beside_pieces(crowd) if batch else (b"", b"")
        batch = batch and row in (b"", alone[0])
        self._runtime.forget(0)
        # In pieces beside another row and the same bits: then also without it. Otherwise that has to be seen.
        chunk = prompt == start or self._prefill(0, _CHUNK) == start
        return Exactness(batch=batch, verify=verify, chunk=chunk, rollback=True)

    def _decode(self, segments: Sequence[Segment]) -> None:
        """Raises Exhausted."""
        self._allowance.evaluate(partial(self._runtime.decode, segments))

    def _prefill(self, sequence: int, chunk: int) -> bytes:
        for start in range(0, self._size, chunk):
            piece = self._prompt[start : start + chunk]
            last = start + chunk >= self._size
            self._decode([Segment(sequence=sequence, position=start, tokens=piece, outputs=int(last))])
        return self._runtime.logits(len(piece) - 1).tobytes()

    def _one_by_one(self, sequence: int) -> list[bytes]:
        rows = []
        for index, token in enumerate(self._next):
            self._decode([self._after(sequence, [token], index)])
            rows.append(self._runtime.logits(0).tobytes())
        return rows

    def _together(self, sequence: int) -> list[bytes]:
        self._decode([self._after(sequence, self._next, 0)])
        return [self._runtime.logits(row).tobytes() for row in range(len(self._next))]

    def _after(self, sequence: int, tokens: list[int], offset: int) -> Segment:
        return Segment(sequence=sequence, position=self._size + offset, tokens=tokens, outputs=len(tokens))

    def _crowd(self, state: bytes) -> list[int]:
        """Fill other sequences with the prompt, past the border of the cells where they allow it."""
        options = self._runtime.options
        room = options.kv_tokens - self._size - options.n_batch - _STEPS
        count = max(0, min(options.n_sequences - 2, _CROWDED_CELLS // self._size + 1, room // self._size))
        return [sequence for sequence in range(1, count + 1) if self._runtime.restore(sequence, state)]

    def _packed(self, crowd: list[int], expected: bytes) -> bool:
        """One row of each of up to eight sequences."""
        chosen = [0, *crowd][: min(8, self._runtime.options.n_batch)]
        self._decode([self._after(sequence, self._next[:1], 0) for sequence in chosen])
        rows = [self._runtime.logits(row).tobytes() for row in range(len(chosen))]
        for sequence in chosen:
            self._runtime.forget(sequence, start=self._size)
        return all(row == expected for row in rows)

    def _beside_pieces(self, crowd: list[int]) -> tuple[bytes, bytes]:
        """Logits of one row in company of most of another sequence's prompt, and of that prompt, ended in pieces.

        Empty where the context has no room for them.
        """
        options = self._runtime.options
        other = len(crowd) + 1
        piece = min(min(SMALL_STEP, options.n_batch) - 1, self._size - 2 * _CHUNK)
        if piece < 1 or other >= options.n_sequences:
            return b"", b""
        beside = Segment(sequence=other, position=0, tokens=self._prompt[:piece], outputs=0)
        self._decode([self._after(0, self._next[:1], 0), beside])
        row = self._runtime.logits(0).tobytes()
        for start in range(piece, self._size, _CHUNK):
            tokens = self._prompt[start : start + _CHUNK]
            last = int(start + _CHUNK >= self._size)
            self._decode([Segment(sequence=other, position=start, tokens=tokens, outputs=last)])
        prompt = self._runtime.logits(len(tokens) - 1).tobytes()
        self._runtime.forget(0, start=self._size)
        self._runtime.forget(other)
        return row, prompt
