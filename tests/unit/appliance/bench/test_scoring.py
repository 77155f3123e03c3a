"""What counts as a right answer, strictly and relaxedly."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.asking import log_probabilities
from appliance.bench.scoring import Score, score_choice, score_text
from appliance.bench.suite import Kind, Question
from client_sdk.errors import MalformedError

RIGHT, RELAXED, WRONG = (
    Score(strict=True, relaxed=True),
    Score(strict=False, relaxed=True),
    Score(strict=False, relaxed=False),
)


def question(kind: Kind, *answers: str, within: str = "0") -> Question:
    numbers = tuple(map(Decimal, answers)) if kind is Kind.NUMBER else ()
    return Question(
        id="q", prompt="p", kind=kind, answers=() if numbers else answers, numbers=numbers, within=Decimal(within)
    )


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Paris", RIGHT),
        (" Paris\n", RIGHT),
        ("Lutetia", RIGHT),
        ("paris", RELAXED),
        ("Paris.", RELAXED),
        ('It is "PARIS".', RELAXED),
        ("Parisian", WRONG),
        ("", WRONG),
        ("London", WRONG),
    ],
)
def test_exact(text: str, score: Score) -> None:
    assert score_text(question(Kind.EXACT, "Paris", "Lutetia"), text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The capital is Paris.", RIGHT),
        ("**Paris**", RIGHT),
        ("PARIS", RELAXED),
        ("a Parisian", RELAXED),
        ("\uff30aris", RELAXED),
        ("Par is", WRONG),
        ("", WRONG),
    ],
)
def test_contains(text: str, score: Score) -> None:
    assert score_text(question(Kind.CONTAINS, "Paris"), text) == score


def test_an_answer_is_no_pattern() -> None:
    assert score_text(question(Kind.CONTAINS, "a.c"), "abc") == WRONG
    assert score_text(question(Kind.CONTAINS, "C++"), "It is C++!") == RIGHT


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("12", "12", RIGHT),
        ("12", "7 + 5 = 12.", RIGHT),
        ("12", "It is 12, for 7 and 5.", RELAXED),
        ("12", "120", WRONG),
        ("12", "1.2", WRONG),
        ("12", "", WRONG),
        ("12", "twelve", WRONG),
        ("-3", "4 - 7 = -3", RIGHT),
        ("-3", "\u22123", RIGHT),
        ("3", "10-7 = 3", RIGHT),
        ("-7", "10-7", WRONG),
        ("7", "10-7", RIGHT),
        ("1000", "$1,000.00", RIGHT),
        ("2000", "1,2000", RIGHT),
        ("3.5", "x=3.5!", RIGHT),
        ("0.5", "0.50", RIGHT),
        ("5", "9" * 5000 + " 5", RIGHT),
    ],
)
def test_number(answer: str, text: str, score: Score) -> None:
    assert score_text(question(Kind.NUMBER, answer), text) == score


def test_a_number_may_be_missed_by_as_much_as_the_line_says() -> None:
    near = question(Kind.NUMBER, "10", within="0.1")
    assert score_text(near, "9.9") == RIGHT
    assert score_text(near, "9.89") == WRONG


@given(
    st.sampled_from([Kind.EXACT, Kind.CONTAINS, Kind.NUMBER]), st.text(max_size=60) | st.from_regex(r"[-0-9,. ]{0,40}")
)
def test_what_is_strictly_right_is_relaxedly_right(kind: Kind, text: str) -> None:
    asked = question(kind, "7", "12")
    score = score_text(asked, text)
    assert score.relaxed or not score.strict


def choices(*texts: str, right: str) -> Question:
    return Question(id="q", prompt="The sky is", kind=Kind.CHOICE, choices=texts, answers=(right,))


@pytest.mark.parametrize(
    ("numbers", "score"),
    [
        ([-1.0, -2.0], RIGHT),
        ([-2.0, -1.0], WRONG),
        ([-1.0, -1.0], RELAXED),
        ([-2.0, -1.9], RELAXED),
        ([-4.0, -1.0], WRONG),
    ],
)
def test_a_choice_has_to_be_the_most_probable_alone(numbers: list[float], score: Score) -> None:
    assert score_choice(choices("blueblue", "loud", right="blueblue"), numbers) == score


def completion(*entries: tuple[list[int], list[float | None]]) -> dict[str, object]:
    measured = [{"text_offset": offsets, "token_logprobs": numbers} for offsets, numbers in entries]
    found = [{"index": index, "logprobs": each} for index, each in enumerate(measured)]
    return {"choices": found[::-1]}


def test_a_choice_is_all_of_its_tokens_and_none_of_the_prompt_or_behind_it() -> None:
    asked = choices("blue", "very loud", right="blue")  # the prompt ends at 10, the choices at 15 and 20
    body = completion(
        ([0, 3, 7, 10, 15], [None, -9.0, -9.0, -0.5, -9.0]),
        ([0, 3, 9, 15, 20], [None, -9.0, -0.25, -0.5, -9.0]),
    )
    assert log_probabilities(body, asked) == [-0.5, -0.75]


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"choices": [{"index": 0, "logprobs": None}]},
        completion(([0, 10], [None, -1.0])),
        completion(([0], [None]), ([0], [None])),
        completion(([0, 10], [None]), ([0, 10], [None, -1.0])),
        completion(([0, 10], [None, "x"]), ([0, 10], [None, -1.0])),  # type: ignore[list-item]
    ],
)
def test_a_completion_without_them_is_malformed(body: object) -> None:
    with pytest.raises(MalformedError, match="question q"):
        log_probabilities(body, choices("blue", "loud", right="blue"))
