"""Composition root: configuration -> keys -> attester -> models and engines -> issuer -> service -> application.

Everything that can refuse the start does so here, before any listener exists.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from fastapi import FastAPI

from appliance.api.app import build_app, build_metrics_app
from appliance.attestation.attester import Attester, Binding, DeviceAttester, Measured, choose, choose_devices
from appliance.attestation.certificate_evidence import make_extension
from appliance.attestation.endorsements.keeper import EndorsedAttester
from appliance.attestation.endorsements.relay import endorsed
from appliance.attestation.limiter import QuoteLimiter
from appliance.attestation.responder import Responder, Statement
from appliance.boot import identities
from appliance.boot.instance_keys import InstanceKeys, make_keys
from appliance.config.settings import Config, allowed_cids
from appliance.engine.embedding.supervisor import SupervisedEmbedder
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.stats import ENGINE_STATS
from appliance.errors import AttestationUnavailable, BootError
from appliance.inference.service import ServedModel, Service, ServiceLimits, Surroundings
from appliance.keys import KeyRing
from appliance.listener.certificates import CertificateRotator
from appliance.listener.connection import ConnectionLimits
from appliance.listener.tls_server import ChannelProtocol, make_protocol_class
from appliance.metrics import Metrics
from appliance.models.progress import Fractions
from appliance.models.store import ModelStore
from appliance.receipts.air import FAMILIES as AIR_FAMILIES
from appliance.receipts.air import AirIssuer
from appliance.receipts.claims import InstanceFacts, Served
from appliance.receipts.issuer import Issuer

_AIR_TEXT_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Appliance:
    """A booted appliance, ready to be given sockets. `close` ends its engines."""

    app: FastAPI
    metrics_app: FastAPI
    service: Service
    protocol_class: type[ChannelProtocol]
    metrics_protocol_class: type[ChannelProtocol]
    rotator: CertificateRotator
    mode: str
    stack: AsyncExitStack

    async def close(self) -> None:
        await self.stack.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What boot needs of the machine: the model store, an interpreter for workers, clocks and randomness."""

    store: ModelStore
    key_ring: KeyRing | None
    python: str
    surroundings: Surroundings


async def boot(config: Config, host: Host, attester: Attester, progress: Fractions) -> Appliance:
    """Load the models and compose the appliance. Raises BootError; nothing listens and nothing runs on then."""
    around = host.surroundings
    if not config.models:
        raise BootError("no model is configured: name one with --model or [[models]]")
    async with AsyncExitStack() as stack:
        keys = make_keys(around.random_bytes)
        devices = choose_devices(config.attestation)
        models = await _load_models(config, host, progress, stack)
        air = _air(config, keys, attester) if config.receipts.air else None
        service = _service(config, keys, attester, models, (around, air))
        responder = _responder(config, keys, (attester, devices), models, (around, air))
        stack.callback(responder.close)
        if isinstance(attester, EndorsedAttester):
            stack.callback(attester.close)
        rotator = CertificateRotator(
            keys.tls,
            now=around.clock,
            random_bytes=around.random_bytes,
            lifetime_s=config.attestation.certificate_lifetime_s,
            extensions=[make_extension(attester, keys.tls_spki)] if config.attestation.certificate_evidence else (),
        )
        limits = _connection_limits(config)
        protocol_class = make_protocol_class(contexts=rotator, limits=limits, clock=around.monotonic)
        _register_levels(service, protocol_class)
        return Appliance(
            app=build_app(
                service=service,
                responder=responder,
                ring=host.key_ring,
                clock=around.clock,
                max_body_bytes=config.server.max_body_bytes,
            ),
            metrics_app=build_metrics_app(service),
            service=service,
            protocol_class=protocol_class,
            metrics_protocol_class=make_protocol_class(contexts=None, limits=limits, clock=around.monotonic),
            rotator=rotator,
            mode=attester.mode,
            stack=stack.pop_all(),
        )


def choose_attester(config: Config, surroundings: Surroundings) -> Attester:
    """The configured attester, proven to work by one quote. Raises BootError before anything is loaded."""
    chosen = choose(config.attestation, random_bytes=surroundings.random_bytes)
    attester = endorsed(chosen, config.attestation.endorsement_relay, monotonic=surroundings.monotonic)
    try:
        _quote(attester, surroundings)
    except AttestationUnavailable as error:
        raise BootError(f"the attester {attester.family!r} makes no evidence: {error.message}") from error
    return attester


