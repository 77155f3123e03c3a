"""Turns, packing, repetition and bounds of jobs for vectors, over a model that is a few lines of arithmetic."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.embedding.jobs import (
    MAX_INPUTS,
    MAX_NUMBERS,
    MAX_TOKENS,
    EmbeddingEvent,
    EmbeddingJob,
    InputsReady,
    TextInput,
    Vector,
    pack_inputs_ready,
    pack_job,
    pack_vector,
    unpack_embedding_event,
    unpack_job,
)
from appliance.engine.embedding.pooling import resolve_pooling
from appliance.engine.embedding.scheduler import EmbeddingLimits, EmbeddingScheduler, normalized
from appliance.engine.host.channel import ChannelError, decode_body, encode_frame
from appliance.engine.host.messages import pack_event
from appliance.engine.types import Delta, Finished, TokenPrompt
from appliance.engine.weights.gguf import ModelFacts, facts_of
from appliance.engine.weights.sizes import PART_CHARACTERS
from appliance.errors import ApplianceError, BadRequest, BootError, EngineFailed

CONTROL = 9


class Interrupted(Exception):
    """Stands for whatever ends an evaluation."""


class ToyModel:
    """Every character is a token; its vector counts. `fail` makes the next evaluation raise. "~" has no direction."""

    def __init__(self, dimensions: int = 4) -> None:
        self.dimensions = dimensions
        self.vocabulary_size = 1 << 20
        self.control_ids = frozenset({CONTROL})
        self.evaluated: list[list[int]] = []
        self.fail = False

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        assert not parse_special
        return [ord(character) for character in text]

    def tokenize_input(self, text: str) -> list[int]:
        return [1, *self.tokenize(text, parse_special=False), 2] if text != "nothing" else []

    def piece(self, token: int) -> bytes:
        return chr(token).encode() if token > 31 else b""

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        self.evaluated.append([len(tokens) for tokens in inputs])
        if self.fail:
            self.fail = False
            raise Interrupted
        return [
            np.full(self.dimensions, 0 if ord("~") in tokens else sum(tokens), dtype=np.float32) for tokens in inputs
        ]


class Harness:
    def __init__(self, *, rows: int = 16, together: int = 1, context_length: int = 16, dimensions: int = 4) -> None:
        self.model = ToyModel(dimensions)
        self.events: list[tuple[int, EmbeddingEvent | ApplianceError]] = []
        limits = EmbeddingLimits(
            context_length=context_length, rows=rows, together=together, pooling="mean", facts={"exact": True}
        )
        self.scheduler = EmbeddingScheduler(self.model, limits, lambda job, event: self.events.append((job[0], event)))

    def submit(self, number: int, *inputs: TextInput, dimensions: int | None = None) -> None:
        self.scheduler.submit(EmbeddingJob(job_id=bytes([number]) * 16, inputs=inputs, dimensions=dimensions))

    def run(self) -> None:
        while not self.scheduler.idle:
            self.scheduler.step()

    def vectors(self, number: int) -> dict[int, bytes]:
        return {event.index: event.numbers for job, event in self.events if job == number and isinstance(event, Vector)}

    def ended(self) -> list[int]:
        return [job for job, event in self.events if isinstance(event, Finished)]

    def error(self) -> ApplianceError:
        (error,) = [event for _, event in self.events if isinstance(event, ApplianceError)]
        return error


def test_a_job_is_its_inputs_then_its_vectors_then_its_end() -> None:
    harness = Harness()
    harness.submit(1, "a", TokenPrompt(tokens=(104, 105)), dimensions=2)
    harness.run()
    first, *rest, last = [event for _, event in harness.events]
    assert first == InputsReady(
        texts=("a", "hi"),
        token_ids=(struct.pack("<3I", 1, 97, 2), struct.pack("<2I", 104, 105)),
        native=4,
        dimensions=2,
        pooling="mean",
        execution={"exact": True},
    )
    half = struct.pack("<2f", *[math.sqrt(0.5)] * 2)
    assert rest == [Vector(index=0, numbers=half), Vector(index=1, numbers=half)]
    assert last == Finished(reason="stop")
    assert harness.scheduler.stats() == {"prefill_tokens": 5, "vectors": 2, "failed_steps": 0}


def test_jobs_take_turns_input_by_input() -> None:
    harness = Harness()
    harness.submit(1, *["a"] * 5)
    harness.submit(2, "b")
    harness.submit(3, "c", "c")
    harness.run()
    assert harness.ended() == [2, 3, 1]
    assert harness.model.evaluated == [[3]] * 8


def test_inputs_share_an_evaluation_while_they_fit() -> None:
    harness = Harness(rows=10, together=3)
    harness.submit(1, "a", "bbbbbb", "c", "d")
    harness.submit(2, "e")
    harness.run()
    assert all(sum(sizes) <= 10 and len(sizes) <= 3 for sizes in harness.model.evaluated)
    assert sorted(size for sizes in harness.model.evaluated for size in sizes) == [3, 3, 3, 3, 8]
    assert harness.model.evaluated[0] == [3, 3]
    assert sorted(harness.vectors(1)) == [0, 1, 2, 3]
    assert set(harness.ended()) == {1, 2}


def test_an_input_longer_than_one_evaluation_goes_alone() -> None:
    harness = Harness(rows=8, together=4, context_length=16)
    harness.submit(1, "a", "b" * 12, "c")
    harness.run()
    assert [14] in harness.model.evaluated
    assert sorted(harness.vectors(1)) == [0, 1, 2]


@pytest.mark.parametrize("together", [1, 4])
def test_an_evaluation_that_was_interrupted_comes_again_and_nothing_is_lost(together: int) -> None:
    harness = Harness(rows=16, together=together)
    harness.submit(1, "a", "b", "c")
    harness.submit(2, "d")
    harness.model.fail = True
    with pytest.raises(Interrupted):
        harness.scheduler.step()
    assert not harness.vectors(1)
    assert not harness.vectors(2)
    harness.run()
    assert (sorted(harness.vectors(1)), sorted(harness.vectors(2))) == ([0, 1, 2], [0])
    assert harness.scheduler.stats()["failed_steps"] == 1


def test_what_is_cancelled_is_not_evaluated() -> None:
    harness = Harness()
    harness.submit(1, *["a"] * 3)
    harness.scheduler.step()
    harness.scheduler.cancel(bytes([1]) * 16)
    assert harness.scheduler.idle
    harness.scheduler.step()
    assert len(harness.model.evaluated) == 1
    assert not harness.ended()


def test_a_vector_without_direction_fails_its_job_alone() -> None:
    harness = Harness(together=4)
    harness.submit(1, "a", "~", "b")
    harness.submit(2, "c")
    harness.run()
    assert isinstance(harness.error(), EngineFailed)
    assert harness.ended() == [2]


@pytest.mark.parametrize("numbers", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_what_is_no_direction_is_not_normalized(numbers: list[float]) -> None:
    assert normalized(np.array(numbers, dtype=np.float32), 2) is None


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=64), st.integers(1, 64))
def test_normalized_vectors_have_length_one(numbers: list[float], dimensions: int) -> None:
    vector = np.array(numbers, dtype=np.float32)
    packed = normalized(vector, dimensions)
    if packed is not None:
        read = np.frombuffer(packed, dtype="<f4").astype(np.float64)
        assert len(read) == min(dimensions, len(numbers))
        assert abs(np.sqrt(np.sum(read * read)) - 1) < 1e-5


@pytest.mark.parametrize(
    ("inputs", "dimensions", "code", "param"),
    [
        (("a",), 5, "invalid_dimensions", "dimensions"),
        (("a",), -1, "invalid_dimensions", "dimensions"),
        (("a", "b" * 15), None, "context_length_exceeded", "input[1]"),
        (("b" * 15,), None, "context_length_exceeded", "input"),
        (("a" + chr(CONTROL),), None, "control_token_in_content", "input"),
        (("a", "nothing"), None, "empty_prompt", "input[1]"),
        ((TokenPrompt(tokens=()),), None, "empty_prompt", "input"),
        ((TokenPrompt(tokens=(1 << 20,)),), None, "invalid_token", "input"),
    ],
)
def test_refusals(inputs: tuple[TextInput, ...], dimensions: int | None, code: str, param: str) -> None:
    harness = Harness()
    harness.submit(1, *inputs, dimensions=dimensions)
    error = harness.error()
    assert isinstance(error, BadRequest)
    assert (error.code, error.param) == (code, param)
    assert harness.scheduler.idle
    assert not harness.model.evaluated


def test_what_one_answer_holds_is_bounded_before_anything_is_evaluated() -> None:
    wide = Harness(dimensions=MAX_NUMBERS // 4)
    wide.submit(1, *["a"] * 5)
    assert wide.error().code == "too_many_numbers"
    assert str(MAX_NUMBERS) in wide.error().message
    long = Harness(context_length=MAX_TOKENS)
    long.submit(1, "a" * (MAX_TOKENS - 10), "b" * 10)
    assert long.error().code == "too_many_tokens"


def test_a_huge_text_is_refused_by_its_beginning() -> None:
    harness = Harness(context_length=16)
    read: list[int] = []
    tokenize = harness.model.tokenize

    def counting(text: str, *, parse_special: bool) -> list[int]:
        read.append(len(text))
        return tokenize(text, parse_special=parse_special)

    harness.model.tokenize = counting  # type: ignore[method-assign]
    harness.submit(1, "a" * (20 * PART_CHARACTERS))
    assert harness.error().code == "context_length_exceeded"
    assert "more than 16" in harness.error().message
    assert sum(read) == PART_CHARACTERS


def test_a_long_text_of_few_tokens_is_read_to_its_end() -> None:
    harness = Harness(context_length=16)
    tokenize = harness.model.tokenize
    harness.model.tokenize = lambda text, *, parse_special: tokenize(  # type: ignore[method-assign]
        text.strip(), parse_special=parse_special
    )
    harness.submit(1, " " * (3 * PART_CHARACTERS) + "a")
    harness.run()
    assert sorted(harness.vectors(1)) == [0]


# -- messages ----------------------------------------------------------------------------------------------------------

inputs = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=("Cs",))),
        st.lists(st.integers(0, 2**32 - 1)).map(lambda tokens: TokenPrompt(tokens=tuple(tokens))),
    ),
    min_size=1,
    max_size=8,
)


@given(inputs, st.one_of(st.none(), st.integers(1, 1 << 20)))
def test_jobs_arrive_as_they_were_sent(given_inputs: list[TextInput], dimensions: int | None) -> None:
    job = EmbeddingJob(job_id=b"j" * 16, inputs=tuple(given_inputs), dimensions=dimensions)
    assert unpack_job(decode_body(encode_frame(pack_job(job))[4:])) == job


def test_events_arrive_as_they_were_sent() -> None:
    ready = InputsReady(
        texts=("a",), token_ids=(b"1234",), native=4, dimensions=2, pooling="cls", execution={"exact": True}
    )
    vector = Vector(index=3, numbers=b"12345678")
    finished = Finished(reason="stop")
    for event, message in (
        (ready, pack_inputs_ready(b"j", ready)),
        (vector, pack_vector(b"j", vector)),
        (finished, pack_event(b"j", finished)),
    ):
        assert unpack_embedding_event(decode_body(encode_frame(message)[4:])) == event
    error = unpack_embedding_event(pack_event(b"j", BadRequest("code", "message", param="input")))
    assert isinstance(error, BadRequest)
    assert (error.code, error.param) == ("code", "input")


@pytest.mark.parametrize(
    "message",
    [
        {"t": "vector", "index": 0, "numbers": "text"},
        {"t": "vector", "index": True, "numbers": b""},
        {"t": "inputs", "texts": [1], "tokens": [], "native": 1, "dimensions": 1, "pooling": "cls", "execution": {}},
        {"t": "inputs", "texts": [], "tokens": ["x"], "native": 1, "dimensions": 1, "pooling": "cls", "execution": {}},
        {"t": "unknown"},
        {},
        pack_event(b"j", Delta(text="generated", token_ids=b"")),
    ],
)
def test_events_of_another_form_end_the_channel(message: dict[str, object]) -> None:
    with pytest.raises(ChannelError):
        unpack_embedding_event(message)


@pytest.mark.parametrize("sent", [[], ["a"] * (MAX_INPUTS + 1), [1], [b"123"], [None]])
def test_jobs_of_another_form_end_the_channel(sent: list[object]) -> None:
    with pytest.raises(ChannelError):
        unpack_job({"t": "embed", "id": b"j" * 16, "inputs": sent, "dimensions": 0})


# -- what a model is for -----------------------------------------------------------------------------------------------


def facts(**metadata: object) -> ModelFacts:
    return facts_of({"general.architecture": "arch", "arch.context_length": 8, **metadata})


@pytest.mark.parametrize(
    ("configured", "metadata", "pooling"),
    [
        ("auto", {}, None),
        ("auto", {"arch.pooling_type": 0}, None),
        ("auto", {"arch.pooling_type": 1, "arch.attention.causal": False}, "mean"),
        ("auto", {"arch.pooling_type": 2}, "cls"),
        ("auto", {"arch.pooling_type": 3}, "last"),
        ("none", {"arch.pooling_type": 3}, None),
        ("mean", {}, "mean"),
        ("last", {"arch.pooling_type": 1}, "last"),
        ("cls", {"arch.attention.causal": False}, "cls"),
    ],
)
def test_what_a_model_is_for(configured: str, metadata: dict[str, object], pooling: str | None) -> None:
    assert resolve_pooling(configured, facts(**metadata)) == pooling


@pytest.mark.parametrize(
    ("configured", "metadata", "says"),
    [
        ("auto", {"arch.attention.causal": False}, r"set models\.pooling"),
        ("none", {"arch.attention.causal": False, "arch.pooling_type": 1}, r"set models\.pooling"),
        ("auto", {"arch.pooling_type": 4}, "ranks"),
        ("auto", {"arch.pooling_type": 5}, "unknown pooling_type 5"),
        ("sum", {}, "none of auto"),
    ],
)
def test_what_no_model_is_for(configured: str, metadata: dict[str, object], says: str) -> None:
    with pytest.raises(BootError, match=says):
        resolve_pooling(configured, facts(**metadata))


@pytest.mark.parametrize(
    "metadata", [{"arch.pooling_type": "mean"}, {"arch.pooling_type": True}, {"arch.attention.causal": 0}]
)
def test_metadata_of_another_type_are_refused(metadata: dict[str, object]) -> None:
    with pytest.raises(BootError, match="wrong type"):
        facts(**metadata)
