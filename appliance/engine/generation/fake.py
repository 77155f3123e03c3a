"""An engine without a model: scripted answers, injected delays and failures. Runs the same contract as the real one."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from appliance.engine.base import Progress
from appliance.engine.text import TextAssembler
from appliance.engine.types import (
    Begun,
    ChatFormat,
    Delta,
    EngineEvent,
    EngineInfo,
    Finished,
    FinishReason,
    GenerationJob,
    InfillPrompt,
    LoadedModel,
    PromptInput,
    PromptReady,
    TokenLogprob,
    TokenPrompt,
    ToolChat,
)
from appliance.errors import BadRequest, EngineFailed, Unavailable

END_TOKEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScript:
    """What every answer consists of: the bytes of its tokens, then the end token.

    `fail_at` k raises EngineFailed in place of token k (from 0). `delay_s` is slept before each token. Prompts of more
    than `context_length` UTF-8 bytes are too long: a byte of a prompt is a token here.
    """

    pieces: tuple[bytes, ...] = (b"Hello", b" world", b".")
    fail_at: int | None = None
    delay_s: float = 0.0
    context_length: int = 4096
    cached_tokens: int | None = None
    """Where given, this is told of every prompt when its turn has come."""
    seeded: bool = False
    """True appends the seed to the answer, so that answers can be told apart."""
    chat: ChatFormat = field(default_factory=ChatFormat)
    """What its template knows. One that opens reasoning ends every chat prompt with the start tag."""


@dataclass(slots=True)
class FakeCounters:
    """What happened so far."""

    started: int = 0
    cancelled: int = 0
    live: int = 0
    jobs: list[GenerationJob] = field(default_factory=list)


class FakeEngine:
    """`base.Engine`; one job at a time is evaluated, like the real one. `sleep` makes the delays."""

    def __init__(
        self, script: FakeScript | None = None, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self.script = script or FakeScript()
        self.counters = FakeCounters()
        self.restarts = 0
        self._sleep = sleep
        self._turn = asyncio.Lock()
        self._ready = False
        self._stopped = False

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(name="fake", version="1", libraries=(), threads=1, threads_reason="fake: computes nothing")

    @property
    def model(self) -> LoadedModel:
        return LoadedModel(
            context_length=self.script.context_length,
            vocabulary_size=259,
            architecture="fake",
            has_chat_template=True,
            tokenizer_digest=bytes([1] * 32),
            chat_template_digest=bytes([2] * 32),
            weights=((1, bytes([3] * 32)),),
            chat=self.script.chat,
        )

    @property
    def ready(self) -> bool:
        return self._ready and not self._stopped

    @ready.setter
    def ready(self, value: bool) -> None:
        self._ready = value

    @property
    def active(self) -> int:
        return min(self.counters.live, 1)

    @property
    def queued(self) -> int:
        return self.counters.live - self.active

    async def start(self, progress: Progress) -> None:
        progress("hash", 1.0)
        progress("load", 1.0)
        self._ready = True

    async def stop(self, grace_s: float) -> None:
        self._stopped = True

    async def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        """See `base.Engine.generate`."""
        if not self.ready:
            raise Unavailable("engine_restarting", "the engine is being restarted", retry_after_s=1)
        self.counters.jobs.append(job)
        self.counters.started += 1
        self.counters.live += 1
        ended = False
        try:
            ready = self._prepare(job)
            yield ready
            if not job.evaluate:
                ended = True
                yield Finished(reason="length")
                return
            async with self._turn, aclosing(self._answer(job, ready.max_tokens)) as events:
                if self.script.cached_tokens is not None:
                    yield Begun(execution={"cached-prompt-tokens": self.script.cached_tokens})
                async for event in events:
                    ended = isinstance(event, Finished)
                    yield event
        except (BadRequest, EngineFailed, Unavailable):
            ended = True
            raise
        finally:
            self.counters.live -= 1
            self.counters.cancelled += not ended

    def _prepare(self, job: GenerationJob) -> PromptReady:
        text, tags = _prompt_text(job.prompt), self.script.chat.reasoning
        if job.prompt_field == "messages" and tags is not None and self.script.chat.opens_reasoning:
            text += f"{tags.start}\n"
        given = job.prompt.tokens if isinstance(job.prompt, TokenPrompt) else None
        tokens = [byte + 3 for byte in text.encode()] if given is None else list(given)
        limit = self.script.context_length
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
        if not job.evaluate:
            facts = {"context-length": limit, "evaluated": False}
            return PromptReady(prompt_text=text, token_ids=packed, max_tokens=0, execution=facts)
        if len(tokens) >= limit:
            raise BadRequest(
                "context_length_exceeded",
                f"the prompt has {len(tokens)} tokens; the context holds {limit}, at least one of them for the answer",
                param=job.prompt_field,
            )
        room = limit - len(tokens)
        wanted = job.sampling.max_tokens
        return PromptReady(
            prompt_text=text,
            token_ids=packed,
            max_tokens=room if wanted is None else min(room, wanted),
            execution={"threads": 1, "batching": "none", "cached-prompt-tokens": 0, "template-date": job.template_date},
        )

    async def _answer(self, job: GenerationJob, max_tokens: int) -> AsyncGenerator[EngineEvent, None]:
        text = TextAssembler(job.sampling.stop)
        pieces = self.script.pieces + ((f" {job.sampling.seed}".encode(),) if self.script.seeded else ())
        for index in range(max_tokens):
            if self.script.delay_s:
                await self._sleep(self.script.delay_s)
            if self._stopped:
                raise Unavailable("shutting_down", "the engine is shutting down", retry_after_s=5)
            if index == self.script.fail_at:
                raise EngineFailed("engine_failed", "the engine stopped in the middle of this answer")
            reason: FinishReason | None = None
            if index == len(pieces):
                token, released, reason = END_TOKEN, "", "stop"
            else:
                token, released = 3 + index % 256, text.feed(pieces[index])
                reason = "stop" if text.stopped else "length" if index + 1 == max_tokens else None
            if reason is not None:
                released += text.finish()
            logprobs = () if token == END_TOKEN else _measure(pieces[index], job.sampling.logprobs)
            scores = _scores(job) if index == 0 and job.sampling.score_prompt else ()
            yield Delta(text=released, token_ids=token.to_bytes(4, "little"), logprobs=logprobs, prompt_logprobs=scores)
            if reason is not None:
                yield Finished(reason="stop" if text.stopped else reason)
                return


def _prompt_text(prompt: PromptInput) -> str:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, TokenPrompt):
        if not all(3 <= token < 259 for token in prompt.tokens):
            raise BadRequest("invalid_token", "the prompt has a token that the model does not have", param="prompt")
        return bytes(token - 3 for token in prompt.tokens).decode("utf-8", "replace")
    if isinstance(prompt, InfillPrompt):
        raise BadRequest("suffix_not_supported", "the fake engine fills no gaps", param="suffix")
    told, messages = (prompt.tools, prompt.messages) if isinstance(prompt, ToolChat) else ("", prompt)
    lines = [f"<{message.role}>{message.content}" for message in messages]
    return "".join(f"{line}\n" for line in ([f"<tools>{told}"] if told else []) + lines)


def _scores(job: GenerationJob) -> tuple[TokenLogprob, ...]:
    """Every byte of the prompt is a token, and the first has nothing before it."""
    first, *rest = (bytes([byte]) for byte in _prompt_text(job.prompt).encode())
    measured = [_measure(piece, job.sampling.logprobs)[0] for piece in rest]
    return (TokenLogprob(token=first, logprob=None), *measured)


def _measure(piece: bytes, top: int | None) -> tuple[TokenLogprob, ...]:
    """Every token has probability 1/2; the alternatives halve from there."""
    if top is None:
        return ()
    alternatives = tuple((piece + b"'" * rank, -math.log(2) * (rank + 1)) for rank in range(top))
    return (TokenLogprob(token=piece, logprob=-math.log(2), top=alternatives),)
