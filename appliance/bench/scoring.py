"""Whether an answer is right. Pure; what is strictly right is relaxedly right too.

| kind | strict | relaxed |
|---|---|---|
| exact | the text is an answer, blanks around it aside | an answer stands in it as whole words, letter case aside |
| contains | an answer stands in the text, as whole words | anywhere, letter case aside |
| number | the last number in the text is an answer | any number in the text is |
| choice | the right continuation is more probable than each other one | that, or it is by the mean for each character |
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from appliance.bench.suite import Kind, Question

_NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
"""A hyphen behind a word, a number or a bracket is no sign."""
_DIGITS_AT_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    strict: bool
    relaxed: bool


def score_text(question: Question, text: str) -> Score:
    """Of an answer to a question of any kind but CHOICE."""
    match question.kind:
        case Kind.EXACT:
            strict = text.strip() in question.answers
            relaxed = any(_stands_in(_folded(answer), _folded(text)) for answer in question.answers)
        case Kind.CONTAINS:
            strict = any(_stands_in(answer, text) for answer in question.answers)
            relaxed = any(_folded(answer) in _folded(text) for answer in question.answers)
        case _:
            found = [_right(number, question) for number in _numbers(text)]
            strict, relaxed = found[-1:] == [True], any(found)
    return Score(strict=strict, relaxed=strict or relaxed)


def score_choice(question: Question, log_probabilities: Sequence[float]) -> Score:
    """`log_probabilities`: of each of the question's choices, whole, behind the prompt."""
    right = question.choices.index(question.answers[0])
    means = [total / len(choice) for total, choice in zip(log_probabilities, question.choices, strict=True)]
    strict = _greatest(log_probabilities) == right
    return Score(strict=strict, relaxed=strict or _greatest(means) == right)


def chosen(log_probabilities: Sequence[float]) -> int:
    """The most probable of the choices; of equal ones the first."""
    return max(range(len(log_probabilities)), key=lambda place: log_probabilities[place])


def _greatest(values: Sequence[float]) -> int | None:
    """None where two are equally great: a tie decides for nobody."""
    best = chosen(values)
    return best if values.count(values[best]) == 1 else None


def _right(number: Decimal, question: Question) -> bool:
    return any(abs(number - answer) <= question.within for answer in question.numbers)


def _numbers(text: str) -> Iterator[Decimal]:
    for found in _NUMBER.finditer(text):
        digits = found[0].replace(",", "").replace("\u2212", "-")
        if len(digits) <= _DIGITS_AT_MOST:
            yield Decimal(digits)


def _stands_in(answer: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
