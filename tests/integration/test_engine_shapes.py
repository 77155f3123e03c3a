"""Logits of the demo model, bit for bit the same however a prompt is cut and whoever is evaluated beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

llama_cpp = pytest.importorskip("llama_cpp")

from appliance.engine.batch import Segment  # noqa: E402
from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions  # noqa: E402
from tests import ggml_ops  # noqa: E402

pytestmark = pytest.mark.model

_PROMPT, _MORE, _OTHERS = 320, 3, 8


def _tokens(count: int, stride: int) -> list[int]:
    return [1 + index * stride % 40_000 for index in range(count)]


class Conversation:
    """Logits after a prompt and after some tokens more, one at a time."""

    def __init__(self, model: Path, threads: int, sequences: int = _OTHERS + 1) -> None:
        fd = os.open(model, os.O_RDONLY)
        options = RuntimeOptions(fd=fd, kv_tokens=4096, n_batch=512, n_sequences=sequences, threads=threads)
        self.runtime = LlamaRuntime(options, progress=lambda _: None)
        os.close(fd)

    def evaluate(self, sequence: int, start: int, tokens: Sequence[int], *beside: Segment) -> bytes:
        own = Segment(sequence=sequence, position=start, tokens=list(tokens), outputs=1)
        self.runtime.decode([own, *beside])
        return self.runtime.logits(len(own.tokens) - 1).tobytes()

    def run(self, *, piece: int, sequence: int = 0) -> list[bytes]:
        prompt, found = _tokens(_PROMPT, 7919), [b""]
        for start in range(0, _PROMPT, piece):
            found[0] = self.evaluate(sequence, start, prompt[start : start + piece])
        for index, token in enumerate(_tokens(_MORE, 104_729)):
            found.append(self.evaluate(sequence, _PROMPT + index, [token]))
        return found


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> list[bytes]:
    return Conversation(smollm2, threads=1).run(piece=512)


@pytest.mark.parametrize("piece", [7, 63, 64, 200])
def test_pieces_of_a_prompt(smollm2: Path, expected: list[bytes], piece: int) -> None:
    assert Conversation(smollm2, threads=1).run(piece=piece) == expected


def test_a_prompt_token_by_token(smollm2: Path, expected: list[bytes]) -> None:
    assert Conversation(smollm2, threads=1).run(piece=1) == expected


@pytest.mark.parametrize("threads", [2, 4])
def test_threads(smollm2: Path, expected: list[bytes], threads: int) -> None:
    assert Conversation(smollm2, threads=threads).run(piece=512) == expected


def test_every_variant_that_this_machine_has(smollm2: Path, expected: list[bytes]) -> None:
    ggml = ggml_ops.library()
    for name in ggml_ops.available(ggml)[1:]:
        with ggml_ops.variant(ggml, name):
            assert Conversation(smollm2, threads=1).run(piece=64) == expected, name


def test_beside_eight_sequences_and_behind_holes(smollm2: Path, expected: list[bytes]) -> None:
    """Cells of others before and between one's own, some of them given up again."""
    talk = Conversation(smollm2, threads=1)
    prompt = _tokens(_PROMPT, 7919)
    for sequence in range(1, _OTHERS + 1):
        talk.evaluate(sequence, 0, _tokens(40 + sequence, 13 * sequence))
    talk.runtime.forget(2)
    talk.runtime.forget(5, start=20)
    for start in range(0, _PROMPT, 80):
        rows = [
            Segment(sequence=sequence, position=40 + sequence + start // 80, tokens=[11 * sequence], outputs=1)
            for sequence in (1, 3, 4, 6, 7, 8)
        ]
        last = talk.evaluate(0, start, prompt[start : start + 80], *rows)
        talk.runtime.forget(7, start=40 + 7 + start // 80)
        talk.evaluate(7, 40 + 7 + start // 80, [77])
    found = [last]
    for index, token in enumerate(_tokens(_MORE, 104_729)):
        beside = Segment(sequence=5, position=20 + index, tokens=[9], outputs=1)
        found.append(talk.evaluate(0, _PROMPT + index, [token], beside))
    assert found == expected
