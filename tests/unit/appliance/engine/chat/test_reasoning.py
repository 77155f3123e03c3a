"""Reasoning comes out of generated text the same whatever pieces it comes in, and leads back to that text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.chat.reasoning import LIMIT_BREAKS, ReasoningText, Tags

TAGS = Tags(start="<think>", end="</think>")
TEXT = st.text("<think>/ \nü", max_size=40)


def split(text: str, size: int, *, opened: bool) -> tuple[ReasoningText, str, str]:
    parser = ReasoningText(TAGS, opened=opened)
    parts = [parser.feed(text[start : start + size]) for start in range(0, len(text), size)]
    parts.append(parser.finish())
    return parser, "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@given(
    TEXT | st.builds(lambda a, b, c: f"{a}<think>{b}</think>{c}", TEXT, TEXT, TEXT), st.integers(1, 9), st.booleans()
)
def test_any_cut_gives_the_same_parts_and_they_lead_back(text: str, size: int, opened: bool) -> None:
    parser, reasoning, said = split(text, size, opened=opened)
    before, behind = parser.marks
    assert before + reasoning + behind + said == text
    assert parser.reasoning == reasoning
    whole, *parts = split(text, max(1, len(text)), opened=opened)
    assert (whole.marks, parts) == (parser.marks, [reasoning, said])


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, ("hm", "yes", ("<think>\n", "\n</think>\n\n"))),
        ("\n <think>hm</think>yes", False, ("hm", "yes", ("\n <think>", "</think>"))),
        ("hm\n</think>\nyes", True, ("hm", "yes", ("", "\n</think>\n"))),
        ("\n\n</think>\n\nyes", True, ("", "yes", ("\n\n", "</think>\n\n"))),
        ("yes <think>no</think>", False, ("", "yes <think>no</think>", ("", ""))),
        ("<thin", False, ("", "<thin", ("", ""))),
        ("<think>hm\n</thin", False, ("hm\n</thin", "", ("<think>", ""))),
        ("<think>a</think><think>b</think>", False, ("a", "<think>b</think>", ("<think>", "</think>"))),
        ("<think>" + "\n" * 10 + "x", False, ("\n\nx", "", ("<think>" + "\n" * LIMIT_BREAKS, ""))),
    ],
)
def test_parts(text: str, opened: bool, expected: tuple[str, str, tuple[str, str]]) -> None:
    parser, reasoning, said = split(text, 3, opened=opened)
    assert (reasoning, said, parser.marks) == expected
