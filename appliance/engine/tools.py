"""Calls of tools in generated text: the grammar that keeps a model to their form, the parser that takes them out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.engine.json_schema import Rules, literal
from client_sdk.wire import tools as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that may be called. `parameters` is a JSON Schema of its arguments, an object."""

    name: str
    parameters: object


def grammar(tools: Sequence[Tool], *, optional: bool, parallel: bool) -> str:
    """The grammar of an answer that calls tools; `optional`: text may come first, and need not be followed by a call.

    Raises json_schema.SchemaRefused.
    """
    rules = Rules()
    bodies = [f"{literal(wire.head(tool.name))} {rules.add(tool.parameters)} {literal(wire.CLOSE)}" for tool in tools]
    rules.rules["call"] = " | ".join(bodies)
    more = f" ({literal(wire.BETWEEN + wire.OPEN)} call)*" if parallel else ""
    rules.rules["calls"] = f"call{more}"
    if optional:
        rules.rules.update(_text_before(wire.OPEN))
        root = "t0"
    else:
        root = f"{literal(wire.OPEN)} calls"
    rules.rules["root"] = root
    return rules.text()


def _text_before(mark: str) -> dict[str, str]:
    """Rules of any text in which `mark` occurs at most once, followed by `calls`: rule t(i) is where the text so far
    ends with the first i characters of the mark. No character of the mark but the first occurs in it twice as a start,
    so that a mismatch begins anew (Knuth, Morris and Pratt's failure function is 0 everywhere)."""
    first = mark[0]
    assert first not in mark[1:]
    rules = {}
    for index, wanted in enumerate(mark):
        following = "calls" if index == len(mark) - 1 else f"t{index + 1}"
        again = "" if index == 0 else f' | "{first}" t1'
        excluded = wanted if index == 0 else wanted + first
        rules[f"t{index}"] = f'| "{wanted}" {following}{again} | [^{excluded}] t0'
    return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """More of call number `index`: its name with the first one, then arguments as they come."""

    index: int
    name: str | None
    arguments: str


class ToolText:
    """Splits generated text that keeps to the grammar into plain text and calls, whatever pieces it comes in."""

    __slots__ = ("_pending", "_state", "calls", "text")

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[tuple[str, str]] = []
        """(name, arguments) so far."""
        self._state = "text"
        self._pending = ""

    def feed(self, piece: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Take generated text; the plain text and the parts of calls that are certain now."""
        self._pending += piece
        text, deltas = "", list[CallDelta]()
        while True:
            if self._state == "text":
                before, found = self._until(wire.OPEN)
                text += before
                if not found:
                    break
                self._state = "head"
            elif self._state == "head":
                name = self._name()
                if name is None:
                    break
                deltas.append(CallDelta(index=len(self.calls), name=name, arguments=""))
                self.calls.append((name, ""))
                self._state = "arguments"
            elif self._state == "arguments":
                arguments, found = self._until(wire.CLOSE)
                if arguments:
                    deltas.append(self._more(arguments))
                if not found:
                    break
                self._state = "after"
            elif not self._next():
                break
        self.text += text
        return text, tuple(deltas)

    def finish(self) -> tuple[str, tuple[CallDelta, ...]]:
        """The text has ended: what was held back for what might have come is text or arguments after all."""
        pending, self._pending = self._pending, ""
        if self._state == "text" and pending:
            self.text += pending
            return pending, ()
        return "", (self._more(pending),) if self._state == "arguments" and pending else ()

    @property
    def complete(self) -> bool:
        """There are calls, and the last one is whole."""
        return self._state == "after"

    def _more(self, arguments: str) -> CallDelta:
        name, so_far = self.calls[-1]
        self.calls[-1] = (name, so_far + arguments)
        return CallDelta(index=len(self.calls) - 1, name=None, arguments=arguments)

    def _until(self, mark: str) -> tuple[str, bool]:
        """Text up to the mark, and whether it was found; what may be its beginning stays pending."""
        before, found, rest = self._pending.partition(mark)
        if found:
            self._pending = rest
            return before, True
        held = next((size for size in range(len(mark) - 1, 0, -1) if before.endswith(mark[:size])), 0)
        cut = len(before) - held
        self._pending = before[cut:]
        return before[:cut], False

    def _name(self) -> str | None:
        before, found, rest = self._pending.partition(', "arguments": ')
        if not found:
            return None
        self._pending = rest
        name = json.loads(before.removeprefix('\n{"name": '))
        assert isinstance(name, str)
        return name

    def _next(self) -> bool:
        following = wire.BETWEEN + wire.OPEN
        if not self._pending.startswith(following):
            return False
        self._pending = self._pending.removeprefix(following)
        self._state = "head"
        return True
