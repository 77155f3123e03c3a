"""The nouns of the engine: what a job is, and what comes back. Frozen, free of llama.cpp and of HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from appliance.engine.batch import EXACT, Exactness
from appliance.engine.chat.reasoning import Tags
from client_sdk.wire import cbor, digests
from client_sdk.wire.tools import CallSyntax

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCall:
    """A call that an earlier message made. `arguments` is text, in the best case a JSON object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message. `reasoning` and `calls` are an assistant's; `call_id` and `name` say whose result a tool's is."""

    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[MadeCall, ...] = ()
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChat:
    """Messages of a conversation with tools, for a template that takes them. `tools` is JSON, a list as sent."""

    messages: tuple[ChatMessage, ...]
    tools: str
    arguments_as_text: bool = False
    """The template wants the arguments of calls as text, not as an object."""
    no_content_as_null: bool = False
    """It wants null, not empty text, where a message only makes calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """A prompt that came as token ids: evaluated as they are, nothing put before them."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillPrompt:
    """Raw text around a gap that the answer fills. Only for models that were trained to."""

    prefix: str
    suffix: str


PromptInput = tuple[ChatMessage, ...] | ToolChat | str | TokenPrompt | InfillPrompt
"""Chat messages (rendered with the model's own template), with tools or without, raw text, token ids, or a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Effective sampling parameters, defaults applied. `seed` is the resolved one (0..2**32-1).

    `temperature` 0.0 means greedy. `top_k` 0 means off. `max_tokens` None means "until the context is full". `min_p`
    0.0, `repeat_penalty` 1.0 and the other penalties at 0.0 mean off; penalties count the tokens of the answer, never
    those of the prompt. `logit_bias` is (token id, addend), by id. `logprobs` is how many alternatives come with each
    token, None: not even the token's own. `grammar` is GBNF with the start symbol `root`, which the whole answer keeps
    to. `deterministic`: the same bits for the same seed whatever else is running. `score_prompt`: the tokens of the
    prompt are measured as well, with `logprobs` alternatives each.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    grammar: str | None = None
    deterministic: bool = False
    score_prompt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithm of a token's probability under the model's own distribution, before any sampling parameter.

    `token` and those of `top` (the most probable ones, best first, with theirs) are the tokens' bytes. None: nothing
    came before the token, so that the model says nothing of it.
    """

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """One answer to make.

    `job_id` is 16 bytes, unique among live jobs. `template_date` is the UTC date (YYYY-MM-DD) a chat template's clock
    shows. Evaluated prompts are reused among jobs of the same `cache_scope` only; the empty one reuses nothing. Without
    `evaluate` the prompt is made into tokens, of any number, and that is all: nothing is computed and no text made.
    """

    job_id: bytes
    prompt: PromptInput
    sampling: SamplingParams
    template_date: str
    cache_scope: bytes = b""
    evaluate: bool = True

    @property
    def prompt_field(self) -> str:
        """The request field that the prompt came from."""
        return "messages" if isinstance(self.prompt, tuple | ToolChat) else "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReady:
    """First event of every accepted job: what the engine will really evaluate.

    `token_ids` is u32 little-endian. `max_tokens` is the effective bound after the context limit. `execution` holds
    facts about the path the answer takes (cached prompt tokens, threads, batching, ...), dCBOR-encodable.
    """

    prompt_text: str
    token_ids: bytes
    max_tokens: int
    execution: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The job waits no longer. `execution` holds what is known of its path from then on, however it ends.

    The facts replace those of the same name in PromptReady. At most once, before any Delta.
    """

    execution: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Newly released text (complete UTF-8, may be empty while bytes are held back) and the tokens sampled for it.

    `token_ids` is u32 little-endian, in sampling order, the end-of-generation token included where it was sampled.
    `logprobs` has one entry a token where the job asked for them, else none. `prompt_logprobs` has those of the whole
    prompt, in the first delta of a job that asked for them.
    """

    text: str
    token_ids: bytes
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Last event of a job that ended well. All text and tokens have gone out in Delta events before it.

    `execution` holds facts that only the end knows; they replace those of the same name said before.
    """

    reason: FinishReason
    execution: Mapping[str, object] = field(default_factory=dict)


EngineEvent = PromptReady | Begun | Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """How the chat template in force takes tools and spells calls, and what stands around reasoning.

    `takes_tools`: it uses the variable `tools`. `calls` None: no form of calls could be told. `arguments_as_text`:
    it wants the arguments of earlier calls as text. `no_content_as_null`: it wants null for the content of a message
    that only makes calls. `opens_reasoning`: prompts end with the start tag.
    """

    takes_tools: bool = False
    calls: CallSyntax | None = None
    arguments_as_text: bool = False
    no_content_as_null: bool = False
    reasoning: Tags | None = None
    opens_reasoning: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """Text that answers have in place of structure: around calls and reasoning."""
        calls, tags = self.calls, self.reasoning
        around = (
            () if calls is None else (calls.start, calls.before, calls.middle, calls.after, calls.between, calls.end)
        )
        return tuple(text for text in (*around, *((tags.start, tags.end) if tags else ())) if text)

    @property
    def digest(self) -> bytes:
        """32 bytes over all of it: it decides which control tokens are text, and how answers are held to a form."""
        calls, tags = self.calls, self.reasoning
        said = [
            self.takes_tools,
            None if calls is None else calls.encode(),
            self.arguments_as_text,
            self.no_content_as_null,
            None if tags is None else [tags.start, tags.end],
            self.opens_reasoning,
        ]
        return digests.labelled("chat-format v1", cbor.encode(said))

    def describe(self) -> str:
        """For the log."""
        form = "calls in its own form" if self.calls is not None else "a form of calls that cannot be told"
        tools = f"takes tools, {form}" if self.takes_tools else "takes no tools"
        tags = "no reasoning" if self.reasoning is None else f"reasoning between {self.reasoning.start} and its end"
        return f"{tools}; {tags}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine found in the weights it really loaded."""

    context_length: int
    vocabulary_size: int
    architecture: str
    has_chat_template: bool
    tokenizer_digest: bytes  # SHA-256 of the dCBOR of the GGUF keys tokenizer.* without tokenizer.chat_template
    chat_template_digest: bytes | None  # SHA-256 of the UTF-8 template in force
    weights: tuple[tuple[int, bytes], ...]  # (size in bytes, SHA-256) of each file, sorted by SHA-256
    chat: ChatFormat = ChatFormat()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Identity of the engine: name, version, and the native libraries mapped in the worker.

    `libraries` is sorted (basename, SHA-256). `exactness` is what the self-test found at the load. `arithmetic` and
    `kernels` are those of receipts (docs/receipt-format.md); None where nothing is computed, or no kernel computes.
    `uncovered` are types of the model's tensors that no kernel covers, `cut` measurements of the start without an end,
    `steps` the most rows of one evaluation.
    """

    name: str
    version: str
    libraries: tuple[tuple[str, bytes], ...]
    threads: int
    threads_reason: str
    exactness: Exactness = EXACT
    arithmetic: str | None = None
    kernels: str | None = None
    uncovered: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    steps: int = 0

    def describe(self) -> Iterator[str]:
        """Lines for the log."""
        yield f"{self.name} {self.version} runs with {self.threads} threads ({self.threads_reason})"
        if self.kernels is None:
            kernels = "computed by llama.cpp alone: this build has none of this project's kernels"
        else:
            kernels = f"kernels {self.kernels}"
        if self.kernels is not None and self.uncovered:
            types = ", ".join(self.uncovered)
            kernels += f", which do not cover this model's {types}: llama.cpp's own code computes those"
        yield f"arithmetic {self.arithmetic}, {kernels}"
        yield f"shapes that are exact on this model: {self.exactness.describe()}, in steps of up to {self.steps} rows"

    def describe_cut(self, limit_s: float) -> str:
        """For the log, where `cut` is not empty."""
        return (
            f"not measured within engine.selftest_limit_s = {limit_s:g}: {', '.join(self.cut)}; the careful answer is "
            "taken (one thread, nothing exact, no speculation, as far as they are among these)"
        )
