"""Render a model's chat template in a sandbox, and know which characters of the result came from the user.

Templates are jinja2 as Hugging Face transformers runs it (trim_blocks, lstrip_blocks, loop controls, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`), in jinja2's immutable sandbox, less what makes output random or
unbounded. A template is data of the model: nothing it does may reach beyond the text it returns.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from appliance.engine.types import ChatMessage, ToolChat
from appliance.errors import BadRequest

LIMIT_CHARS = 1024 * 1024
"""Largest rendered prompt, in characters."""

_ROLE = re.compile(r"[a-z][a-z_-]{0,31}")
_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_SCHEMA_WORDS = frozenset({"type", "name", "format", "required"})
"""Keys of tools whose values templates compare with words: no marks are put into those."""

_DIRECTIVE_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")


class TemplateRejected(Exception):
    """The template failed or reached outside the sandbox. The message never quotes message content."""


class TemplateTooSlow(TemplateRejected):
    """A render ran into its time limit."""


class TemplateTimeout(Exception):
    """Raised into a render by the caller's timer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """`text`, and the spans [start, end) of it that are user content; `spans` None: provenance could not be shown."""

    text: str
    spans: tuple[tuple[int, int], ...] | None
    marked: str


class ChatTemplate:
    """One compiled template. `source` None: a model that has none and refuses chat."""

    def __init__(self, source: str | None, *, bos_text: str, eos_text: str) -> None:
        self._bos_text = bos_text
        self._eos_text = eos_text
        self._template: jinja2.Template | None = None
        self._defect: str | None = None
        self.tree: jinja2.nodes.Template | None = None
        """What the template consists of; None where there is none that can be read."""
        self.variables: frozenset[str] = frozenset()
        """The variables it takes from outside."""
        if source is None:
            return
        sandbox = _Sandbox()
        try:
            self.tree = sandbox.parse(source)
            self._template = sandbox.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(sandbox.parse(source)))
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            self._template = self.tree = None
            self._defect = type(error).__name__

    def render(
        self, chat: Sequence[ChatMessage] | ToolChat, *, template_date: str, random_bytes: Callable[[int], bytes]
    ) -> Rendering:
        """Render twice: as is, and with every text of the user wrapped in random marks, which shows where it went.

        `template_date` is YYYY-MM-DD. Raises BadRequest `no_chat_template`, `invalid_role`, `chat_template_rejected`.
        """
        messages = chat.messages if isinstance(chat, ToolChat) else chat
        for index, message in enumerate(messages):
            if not _ROLE.fullmatch(message.role):
                # Templates put the role into the scaffolding, so it is no place for free text.
                raise BadRequest("invalid_role", "the role is not a known word", param=f"messages[{index}].role")
        marker = random_bytes(16).hex()
        try:
            plain = self.run(*documents(chat, _same), template_date=template_date)
            marked = self.run(*documents(chat, _Wrapper(marker)), template_date=template_date)
        except TemplateRejected as error:
            raise BadRequest(
                "chat_template_rejected", f"the model's chat template cannot render these messages: {error}"
            ) from None
        return Rendering(text=plain, spans=_locate(plain, marked, marker), marked=marked)

    def run(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None,
        *,
        template_date: str,
        prompting: bool = True,
    ) -> str:
        """The text of `messages`, as JSON has them; `prompting`: the answer is to come next.

        Raises TemplateRejected, and BadRequest `no_chat_template`.
        """
        if self._defect is not None:
            raise TemplateRejected(self._defect)
        if self._template is None:
            raise BadRequest("no_chat_template", "this model has no chat template; use /v1/completions")
        today = datetime.datetime.strptime(template_date, "%Y-%m-%d").replace(tzinfo=datetime.UTC)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=messages,
                add_generation_prompt=prompting,
                bos_token=self._bos_text,
                eos_token=self._eos_text,
                tools=tools,
                raise_exception=_raise_exception,
                strftime_now=today.strftime,
            ):
                size += len(piece)
                if size > LIMIT_CHARS:
                    raise TemplateRejected(f"the output is longer than {LIMIT_CHARS} characters")
                pieces.append(piece)
        except TemplateTimeout:
            raise TemplateTooSlow("the template takes too long") from None
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise TemplateRejected(type(error).__name__) from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Python's own errors out of template code; their messages may quote content, so only the kind is told.
            raise TemplateRejected(type(error).__name__) from None
        return _encodable("".join(pieces))


