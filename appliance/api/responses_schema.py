"""What /v1/responses accepts: the stateless part of OpenAI's Responses API. Everything else is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from appliance.api.schema import (
    MAX_SEED,
    MAX_TOOLS,
    Bias,
    Closed,
    Off,
    Penalty,
    PromptText,
    StreamOptions,
    TokenId,
    ToolName,
    validated,
)
from appliance.errors import BadRequest

MAX_ITEMS = 4096
_Nothing = Annotated[list[Any], Field(max_length=0)]
_Id = Annotated[str, StringConstraints(min_length=1, max_length=64)]
_Status = Literal["in_progress", "completed", "incomplete"]
_Zero = Annotated[int, Field(ge=0, le=0)]


class InputText(Closed):
    type: Literal["input_text"]
    text: str


class OutputText(Closed):
    """As answers carry it and requests repeat it."""

    type: Literal["output_text"]
    text: str
    annotations: _Nothing | None = None
    logprobs: _Nothing | None = None


def _branch(value: object) -> str:
    return _LIST if isinstance(value, list) else "str"


_LIST = "list[]"
_Texts = Annotated[list[InputText], Field(min_length=1, max_length=MAX_ITEMS)]
_Outputs = Annotated[list[OutputText], Field(min_length=1, max_length=MAX_ITEMS)]
_Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ITEMS)]
# Told apart beforehand, so that an error names the part at fault and not the whole.
Content = Annotated[Annotated[str, Tag("str")] | Annotated[_Texts, Tag(_LIST)], Discriminator(_branch)]
AnswerContent = Annotated[Annotated[str, Tag("str")] | Annotated[_Outputs, Tag(_LIST)], Discriminator(_branch)]


class InputMessage(Closed):
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    content: Content
    id: _Id | None = None
    status: _Status | None = None


class AssistantMessage(Closed):
    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: AnswerContent
    id: _Id | None = None
    status: _Status | None = None
    phase: None = None


class FunctionCall(Closed):
    type: Literal["function_call"]
    call_id: _Id
    name: ToolName
    arguments: str
    id: _Id | None = None
    status: _Status | None = None
    caller: None = None
    namespace: None = None


class FunctionCallOutput(Closed):
    type: Literal["function_call_output"]
    call_id: _Id
    output: Content
    id: _Id | None = None
    status: _Status | None = None


class ReasoningText(Closed):
    type: Literal["reasoning_text"]
    text: str


class Reasoning(Closed):
    """As answers carry it and requests repeat it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(min_length=1, max_length=MAX_ITEMS)]
    id: _Id | None = None
    status: _Status | None = None
    summary: _Nothing | None = None
    encrypted_content: None = None


_OF_TYPE: dict[str, type[Closed]] = {
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
}
ITEMS: tuple[type[Closed], ...] = (InputMessage, AssistantMessage, *_OF_TYPE.values())


class TextFormat(Closed):
    """`strict` is neutral: the grammar holds the answer to the schema either way."""

    type: Literal["text", "json_object", "json_schema"]
    name: ToolName | None = None
    description: Annotated[str, StringConstraints(max_length=4096)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Closed):
    format: TextFormat | None = None
    verbosity: None = None


class FunctionTool(Closed):
    """`strict` is neutral: the grammar holds the arguments to their schema either way."""

    type: Literal["function"]
    name: ToolName
    description: Annotated[str, StringConstraints(max_length=16384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Closed):
    type: Literal["function"]
    name: ToolName


class ResponsesRequest(Closed):
    """Answers are never stored, so whatever needs one that was is refused."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    input: Annotated[Annotated[PromptText, Tag("str")] | Annotated[_Items, Tag(_LIST)], Discriminator(_branch)]
    instructions: PromptText | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    deterministic: bool | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, StringConstraints(max_length=512)] | None = None
    store: Off | None = None
    background: Off | None = None
    truncation: Literal["disabled"] | None = None
    include: _Nothing | None = None
    top_logprobs: _Zero | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    reasoning: None = None
    service_tier: None = None
    max_tool_calls: None = None


def check_items(items: list[dict[str, Any]]) -> None:
    """Each item by its own rules. Raises BadRequest naming the field within its item."""
    for index, item in enumerate(items):
        path = f"input[{index}]"
        try:
            validated(_kind(item, path), item)
        except BadRequest as error:
            if error.param is None or error.param.startswith(path):
                raise
            param = f"{path}.{error.param}"
            message = error.message.replace(repr(error.param), repr(param), 1)
            raise BadRequest(error.code, message, param=param) from None


def _kind(item: dict[str, Any], path: str) -> type[Closed]:
    kind = item.get("type", "message")
    if kind == "message":
        return AssistantMessage if item.get("role") == "assistant" else InputMessage
    if isinstance(kind, str) and kind in _OF_TYPE:
        return _OF_TYPE[kind]
    raise BadRequest(
        "invalid_field",
        f"The field '{path}.type' has a value that is not supported here: message, {', '.join(_OF_TYPE)} are.",
        param=f"{path}.type",
    )
