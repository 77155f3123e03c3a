"""Suites: a closed schema, and what is wrong with a line is told by its number and a reason, never by its text."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.suite import SHIPPED, Kind, SuiteError, load_suite, parse_suite
from appliance.errors import BootError

CANARY = "canary-4711"
EXACT = {"id": "a", "prompt": f"Say yes. {CANARY}", "score": "exact", "answers": ["yes"]}
NUMBER = {"id": "b", "prompt": "2 + 2?", "score": "number", "answers": [4]}
CHOICE = {"id": "c", "prompt": "The sky is", "score": "choice", "choices": ["blue", "loud"], "answers": ["blue"]}


def lines(*entries: object) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def without(entry: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in entry.items() if key != name}


def test_every_kind_of_question_is_read() -> None:
    contains = {**EXACT, "id": "d", "score": "contains", "answers": ["yes", "Yes"], "system": "Be brief.", "tokens": 3}
    suite = parse_suite(lines(EXACT, {**NUMBER, "answers": [4, 4.5], "within": 0.25}, CHOICE, contains), name="s")
    exact, number, choice, last = suite.questions
    assert (exact.kind, exact.answers, exact.tokens, exact.system) == (Kind.EXACT, ("yes",), 16, "")
    assert (number.numbers, number.within) == ((Decimal(4), Decimal("4.5")), Decimal("0.25"))
    assert (choice.choices, choice.answers) == (("blue", "loud"), ("blue",))
    assert (last.kind, last.answers, last.system, last.tokens) == (Kind.CONTAINS, ("yes", "Yes"), "Be brief.", 3)
    assert len(suite.digest) == 32


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"", 0, "has no questions"),
        (b"\n", 1, "is empty"),
        (lines(EXACT) + b"\n" + lines(NUMBER), 2, "is empty"),
        (lines(EXACT) + b"  \n", 2, "is empty"),
        (lines(EXACT) + b"{", 2, "is not JSON"),
        (b"[" * 60_000 + b"\n", 1, "is not JSON"),
        (b"\xef\xbb\xbf" + lines(EXACT), 1, "is not JSON"),
        (b"\xff\xfe\n", 1, "is not UTF-8"),
        (lines([EXACT]), 1, "is not a JSON object"),
        (lines(None), 1, "is not a JSON object"),
        (b'{"id": "a", "id": "b"}\n', 1, "has a field twice"),
        (b'{"id": NaN}\n', 1, "has a number that is not finite"),
        (b'{"id": -Infinity}\n', 1, "has a number that is not finite"),
        (b'{"id": ' + b"9" * 5000 + b"}\n", 1, "has a number of more than 32 digits"),
        (lines({**EXACT, "prompt": "x" * 70_000}), 1, "has more than 65536 bytes"),
        (lines({**EXACT, "prompt": "x" * 17_000}), 1, "'prompt' has more than 16384 characters"),
        (lines(without(EXACT, "id")), 1, "'id' is missing"),
        (lines(without(EXACT, "score")), 1, "'score' is missing"),
        (lines(without(EXACT, "answers")), 1, "'answers' is missing"),
        (lines({**EXACT, "answer": "x"}), 1, "unknown field 'answer' where the score is 'exact'"),
        (lines({**EXACT, "within": 1}), 1, "unknown field 'within' where the score is 'exact'"),
        (lines({**EXACT, "choices": ["yes", "no"]}), 1, "unknown field 'choices' where the score is 'exact'"),
        (lines({**CHOICE, "tokens": 3}), 1, "unknown field 'tokens' where the score is 'choice'"),
        (lines({**EXACT, "\x1b[2J" + "y" * 900: 1}), 1, "unknown field '\\x1b[2J"),
        (lines({**EXACT, "score": "Exact"}), 1, "'score' must be one of exact, contains, number, choice"),
        (lines({**EXACT, "score": ["exact"]}), 1, "'score' must be one of"),
        (lines({**EXACT, "id": "A b"}), 1, "'id' must be of a-z"),
        (lines({**EXACT, "id": ""}), 1, "'id' must be text that is not blank"),
        (lines({**EXACT, "id": 7}), 1, "'id' must be text that is not blank"),
        (lines({**EXACT, "id": "x" * 65}), 1, "'id' has more than 64 characters"),
        (lines({**EXACT, "prompt": " \n"}), 1, "'prompt' must be text that is not blank"),
        (lines({**EXACT, "prompt": None}), 1, "'prompt' must be text that is not blank"),
        (b'{"id": "a", "prompt": "\\ud800", "score": "exact", "answers": ["x"]}\n', 1, "a lone surrogate"),
        (lines({**EXACT, "system": ""}), 1, "'system' must be text that is not blank"),
        (lines({**EXACT, "answers": "yes"}), 1, "'answers' must be a list of 1 to 16"),
        (lines({**EXACT, "answers": []}), 1, "'answers' must be a list of 1 to 16"),
        (lines({**EXACT, "answers": ["y", "y"]}), 1, "'answers' has a text twice"),
        (lines({**EXACT, "answers": ["y", 1]}), 1, "a text of 'answers' must be text that is not blank"),
        (lines({**EXACT, "answers": [str(n) for n in range(17)]}), 1, "'answers' must be a list of 1 to 16"),
        (lines({**NUMBER, "answers": ["4"]}), 1, "'answers' must have numbers"),
        (lines({**NUMBER, "answers": [True]}), 1, "'answers' must have numbers"),
        (lines({**NUMBER, "answers": []}), 1, "'answers' must be a list of 1 to 16"),
        (b'{"id": "a", "prompt": "p", "score": "number", "answers": [1e400000]}\n', 1, "a number beyond 32 digits"),
        (lines({**NUMBER, "within": -1}), 1, "'within' is negative"),
        (lines({**NUMBER, "within": "1"}), 1, "'within' must have numbers"),
        (lines({**EXACT, "tokens": 0}), 1, "'tokens' must be a whole number from 1 to 1024"),
        (lines({**EXACT, "tokens": True}), 1, "'tokens' must be a whole number"),
        (lines({**EXACT, "tokens": 1.5}), 1, "'tokens' must be a whole number"),
        (lines({**EXACT, "tokens": 1025}), 1, "'tokens' must be a whole number"),
        (lines(without(CHOICE, "choices")), 1, "'choices' is missing"),
        (lines({**CHOICE, "choices": ["blue"]}), 1, "'choices' must be at least two"),
        (lines({**CHOICE, "choices": [str(n) for n in range(9)]}), 1, "'choices' must be a list of 1 to 8"),
        (lines({**CHOICE, "answers": ["red"]}), 1, "'answers' must be one of 'choices'"),
        (lines({**CHOICE, "answers": ["blue", "loud"]}), 1, "'answers' must be one of 'choices'"),
        (lines({**CHOICE, "choices": ["blue", " loud"]}), 1, "a blank joins them"),
        (lines({**CHOICE, "prompt": "The sky is "}), 1, "a blank joins them"),
        (lines(EXACT, {**NUMBER, "id": "a"}), 2, "'id' is that of an earlier line"),
        (lines(EXACT) * 4097, 0, "has 4097 lines, more than 4096"),
        (b" " * (4 << 20) + b"\n", 0, "is larger than 4194304 bytes"),
    ],
)
def test_a_bad_line_is_named_by_number_and_reason(content: bytes, line: int, reason: str) -> None:
    with pytest.raises(SuiteError) as caught:
        parse_suite(content, name="s.jsonl")
    assert caught.value.line == line
    assert reason in caught.value.reason
    text = str(caught.value)
    assert text.startswith(f"suite s.jsonl, line {line}: " if line else "suite s.jsonl: ")
    assert CANARY not in text
    assert text.isprintable()
    assert len(text) < 250


@given(st.binary(max_size=300) | st.dictionaries(st.text(max_size=9), st.text(max_size=9)).map(lines))
def test_whatever_a_file_holds_it_is_a_suite_or_a_suite_error(content: bytes) -> None:
    try:
        parse_suite(content, name="s")
    except SuiteError:
        pass


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        load_suite(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(BootError, match="cannot be read: Is a directory"):
        load_suite(str(tmp_path))


def test_the_shipped_suite_has_a_hundred_questions_of_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    suite = load_suite(SHIPPED)
    assert len(suite.questions) == 100
    assert {question.kind for question in suite.questions} == set(Kind)
    assert max(question.tokens for question in suite.questions) <= 16, "it has to be quick"
    assert len({question.prompt for question in suite.questions}) == 100
    (tmp_path / "small").write_bytes(lines(EXACT))
    assert len(load_suite(SHIPPED).questions) == 1, "a file of that name goes first"


def test_the_shipped_suite_is_in_the_wheel() -> None:
    code = "import importlib.resources as r; print((r.files('appliance.bench') / 'suites/small.jsonl').is_file())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
