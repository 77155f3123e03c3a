"""One job on its way through the engine: what is committed of it, and what was proposed or drawn and is not yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from appliance.engine.generation.speculation import Speculation, committed
from appliance.engine.text import TextAssembler
from appliance.engine.types import Delta, FinishReason, TokenLogprob


class TokenSampler(Protocol):
    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the token sampled last, where the job asked for them."""

    def sample(self, row: int) -> int:
        """Draw from row `row` of the last batch, one number of the job's generator for each call."""

    def measure(self, row: int, token: int) -> TokenLogprob:
        """What row `row` of the last batch said of a token that came next."""

    def name(self, token: int) -> bytes:
        """The token's bytes as probabilities have them."""

    def close(self) -> None: ...


class Vocabulary(Protocol):
    def piece(self, token: int) -> bytes: ...
    def is_end(self, token: int) -> bool: ...


@dataclass(slots=True, kw_only=True)
class Sequence:
    """`position` tokens of `tokens` (prompt and answer) are in the context, in `slot`.

    `drawn` are tokens drawn by the sampler that no step has committed: a step that failed after them is repeated with
    them, for a generator cannot be turned back.
    """

    job_id: bytes
    tokens: list[int]
    prompt_count: int
    max_tokens: int
    sampler: TokenSampler
    text: TextAssembler
    scope: bytes = b""
    alone: bool = False
    slot: int = -1
    position: int = 0
    cached: int = 0
    begun: bool = False
    passes: int = 0
    drafts: list[int] = field(default_factory=list)
    drawn: list[tuple[int, tuple[TokenLogprob, ...]]] = field(default_factory=list)
    speculation: Speculation | None = None
    scored: dict[int, TokenLogprob] | None = None
    """What the model said of the tokens of the prompt, by their index; None where nobody asked."""

    @property
    def scoring(self) -> bool:
        """Every row of the prompt has logits."""
        return self.scored is not None and self.position < self.prompt_count

    def score(self, row: int, count: int) -> None:
        """Measure the prompt tokens behind the `count` rows of this step that begin at `row`. Idempotent."""
        assert self.scored is not None
        for index in range(self.position + 1, min(self.position + count + 1, self.prompt_count)):
            self.scored[index] = self.sampler.measure(row + index - self.position - 1, self.tokens[index])

    def scores(self) -> tuple[TokenLogprob, ...]:
        """Of the whole prompt, with the first tokens of the answer. Nothing came before the first one."""
        if self.scored is None or self.passes > 1:
            return ()
        first = TokenLogprob(token=self.sampler.name(self.tokens[0]), logprob=None)
        return (first, *(self.scored[index] for index in range(1, self.prompt_count)))

    @property
    def pending(self) -> int:
        """Tokens that are to be evaluated before the next one can be drawn."""
        return len(self.tokens) - self.position

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_count

    @property
    def cells(self) -> int:
        """The most cells this job can come to hold."""
        return self.prompt_count + self.max_tokens

    def draw(self, row: int, vocabulary: Vocabulary) -> None:
        """Draw from the rows of this step that begin at `row`, until one disagrees with its draft or ends the answer.

        Idempotent: what is in `drawn` already is not drawn again.
        """
        for index in range(len(self.drafts) + 1):
            if index == len(self.drawn):
                token = self.sampler.sample(row + index)
                self.drawn.append((token, self.sampler.logprobs))
            token = self.drawn[index][0]
            if vocabulary.is_end(token) or index == len(self.drafts) or token != self.drafts[index]:
                return

    def commit(self, vocabulary: Vocabulary) -> tuple[Delta, FinishReason | None]:
        """Take what was drawn into the answer; all that was pending is in the context, and the drafts behind it.

        Afterwards `position` is behind the last token that the context rightly holds.
        """
        targets = [token for token, _ in self.drawn[: len(self.drafts) + 1]]
        count = len(committed(self.drafts[: len(targets) - 1], targets))
        taken, self.drawn = self.drawn[:count], self.drawn[count:]
        text, ids = "", b""
        logprobs: list[TokenLogprob] = []
        reason: FinishReason | None = None
        for token, extras in taken:
            self.tokens.append(token)
            ids += token.to_bytes(4, "little")
            if vocabulary.is_end(token):
                reason = "stop"
                break  # the end is no part of the text
            text += self.text.feed(vocabulary.piece(token))
            logprobs += extras
            reason = "stop" if self.text.stopped else "length" if self.generated >= self.max_tokens else None
            if reason is not None:
                break
        self.position += min(len(ids) // 4, count - 1)
        self.passes += 1
        self._judge(count - 1)
        if reason is not None:
            text += self.text.finish()
            # The held-back tail may itself complete a stop string only by an incomplete character's U+FFFD.
            reason = "stop" if self.text.stopped else reason
        return Delta(text=text, token_ids=ids, logprobs=tuple(logprobs), prompt_logprobs=self.scores()), reason

    def _judge(self, accepted: int) -> None:
        if self.speculation is not None and self.drafts:
            self.speculation.proposed += len(self.drafts)
            self.speculation.accepted += accepted
            self.speculation.controller.record(len(self.drafts), accepted)
        self.drafts = []

    def close(self) -> None:
        self.sampler.close()
        if self.speculation is not None:
            self.speculation.drafter.close()
