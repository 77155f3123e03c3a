"""How generated text spells calls of tools, and what separates reasoning from it. A receipt commits to that text, an
answer carries its parts: both sides must agree on it to the byte.

The form of calls is the model's own where its chat template shows one, and stands in the receipt then. Without a word
there it is HERMES: `<tool_call>`, a line break, `{"name": NAME, "arguments": ARGUMENTS}`, a line break,
`</tool_call>`; calls are one line break apart. All other text comes before the first call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

FACT_CHAT_FORMAT = "chat-format"
FACT_FORMAT = "tool-format"
FACT_SYNTAX = "tool-syntax"
FACT_TAGS = "reasoning-tags"
FACT_MARKS = "reasoning-marks"
FACT_REASONING_TOKENS = "reasoning-tokens"
FORMAT_TEMPLATE = "template"
FORMAT_HERMES = "hermes"

_MAX_MARK_CHARS = 256
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_NO_MARKS = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """What stands around the names and the arguments of calls.

    `start`, then for each call `before`, its name, `middle`, its arguments (a JSON object), `after`, calls being
    `between` apart, then `end`. `between` None: there is never more than one call.
    """

    start: str
    before: str
    middle: str
    after: str
    between: str | None
    end: str

    @property
    def opening(self) -> str:
        """What stands before the first name."""
        return self.start + self.before

    @property
    def mark(self) -> str:
        """The beginning of `opening` that text before calls never has: its first tag, or all of it."""
        tag = _TAG.match(self.opening)
        return self.opening if tag is None else tag[0]

    def head(self, name: str) -> str:
        """What stands between `mark` and the arguments of a first call."""
        return self.opening[len(self.mark) :] + name + self.middle

    @property
    def next(self) -> str:
        """What stands between the arguments of one call and the name of the next; "" where there is no next one."""
        return "" if self.between is None else self.after + self.between + self.before

    def spelled(self, text: str, calls: Iterable[tuple[str, str]]) -> str:
        """The text that was generated for `text` and calls (name, arguments), all of them complete."""
        each = [f"{self.before}{name}{self.middle}{arguments}{self.after}" for name, arguments in calls]
        return f"{text}{self.start}{(self.between or '').join(each)}{self.end}" if each else text

    def encode(self) -> str:
        """As receipts state it: a JSON array of the six."""
        return json.dumps(astuple(self), ensure_ascii=False, separators=(",", ":"))


HERMES = CallSyntax(
    start="",
    before='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    after="}\n</tool_call>",
    between="\n",
    end="",
)


def syntax_of(execution: Mapping[str, object]) -> CallSyntax:
    """The form that a receipt's execution facts state, HERMES where they state none. Raises ValueError."""
    stated = execution.get(FACT_SYNTAX)
    if stated is None:
        return HERMES
    parts = _texts(json.loads(stated)) if isinstance(stated, str) else ()
    if len(parts) != 6 or any(part is None for part in (*parts[:4], parts[5])):
        raise ValueError("the form of calls is not six texts")
    start, before, middle, after, between, end = parts
    syntax = CallSyntax(
        start=start or "", before=before or "", middle=middle or "", after=after or "", between=between, end=end or ""
    )
    if not syntax.opening or not syntax.middle:
        raise ValueError("a form of calls without a beginning, or without anything behind the name")
    return syntax


def tags_text(start: str, end: str) -> str:
    """As receipts state the tags that stand around reasoning: a JSON array of two texts."""
    return json.dumps([start, end], ensure_ascii=False, separators=(",", ":"))


def tags_of(execution: Mapping[str, object]) -> tuple[str, str] | None:
    """The tags that stand around reasoning; None where the engine knows of none. Raises ValueError."""
    stated = execution.get(FACT_TAGS)
    if stated is None:
        return None
    parts = _texts(json.loads(stated)) if isinstance(stated, str) else ()
    if len(parts) != 2 or not parts[0] or not parts[1]:
        raise ValueError("the tags of reasoning are not two texts")
    return parts[0], parts[1]


def marks_text(marks: Iterable[tuple[str, str]]) -> str:
    """As receipts state what stood around the reasoning of each choice: a JSON array of pairs."""
    return json.dumps([list(pair) for pair in marks], ensure_ascii=False, separators=(",", ":"))


def marks_of(execution: Mapping[str, object], choices: int) -> list[tuple[str, str]]:
    """What stood before and behind the reasoning of each choice, empty where facts say nothing. Raises ValueError."""
    stated = execution.get(FACT_MARKS)
    if stated is None:
        return [_NO_MARKS] * choices
    listed = json.loads(stated) if isinstance(stated, str) else None
    if type(listed) is not list or len(listed) != choices:
        raise ValueError("the marks of reasoning are not one pair for each choice")
    marks: list[tuple[str, str]] = []
    for item in listed:
        opened, *closed = _texts(item)
        if opened is None or len(closed) != 1 or closed[0] is None:
            raise ValueError("the marks of reasoning are not pairs of texts")
        marks.append((opened, closed[0]))
    return marks


def _texts(value: object) -> tuple[str | None, ...]:
    """Raises ValueError for what is no list of short texts or nulls."""
    if type(value) is not list or not value:
        raise ValueError("not a list")
    if not all(item is None or (type(item) is str and len(item) <= _MAX_MARK_CHARS) for item in value):
        raise ValueError("not short texts")
    return tuple(value)
