"""Find out by rendering it how a chat template takes tools, spells calls and sets reasoning apart.

A template says these things in code, so it is asked: conversations of known words are rendered, and what stands around
the words is the model's own form. Nothing is concluded from a model's name. What cannot be told stays unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2.nodes

from appliance.engine.chat.chat_template import ChatTemplate, TemplateRejected, TemplateTooSlow
from appliance.engine.chat.reasoning import Tags
from appliance.engine.types import ChatFormat
from appliance.errors import BadRequest
from client_sdk.wire.tools import CallSyntax

Document = Mapping[str, object]

_DATE = "2026-01-01"
_ASKED, _SAID, _THOUGHT, _RESULT = "Probe-asks", "Probe-says", "Probe-thinks", "Probe-result"
_IDS = ("prbcallA1", "prbcallB2")  # nine letters and digits: some templates want nothing else
_NAMES = ("prb_first", "prb_second")
_ARGUMENTS = ({"prb_key": "prb_one"}, {"prb_key": "prb_two"})
_USER: Document = {"role": "user", "content": _ASKED}
_TOOL: Document = {
    "type": "function",
    "function": {
        "name": "prb_listed",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}},
    },
}
_TAG = r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]"
_TAG_BEFORE = re.compile(rf"({_TAG})\s*\Z")
_TAG_BEHIND = re.compile(rf"\s*({_TAG})\s*\Z")
_CLOSING = re.compile(r"</([^<>/\s]{1,62})>")


def probe(template: ChatTemplate, *, reasoning: tuple[str, str] | None, detect: bool, tools: bool = True) -> ChatFormat:
    """The format of a template. `reasoning`: configured tags (start, end); else they are looked for if `detect`.

    Without `tools` it is taken for one that takes none.
    Raises TemplateTooSlow where the caller's timer interrupts it, between two pieces of template code TemplateTimeout.
    """
    asker = _Asker(template)
    prompt = asker.text([_USER], prompting=True)
    if prompt is None:
        return ChatFormat(reasoning=None if reasoning is None else Tags(start=reasoning[0], end=reasoning[1]))
    tags = None
    if reasoning is not None:
        tags = Tags(start=reasoning[0], end=reasoning[1])
    elif detect:
        tags = _shown_reasoning(asker, prompt) or _cut_reasoning(template, prompt)
    takes_tools = tools and "tools" in template.variables
    calls, way = _calls(asker, tags) if takes_tools else (None, _WAYS[0])
    return ChatFormat(
        takes_tools=takes_tools,
        calls=calls,
        arguments_as_text=way.as_text,
        no_content_as_null=way.null,
        reasoning=tags,
        opens_reasoning=tags is not None and prompt.rstrip().endswith(tags.start),
    )


@dataclass(frozen=True, slots=True)
class _Asker:
    template: ChatTemplate

    def text(
        self, messages: Sequence[Document], *, tools: Sequence[Document] | None = None, prompting: bool = False
    ) -> str | None:
        """None where the template refuses the messages."""
        try:
            return self.template.run(messages, tools, template_date=_DATE, prompting=prompting)
        except TemplateTooSlow:
            raise
        except (TemplateRejected, BadRequest):
            return None


def _shown_reasoning(asker: _Asker, prompt: str) -> Tags | None:
    """The tags around `reasoning_content` of an earlier message: nothing but white space stands beside them."""
    text = asker.text([_USER, {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT}])
    if text is None or text.count(_THOUGHT) != 1 or text.count(_SAID) != 1:
        return None
    before, _, rest = text.partition(_THOUGHT)
    between, said, _ = rest.partition(_SAID)
    start, end = _TAG_BEFORE.search(before), _TAG_BEHIND.match(between)
    if not said or start is None or end is None:
        return None
    if prompt.rstrip() not in (before[: start.start()].rstrip(), before.rstrip()):
        return None
    return Tags(start=start[1], end=end[1])


def _cut_reasoning(template: ChatTemplate, prompt: str) -> Tags | None:
    """The tag at which the template cuts what assistants said, or the one its prompts end with and that it closes."""
    cut: set[str] = set()
    texts: set[str] = set()
    if template.tree is not None:
        for call in template.tree.find_all(jinja2.nodes.Call):
            if isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr == "split":
                cut.update(
                    found[1]
                    for argument in call.args
                    if isinstance(argument, jinja2.nodes.Const)
                    and isinstance(argument.value, str)
                    and (found := _CLOSING.fullmatch(argument.value))
                )
        texts = {node.value for node in template.tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    if len(cut) == 1:
        (name,) = cut
        return Tags(start=f"<{name}>", end=f"</{name}>")
    last = _TAG_BEFORE.search(prompt)
    if last is not None and last[1].startswith("<") and any(f"</{last[1][1:]}" in text for text in texts):
        return Tags(start=last[1], end=f"</{last[1][1:]}")
    return None


@dataclass(frozen=True, slots=True)
class _Way:
    """How templates may want messages that make calls: the arguments as text, null for the content."""

    as_text: bool
    null: bool


_WAYS = tuple(_Way(as_text, null) for null in (False, True) for as_text in (False, True))


def _calls(asker: _Asker, tags: Tags | None) -> tuple[CallSyntax | None, _Way]:
    for way in _WAYS:
        syntax = _syntax(asker, tags, way)
        if syntax is not None:
            return syntax, way
    return None, _WAYS[0]


def _syntax(asker: _Asker, tags: Tags | None, way: _Way) -> CallSyntax | None:
    """The form of calls, from one call and from two; None where it has parts that cannot be told from each other."""
    turns = [_turn(asker, tags, count, way) for count in (1, 2)]
    if turns[0] is None:
        return None
    single = _pieces(turns[0], 1)
    if single is None or not _shows_results(asker, way):
        return None
    opening, middle, tail = single
    pair = None if turns[1] is None else _pieces(turns[1], 2)
    if pair is None:
        syntax = CallSyntax(start="", before=opening, middle=middle, after=tail, between=None, end="")
    else:
        first, second, last, between, again = pair
        if (first, second, last) != (opening, middle, middle):
            return None
        before = _shared(opening[::-1], between[::-1])[::-1]
        gap = between[: len(between) - len(before)]
        after = _shared(gap, again)
        syntax = CallSyntax(
            start=opening[: len(opening) - len(before)],
            before=before,
            middle=middle,
            after=after,
            between=gap[len(after) :],
            end=again[len(after) :],
        )
        if syntax.spelled("", zip(_NAMES, map(_json, _ARGUMENTS), strict=True)) != turns[1]:
            return None
    return syntax if syntax.mark and syntax.middle and not _same_sign(syntax) else None


def _same_sign(syntax: CallSyntax) -> bool:
    """Calls that cannot be told apart from the end of the arguments."""
    return not syntax.after and bool(syntax.between or syntax.end) and (syntax.between or syntax.end)[0].isspace()


def _turn(asker: _Asker, tags: Tags | None, count: int, way: _Way) -> str | None:
    """What an assistant generates that makes the first `count` calls and says nothing else."""
    prompt = asker.text([_USER], tools=[_TOOL], prompting=True)
    plain = asker.text([_USER, {"role": "assistant", "content": _SAID}], tools=[_TOOL])
    text = asker.text([_USER, _caller(count, way)], tools=[_TOOL])
    if prompt is None or plain is None or text is None or plain.count(_SAID) != 1:
        return None
    ending = plain.partition(_SAID)[2]
    begun = prompt.rstrip()
    if tags is not None:
        begun = begun.removesuffix(tags.start).rstrip()
    if not text.startswith(begun) or not text.endswith(ending) or len(text) <= len(begun) + len(ending):
        return None
    made = text[len(begun) : len(text) - len(ending)].strip()
    if tags is not None:
        empty = re.match(rf"({re.escape(tags.start)})?\s*{re.escape(tags.end)}\s*", made)
        made = made[empty.end() :] if empty else made
    return made


def _caller(count: int, way: _Way) -> Document:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": _json(a) if way.as_text else a}}
        for call_id, name, a in zip(_IDS, _NAMES, _ARGUMENTS, strict=True)
    ]
    return {"role": "assistant", "content": None if way.null else "", "tool_calls": calls[:count]}


def _pieces(turn: str, count: int) -> tuple[str, ...] | None:
    """The text around names and arguments: [before, middle, behind], for two calls the two middles come first.

    None where a name or its arguments do not stand there exactly once, or an id does.
    """
    words = [word for pair in zip(_NAMES, map(_json, _ARGUMENTS), strict=True) for word in pair][: 2 * count]
    if any(turn.count(word) != 1 for word in words) or any(call_id in turn for call_id in _IDS):
        return None
    parts: list[str] = []
    rest = turn
    for word in words:
        part, found, rest = rest.partition(word)
        if not found:
            return None
        parts.append(part)
    if count == 1:
        return parts[0], parts[1], rest
    return parts[0], parts[1], parts[3], parts[2], rest


def _shows_results(asker: _Asker, way: _Way) -> bool:
    result = {"role": "tool", "content": _RESULT, "tool_call_id": _IDS[0], "name": _NAMES[0]}
    text = asker.text([_USER, _caller(1, way), result], tools=[_TOOL], prompting=True)
    return text is not None and _RESULT in text


def _shared(one: str, other: str) -> str:
    """The longest beginning of both."""
    pairs = zip(one, other, strict=False)
    return one[: next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
