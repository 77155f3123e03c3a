"""Answers attestation requests: nonce in, evidence bound to this very connection out (docs/attestation.md)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from appliance.attestation.attester import Attester, Binding, Collected, DeviceAttester
from appliance.attestation.limiter import QuoteLimiter
from appliance.errors import AttestationUnavailable
from appliance.listener.connection import ChannelState, peer_key
from client_sdk.wire import cose, digests, names
from client_sdk.wire.attestation import (
    AttestationBundle,
    AttestationClaims,
    AttestationRequest,
    ChannelProof,
    EvidenceItem,
)

_MAX_REMEMBERED = 4096
_QUOTE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The attestation that holds on one connection: what receipts of its requests name."""

    attestation: bytes
    binder: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What this boot claims about itself, the parts of one connection excepted. Keys are encoded COSE_Keys."""

    receipt_key: bytes
    channel_key: bytes
    sealing_key: bytes
    config: bytes
    models: Mapping[str, bytes]
    mode: str
    instance: bytes
    air_key: bytes | None = None


OnEvidence = Callable[[bytes, Sequence[EvidenceItem]], None]


class Responder:
    """Makes full and continued attestations. `clock` is Unix seconds, `monotonic` seconds since any moment.

    One quote at a time, off the event loop, for `quote_timeout_s` at most: hardware takes 6 ms to over a second and
    answers one caller at a time. `on_evidence` is told the digest of claims and the evidence that was made for them,
    before they are in force.
    """

    def __init__(
        self,
        *,
        attester: Attester,
        statement: Statement,
        sign_channel: Callable[[bytes], bytes],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        limiter: QuoteLimiter,
        max_continued_s: int,
        devices: Sequence[DeviceAttester] = (),
        quote_timeout_s: float = _QUOTE_TIMEOUT_S,
        on_evidence: OnEvidence | None = None,
    ) -> None:
        self._on_evidence = on_evidence
        self._attester = attester
        self._devices = tuple(devices)
        self._quote_timeout_s = quote_timeout_s
        self._statement = statement
        self._sign_channel = sign_channel
        self._proof_header = cose.protected_header(kid=cose.key_id(statement.channel_key), typ=names.TYP_CHANNEL_PROOF)
        self._clock = clock
        self._monotonic = monotonic
        self._limiter = limiter
        self._max_continued_s = max_continued_s
        self._issued: OrderedDict[bytes, float] = OrderedDict()
        self._quoting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quote")

    async def answer(self, request: AttestationRequest, channel: ChannelState) -> AttestationBundle:
        """The answer to a POST; from now on it is the attestation in force on `channel`.

        Raises AttestationUnavailable (503) when quotes are asked for faster than they can be made.
        """
        spki, binder = _bind(channel, request.nonce)
        if request.have is not None and self._may_continue(request.have):
            proof = self._prove(request.nonce, binder, request.have)
            channel.in_force = InForce(attestation=request.have, binder=binder)
            return AttestationBundle(channel_proof=proof)
        bundle = await self._collect(request.nonce, spki, binder, channel.peer)
        assert bundle.claims is not None
        digest = digests.sha256(bundle.claims)
        if self._on_evidence is not None:
            self._on_evidence(digest, bundle.evidence)
        self._remember(digest)
        channel.in_force = InForce(attestation=digest, binder=binder)
        return bundle

    async def show(self, nonce: bytes, channel: ChannelState) -> AttestationBundle:
        """A full answer for people and curl. It never puts an attestation in force."""
        spki, binder = _bind(channel, nonce)
        return await self._collect(nonce, spki, binder, channel.peer)

    def close(self) -> None:
        self._quoting.shutdown(wait=False, cancel_futures=True)

    async def _collect(self, nonce: bytes, spki: bytes | None, binder: bytes | None, peer: str) -> AttestationBundle:
        async with self._limiter.turn(peer_key(peer)):
            loop = asyncio.get_running_loop()
            quoted = loop.run_in_executor(self._quoting, self._quote, nonce, spki, binder)
            try:
                claims, collected = await asyncio.wait_for(quoted, self._quote_timeout_s)
            except TimeoutError:
                # What hangs in the kernel keeps the one thread; callers behind it wait no longer than this one did.
                raise AttestationUnavailable(
                    "evidence_timeout", "The hardware makes no evidence in time.", retry_after_s=30
                ) from None
        return AttestationBundle(
            claims=claims,
            evidence=collected.evidence,
            endorsements=collected.endorsements,
            event_logs=collected.event_logs,
            channel_proof=self._prove(nonce, binder, digests.sha256(claims)),
        )

    def _quote(self, nonce: bytes, spki: bytes | None, binder: bytes | None) -> tuple[bytes, Collected]:
        """(encoded claims, evidence of the CPU and of the devices they name). On the quoting thread."""
        gpu_nonce = digests.gpu_nonce(nonce, binder)
        parts = [device.collect(gpu_nonce) for device in self._devices]
        named = tuple(
            (item.kind, digests.item_digest(item.kind, item.content)) for part in parts for item in part.evidence
        )
        claims = self._claims(nonce, spki, binder, named).encode()
        binding = Binding.of_session(claims, nonce=nonce, spki=spki)
        return claims, _join([self._attester.collect(binding), *parts])

    def _claims(
        self, nonce: bytes, spki: bytes | None, binder: bytes | None, devices: tuple[tuple[str, bytes], ...]
    ) -> AttestationClaims:
        said = self._statement
        return AttestationClaims(
            nonce=nonce,
            binder=binder,
            tls_key=None if spki is None else digests.sha256(spki),
            receipt_key=said.receipt_key,
            channel_key=said.channel_key,
            sealing_key=said.sealing_key,
            air_key=said.air_key,
            config=said.config,
            models=said.models,
            devices=devices,
            mode=said.mode,
            instance=said.instance,
            issued_at=int(self._clock()),
        )

    def _prove(self, nonce: bytes, binder: bytes | None, claims: bytes) -> bytes:
        payload = ChannelProof(nonce=nonce, binder=binder, claims=claims).encode()
        return cose.sign1(protected=self._proof_header, salt=None, payload=payload, sign=self._sign_channel)

    def _may_continue(self, have: bytes) -> bool:
        """Whether these claims are this boot's and recent. All but their connection's parts is fixed for a boot."""
        issued = self._issued.get(have)
        return issued is not None and self._monotonic() - issued < self._max_continued_s

    def _remember(self, digest: bytes) -> None:
        self._issued[digest] = self._monotonic()
        while len(self._issued) > _MAX_REMEMBERED:
            self._issued.popitem(last=False)


def _join(parts: Sequence[Collected]) -> Collected:
    return Collected(
        evidence=tuple(item for part in parts for item in part.evidence),
        endorsements=tuple(item for part in parts for item in part.endorsements),
        event_logs=tuple(item for part in parts for item in part.event_logs),
    )


def _bind(channel: ChannelState, nonce: bytes) -> tuple[bytes | None, bytes | None]:
    """(SPKI of this connection's own leaf, binder), both None without TLS."""
    if channel.spki is None:
        return None, None
    exported = channel.export(names.EXPORTER_LABEL, names.EXPORTER_BYTES, nonce)
    return channel.spki, digests.channel_binder(channel.spki, exported)
