"""The request path: body in, engine events through, answer and receipt out. Engine and receipts meet only here."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from appliance.engine.base import Engine
from appliance.engine.types import Delta, Finished, GenerationJob, PromptReady, SamplingParams
from appliance.errors import ApplianceError, BadRequest, InternalError, NotFound, Overloaded, Unavailable
from appliance.exchange import Call, Dialect, Exchange, Heading, Usage
from appliance.interrupts import ClientGone, EventReader, Interrupts
from appliance.metrics import Metrics
from appliance.receipts.claims import Evaluation, Outcome, Record, Served
from appliance.receipts.issuer import Issuer
from appliance.receipts.transcript import (
    OutputTranscript,
    StreamTranscript,
    Subject,
    prompt_facts,
    request_facts,
)
from appliance.streaming import StreamWriter
from client_sdk.wire import cbor, names
from client_sdk.wire.stream import encode_base64url


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model under its public name, with what its receipts say about it."""

    name: str
    engine: Engine
    served: Served
    created: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Clocks and randomness. `clock` is Unix seconds, `monotonic` seconds since any moment."""

    clock: Callable[[], float]
    monotonic: Callable[[], float]
    random_bytes: Callable[[int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    max_active: int
    max_request_s: float
    stream_padding_bytes: int


class Answer:
    """One request on its way. Collects facts until its receipt is issued, exactly once, whatever happens."""

    def __init__(
        self,
        exchange: Exchange,
        subject: Subject,
        issuer: Issuer,
        fallback: Served,
        ended: Callable[[Answer], None],
    ) -> None:
        self.exchange = exchange
        self.subject = subject
        self.heading = Heading(identifier=subject.cti.hex(), created=subject.iat, model="")
        self.output = OutputTranscript()
        self.served: Served | None = None
        self.evaluation: Evaluation | None = None
        self.writer: StreamWriter | None = None
        self._issuer = issuer
        self._fallback = fallback
        self._ended = ended
        self.receipt: bytes | None = None
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

    def issue(self, outcome: Outcome) -> bytes:
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
            engine=(self.served or self._fallback).engine,
            served=self.served,
            evaluation=self.evaluation,
        )
        self.status = outcome.status
        self.receipt = self._issuer.issue(record, exchange.scope)
        return self.receipt

    @property
    def head(self) -> dict[str, str]:
        return {names.HEADER_RECEIPT_ID: self.subject.cti.hex()}


class Service:
    """Answers inference requests on the models it was given."""

    def __init__(
        self,
        *,
        models: Mapping[str, ServedModel],
        issuer: Issuer,
        surroundings: Surroundings,
        limits: ServiceLimits,
        metrics: Metrics,
    ) -> None:
        self.models = models
        self.issuer = issuer
        self.metrics = metrics
        self._surroundings = surroundings
        self._limits = limits
        self._stopping: asyncio.Future[None] | None = None
        self._active = 0

    @property
    def active(self) -> int:
        return self._active

    @property
    def ready(self) -> bool:
        stopping = self._stopping is not None and self._stopping.done()
        return not stopping and all(model.engine.ready for model in self.models.values())

    def begin_shutdown(self) -> None:
        """End every answer in flight: with status `error` and a receipt."""
        stopping = self._stop_signal()
        if not stopping.done():
            stopping.set_result(None)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """A place for one request, from before its body is read to the last byte of its answer.

        Raises Overloaded or Unavailable on entry: such a refusal has no receipt.
        """
        if self._stop_signal().done():
            raise Unavailable("shutting_down", "The appliance is stopping.", retry_after_s=5)
        if self._active >= self._limits.max_active:
            self.metrics.refused_busy.inc()
            places = self._limits.max_active
            raise Overloaded("queue_full", f"All {places} places are taken; try again later.", retry_after_s=1)
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    async def respond(self, exchange: Exchange, dialect: Dialect) -> None:
        """Answer one request. Once it has a place, every way out of here has issued one receipt.

        Raises Overloaded or Unavailable when there is no place.
        """
        around = self._surroundings
        subject = Subject(
            cti=around.random_bytes(names.CTI_BYTES),
            salt=around.random_bytes(names.SALT_BYTES),
            iat=int(around.clock()),
            eat_nonce=exchange.nonce,
            attestation=exchange.attestation,
            channel=exchange.channel,
        )
        fallback = next(iter(self.models.values())).served
        with self._place(), Answer(exchange, subject, self.issuer, fallback, self._count) as answer:
            try:
                await self._answer(answer, dialect)
            except ApplianceError as error:
                await self._fail(answer, error)
            except ClientGone:
                answer.issue(answer.outcome(names.STATUS_CANCELLED, 499, b""))

    async def _answer(self, answer: Answer, dialect: Dialect) -> None:
        exchange, around = answer.exchange, self._surroundings
        interrupts = Interrupts(
            gone=exchange.gone,
            stopping=self._stop_signal(),
            deadline=around.monotonic() + self._limits.max_request_s,
            monotonic=around.monotonic,
        )
        # The body counts too: a client that sends it drop by drop holds a place.
        call = dialect.parse(await interrupts.bound(exchange.read_body()))
        model = self.models.get(call.model)
        if model is None:
            raise NotFound("model_not_found", "No model of this name is served here.", param="model")
        answer.served = model.served
        answer.heading = Heading(
            identifier=answer.subject.cti.hex(),
            created=answer.subject.iat,
            model=model.name,
            include_usage=call.include_usage,
        )
        job = self._job(answer.subject, call)
        reader = EventReader(model.engine.generate(job), interrupts)
        try:
            prompt_tokens = await self._begin(answer, call, job, reader)
            if call.stream:
                await self._stream(answer, dialect, reader, prompt_tokens)
            else:
                await self._whole(answer, dialect, reader, prompt_tokens)
        finally:
            await reader.aclose()

    def _job(self, subject: Subject, call: Call) -> GenerationJob:
        """Defaults applied and the seed resolved: from here on nothing is left open."""
        drawn = int.from_bytes(self._surroundings.random_bytes(4), "big") >> 1
        return GenerationJob(
            job_id=subject.cti,
            prompt=call.prompt,
            sampling=SamplingParams(
                temperature=1.0 if call.temperature is None else call.temperature,
                top_p=1.0 if call.top_p is None else call.top_p,
                top_k=0 if call.top_k is None else call.top_k,
                seed=drawn if call.seed is None else call.seed,
                max_tokens=call.max_tokens,
                stop=call.stop,
            ),
            template_date=datetime.datetime.fromtimestamp(subject.iat, datetime.UTC).date().isoformat(),
        )

    async def _begin(self, answer: Answer, call: Call, job: GenerationJob, reader: EventReader) -> int:
        """Wait until the engine has accepted the prompt; returns its length in tokens."""
        ready = await reader.next()
        assert isinstance(ready, PromptReady), "the engine's first event is PromptReady"
        prompt_tokens = len(ready.token_ids) // 4
        if call.max_tokens is not None and ready.max_tokens < call.max_tokens:
            raise BadRequest(
                "context_length_exceeded",
                f"The prompt has {prompt_tokens} tokens, which leaves room for {ready.max_tokens}; "
                f"{call.max_tokens} were asked for.",
                param=call.max_tokens_field,
            )
        sampling, commit = job.sampling, answer.subject.commit
        stop = commit(names.LABEL_STOP, cbor.encode(list(sampling.stop))) if sampling.stop else None
        answer.evaluation = Evaluation(
            prompt=prompt_facts(answer.subject, text=ready.prompt_text, token_ids=ready.token_ids),
            decoding={
                "temperature": float(sampling.temperature),
                "top_p": float(sampling.top_p),
                "top_k": sampling.top_k,
                "seed": sampling.seed,
                "max_tokens": ready.max_tokens,
                "n": 1,
                "stop": stop,
            },
            outputs=(answer.output,),
            execution=ready.execution,
        )
        return prompt_tokens

    async def _whole(self, answer: Answer, dialect: Dialect, reader: EventReader, prompt_tokens: int) -> None:
        output = answer.output
        while output.finish is None:
            match await reader.next():
                case Delta(text=text, token_ids=token_ids):
                    output.add(text, token_ids)
                case Finished(reason=reason):
                    output.finish = reason
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=output.count)
        body = dialect.whole(answer.heading, output.text, output.finish, usage)
        await self._send_whole(answer, names.STATUS_COMPLETE, 200, body, {})

    async def _stream(self, answer: Answer, dialect: Dialect, reader: EventReader, prompt_tokens: int) -> None:
        exchange, output, heading = answer.exchange, answer.output, answer.heading
        writer = self._open_stream(answer)
        await exchange.send_head(answer.head)
        opening = dialect.opening(heading)
        if opening:
            await writer.frames(*opening)
        while output.finish is None:
            match await reader.next(writer.transcript.checkpoint_wait_s):
                case None:
                    if writer.transcript.checkpoint_due:
                        await writer.checkpoint()
                case Delta(text=text, token_ids=token_ids):
                    output.add(text, token_ids)
                    if text:
                        await writer.frames(dialect.delta(heading, text))
                case Finished(reason=reason):
                    output.finish = reason
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=output.count)
        await writer.frames(*dialect.closing(heading, output.finish, usage))
        await writer.last(answer.issue(answer.outcome(names.STATUS_COMPLETE, 200, b"")), done=True)
        await exchange.send_end(close=False)

    def _open_stream(self, answer: Answer) -> StreamWriter:
        around = self._surroundings
        commitment = answer.subject.commit(names.LABEL_REQUEST, answer.exchange.received)
        answer.writer = StreamWriter(
            send=answer.exchange.send_part,
            transcript=StreamTranscript(answer.subject, commitment, clock=around.monotonic),
            issuer=self.issuer,
            salt=answer.subject.salt,
            random_bytes=around.random_bytes,
            padding_bytes=self._limits.stream_padding_bytes,
        )
        return answer.writer

    async def _fail(self, answer: Answer, error: ApplianceError) -> None:
        """Tell the client what went wrong, with a receipt: as a whole answer, or as the last frame of the stream."""
        if answer.writer is None:
            headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
            await self._send_whole(answer, _terminal_status(error), error.status, error.body(), headers)
            return
        await answer.writer.frames(b"data: " + error.body() + b"\n\n")
        await answer.writer.last(answer.issue(answer.outcome(_stream_status(error), 200, b"")), done=False)
        await answer.exchange.send_end(close=True)

    async def _send_whole(
        self, answer: Answer, status: str, http_status: int, body: bytes, headers: Mapping[str, str]
    ) -> None:
        receipt = answer.issue(answer.outcome(status, http_status, body))
        head = {**answer.head, **headers}
        encoded = encode_base64url(receipt)
        if len(encoded) <= names.LIMIT_RECEIPT_HEADER_BYTES:
            head[names.HEADER_EXECUTION_RECEIPT] = encoded.decode()
        await answer.exchange.send_whole(http_status, head, body)

    def _count(self, answer: Answer) -> None:
        evaluation = answer.evaluation
        prompt_tokens = evaluation.prompt.count if evaluation else 0
        self.metrics.count_answer(answer.status, prompt_tokens=prompt_tokens, output_tokens=answer.output.count)

    def _stop_signal(self) -> asyncio.Future[None]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_future()
        return self._stopping


def _terminal_status(error: ApplianceError) -> str:
    if error.status == 408:
        return names.STATUS_DEADLINE
    return names.STATUS_REFUSED if error.status < 500 else names.STATUS_ERROR


def _stream_status(error: ApplianceError) -> str:
    """A stream has begun: whatever fails now is no refusal any more."""
    return names.STATUS_DEADLINE if error.status == 408 else names.STATUS_ERROR
