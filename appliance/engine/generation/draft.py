"""A second, smaller model of the same vocabulary that guesses ahead for the first one. Free of llama.cpp.

It has a context of its own, lent to one answer at a time: the planner proposes only while one is in progress. Whoever
gets it next finds it empty, also where the prompts agree: how fast a guess comes must not tell what another one asked.
"""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from appliance.engine.batch import Segment
from appliance.engine.weights.gguf import ModelFacts, facts_of, read_metadata
from appliance.errors import BootError

_TOKENS = "tokenizer.ggml.tokens"
_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """The draft model's file: like those of the model, its bytes must have this size and SHA-256."""

    paths: tuple[Path, ...]
    sha256: bytes
    size_bytes: int


def read_draft(model_fd: int, draft_fd: int) -> ModelFacts:
    """The draft's metadata. Raises BootError unless both models have the same tokens, naming the first difference."""
    model, draft = read_metadata(model_fd), read_metadata(draft_fd)
    difference = vocabulary_difference(model, draft)
    if difference is not None:
        raise BootError(f"the draft model's vocabulary is not the model's: {difference}")
    return facts_of(draft)


def vocabulary_difference(model: Mapping[str, object], draft: Mapping[str, object]) -> str | None:
    """What differs first between the token texts of two models' metadata; None where all are equal.

    Ids are all that the two exchange, so that how they would split a text does not matter.
    """
    ours, theirs = _texts(model), _texts(draft)
    if ours is None or theirs is None:
        return f"{'the model' if ours is None else 'the draft'} lists no tokens"
    if len(ours) != len(theirs):
        return f"it has {len(theirs)} tokens, the model {len(ours)}"
    for identifier, (text, other) in enumerate(zip(ours, theirs, strict=True)):
        if text != other:
            return f"token {identifier} is {_shown(other)}, the model's is {_shown(text)}"
    return None


def _texts(metadata: Mapping[str, object]) -> Sequence[object] | None:
    texts = metadata.get(_TOKENS)
    return texts if isinstance(texts, list | tuple | array.array) and len(texts) else None


def _shown(text: object) -> str:
    return ascii(text if not isinstance(text, str) else text[:_SHOWN])


class DraftRuntime(Protocol):
    """What a draft needs of `llama_cpp.runtime.LlamaRuntime`."""

    def decode(self, segments: Sequence[Segment]) -> None: ...
    def forget(self, sequence: int, *, start: int = 0) -> bool: ...
    def best(self, row: int) -> int: ...


class DraftModel:
    """The context and what it holds. `rows` is the most of one evaluation, `capacity` the tokens it can hold."""

    def __init__(self, runtime: DraftRuntime, *, rows: int, capacity: int) -> None:
        self._runtime = runtime
        self._rows = rows
        self._capacity = capacity
        self._owner: object = None
        self._held: list[int] = []
        self._agreed = 0

    def drafter(self) -> DraftModelDrafter:
        """A drafter for one answer."""
        return DraftModelDrafter(self)

    @property
    def held(self) -> int:
        """Tokens in the context."""
        return len(self._held)

    def propose(self, owner: object, tokens: Sequence[int], width: int) -> list[int]:
        """The most probable continuation, `width` tokens of it; none while the context has not caught up.

        Catching up is one evaluation for each call, so that a long prompt delays a step by no more than that. Raises
        what the runtime raises; the context then holds what it held of `tokens` before.
        """
        if self._owner is not owner:
            self._empty()
            self._owner = owner
        if len(tokens) + width > self._capacity:
            return []
        self._cut(self._agreeing(tokens))
        self._agreed = committed = len(self._held)
        try:
            return self._guess(tokens, width)
        except BaseException:
            self._cut(committed)
            raise

    def rewind(self, owner: object, length: int) -> None:
        """Drop what is held behind the first `length` tokens."""
        if self._owner is owner:
            self._cut(length)

    def release(self, owner: object) -> None:
        """The answer has ended: nothing of it stays."""
        if self._owner is owner:
            self._empty()

    def _guess(self, tokens: Sequence[int], width: int) -> list[int]:
        pending = len(tokens) - len(self._held)
        piece = list(tokens[len(self._held) : len(self._held) + self._rows])
        if pending > self._rows:
            self._evaluate(piece, outputs=0)
            return []
        self._evaluate(piece, outputs=1)
        guesses = [self._runtime.best(len(piece) - 1)]
        while len(guesses) < width:
            self._evaluate(guesses[-1:], outputs=1)
            guesses.append(self._runtime.best(0))
        return guesses

    def _evaluate(self, tokens: list[int], *, outputs: int) -> None:
        self._runtime.decode([Segment(sequence=0, position=len(self._held), tokens=tokens, outputs=outputs)])
        self._held += tokens

    def _agreeing(self, tokens: Sequence[int]) -> int:
        """How much of what is held is the beginning of `tokens`, the last of them left out: its logits are wanted."""
        most = min(len(self._held), len(tokens) - 1)
        length = min(self._agreed, most)  # `tokens` only grows, so this much was compared before
        while length < most and self._held[length] == tokens[length]:
            length += 1
        return length

    def _cut(self, length: int) -> None:
        # Asked for also where nothing is held behind `length`: an evaluation that failed may have left rows there.
        if not self._runtime.forget(0, start=length):
            self._runtime.forget(0)  # a memory that cannot be cut is filled again from the start
            length = 0
        del self._held[length:]
        self._agreed = min(self._agreed, length)

    def _empty(self) -> None:
        self._runtime.forget(0)
        self._held = []
        self._agreed = 0
        self._owner = None


class DraftModelDrafter:
    """`speculation.Drafter` of one answer, over the context that all of them share in turns."""

    __slots__ = ("_model",)

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def propose(self, tokens: Sequence[int], width: int) -> list[int]:
        return self._model.propose(self, tokens, width)

    def rewind(self, length: int) -> None:
        self._model.rewind(self, length)

    def close(self) -> None:
        self._model.release(self)