def documents(
    chat: Sequence[ChatMessage] | ToolChat, through: Callable[[str], str]
) -> tuple[list[dict[str, object]], list[object] | None]:
    """(messages, tools) as templates take them, every text of the user's put `through` a function.

    Roles, ids and names, and words that templates compare, stay as they are.
    """
    if not isinstance(chat, ToolChat):
        return [_message(message, through, as_text=False) for message in chat], None
    messages = [_message(message, through, as_text=chat.arguments_as_text) for message in chat.messages]
    for document in messages if chat.no_content_as_null else ():
        if document["content"] == "" and "tool_calls" in document:
            document["content"] = None
    tools = json.loads(chat.tools)
    return messages, [_texts(tool, through, keys=False) for tool in tools] or None


def _message(message: ChatMessage, through: Callable[[str], str], *, as_text: bool) -> dict[str, object]:
    document: dict[str, object] = {"role": message.role, "content": through(message.content)}
    if message.reasoning is not None:
        document["reasoning_content"] = through(message.reasoning)
    if message.calls:
        document["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": through(call.arguments)
                    if as_text
                    else _texts(json.loads(call.arguments), through, keys=True),
                },
            }
            for call in message.calls
        ]
    for key, value in (("tool_call_id", message.call_id), ("name", message.name)):
        if value is not None:
            document[key] = value
    return document


def _texts(value: object, through: Callable[[str], str], *, keys: bool) -> object:
    """A JSON value with its texts put `through`; `keys`: those of objects as well, and no text is a word to compare."""
    if isinstance(value, str):
        return through(value)
    if isinstance(value, list):
        return [_texts(item, through, keys=keys) for item in value]
    if not isinstance(value, dict):
        return value
    if keys:
        return {through(name): _texts(item, through, keys=True) for name, item in value.items()}
    return {
        name: item if name in _SCHEMA_WORDS and not isinstance(item, dict) else _texts(item, through, keys=False)
        for name, item in value.items()
    }


def _same(text: str) -> str:
    return text


class _Wrapper:
    """Puts numbered marks around texts, white space left outside so that `trim` in a template changes both alike."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._count = 0

    def __call__(self, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        end = start + len(core)
        self._count += 1
        marker, number = self._marker, self._count
        return f"{text[:start]}{marker}<{number}|{core}{marker}>{number}|{text[end:]}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox without the operations whose cost a small template can blow up."""

    intercepted_binops = frozenset({"*", "**", "%", "<<"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols])
        self.filters["tojson"] = _tojson
        for name in ("center", "format", "random", "xmlattr", "pprint", "urlize"):
            self.filters.pop(name, None)
        self.globals.pop("lipsum", None)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if isinstance(obj, str) and attr in _PADDING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is not None:
            raise jinja2.exceptions.SecurityError("str.format is not available")
        return None

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if operator in ("**", "<<"):
            raise jinja2.exceptions.SecurityError(f"operator {operator} is not available")
        if operator == "*":
            for value in (left, right):
                if isinstance(value, str | bytes | list | tuple):
                    raise jinja2.exceptions.SecurityError("repetition is not available")
        if operator == "%" and isinstance(left, str) and _DIRECTIVE_WIDTH.search(left):
            raise jinja2.exceptions.SecurityError("wide format directives are not available")
        return super().call_binop(context, operator, left, right)


class _GenerationTags(Extension):
    """`{% generation %}` marks training targets in transformers; when rendering, only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node | list[Node]:
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TemplateRejected("the template makes text that is no Unicode") from None
    return text


def _raise_exception(message: str) -> None:
    del message  # a template may put content into it
    raise TemplateRejected("the template refuses these messages")


def _tojson(value: object, indent: int | None = None, sort_keys: bool = False) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise ValueError("indent")
    return json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)


def _locate(plain: str, marked: str, marker: str) -> tuple[tuple[int, int], ...] | None:
    spans: list[tuple[int, int]] = []
    parts: list[str] = []
    position, length = 0, 0
    opened: tuple[str, int] | None = None
    for mark in re.finditer(marker + r"([<>])([0-9]+)\|", marked):
        parts.append(marked[position : mark.start()])
        length += len(parts[-1])
        position = mark.end()
        if mark[1] == "<":
            if opened is not None:
                return None
            opened = (mark[2], length)
        else:
            if opened is None or opened[0] != mark[2]:
                return None
            spans.append((opened[1], length))
            opened = None
    parts.append(marked[position:])
    if opened is not None or "".join(parts) != plain:
        return None
    return tuple(spans)
