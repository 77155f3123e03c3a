"""The nouns between HTTP and the service: a parsed call, the JSON of a route, and the way back to one client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from appliance.engine.chat.reasoning import ReasoningText, Tags
from appliance.engine.chat.tools import CallDelta, Tool, ToolText
from appliance.engine.types import PromptInput, PromptReady, TokenLogprob
from appliance.errors import ApplianceError
from appliance.receipts.issuer import ChainScope
from appliance.receipts.transcript import OutputTranscript
from client_sdk.wire.tools import CallSyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request says about sampling. None stands for "not given"; defaults are applied by `sampling.resolve`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    deterministic: bool | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """Which functions may be called; `optional`: or none; `parallel`: more than one call may follow."""

    tools: tuple[Tool, ...]
    optional: bool
    parallel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What answers are held to: JSON values as sent, where they are in force, and the grammar made of them.

    `tool_choice` is as receipts spell it. The grammar of `calls` depends on the model: `chat_format.fit` makes it.
    """

    response_format: object = None
    grammar: str | None = None
    tools: object = None
    tool_choice: str = "none"
    parallel: bool = True
    calls: CallRules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How answers of the model at hand are taken apart: the form of its calls, the tags around its reasoning.

    None: there are none to be taken out. `facts` are what receipts say of it.
    """

    syntax: CallSyntax | None = None
    tags: Tags | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One parsed request: `n` choices for each of the prompts, in that order."""

    model: str
    prompts: tuple[PromptInput, ...]
    wanted: Wanted
    max_tokens_field: str
    n: int
    stream: bool
    include_usage: bool
    echo: bool = False
    shape: Shape = Shape()
    split_reasoning: bool = False
    include_obfuscation: bool = False
    fit: Fit = Fit()
    evaluate: bool = True
    """False: the prompts are made into tokens, and that is all."""
    cache_key: str = ""
    """Divides what evaluated prompts are reused for, within one identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every body and frame of one answer begins with. `identifier` is the receipt id in hex.

    `obfuscate` makes random bytes for frames that are to hide how long their text is.
    """

    identifier: str
    created: int
    model: str
    include_usage: bool = False
    obfuscate: Callable[[int], bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Numbers of tokens. `cached_tokens` of the prompt were not evaluated again; of those guessed ahead
    `accepted_tokens` became part of the answer and `rejected_tokens` did not. `reasoning_tokens` came before it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that one choice released at once, and the probabilities of the tokens it is made of, where asked for.

    `offset` is the number of characters of the choice before it. `reasoning` comes before text, `calls` is what the
    piece adds to calls of tools. `echo` is the prompt, with probabilities of its own, before the first text.
    """

    text: str
    offset: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    reasoning: str = ""
    echo: str = ""
    echo_logprobs: tuple[TokenLogprob, ...] = ()


class Choice:
    """One choice while it grows: what the receipt says of it, and what its JSON needs."""

    __slots__ = (
        "_offset",
        "_pending",
        "_ready",
        "_said",
        "_undecided",
        "echoed",
        "index",
        "measured",
        "output",
        "prompt",
        "reasoning",
        "reasoning_tokens",
        "tools",
    )

    def __init__(
        self,
        index: int,
        *,
        measured: bool,
        echoed: str = "",
        tools: ToolText | None = None,
        reasoning: ReasoningText | None = None,
    ) -> None:
        self.index = index
        self.tools = tools
        """The text and calls so far where calls are taken out of the text; `output` has what was generated."""
        self.reasoning = reasoning
        """The reasoning so far where it is taken out of the text."""
        self.reasoning_tokens = 0
        self.prompt: PromptReady | None = None
        """The prompt as the engine has it, where the answer is about that."""
        self.echoed = echoed
        """The prompt, where it was asked for in front of the answer."""
        self.output = OutputTranscript()
        self.measured: list[Piece] | None = [] if measured else None
        """Every piece so far where log probabilities were asked for, else None."""
        self._said: list[str] = []
        self._pending: tuple[TokenLogprob, ...] = ()
        self._ready: tuple[TokenLogprob, ...] = ()
        self._undecided = 0
        self._offset = len(echoed) if measured else 0

    @property
    def content(self) -> str:
        """What the answer says so far, reasoning and calls taken out."""
        if self.tools is not None:
            return self.tools.text
        return self.output.text if self.reasoning is None else "".join(self._said)

    def take(
        self,
        text: str,
        token_ids: bytes,
        logprobs: tuple[TokenLogprob, ...],
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Piece | None:
        """Account for one step of the engine; the piece to send, if it released anything.

        Tokens whose bytes are held back are told about with the text they become part of. Those of a stop string
        become part of none, and are not told about.
        """
        self.output.add(text, token_ids)
        self._pending += logprobs
        if text:
            self._ready, self._pending = self._ready + self._pending, ()
        reasoning, said = self._without_reasoning(text, len(token_ids) // 4)
        calls: tuple[CallDelta, ...] = ()
        if self.tools is not None and said:
            said, calls = self.tools.feed(said)
        echo = (self.echoed, prompt_logprobs) if prompt_logprobs else ("", ())
        return self._piece(reasoning, said, calls, echo)

    def end(self, reason: str) -> Piece | None:
        """The engine is done with the choice; what had been held back, if anything."""
        self.output.finish = reason
        reasoning, said = ("", "") if self.reasoning is None else self.reasoning.finish()
        calls: tuple[CallDelta, ...] = ()
        if self.tools is not None:
            said, calls = self.tools.feed(said)
            held, more = self.tools.finish()
            said, calls = said + held, calls + more
            if self.tools.complete and reason == "stop":
                self.output.finish = "tool_calls"
        return self._piece(reasoning, said, calls, ("", ()), flush=True)

    def _without_reasoning(self, text: str, tokens: int) -> tuple[str, str]:
        """(reasoning, what is none), and counts the tokens of reasoning: those of its tags are among them."""
        if self.reasoning is None:
            return "", text
        undecided, thinking = self.reasoning.undecided, self.reasoning.thinking
        parts = self.reasoning.feed(text) if text else ("", "")
        if undecided:
            self._undecided += tokens
            if not self.reasoning.undecided and any(self.reasoning.marks):
                self.reasoning_tokens = self._undecided
        elif thinking:
            self.reasoning_tokens += tokens
        return parts

    def _piece(
        self,
        reasoning: str,
        text: str,
        calls: tuple[CallDelta, ...],
        echo: tuple[str, tuple[TokenLogprob, ...]],
        *,
        flush: bool = False,
    ) -> Piece | None:
        """`flush`: tokens that became part of no piece so far get one of their own."""
        if not (reasoning or text or calls or echo[1] or (flush and self._ready)):
            return None
        measured, self._ready = self._ready, ()
        piece = Piece(
            text=text,
            offset=self._offset,
            logprobs=measured,
            calls=calls,
            reasoning=reasoning,
            echo=echo[0],
            echo_logprobs=echo[1],
        )
        self._offset += len(text)
        if self.reasoning is not None:
            self._said.append(text)
        if self.measured is not None:
            self.measured.append(piece)
        return piece


class Dialect(Protocol):
    """The JSON of one route: how a request is read and an answer is written. Bytes in, bytes out.

    A stream is the frames of `opening`, then `delta` for each piece and `finish` once for each choice, then `closing`.
    `explain` puts an error into the names of this route's fields; `failure` is the last frame of a stream that failed.
    One object serves one request at a time, and may remember it.
    """

    def parse(self, body: bytes) -> Call: ...
    def whole(self, heading: Heading, choices: Sequence[Choice], usage: Usage) -> bytes: ...
    def opening(self, heading: Heading, choices: Sequence[Choice]) -> tuple[bytes, ...]: ...
    def delta(self, heading: Heading, choice: Choice, piece: Piece) -> tuple[bytes, ...]: ...
    def finish(self, heading: Heading, choice: Choice) -> tuple[bytes, ...]: ...
    def closing(self, heading: Heading, usage: Usage) -> tuple[bytes, ...]: ...
    def explain(self, error: ApplianceError) -> ApplianceError: ...
    def failure(self, heading: Heading, error: ApplianceError) -> bytes: ...


class Exchange(Protocol):
    """One HTTP request and the way back to its client. `received` grows while the body is read."""

    method: str
    route: str
    nonce: bytes | None
    attestation: bytes | None
    channel: bytes | None
    scope: ChainScope
    received: bytes
    complete: bool
    timeout_s: float | None

    @property
    def gone(self) -> asyncio.Future[None]: ...
    async def read_body(self) -> bytes: ...
    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None: ...
    async def send_head(self, headers: Mapping[str, str]) -> None: ...
    async def send_part(self, data: bytes) -> None: ...
    async def send_end(self, *, close: bool) -> None: ...
