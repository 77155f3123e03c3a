"""How generated text spells calls of tools. A receipt commits to that text, an answer carries the calls: both sides
must agree on it to the byte.

A call is `<tool_call>`, a line break, `{"name": NAME, "arguments": ARGUMENTS}`, a line break, `</tool_call>`; calls are
one line break apart, all other text comes before the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

OPEN = "<tool_call>"
CLOSE = "}\n</tool_call>"
BETWEEN = "\n"


def head(name: str) -> str:
    """What stands between OPEN and the arguments."""
    return f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def spelled(text: str, calls: Iterable[tuple[str, str]]) -> str:
    """The text that was generated for `text` and calls (name, arguments), all of them complete."""
    return text + BETWEEN.join(f"{OPEN}{head(name)}{arguments}{CLOSE}" for name, arguments in calls)
