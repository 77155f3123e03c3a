"""The request path: body in, engine events through, answer and receipt out. Engine and receipts meet only here."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from appliance.engine.base import Engine
from appliance.engine.embedding.jobs import Embedder
from appliance.engine.types import Begun, Delta, EngineEvent, Finished, PromptReady
from appliance.errors import ApplianceError, NotFound, Overloaded, Unavailable
from appliance.inference import chat_format
from appliance.inference import sampling as decoding
from appliance.inference.answer import Answer
from appliance.inference.cache_scopes import CacheScopes
from appliance.inference.embedding import VectorDialect, VectorWork
from appliance.inference.event_reader import ClientGone, EventReader, Interrupts
from appliance.inference.request import Call, Dialect, Exchange
from appliance.inference.sse import StreamWriter
from appliance.metrics import Metrics
from appliance.receipts.air import AirIssuer, AirRecord
from appliance.receipts.claims import Served, failed_status
from appliance.receipts.issuer import Issuer
from appliance.receipts.transcript import StreamTranscript, Subject
from client_sdk.wire import names
from client_sdk.wire.receipt import EngineFacts
from client_sdk.wire.stream import encode_base64url


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model under its public name, with what its receipts say about it. `embedder` is there for one of vectors."""

    name: str
    engine: Engine
    served: Served
    created: int
    embedder: Embedder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Clocks and randomness. `clock` is Unix seconds, `monotonic` seconds since any moment."""

    clock: Callable[[], float]
    monotonic: Callable[[], float]
    random_bytes: Callable[[int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What is drawn, or read from a clock, for one answer: with it, the request and the model the answer is decided.

    `iat` is Unix seconds; `seed` is for a request that names none.
    """

    cti: bytes
    salt: bytes
    iat: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """`deterministic` is in force for every request. `max_active_per_key`: None is no limit of its own."""

    max_active: int
    max_request_s: float
    stream_padding_bytes: int
    deterministic: bool = False
    max_active_per_key: int | None = None


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
        air: AirIssuer | None = None,
        fallback: EngineFacts | None = None,
    ) -> None:
        """`fallback` is what receipts say of the engine where a request names no model; None: the first model's."""
        self._air = air
        self._fallback = fallback or next(iter(models.values())).served.engine
        self.models = models
        self.issuer = issuer
        self.metrics = metrics
        self._surroundings = surroundings
        self._limits = limits
        self._stopping: asyncio.Future[None] | None = None
        self._active = 0
        self._active_of: Counter[str | None] = Counter()
        self._scopes = CacheScopes(surroundings.random_bytes)

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
    def _place(self, key: str | None) -> Iterator[None]:
        """A place for one request, from before its body is read to the last byte of its answer.

        Raises Overloaded or Unavailable on entry: such a refusal has no receipt.
        """
        if self._stop_signal().done():
            raise Unavailable("shutting_down", "The appliance is stopping.", retry_after_s=5)
        if self._active >= self._limits.max_active:
            self.metrics.refused_busy.inc()
            places = self._limits.max_active
            raise Overloaded("queue_full", f"All {places} places are taken; try again later.", retry_after_s=1)
        held, most = self._active_of[key], self._limits.max_active_per_key
        if key is not None and most is not None and held >= most:
            self.metrics.refused_busy.inc()
            raise Overloaded("key_busy", f"This key holds all {most} places it may; try again later.", retry_after_s=1)
        self._active += 1
        self._active_of[key] += 1
        try:
            yield
        finally:
            self._active -= 1
            self._active_of[key] -= 1

    async def respond(
        self, exchange: Exchange, dialect: Dialect | VectorDialect, *, drawn: Drawn | None = None
    ) -> None:
        """Answer one request. Once it has a place, every way out of here has issued one receipt.

        `drawn` is what another answer to this request was made with, to make it again (`appliance.replay`). Raises
        Overloaded or Unavailable when there is no place.
        """
        drawn = drawn or self._draw()
        subject = Subject(
            cti=drawn.cti,
            salt=drawn.salt,
            iat=drawn.iat,
            eat_nonce=exchange.nonce,
            attestation=exchange.attestation,
            channel=exchange.channel,
        )
        with (
            self._place(exchange.scope.store_key),
            Answer(exchange, subject, self.issuer, self._fallback, self._count) as answer,
        ):
            answer.started, answer.drawn_seed = self._surroundings.monotonic(), drawn.seed
            try:
                await self._answer(answer, dialect)
            except ApplianceError as error:
                await self._fail(answer, dialect, dialect.explain(error))
            except ClientGone:
                answer.issue(answer.outcome(names.STATUS_CANCELLED, 499, b""))

    def _draw(self) -> Drawn:
        around = self._surroundings
        return Drawn(
            cti=around.random_bytes(names.CTI_BYTES),
            salt=around.random_bytes(names.SALT_BYTES),
            iat=int(around.clock()),
            seed=int.from_bytes(around.random_bytes(4), "big") >> 1,
        )

    async def _answer(self, answer: Answer, dialect: Dialect | VectorDialect) -> None:
        exchange, around = answer.exchange, self._surroundings
        interrupts = Interrupts(
            gone=exchange.gone,
            stopping=self._stop_signal(),
            deadline=around.monotonic() + min(self._limits.max_request_s, exchange.timeout_s or math.inf),
            monotonic=around.monotonic,
        )
        # The body counts too: a client that sends it drop by drop holds a place.
        body = await interrupts.bound(exchange.read_body())
        if isinstance(dialect, VectorDialect):
            await self._vectors(answer, dialect, body, interrupts)
        else:
            await self._generate(answer, dialect, body, interrupts)

    def _open(self, answer: Answer, name: str) -> ServedModel:
        """The model asked for, whose name the answer and its receipt have from here on. Raises NotFound."""
        model = self.models.get(name)
        if model is None:
            raise NotFound("model_not_found", "No model of this name is served here.", param="model")
        answer.served = model.served
        answer.heading = replace(answer.heading, model=model.name)
        return model

    async def _vectors(self, answer: Answer, dialect: VectorDialect, body: bytes, interrupts: Interrupts) -> None:
        call, written = dialect.parse_inputs(body), b""
        embedder = self._open(answer, call.model).embedder
        work = VectorWork(subject=answer.subject, heading=answer.heading, call=call, dialect=dialect)
        async with aclosing(work.steps(embedder, interrupts)) as steps:
            async for evaluation, part in steps:
                answer.evaluation, written = evaluation, part
        await self._send_whole(answer, names.STATUS_COMPLETE, 200, written, {})

    async def _generate(self, answer: Answer, dialect: Dialect, body: bytes, interrupts: Interrupts) -> None:
        exchange, around = answer.exchange, self._surroundings
        call = dialect.parse(body)
        model = self._open(answer, call.model)
        answer.heading = replace(
            answer.heading,
            include_usage=call.include_usage,
            obfuscate=around.random_bytes if call.include_obfuscation else None,
        )
        call = chat_format.fit(call, model.engine.model.chat)
        sampling = decoding.resolve(call, drawn_seed=answer.drawn_seed, deterministic=self._limits.deterministic)
        scope = self._scopes.scope(exchange.scope, exchange.route, call.cache_key)
        jobs = decoding.jobs(answer.subject, call, sampling, scope)
        reader = EventReader((model.engine.generate(job) for job in jobs), interrupts)
        try:
            answer.begin(call, sampling, await self._prompts(call, reader))
            if call.stream:
                await self._stream(answer, dialect, reader)
            else:
                await self._whole(answer, dialect, reader)
        finally:
            await reader.aclose()

    @staticmethod
    async def _prompts(call: Call, reader: EventReader[EngineEvent]) -> Mapping[int, PromptReady]:
        """Wait until the engine has accepted every prompt: what is refused is refused before anything was sent."""
        ready: dict[int, PromptReady] = {}
        early: list[tuple[int, EngineEvent]] = []
        while len(ready) < len(call.prompts) * call.n:
            arrived = await reader.next()
            assert arrived is not None, "a wait without a limit ends with an event"
            index, event = arrived
            if isinstance(event, PromptReady):
                decoding.check_room(call, event)
                ready[index] = event
            else:
                early.append(arrived)
        reader.unread(early)
        return ready

    async def _whole(self, answer: Answer, dialect: Dialect, reader: EventReader[EngineEvent]) -> None:
        running = len(answer.choices)
        while running:
            match await reader.next():
                case index, Begun() as begun:
                    answer.learn(index, begun.execution)
                case index, Delta() as delta:
                    answer.choices[index].take(delta.text, delta.token_ids, delta.logprobs, delta.prompt_logprobs)
                case index, Finished() as finished:
                    answer.end(answer.choices[index], finished)
                    running -= 1
        body = dialect.whole(answer.heading, answer.choices, answer.usage)
        await self._send_whole(answer, names.STATUS_COMPLETE, 200, body, {})

    async def _stream(self, answer: Answer, dialect: Dialect, reader: EventReader[EngineEvent]) -> None:
        exchange, choices, heading = answer.exchange, answer.choices, answer.heading
        writer = self._open_stream(answer)
        await exchange.send_head(answer.head)
        opening = dialect.opening(heading, choices)
        if opening:
            await writer.frames(*opening)
        running = len(choices)
        while running:
            match await reader.next(writer.transcript.checkpoint_wait_s):
                case None:
                    if writer.transcript.checkpoint_due:
                        await writer.checkpoint()
                case index, Begun() as begun:
                    answer.learn(index, begun.execution)
                case index, Delta() as delta:
                    piece = choices[index].take(delta.text, delta.token_ids, delta.logprobs, delta.prompt_logprobs)
                    if piece is not None:
                        await writer.frames(*dialect.delta(heading, choices[index], piece))
                case index, Finished() as finished:
                    held = answer.end(choices[index], finished)
                    running -= 1
                    last = () if held is None else dialect.delta(heading, choices[index], held)
                    ending = dialect.finish(heading, choices[index])
                    closing = () if running else dialect.closing(heading, answer.usage)
                    await writer.frames(*last, *ending, *closing)
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

    async def _fail(self, answer: Answer, dialect: Dialect | VectorDialect, error: ApplianceError) -> None:
        """Tell the client what went wrong, with a receipt: as a whole answer, or as the last frame of the stream."""
        answer.require_open()
        if answer.writer is None:
            headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
            await self._send_whole(answer, failed_status(error, streaming=False), error.status, error.body(), headers)
            return
        await answer.writer.frames(dialect.failure(answer.heading, error))
        await answer.writer.last(
            answer.issue(answer.outcome(failed_status(error, streaming=True), 200, b"")), done=False
        )
        await answer.exchange.send_end(close=True)

    async def _send_whole(
        self, answer: Answer, status: str, http_status: int, body: bytes, headers: Mapping[str, str]
    ) -> None:
        receipt = answer.issue(answer.outcome(status, http_status, body))
        head = {**answer.head, **headers}
        encoded = encode_base64url(receipt)
        if len(encoded) <= names.LIMIT_RECEIPT_HEADER_BYTES:
            head[names.HEADER_EXECUTION_RECEIPT] = encoded.decode()
        if self._air is not None and status == names.STATUS_COMPLETE and answer.served is not None:
            self._add_air(self._air, answer, answer.served, body, head)
        await answer.exchange.send_whole(http_status, head, body)

    def _add_air(self, issuer: AirIssuer, answer: Answer, served: Served, body: bytes, head: dict[str, str]) -> None:
        """The AIR receipt of a whole answer, in a header of its own."""
        receipt = issuer.issue(
            AirRecord(
                subject=answer.subject,
                model=served.model,
                request=answer.exchange.received,
                response=body,
                took_ms=int(1000 * (self._surroundings.monotonic() - answer.started)),
                finished_at=int(self._surroundings.clock()),
            )
        )
        if receipt is not None:
            head[names.HEADER_AIR_RECEIPT] = encode_base64url(receipt).decode()

    def _count(self, answer: Answer) -> None:
        usage = answer.usage
        self.metrics.count_answer(
            answer.status, prompt_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens
        )

    def _stop_signal(self) -> asyncio.Future[None]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_future()
        return self._stopping