def machine_lines(config: Config, surroundings: Surroundings) -> list[str]:
    """`[families.NAME]` in TOML for this machine as it runs now, where its attester can tell. Raises BootError."""
    config = replace(config, attestation=replace(config.attestation, endorsement_relay=""))  # nothing is asked of it
    try:
        attester = choose_attester(config, surroundings)
    except BootError:
        if config.attestation.attester != "auto":
            raise
        return ["", "# no attestation hardware was found here: no [families] to pin"]
    if not isinstance(attester, Measured):
        return []
    try:
        table = attester.reference_table()
    except AttestationUnavailable as error:
        raise BootError(f"the attester {attester.family!r} tells no reference values: {error.message}") from error
    return ["", f"[families.{attester.family}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]


def _toml(value: object) -> str:
    """Lists, tables and texts of digests as TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{key}" = {_toml(entry)}' for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    return f'"{value}"'


def _service(
    config: Config,
    keys: InstanceKeys,
    attester: Attester,
    models: Mapping[str, ServedModel],
    beside: tuple[Surroundings, AirIssuer | None],
) -> Service:
    around, air = beside
    issuer = Issuer(
        receipt_public=keys.receipt.public_key().public_bytes_raw(),
        sign=keys.receipt.sign,
        instance=InstanceFacts(
            iss=config.server.issuer, mode=attester.mode, config=config.digest(), device=identities.device_facts()
        ),
        random_bytes=around.random_bytes,
        stored_per_identity=config.receipts.stored_per_identity,
    )
    return Service(
        models=models,
        issuer=issuer,
        surroundings=around,
        limits=ServiceLimits(
            max_active=config.engine.max_active,
            max_request_s=config.server.max_request_s,
            stream_padding_bytes=config.server.stream_padding_bytes,
            deterministic=config.engine.determinism == "always",
            max_active_per_key=config.engine.max_active_per_key or None,
        ),
        metrics=Metrics(),
        air=air,
    )


def _air(config: Config, keys: InstanceKeys, attester: Attester) -> AirIssuer:
    """Raises BootError where AIR has no layout for what this appliance would have to say."""
    if attester.family not in AIR_FAMILIES:
        known = " and ".join(sorted(AIR_FAMILIES))
        raise BootError(f"receipts.air: AIR has no layout for {attester.family!r}, only for {known}")
    for what, text in (("server.issuer", config.server.issuer), *(("a model's name", m.name) for m in config.models)):
        if not 1 <= len(text.encode()) <= _AIR_TEXT_BYTES:
            raise BootError(f"receipts.air: {what} has 1 to {_AIR_TEXT_BYTES} bytes in an AIR receipt")
    return AirIssuer(
        iss=config.server.issuer,
        policy_version=f"config-{config.digest().hex()}",
        sign=keys.air.sign,
        memory_mb=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )


async def _load_models(
    config: Config, host: Host, progress: Fractions, stack: AsyncExitStack
) -> dict[str, ServedModel]:
    models: dict[str, ServedModel] = {}
    for model in config.models:
        engine = identities.engine_for(config, model, host.store, host.python)
        stack.push_async_callback(engine.stop, config.server.grace_s)

        def named(phase: str, fraction: float, name: str = model.name) -> None:
            progress(f"{phase} {name}", fraction)

        await engine.start(named)
        served = Served(
            model=identities.model_facts(model.name, engine.model), engine=identities.engine_facts(engine.info)
        )
        created = int(host.surroundings.clock())
        embedder = engine if isinstance(engine, SupervisedEmbedder) else None
        models[model.name] = ServedModel(
            name=model.name, engine=engine, served=served, created=created, embedder=embedder
        )
    return models


def _responder(
    config: Config,
    keys: InstanceKeys,
    attesters: tuple[Attester, Sequence[DeviceAttester]],
    models: Mapping[str, ServedModel],
    beside: tuple[Surroundings, AirIssuer | None],
) -> Responder:
    (attester, devices), (around, air) = attesters, beside
    statement = Statement(
        receipt_key=keys.receipt_cose,
        channel_key=keys.channel_cose,
        sealing_key=keys.sealing_cose,
        config=config.digest(),
        models={name: model.served.model.identity for name, model in models.items()},
        mode=attester.mode,
        instance=keys.instance,
        air_key=None if air is None else keys.air_cose,
    )
    per_s = config.attestation.quotes_per_s or _measured_rate(attester, devices, around)
    return Responder(
        attester=attester,
        devices=devices,
        statement=statement,
        sign_channel=keys.channel.sign,
        clock=around.clock,
        monotonic=around.monotonic,
        limiter=QuoteLimiter(
            per_s=per_s,
            burst=max(8, round(per_s)),
            max_waiting=config.attestation.max_waiting,
            monotonic=around.monotonic,
        ),
        max_continued_s=config.attestation.max_continued_s,
        on_evidence=None if air is None else air.remember,
    )


def _measured_rate(attester: Attester, devices: Sequence[DeviceAttester], around: Surroundings) -> float:
    """Quotes a second that leave the hardware half idle, measured on one quote of all of it. Raises BootError."""
    started = time.perf_counter()
    try:
        _quote(attester, around)
        for device in devices:
            device.collect(around.random_bytes(32))
    except AttestationUnavailable as error:
        raise BootError(f"no evidence could be made: {error.message}") from error
    took_s = time.perf_counter() - started
    return min(200.0, 0.5 / max(took_s, 1e-6))


def _quote(attester: Attester, around: Surroundings) -> None:
    """Evidence over a random nonce, thrown away."""
    nonce = around.random_bytes(32)
    attester.collect(Binding.of_session(nonce, nonce=nonce, spki=None))


def _connection_limits(config: Config) -> ConnectionLimits:
    limits = config.limits
    return ConnectionLimits(
        handshake_s=limits.handshake_s,
        head_s=limits.head_s,
        head_bytes=limits.head_bytes,
        body_idle_s=limits.body_idle_s,
        max_connections=limits.connections,
        max_per_peer=limits.connections_per_peer,
        max_per_cid=limits.connections_per_cid,
        allowed_cids=allowed_cids(config),
        keep_alive_s=limits.keep_alive_s,
    )


def _register_levels(service: Service, protocol_class: type[ChannelProtocol]) -> None:
    metrics, stats = service.metrics, protocol_class.stats
    metrics.level("active_requests", "Requests that hold a place", lambda: service.active)
    metrics.level("open_connections", "Open connections", lambda: stats.open)
    metrics.level("accepted_connections", "Connections accepted", lambda: stats.accepted)
    metrics.level("refused_connections", "Connections refused", lambda: stats.refused)
    metrics.level("ready", "1 while requests are answered", lambda: float(service.ready))
    engines = [model.engine for model in service.models.values() if isinstance(model.engine, SupervisedEngine)]
    metrics.level("engine_active_jobs", "Jobs under evaluation", lambda: sum(e.active for e in engines))
    metrics.level("engine_queued_jobs", "Jobs waiting for their turn", lambda: sum(e.queued for e in engines))
    metrics.level("engine_restarts", "Workers started after a crash", lambda: sum(e.restarts for e in engines))
    metrics.level(
        "engine_threads", "Compute threads of one engine", lambda: max((e.threads for e in engines), default=0)
    )
    for shape in ("batch", "verify", "chunk"):
        text = "1 where the self-test found this shape exact for every model"
        metrics.level(f"engine_exact_{shape}", text, partial(_all_exact, engines, shape))
    metrics.level(
        "engine_start_cut_short",
        "Measurements of the start that came to no end within engine.selftest_limit_s",
        lambda: sum(len(e.info.cut) for e in engines),
    )
    for name, text in ENGINE_STATS.items():
        metrics.level(f"engine_{name}", text, partial(_total, engines, name))


def _all_exact(engines: Sequence[SupervisedEngine], shape: str) -> float:
    return float(all(engine.exact(shape) for engine in engines))


def _total(engines: Sequence[SupervisedEngine], name: str) -> float:
    return float(sum(engine.stats.get(name, 0) for engine in engines))
