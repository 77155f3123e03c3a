"""Suites of questions: JSON lines of a closed schema (docs/benchmarks.md, "Quality").

Everything that is not as it has to be is a SuiteError with the number of the line; a suite with faults is not used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path

from appliance.errors import BootError

SHIPPED = "small"
"""The suite that comes with the package, by the name that may stand for a path."""
_FILE_BYTES_AT_MOST = 4 << 20
_LINE_BYTES_AT_MOST = 64 << 10
_QUESTIONS_AT_MOST = 4096
_PROMPT_CHARACTERS_AT_MOST = 16_384
_ANSWERS_AT_MOST = 16
_CHOICES_AT_MOST = 8
"""As many prompts as one request may have."""
_TOKENS_AT_MOST = 1024
_TOKENS = 16
_DIGITS_AT_MOST = 32
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class SuiteError(BootError):
    """A suite that cannot be used. `line` counts from 1; 0 where the fault is no line's. Free of the suite's text."""

    def __init__(self, name: str, line: int, reason: str) -> None:
        super().__init__(f"suite {name}, line {line}: {reason}" if line else f"suite {name}: {reason}")
        self.line = line
        self.reason = reason


class Kind(Enum):
    """How the answer to a question is scored, see `scoring`."""

    EXACT = "exact"
    CONTAINS = "contains"
    NUMBER = "number"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One line. `answers` are all that count as right: of kind NUMBER decimal numbers, each may be missed by `within`.

    Of kind CHOICE `answers` is one of `choices`, which are continuations of `prompt`; the others have no `choices`, are
    asked as a chat, and answered with at most `tokens` tokens. `system` "": no system message.
    """

    id: str
    prompt: str
    kind: Kind
    answers: tuple[str, ...] = ()
    numbers: tuple[Decimal, ...] = ()
    within: Decimal = Decimal(0)
    choices: tuple[str, ...] = ()
    system: str = ""
    tokens: int = _TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Questions in their order. `digest` is SHA-256 of the file: scores of two suites cannot be compared."""

    name: str
    digest: bytes
    questions: tuple[Question, ...]


def load_suite(name: str) -> Suite:
    """Read the suite at a path, or the shipped one by its name where there is no such file. Raises SuiteError."""
    path = Path(name)
    if name == SHIPPED and not path.exists():
        path = Path(__file__).with_name("suites") / f"{SHIPPED}.jsonl"
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_AT_MOST + 1)
    except OSError as error:
        raise SuiteError(name, 0, f"cannot be read: {error.strerror}") from error
    return parse_suite(content, name=path.name)


def parse_suite(content: bytes, *, name: str) -> Suite:
    """Raises SuiteError for the first line that is not as it has to be."""
    if len(content) > _FILE_BYTES_AT_MOST:
        raise SuiteError(name, 0, f"is larger than {_FILE_BYTES_AT_MOST} bytes")
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    if not lines:
        raise SuiteError(name, 0, "has no questions")
    if len(lines) > _QUESTIONS_AT_MOST:
        raise SuiteError(name, 0, f"has {len(lines)} lines, more than {_QUESTIONS_AT_MOST}")
    questions: dict[str, Question] = {}
    for number, line in enumerate(lines, start=1):
        try:
            question = _question(_fields(line))
            if question.id in questions:
                raise _Fault("'id' is that of an earlier line")
        except _Fault as fault:
            raise SuiteError(name, number, str(fault)) from None
        questions[question.id] = question
    return Suite(name=name, digest=hashlib.sha256(content).digest(), questions=tuple(questions.values()))


class _Fault(Exception):
    """What is wrong with a line, without its text."""


def _fields(line: bytes) -> dict[str, object]:
    if not line.strip():
        raise _Fault("is empty")
    if len(line) > _LINE_BYTES_AT_MOST:
        raise _Fault(f"has more than {_LINE_BYTES_AT_MOST} bytes")
    try:
        value = json.loads(
            line.decode("utf-8"),
            object_pairs_hook=_once,
            parse_float=Decimal,
            parse_int=_integer,
            parse_constant=_no_constant,
        )
    except UnicodeDecodeError:
        raise _Fault("is not UTF-8") from None
    except (ValueError, RecursionError):
        raise _Fault("is not JSON") from None
    if not isinstance(value, dict):
        raise _Fault("is not a JSON object")
    return value


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _Fault("has a field twice")
    return fields


def _integer(text: str) -> int:
    if len(text) > _DIGITS_AT_MOST:
        raise _Fault(f"has a number of more than {_DIGITS_AT_MOST} digits")
    return int(text)


def _no_constant(_text: str) -> object:
    raise _Fault("has a number that is not finite")


_ALWAYS = frozenset({"id", "prompt", "score", "answers"})
_CHAT = frozenset({"system", "tokens"})
_OF_KIND = {
    Kind.EXACT: _CHAT,
    Kind.CONTAINS: _CHAT,
    Kind.NUMBER: _CHAT | {"within"},
    Kind.CHOICE: frozenset({"choices"}),
}


def _question(fields: Mapping[str, object]) -> Question:
    kind = _kind(fields)
    for name in fields:
        if name not in _ALWAYS | _OF_KIND[kind]:
            raise _Fault(f"unknown field {ascii(name)[:66]} where the score is {kind.value!r}")
    identifier = _text(fields, "id", 64)
    if not _NAME.fullmatch(identifier):
        raise _Fault("'id' must be of a-z, 0-9, '.', '_' and '-', and begin with a letter or a digit")
    numeric = kind is Kind.NUMBER
    question = Question(
        id=identifier,
        prompt=_text(fields, "prompt", _PROMPT_CHARACTERS_AT_MOST),
        kind=kind,
        answers=() if numeric else _texts(fields, "answers", _ANSWERS_AT_MOST),
        numbers=_numbers(fields) if numeric else (),
        within=_number(fields.get("within", 0), "within"),
        choices=_texts(fields, "choices", _CHOICES_AT_MOST) if kind is Kind.CHOICE else (),
        system=_text(fields, "system", _PROMPT_CHARACTERS_AT_MOST) if "system" in fields else "",
        tokens=_tokens(fields.get("tokens", _TOKENS)),
    )
    if question.within < 0:
        raise _Fault("'within' is negative")
    if kind is Kind.CHOICE:
        _check_choices(question)
    return question


def _kind(fields: Mapping[str, object]) -> Kind:
    for name in sorted(_ALWAYS - fields.keys()):
        raise _Fault(f"{name!r} is missing")
    try:
        return Kind(fields["score"])
    except ValueError:
        raise _Fault(f"'score' must be one of {', '.join(kind.value for kind in Kind)}") from None


def _check_choices(question: Question) -> None:
    if len(question.choices) < 2:
        raise _Fault("'choices' must be at least two")
    if len(question.answers) != 1 or question.answers[0] not in question.choices:
        raise _Fault("'answers' must be one of 'choices'")
    if question.prompt != question.prompt.rstrip() or any(text != text.strip() for text in question.choices):
        raise _Fault("'prompt' may not end in white space, nor 'choices' begin or end in it: a blank joins them")


def _text(fields: Mapping[str, object], name: str, most: int) -> str:
    return _checked_text(fields[name], repr(name), most)


def _checked_text(value: object, where: str, most: int) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Fault(f"{where} must be text that is not blank")
    if len(value) > most:
        raise _Fault(f"{where} has more than {most} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _Fault(f"{where} holds a lone surrogate, which has no form in UTF-8")
    return value


def _texts(fields: Mapping[str, object], name: str, most: int) -> tuple[str, ...]:
    if name not in fields:
        raise _Fault(f"{name!r} is missing")
    values = _list(fields[name], name, most)
    texts = tuple(_checked_text(value, f"a text of {name!r}", _PROMPT_CHARACTERS_AT_MOST) for value in values)
    if len(set(texts)) != len(texts):
        raise _Fault(f"{name!r} has a text twice")
    return texts


def _numbers(fields: Mapping[str, object]) -> tuple[Decimal, ...]:
    return tuple(_number(value, "answers") for value in _list(fields["answers"], "answers", _ANSWERS_AT_MOST))


def _list(value: object, name: str, most: int) -> list[object]:
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise _Fault(f"{name!r} must be a list of 1 to {most}")
    return value


def _number(value: object, name: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise _Fault(f"{name!r} must have numbers")
    number = Decimal(value)
    if not number.is_finite() or abs(number.adjusted()) > _DIGITS_AT_MOST:
        raise _Fault(f"{name!r} has a number beyond {_DIGITS_AT_MOST} digits")
    return number


def _tokens(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _TOKENS_AT_MOST:
        raise _Fault(f"'tokens' must be a whole number from 1 to {_TOKENS_AT_MOST}")
    return value
