"""The draft model's context over a toy: what is proposed, what is held, and what is left when something fails."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.batch import Segment
from appliance.engine.generation.draft import DraftModel, vocabulary_difference
from appliance.engine.types import Finished, SamplingParams
from tests.unit.appliance.engine.toy import Bench, Broken, alone, next_token

ROWS = 8
CAPACITY = 64


class ToyDraft:
    """Guesses what the toy model says, wrongly after every seventh token; checks its memory on every use."""

    def __init__(self, *, wrong_every: int = 7, cuts: bool = True) -> None:
        self.held: list[int] = []
        self.fail_in = -1
        """Evaluations until one fails, its rows half in the memory."""
        self.evaluations: list[int] = []
        self._wrong_every = wrong_every
        self._cuts = cuts

    def decode(self, segments: Sequence[Segment]) -> None:
        (segment,) = segments
        assert segment.position == len(self.held)
        assert 0 < len(segment.tokens) <= ROWS
        assert segment.position + len(segment.tokens) <= CAPACITY
        self.fail_in -= 1
        if self.fail_in == -1:
            self.held += segment.tokens[: max(1, len(segment.tokens) // 2)]
            raise Broken
        self.held += segment.tokens
        self.evaluations.append(len(segment.tokens))

    def forget(self, sequence: int, *, start: int = 0) -> bool:
        assert sequence == 0
        if start and start < len(self.held) and not self._cuts:
            return False
        del self.held[start:]
        return True

    def best(self, row: int) -> int:
        guess = next_token(self.held, 0)
        return guess + (len(self.held) % self._wrong_every == 0)


def make(draft: ToyDraft) -> DraftModel:
    return DraftModel(draft, rows=ROWS, capacity=CAPACITY)


def bench_with(draft: ToyDraft, *, width: int = 4) -> tuple[Bench, DraftModel]:
    bench = Bench(n_batch=16, width=width, drafter="draft-model")
    model = make(draft)
    bench.make_drafter = model.drafter
    return bench, model


@given(
    st.text("abcd", min_size=1, max_size=40),
    st.one_of(st.none(), st.integers(1, 99)),
    st.integers(1, 12),
    st.integers(1, 9),
    st.booleans(),
)
def test_h27_answers_are_those_of_the_model_alone(
    prompt: str, seed: int | None, width: int, wrong_every: int, cuts: bool
) -> None:
    draft = ToyDraft(wrong_every=wrong_every, cuts=cuts)
    bench, model = bench_with(draft, width=width)
    job = bench.submit(1, prompt, seed=seed)
    bench.drain()
    params = SamplingParams(
        temperature=0.0 if seed is None else 1.0, top_p=1.0, top_k=0, seed=seed or 0, max_tokens=None
    )
    assert bench.tokens(job) == alone(prompt, params, 64)
    assert (draft.held, model.held) == ([], 0)


@pytest.mark.parametrize("number", range(40))
def test_h45_whatever_fails_no_row_is_advanced_in_either_model_and_the_tokens_stay_the_same(number: int) -> None:
    chance = random.Random(number)
    draft = ToyDraft()
    bench, model = bench_with(draft)
    job = bench.submit(1, "abcab", seed=5)
    while not bench.scheduler.idle:
        before = list(b"abcab") + bench.tokens(job)
        held, events = list(draft.held), len(bench.events[job])
        draft.fail_in = chance.randint(-1, 4)
        bench.runtime.failures = [chance.choice(["", "before", "within", "drawing"])]
        if not bench.step():
            assert len(bench.events[job]) == events
            assert list(b"abcab") + bench.tokens(job) == before
            # What it holds is committed, or it was there before: nothing is left of what the failed step guessed.
            assert model.held == len(draft.held)
            assert draft.held in (before[: model.held], held[: model.held])
        draft.fail_in, bench.runtime.failures = -1, []
        if not bench.scheduler.idle:
            bench.step()
    bench.drain()
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=5, max_tokens=None)
    assert bench.tokens(job) == alone("abcab", params, 64)


def test_a_long_prompt_is_caught_up_with_piece_by_piece() -> None:
    draft = ToyDraft()
    drafter = make(draft).drafter()
    tokens = [ord("a") + index % 4 for index in range(2 * ROWS + 3)]
    assert (drafter.propose(tokens, 3), len(draft.held)) == ([], ROWS)
    assert (drafter.propose(tokens, 3), len(draft.held)) == ([], 2 * ROWS)
    guesses = drafter.propose(tokens, 3)
    assert len(guesses) == 3
    assert draft.evaluations == [ROWS, ROWS, 3, 1, 1]
    # All of them right and one more: only what is new is evaluated.
    drafter.propose([*tokens, *guesses, ord("b")], 1)
    assert draft.evaluations[5:] == [2]


def test_b139_the_next_answer_finds_nothing_of_the_one_before() -> None:
    draft = ToyDraft()
    model = make(draft)
    first, second = model.drafter(), model.drafter()
    tokens = list(b"abcdabcd")
    first.propose(tokens, 2)
    draft.evaluations.clear()
    second.propose(tokens, 2)  # the same prompt: as slow as for the first
    assert draft.evaluations == [8, 1]
    first.close()
    first.rewind(0)
    assert model.held == 9  # it is the second one's by now
    second.close()
    assert draft.held == []


def test_what_the_draft_cannot_hold_is_not_asked_of_it() -> None:
    draft = ToyDraft()
    drafter = make(draft).drafter()
    assert drafter.propose([ord("a")] * (CAPACITY - 3), 4) == []
    assert draft.evaluations == []


def test_receipts_name_the_drafter_and_count_what_it_guessed() -> None:
    bench, _ = bench_with(ToyDraft())
    job = bench.submit(1, "abca", max_tokens=30)
    bench.drain()
    end = bench.events[job][-1]
    assert isinstance(end, Finished)
    facts = end.execution
    assert (facts["speculation"], facts["exact"]) == ("draft-model", True)
    assert 0 < int(str(facts["accepted-tokens"])) <= int(str(facts["drafted-tokens"]))


@pytest.mark.parametrize(
    ("draft", "difference"),
    [
        (["a", "b", "c"], None),
        (["a", "b"], "it has 2 tokens, the model 3"),
        (["a", "B", "c"], "token 1 is 'B', the model's is 'b'"),
        ([], "the draft lists no tokens"),
        (None, "the draft lists no tokens"),
        ("abc", "the draft lists no tokens"),
    ],
)
def test_vocabularies_are_compared_whole(draft: object, difference: str | None) -> None:
    ours = {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    theirs = {} if draft is None else {"tokenizer.ggml.tokens": draft}
    assert vocabulary_difference(ours, theirs) == difference
