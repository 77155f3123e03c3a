"""Render a model's chat template in a sandbox, and know which characters of the result came from the user.

Templates are jinja2 as Hugging Face transformers runs it (trim_blocks, lstrip_blocks, loop controls, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`), in jinja2's immutable sandbox, less what makes output random or
unbounded. A template is data of the model: nothing it does may reach beyond the text it returns.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from appliance.engine.types import ChatMessage
from appliance.errors import BadRequest

LIMIT_CHARS = 1024 * 1024
"""Largest rendered prompt, in characters."""

_ROLE = re.compile(r"[a-z][a-z_-]{0,31}")
_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_DIRECTIVE_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")


class TemplateRejected(Exception):
    """The template failed or reached outside the sandbox. The message never quotes message content."""


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
        if source is None:
            return
        try:
            self._template = _Sandbox().from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            self._defect = type(error).__name__

    def render(
        self, messages: Sequence[ChatMessage], *, template_date: str, random_bytes: Callable[[int], bytes]
    ) -> Rendering:
        """Render twice: as is, and with every content wrapped in random marks, which shows where user text went.

        `template_date` is YYYY-MM-DD. Raises BadRequest `no_chat_template`, `invalid_role`, `chat_template_rejected`.
        """
        for index, message in enumerate(messages):
            if not _ROLE.fullmatch(message.role):
                # Templates put the role into the scaffolding, so it is no place for free text.
                raise BadRequest("invalid_role", "the role is not a known word", param=f"messages[{index}].role")
        marker = random_bytes(16).hex()
        wrapped = [
            ChatMessage(role=message.role, content=_wrap(message.content, marker, index))
            for index, message in enumerate(messages)
        ]
        try:
            plain = self._run(messages, template_date)
            marked = self._run(wrapped, template_date)
        except TemplateRejected as error:
            raise BadRequest(
                "chat_template_rejected", f"the model's chat template cannot render these messages: {error}"
            ) from None
        return Rendering(text=plain, spans=_locate(plain, marked, marker), marked=marked)

    def _run(self, messages: Sequence[ChatMessage], template_date: str) -> str:
        if self._defect is not None:
            raise TemplateRejected(self._defect)
        if self._template is None:
            raise BadRequest("no_chat_template", "this model has no chat template; use /v1/completions")
        today = datetime.datetime.strptime(template_date, "%Y-%m-%d").replace(tzinfo=datetime.UTC)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                bos_token=self._bos_text,
                eos_token=self._eos_text,
                tools=None,
                raise_exception=_raise_exception,
                strftime_now=today.strftime,
            ):
                size += len(piece)
                if size > LIMIT_CHARS:
                    raise TemplateRejected(f"the output is longer than {LIMIT_CHARS} characters")
                pieces.append(piece)
        except TemplateTimeout:
            raise TemplateRejected("the template takes too long") from None
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise TemplateRejected(type(error).__name__) from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Python's own errors out of template code; their messages may quote content, so only the kind is told.
            raise TemplateRejected(type(error).__name__) from None
        return _encodable("".join(pieces))


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


def _wrap(content: str, marker: str, index: int) -> str:
    """Put marks around the content, white space left outside so that `trim` in a template changes both alike."""
    core = content.strip()
    if not core:
        return content
    start = content.index(core)
    end = start + len(core)
    return f"{content[:start]}{marker}<{index}|{core}{marker}>{index}|{content[end:]}"


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
