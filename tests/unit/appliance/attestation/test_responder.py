"""Full and continued answers, and how long an answer may be continued."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from appliance.attestation import responder as module
from appliance.attestation.attester import Attester, Binding, Collected, DeviceAttester
from appliance.attestation.families.insecure import InsecureAttester
from appliance.attestation.limiter import QuoteLimiter
from appliance.attestation.responder import InForce, Responder, Statement
from appliance.boot.instance_keys import InstanceKeys, make_keys
from appliance.errors import AttestationUnavailable
from appliance.listener.connection import ChannelState
from client_sdk.wire import digests
from client_sdk.wire.attestation import AttestationBundle, AttestationRequest, EvidenceItem
from client_sdk.wire.digests import sha256
from tests import cddl
from tests import reference_decoder as reference

KEYS: InstanceKeys = make_keys(os.urandom)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def make(
    clock: Clock,
    *,
    max_continued_s: int = 600,
    attester: Attester | None = None,
    devices: Sequence[DeviceAttester] = (),
    quote_timeout_s: float = 30.0,
) -> Responder:
    return Responder(
        attester=attester or InsecureAttester(b"s" * 32),
        devices=devices,
        quote_timeout_s=quote_timeout_s,
        statement=Statement(
            receipt_key=KEYS.receipt_cose,
            channel_key=KEYS.channel_cose,
            sealing_key=KEYS.sealing_cose,
            config=b"c" * 32,
            models={"m": b"i" * 32},
            mode="insecure",
            instance=KEYS.instance,
        ),
        sign_channel=KEYS.channel.sign,
        clock=lambda: 1_800_000_000.9,
        monotonic=clock,
        limiter=QuoteLimiter(per_s=1.0, burst=10_000, max_waiting=8, monotonic=clock),
        max_continued_s=max_continued_s,
    )


def plain() -> ChannelState:
    return ChannelState(tls=None, peer="p", opened_at=0.0)


def ask(nonce: bytes = b"n" * 32, have: bytes | None = None) -> AttestationRequest:
    return AttestationRequest(nonce=nonce, have=have)


def read(bundle: AttestationBundle) -> dict[str, object]:
    cddl.validate("bundle", bundle.encode())
    claims: dict[str, object] = reference.read_cbor(bundle.claims or b"")
    return claims


async def test_without_tls_the_channel_parts_are_null() -> None:
    responder, channel = make(Clock()), plain()
    bundle = await responder.answer(ask(), channel)
    claims = read(bundle)
    assert (claims["binder"], claims["tls-key"], claims["issued-at"]) == (None, None, 1_800_000_000)
    assert channel.in_force == InForce(attestation=sha256(bundle.claims or b""), binder=None)
    proof, _ = reference.read_sign1(bundle.channel_proof, "channel-proof", KEYS.channel_cose)
    assert reference.read_cbor(proof)["claims"] == sha256(bundle.claims or b"")
    responder.close()


async def test_every_answer_is_about_its_own_nonce() -> None:
    responder = make(Clock())
    first, second = await responder.answer(ask(), plain()), await responder.answer(ask(b"m" * 32), plain())
    assert (read(first)["nonce"], read(second)["nonce"]) == (b"n" * 32, b"m" * 32)
    responder.close()


@pytest.mark.parametrize(
    ("waited", "limit", "continued"), [(599.9, 600, True), (600, 600, False), (1, 0, False), (0, 0, False)]
)
async def test_the_window_counts_from_the_issue(waited: float, limit: int, continued: bool) -> None:
    clock = Clock()
    responder = make(clock, max_continued_s=limit)
    have = sha256((await responder.answer(ask(), plain())).claims or b"")
    clock.now += waited
    channel = plain()
    bundle = await responder.answer(ask(b"m" * 32, have), channel)
    assert bundle.continued is continued
    assert (channel.in_force == InForce(attestation=have, binder=None)) is continued
    responder.close()


async def test_continuing_does_not_prolong_the_window_and_proves_the_new_nonce() -> None:
    clock = Clock()
    responder = make(clock)
    have = sha256((await responder.answer(ask(), plain())).claims or b"")
    clock.now += 400
    bundle = await responder.answer(ask(b"m" * 32, have), plain())
    proof, _ = reference.read_sign1(bundle.channel_proof, "channel-proof", KEYS.channel_cose)
    body = reference.read_cbor(proof)
    assert (body["nonce"], body["claims"]) == (b"m" * 32, have)
    clock.now += 400
    assert not (await responder.answer(ask(have=have), plain())).continued
    responder.close()


async def test_claims_of_another_boot_are_unknown() -> None:
    one, other = make(Clock()), make(Clock())
    have = sha256((await one.answer(ask(), plain())).claims or b"")
    # The same statement and clock: only the memory of having issued them tells the two apart.
    assert not (await other.answer(ask(have=b"?" * 32), plain())).continued
    assert (await one.answer(ask(have=have), plain())).continued
    for responder in (one, other):
        responder.close()


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_REMEMBERED", 3)
    responder = make(Clock())
    issued = [
        sha256((await responder.answer(ask(bytes([index]) * 32), plain())).claims or b"") for index in range(1, 6)
    ]
    continued = [(await responder.answer(ask(have=have), plain())).continued for have in issued[2:] + issued[:1]]
    assert continued == [True, True, True, False]
    responder.close()


async def test_showing_puts_nothing_in_force_and_is_not_remembered() -> None:
    responder, channel = make(Clock()), plain()
    bundle = await responder.show(b"n" * 32, channel)
    assert channel.in_force is None
    assert not (await responder.answer(ask(have=sha256(bundle.claims or b"")), channel)).continued
    responder.close()


class WithExtras(InsecureAttester):
    def collect(self, binding: Binding) -> Collected:
        return replace(
            super().collect(binding),
            endorsements=(EvidenceItem(kind="certificates", content=b"cpu"),),
            event_logs=(EvidenceItem(kind="ccel", content=b"log"),),
        )


class Gpus:
    kind = "nvidia"

    def collect(self, nonce: bytes) -> Collected:
        return Collected(
            evidence=tuple(EvidenceItem(kind=self.kind, content=nonce + bytes([index])) for index in range(2)),
            endorsements=(EvidenceItem(kind="certificates", content=b"gpu"),),
        )


async def test_devices_are_named_in_the_claims_and_all_that_was_collected_travels() -> None:
    responder = make(Clock(), attester=WithExtras(b"s" * 32), devices=(Gpus(),))
    bundle = AttestationBundle.parse((await responder.answer(ask(), plain())).encode())
    nonce = digests.gpu_nonce(b"n" * 32, None)
    assert [item.kind for item in bundle.evidence] == ["insecure", "nvidia", "nvidia"]
    assert [item.content for item in bundle.evidence[1:]] == [nonce + b"\0", nonce + b"\1"]
    assert read(bundle)["devices"] == [
        {"kind": "nvidia", "evidence": digests.item_digest("nvidia", item.content)} for item in bundle.evidence[1:]
    ]
    assert [item.content for item in bundle.endorsements] == [b"cpu", b"gpu"]
    assert bundle.event_logs == (EvidenceItem(kind="ccel", content=b"log"),)
    responder.close()


class Hanging(InsecureAttester):
    """A device that does not answer until it is let go."""

    def __init__(self) -> None:
        super().__init__(b"s" * 32)
        self.let_go = threading.Event()

    def collect(self, binding: Binding) -> Collected:
        self.let_go.wait(10)
        return super().collect(binding)


async def test_hardware_that_hangs_is_503_for_everybody_and_nothing_is_in_force() -> None:
    hanging = Hanging()
    responder, channel = make(Clock(), attester=hanging, quote_timeout_s=0.05), plain()
    for _ in range(2):
        with pytest.raises(AttestationUnavailable) as caught:
            await responder.answer(ask(), channel)
        assert (caught.value.code, caught.value.retry_after_s) == ("evidence_timeout", 30)
    assert channel.in_force is None
    hanging.let_go.set()
    await responder.answer(ask(), channel)
    responder.close()
