"""Huge texts are refused by their beginning: reading megabytes of one would hold up everybody else for seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PART_CHARACTERS = 1 << 16
CUT_TOKENS = 256


def surely_longer(text: str, most: int, tokenize: Callable[[str], Sequence[int]]) -> bool:
    """Whether `text` has more than `most` tokens, as soon as its parts tell; False where it may have fewer.

    What is cut at the end of a part may take more tokens than it would uncut, which is allowed for. A text of one part
    is not read.
    """
    if len(text) <= PART_CHARACTERS:
        return False
    seen = 0
    for start in range(0, len(text), PART_CHARACTERS):
        seen += len(tokenize(text[start : start + PART_CHARACTERS])) - CUT_TOKENS
        if seen > most:
            return True
    return False
