"""The nouns between HTTP and the service: a parsed call, the JSON of a route, and the way back to one client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.engine.tools import CallDelta, ToolText
from appliance.engine.types import PromptInput, TokenLogprob
from appliance.errors import ApplianceError
from appliance.receipts.issuer import ChainScope
from appliance.receipts.transcript import OutputTranscript


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request says about sampling. None stands for "not given"; defaults are applied by `decoding.resolve`."""

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
class Shape:
    """What answers are held to: JSON values as sent, where they are in force, and the grammar made of them.

    `tool_choice` is as receipts spell it.
    """

    response_format: object = None
    grammar: str | None = None
    tools: object = None
    tool_choice: str = "none"
    parallel: bool = True


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
    cache_key: str = ""
    """Divides what evaluated prompts are reused for, within one identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every body and frame of one answer begins with. `identifier` is the receipt id in hex."""

    identifier: str
    created: int
    model: str
    include_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Numbers of tokens. `cached_tokens` of the prompt were not evaluated again; of those guessed ahead
    `accepted_tokens` became part of the answer and `rejected_tokens` did not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that one choice released at once, and the probabilities of the tokens it is made of, where asked for.

    `offset` is the number of characters of the choice before it. `calls` is what the piece adds to calls of tools.
    """

    text: str
    offset: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[CallDelta, ...] = ()


class Choice:
    """One choice while it grows: what the receipt says of it, and what its JSON needs."""

    __slots__ = ("_offset", "_pending", "echoed", "index", "measured", "output", "tools")

    def __init__(self, index: int, *, measured: bool, echoed: str = "", tools: bool = False) -> None:
        self.index = index
        self.tools = ToolText() if tools else None
        """The text and calls so far where calls are taken out of the text; `output` has what was generated."""
        self.echoed = echoed
        """The prompt, where it was asked for in front of the answer."""
        self.output = OutputTranscript()
        self.measured: list[Piece] | None = [] if measured else None
        """Every piece so far where log probabilities were asked for, else None."""
        self._pending: tuple[TokenLogprob, ...] = ()
        self._offset = 0

    def take(self, text: str, token_ids: bytes, logprobs: tuple[TokenLogprob, ...]) -> Piece | None:
        """Account for one step of the engine; the piece to send, if it released any text.

        Tokens whose bytes are held back are told about with the text they become part of. Those of a stop string
        become part of none, and are not told about.
        """
        self.output.add(text, token_ids)
        if self.tools is not None:
            return _piece(*self.tools.feed(text)) if text else None
        if self.measured is None:
            return Piece(text=text) if text else None
        self._pending += logprobs
        if not text:
            return None
        piece = Piece(text=text, offset=self._offset, logprobs=self._pending)
        self.measured.append(piece)
        self._pending = ()
        self._offset += len(text)
        return piece

    def end(self, reason: str) -> Piece | None:
        """The engine is done with the choice; what had been held back, if anything."""
        self.output.finish = reason
        if self.tools is None:
            return None
        if self.tools.complete and reason == "stop":
            self.output.finish = "tool_calls"
        return _piece(*self.tools.finish())


def _piece(text: str, calls: tuple[CallDelta, ...]) -> Piece | None:
    return Piece(text=text, calls=calls) if text or calls else None


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
