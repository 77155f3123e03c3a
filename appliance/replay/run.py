"""Evaluate a request again: the service and the engine that serve, with one request and nobody else.

No listener, no TLS, no HTTP: an `Exchange` that has the saved body and keeps what is sent. The answer is made with the
id, salt, time and seed of the receipt, so that whatever is equal has equal commitments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.api.routes import DIALECTS
from appliance.engine.base import Engine, Progress
from appliance.engine.embedding.jobs import Embedder
from appliance.engine.types import Delta, EngineEvent, EngineInfo, GenerationJob, LoadedModel, PromptReady
from appliance.inference.service import Drawn, ServedModel, Service, ServiceLimits, Surroundings
from appliance.metrics import Metrics
from appliance.receipts.claims import InstanceFacts, Served
from appliance.receipts.issuer import ChainScope, Issuer
from appliance.replay.saved import SavedAnswer
from client_sdk.wire import cose, names
from client_sdk.wire.receipt import ReceiptClaims

_NO_LIMIT_S = 1e9


@dataclass(slots=True, kw_only=True)
class Job:
    """What the engine made of one choice: `tokens` is u32 little-endian, the end token included."""

    prompt: str = ""
    text: str = ""
    tokens: bytes = b""


class Recorder:
    """`base.Engine` that remembers what another one generates, choice by choice."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.jobs: list[Job] = []

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def model(self) -> LoadedModel:
        return self._engine.model

    @property
    def ready(self) -> bool:
        return self._engine.ready

    async def start(self, progress: Progress) -> None:
        await self._engine.start(progress)

    async def stop(self, grace_s: float) -> None:
        await self._engine.stop(grace_s)

    def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        """See `base.Engine.generate`."""
        record = Job()
        self.jobs.append(record)
        return self._recorded(self._engine.generate(job), record)

    @staticmethod
    async def _recorded(events: AsyncGenerator[EngineEvent, None], record: Job) -> AsyncGenerator[EngineEvent, None]:
        try:
            async for event in events:
                match event:
                    case PromptReady():
                        record.prompt = event.prompt_text
                    case Delta():
                        record.text += event.text
                        record.tokens += event.token_ids
                    case _:
                        pass
                yield event
        finally:
            await events.aclose()


class KeptExchange:
    """`request.Exchange` without a client: the saved request goes in, and what would be sent is kept."""

    def __init__(self, saved: SavedAnswer) -> None:
        claims = saved.claims
        self.method = claims.request.method
        self.route = claims.request.route
        self.nonce = claims.eat_nonce
        self.attestation = claims.attestation
        self.channel = claims.channel
        self.scope = ChainScope(None)
        self.received = b""
        self.complete = False
        self.timeout_s: float | None = None
        self.body = b""
        self._request = saved.request
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def gone(self) -> asyncio.Future[None]:
        return self._gone

    async def read_body(self) -> bytes:
        self.received, self.complete = self._request, True
        return self.received

    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.body = body

    async def send_head(self, headers: Mapping[str, str]) -> None:
        return

    async def send_part(self, data: bytes) -> None:
        self.body += data

    async def send_end(self, *, close: bool) -> None:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The answer that was made again: its claims, its body or the payloads of its frames, and the engine's record."""

    claims: ReceiptClaims
    body: bytes
    frames: tuple[bytes, ...] | None
    jobs: tuple[Job, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What answers are made with."""

    served: Served
    engine: Engine
    embedder: Embedder | None = None
    deterministic: bool = False


async def evaluate(
    saved: SavedAnswer, means: Means | None, *, monotonic: Callable[[], float], random_bytes: Callable[[int], bytes]
) -> Replayed:
    """Answer the saved request again. What the engine raises becomes an answer with an error, as in serving.

    Without `means` no model is served: for a request that is refused before one is asked.
    """
    claims = saved.claims
    recorder = None if means is None else Recorder(means.engine)
    models: dict[str, ServedModel] = {}
    if means is not None and recorder is not None:
        name = means.served.model.name
        models[name] = ServedModel(
            name=name, engine=recorder, served=means.served, created=claims.iat, embedder=means.embedder
        )
    issuer = _issuer(saved, random_bytes)
    around = Surroundings(clock=lambda: float(claims.iat), monotonic=monotonic, random_bytes=random_bytes)
    limits = ServiceLimits(
        max_active=1,
        max_request_s=_NO_LIMIT_S,
        stream_padding_bytes=0,
        deterministic=means is not None and means.deterministic,
    )
    service = Service(
        models=models, issuer=issuer, surroundings=around, limits=limits, metrics=Metrics(), fallback=claims.engine
    )
    exchange = KeptExchange(saved)
    seed = 0 if claims.decoding is None else claims.decoding["seed"]
    assert isinstance(seed, int), "checked when the claims were parsed"
    drawn = Drawn(cti=claims.cti, salt=saved.salt, iat=claims.iat, seed=seed)
    await service.respond(exchange, DIALECTS[claims.request.route](), drawn=drawn)
    receipt = issuer.store.get(claims.cti, exchange.scope.store_key)
    sign1 = cose.parse_sign1(receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    made = ReceiptClaims.parse(sign1.payload)
    return Replayed(
        claims=made,
        body=exchange.body,
        frames=None if made.stream is None else _payloads(exchange.body),
        jobs=() if recorder is None else tuple(recorder.jobs),
    )


def _issuer(saved: SavedAnswer, random_bytes: Callable[[int], bytes]) -> Issuer:
    """Issues receipts that nobody will trust: under a key of this moment, with the instance facts of the receipt."""
    claims = saved.claims
    key = Ed25519PrivateKey.generate()
    return Issuer(
        receipt_public=key.public_key().public_bytes_raw(),
        sign=key.sign,
        instance=InstanceFacts(iss=claims.iss, mode=claims.mode, config=claims.config, device=claims.device),
        random_bytes=random_bytes,
        stored_per_identity=1,
    )


def _payloads(stream: bytes) -> tuple[bytes, ...]:
    blocks = stream.split(b"\n\n")[:-1]
    return tuple(
        block.removeprefix(b"data: ") for block in blocks if block.startswith(b"data: ") and block != b"data: [DONE]"
    )
