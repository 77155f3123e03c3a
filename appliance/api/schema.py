"""What the inference routes accept, field by field. A field that is not honoured is refused by name, at every depth."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from appliance.errors import BadRequest
from client_sdk.wire import cbor

MAX_STOP_SEQUENCES = 4
MAX_CHOICES = 8
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_TOOLS = 64
MAX_SEED = 2**32 - 2  # llama.cpp takes 2**32 - 1 for "draw one"
_MAX_SHOWN_NAME = 64
_FREE_KEYS = frozenset(
    {"metadata", "logit_bias", "response_format.json_schema.schema"}
)  # their keys are the caller's content, not names of fields

StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
# Not Literal: true == 1 and 0 == false there, and what is not honoured has to be refused.
One = Annotated[int, Field(ge=1, le=1)]
PromptText = Annotated[str, StringConstraints(min_length=1)]
PromptTokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, max_length=1 << 20)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _refuse_true(value: bool) -> bool:
    if value:
        raise PydanticCustomError("off_only", "should be false")
    return value


Off = Annotated[bool, AfterValidator(_refuse_true), WithJsonSchema({"const": False})]


class Closed(BaseModel):
    """A part of a request: what it does not name is refused, and nothing is taken for another type."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)


def _null_as_absent(value: Any) -> Any:
    return False if value is None else value


class StreamOptions(Closed):
    include_usage: Annotated[bool, BeforeValidator(_null_as_absent)] = False
    include_obfuscation: bool | None = None


class NamedSchema(Closed):
    """`strict` is neutral: the grammar holds the answer to the schema either way."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, StringConstraints(max_length=4096)] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Closed):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class CalledFunction(Closed):
    name: ToolName
    arguments: str


class ToolCall(Closed):
    id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    type: Literal["function"]
    function: CalledFunction


class TextPart(Closed):
    type: Literal["text"]
    text: str


def _content_kind(value: object) -> str:
    return "list[part]" if isinstance(value, list) else "str"


# Told apart by form, so that an error names the part and the field that is at fault.
Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[TextPart], Field(min_length=1, max_length=1024), Tag("list[part]")],
    Discriminator(_content_kind),
]


class Message(Closed):
    """The nulls are what answers carry and requests repeat (B121). Parts of content follow one another directly."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=64)] | None = None
    tool_call_id: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class Function(Closed):
    """`strict` is neutral: the grammar holds the arguments to their schema either way."""

    name: ToolName
    description: Annotated[str, StringConstraints(max_length=16384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Closed):
    type: Literal["function"]
    function: Function


class ChosenFunction(Closed):
    name: ToolName


class ToolChoice(Closed):
    type: Literal["function"]
    function: ChosenFunction


class _Request(Closed):
    """Parameters that both routes share. Those of OpenAI's with a neutral default are taken with that value alone."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES)] | None = None
    deterministic: bool | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=512)] | None = None

    def stop_sequences(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatCompletionRequest(_Request):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(_Request):
    prompt: (
        PromptText
        | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_CHOICES)]
        | PromptTokens
        | Annotated[list[PromptTokens], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    best_of: One | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Annotated[str, StringConstraints(max_length=1 << 20)] | None = None


R = TypeVar("R", bound=BaseModel)


def parse(kind: type[R], body: bytes) -> R:
    """Read a request body. Raises BadRequest naming the field, never quoting its value."""
    try:
        # Decoded here: json.loads would guess UTF-16 and UTF-32 as well.
        document = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        if b"\\u" in body:  # half of a surrogate pair is no text: nothing after here could encode it
            json.dumps(document, ensure_ascii=False).encode()
    except BadRequest:
        raise
    except (ValueError, RecursionError):
        raise BadRequest(
            "invalid_json", "The body is not valid JSON (UTF-8, no NaN, no duplicate keys, no lone surrogates)."
        ) from None
    return validated(kind, document)


def validated(kind: type[R], document: object) -> R:
    """A JSON value as what it has to be. Raises BadRequest naming the field, never quoting its value."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _describe(error) from None


def as_sent(part: BaseModel) -> Any:
    """A part of a request as the JSON value it was read from."""
    return part.model_dump(by_alias=True, exclude_unset=True)


def encodable(field: str, value: object) -> None:
    """Raises BadRequest for a JSON value that a receipt cannot commit to: nested too deep, or with huge integers."""
    try:
        cbor.encode(value)
    except ValueError:
        raise BadRequest(
            "invalid_field", f"The field {field!r} is nested too deep or has an integer beyond 64 bits.", param=field
        ) from None


def _refuse_constant(_name: str) -> Any:
    raise BadRequest("invalid_json", "NaN and Infinity are not JSON.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise BadRequest("invalid_json", "An object of the body has the same key twice.")
    return members


def _describe(error: ValidationError) -> BadRequest:
    """The first fault, by the path of its field. Messages of the library are used only where they quote no input."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, location = first["type"], first["loc"]
    if kind == "extra_forbidden":  # any name, one that reads like a union's branch too
        path = _join(_path(location[:-1]), str(location[-1]))
        return BadRequest("unknown_field", f"The field {path!r} is not supported.", param=path)
    path = _path(location) or "(body)"
    if kind == "missing":
        return BadRequest("missing_field", f"The field {path!r} is required.", param=path)
    reason = "has the wrong type" if kind.endswith("_type") else "has a value that is not supported here"
    return BadRequest("invalid_field", f"The field {path!r} {reason}: {_expectation(first['msg'])}", param=path)


def _expectation(message: str) -> str:
    return message.removeprefix("Input ").rstrip(".") + "."


def _path(location: tuple[int | str, ...]) -> str:
    """A dotted path with indices. Steps that name a union's branch, and names of any length, are cut to what helps."""
    path = ""
    for step in location:
        if path in _FREE_KEYS:
            break
        if isinstance(step, int):
            path += f"[{step}]"
        elif not _is_branch(step):
            path = _join(path, step)
    return path


def _join(path: str, name: str) -> str:
    shown = name if name.isprintable() and "[" not in name and len(name) <= _MAX_SHOWN_NAME else "(unprintable)"
    return f"{path}.{shown}" if path else shown


def _is_branch(step: str) -> bool:
    return step in {"str", "int", "bool", "float", "none"} or step.startswith(("constrained-", "list[", "literal["))
