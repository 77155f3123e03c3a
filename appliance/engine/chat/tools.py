"""Calls of tools in generated text: the grammar that keeps a model to their form, the parser that takes them out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.engine.chat.json_schema import Rules, literal
from appliance.engine.chat.reasoning import Tags
from appliance.engine.text import partial
from client_sdk.wire.tools import HERMES, CallSyntax

_ROOT = re.compile(r"^root ::= ", re.MULTILINE)
_GAP = r'"\n"{0,4}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that may be called. `parameters` is a JSON Schema of its arguments, an object."""

    name: str
    parameters: object


def grammar(tools: Sequence[Tool], *, optional: bool, parallel: bool, syntax: CallSyntax = HERMES) -> str:
    """The grammar of an answer that calls tools; `optional`: text may come first, and need not be followed by a call.

    Raises json_schema.SchemaRefused.
    """
    rules = Rules()
    rules.rules["call"] = " | ".join(
        _row(literal(tool.name + syntax.middle), rules.add(tool.parameters), _literal(syntax.after)) for tool in tools
    )
    following = (
        "" if not parallel or syntax.between is None else f"({_row(_literal(syntax.between + syntax.before))} call)*"
    )
    rest = syntax.opening[len(syntax.mark) :]
    rules.rules["calls"] = _row(_literal(rest), "call", following, _literal(syntax.end))
    if optional:
        rules.rules.update(_text_before(syntax.mark, prefix="t", then="calls", may_end=True))
    rules.rules["root"] = "t0" if optional else f"{literal(syntax.mark)} calls"
    return rules.text()


def after_reasoning(answer: str, tags: Tags, *, opened: bool) -> str:
    """The grammar `answer` with reasoning before it: always where the prompt opens it, else as the model likes."""
    rules = {
        **_text_before(tags.end, prefix="u", then=f"{_GAP} answer", may_end=False),
        "root": "u0" if opened else f"answer | {_GAP} {literal(tags.start)} u0",
    }
    renamed = _ROOT.sub("answer ::= ", answer, count=1)
    return renamed + "".join(f"{name} ::= {body}\n" for name, body in rules.items())


def _row(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _literal(text: str) -> str:
    return literal(text) if text else ""


def _text_before(mark: str, *, prefix: str, then: str, may_end: bool) -> dict[str, str]:
    """Rules of any text up to the first `mark`, followed by `then`; `may_end`: or without any mark.

    The rule numbered i is where the text so far ends with the first i characters of the mark and with no more of it
    (Knuth, Morris and Pratt).
    """
    rules = {}
    for index in range(len(mark)):
        reached = {sign: _reached(mark, mark[:index] + sign) for sign in sorted(set(mark))}
        going = {sign: size for sign, size in reached.items() if size}
        branches = ["" if may_end else None]
        branches += [
            f"{literal(sign)} {then if size == len(mark) else f'{prefix}{size}'}" for sign, size in going.items()
        ]
        branches.append(f"[^{''.join(_of_class(sign) for sign in going)}] {prefix}0")
        rules[f"{prefix}{index}"] = " | ".join(branch for branch in branches if branch is not None)
    return rules


def _reached(mark: str, seen: str) -> int:
    """With how many characters of the mark `seen` ends."""
    return next(size for size in range(len(seen), -1, -1) if seen.endswith(mark[:size]))


def _of_class(sign: str) -> str:
    return f"\\U{ord(sign):08x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """More of call number `index`: its name with the first one, then arguments as they come."""

    index: int
    name: str | None
    arguments: str


class ToolText:
    """Splits generated text that keeps to the grammar into plain text and calls, whatever pieces it comes in."""

    __slots__ = ("_json", "_pending", "_state", "_syntax", "calls", "text")

    def __init__(self, syntax: CallSyntax = HERMES) -> None:
        self.text = ""
        self.calls: list[tuple[str, str]] = []
        """(name, arguments) so far."""
        self._syntax = syntax
        self._state = "text"
        self._pending = ""
        self._json = _ObjectEnd()

    def feed(self, piece: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Take generated text; the plain text and the parts of calls that are certain now."""
        self._pending += piece
        text, deltas = "", list[CallDelta]()
        going_on = True
        while going_on:
            match self._state:
                case "text":
                    before, going_on = self._until(self._syntax.mark)
                    text += before
                    self._state = "opening" if going_on else "text"
                case "opening":
                    going_on = self._take(self._syntax.opening[len(self._syntax.mark) :], "name")
                case "name":
                    name, going_on = self._named()
                    if going_on:
                        deltas.append(CallDelta(index=len(self.calls), name=name, arguments=""))
                        self.calls.append((name, ""))
                case "arguments":
                    arguments, going_on = self._argued()
                    deltas += [self._more(arguments)] if arguments else []
                case _:
                    following = (self._syntax.between or "") + self._syntax.before
                    going_on = self._syntax.between is not None and self._take(following, "name")
        self.text += text
        return text, tuple(deltas)

    def finish(self) -> tuple[str, tuple[CallDelta, ...]]:
        """The text has ended: what was held back for what might have come is text or arguments after all."""
        if self._state == "arguments" and self._json.ended and not self._syntax.after:
            self._state = "after"
        if self._state == "after":
            return "", ()  # `complete` still needs what is pending
        pending, self._pending = self._pending, ""
        if self._state == "text" and pending:
            self.text += pending
            return pending, ()
        return "", (self._more(pending),) if self._state == "arguments" and pending else ()

    @property
    def complete(self) -> bool:
        """There are calls, and nothing of the last one is missing."""
        return self._state == "after" and self._pending == self._syntax.end

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
        cut = len(before) - partial(before, mark)
        self._pending = before[cut:]
        return before[:cut], False

    def _take(self, expected: str, then: str) -> bool:
        if not self._pending.startswith(expected):
            return False
        self._pending = self._pending.removeprefix(expected)
        self._state = then
        return True

    def _named(self) -> tuple[str, bool]:
        name, found, rest = self._pending.partition(self._syntax.middle)
        if found:
            self._pending = rest
            self._state = "arguments"
            self._json = _ObjectEnd()
        return name, bool(found)

    def _argued(self) -> tuple[str, bool]:
        """More of the arguments, and whether they are all there: a JSON object, then what white space follows it."""
        size = self._json.feed(self._pending)
        arguments, self._pending = self._pending[:size], self._pending[size:]
        if not self._json.ended:
            return arguments, False
        after = self._syntax.after
        if after:
            blank, ended = self._until(after)
        else:
            behind = self._pending.lstrip()
            blank, ended = self._pending[: len(self._pending) - len(behind)], bool(behind)
            self._pending = behind
        if ended:
            self._state = "after"
        return arguments + blank, ended


class _ObjectEnd:
    """Finds the end of one JSON object in text that comes in pieces."""

    __slots__ = ("_depth", "_escaped", "_quoted", "ended")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self.ended = False

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        if self.ended:
            return 0
        for index, sign in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or sign != '"'
                self._escaped = not self._escaped and sign == "\\"
            elif sign == '"':
                self._quoted = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return index + 1
        return len(text)
