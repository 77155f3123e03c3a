"""One answer on its way: what is known of it, and the one receipt it ends with, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from appliance.engine.types import Finished, PromptReady, SamplingParams
from appliance.errors import AnswerEnded, InternalError
from appliance.inference import chat_format
from appliance.inference import sampling as decoding
from appliance.inference.event_reader import ClientGone
from appliance.inference.request import Call, Choice, Exchange, Fit, Heading, Piece, Usage
from appliance.inference.sse import StreamWriter
from appliance.receipts.claims import Evaluation, Outcome, Record, Served
from appliance.receipts.issuer import Issuer
from appliance.receipts.transcript import Subject, prompt_facts, request_facts
from client_sdk.wire import names
from client_sdk.wire.receipt import EngineFacts


class Answer:
    """One request on its way. Collects facts until its receipt is issued, exactly once, whatever happens."""

    def __init__(
        self,
        exchange: Exchange,
        subject: Subject,
        issuer: Issuer,
        fallback: EngineFacts,
        ended: Callable[[Answer], None],
    ) -> None:
        self.exchange = exchange
        self.subject = subject
        self.heading = Heading(identifier=subject.cti.hex(), created=subject.iat, model="")
        self.choices: tuple[Choice, ...] = ()
        self.served: Served | None = None
        self.evaluation: Evaluation | None = None
        self.writer: StreamWriter | None = None
        self._execution: list[Mapping[str, object]] = []
        self._each = 1
        self._fit = Fit()
        self._issuer = issuer
        self._fallback = fallback
        self._ended = ended
        self.receipt: bytes | None = None
        self.started = 0.0
        self.drawn_seed = 0
        self.status = ""
        issuer.store.expect(subject.cti, exchange.scope.store_key)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        """Whatever escaped, the request still gets its receipt: cancelled by the server's end, or an error of ours."""
        if self.receipt is None:
            if kind is not None and issubclass(kind, asyncio.CancelledError | ClientGone):
                self.issue(self.outcome(names.STATUS_CANCELLED, 500, b""))
            else:
                fault = InternalError()
                self.issue(self.outcome(names.STATUS_ERROR, fault.status, fault.body()))
        self._ended(self)

    def outcome(self, status: str, http_status: int, body: bytes) -> Outcome:
        """How it ended: a whole answer `body`, or the stream if one has begun (its head said 200 long ago)."""
        if self.writer is not None:
            media, stream = names.MEDIA_EVENT_STREAM, self.writer.transcript
            return Outcome(status=status, http_status=200, media_type=media, body=None, stream=stream)
        return Outcome(status=status, http_status=http_status, media_type=names.MEDIA_JSON, body=body)

    def require_open(self) -> None:
        """Raise AnswerEnded once there is a receipt: a second one would say something else of the same answer."""
        if self.receipt is not None:
            raise AnswerEnded("this answer has its receipt")

    def issue(self, outcome: Outcome) -> bytes:
        """The receipt of this answer, made now. Raises AnswerEnded on a second call."""
        self.require_open()
        exchange = self.exchange
        request = request_facts(
            self.subject,
            method=exchange.method,
            route=exchange.route,
            body=exchange.received,
            complete=exchange.complete,
        )
        record = Record(
            subject=self.subject,
            request=request,
            outcome=outcome,
            engine=self._fallback if self.served is None else self.served.engine,
            served=self.served,
            evaluation=self.evaluation,
        )
        self.status = outcome.status
        self.receipt = self._issuer.issue(record, exchange.scope)
        return self.receipt

    def begin(self, call: Call, sampling: SamplingParams, ready: Mapping[int, PromptReady]) -> None:
        """The engine has taken every prompt: from now on the receipt speaks of an evaluation."""
        self.choices = tuple(chat_format.choice(call, index, ready[index].prompt_text) for index in range(len(ready)))
        for choice in self.choices if not call.evaluate else ():
            choice.prompt = ready[choice.index]
        self._fit = call.fit
        self._execution, self._each = [ready[index].execution for index in range(len(ready))], call.n
        prompts = [ready[index] for index in range(0, len(ready), call.n)]
        self.evaluation = Evaluation(
            prompt=prompt_facts(self.subject, [(prompt.prompt_text, prompt.token_ids) for prompt in prompts]),
            decoding=decoding.claim(self.subject, call, sampling, min(each.max_tokens for each in ready.values())),
            outputs=tuple(choice.output for choice in self.choices),
            execution={**decoding.execution(self._execution), **chat_format.facts(call.fit, self.choices)},
        )

    def end(self, choice: Choice, event: Finished) -> Piece | None:
        """One choice has ended; what only its end knows about its path is known now. Returns what was held back."""
        piece = choice.end(event.reason)
        self.learn(choice.index, event.execution)
        return piece

    def learn(self, index: int, execution: Mapping[str, object]) -> None:
        """More is known about the path of a choice."""
        if self.evaluation is not None:
            self._execution[index] = {**self._execution[index], **execution}
            facts = {**decoding.execution(self._execution), **chat_format.facts(self._fit, self.choices)}
            self.evaluation = replace(self.evaluation, execution=facts)

    @property
    def usage(self) -> Usage:
        evaluated = self.evaluation is not None and all(choice.prompt is None for choice in self.choices)
        prompt_tokens = self.evaluation.prompt.count if self.evaluation is not None and evaluated else 0
        counts = [choice.output.count for choice in self.choices]
        usage = decoding.usage(prompt_tokens, counts, self._execution, self._each)
        return replace(usage, reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices))

    @property
    def head(self) -> dict[str, str]:
        return {names.HEADER_RECEIPT_ID: self.subject.cti.hex()}
