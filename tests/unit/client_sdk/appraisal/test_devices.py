"""Devices beside the evidence of a machine, through the whole appraisal of a session: GPUs and a switch, simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from client_sdk.appraisal.verifier import AttestationResult, appraise
from client_sdk.errors import Rejection, UndecidedError, VerificationError
from client_sdk.policy.policy import parse_families
from client_sdk.tee import families
from client_sdk.tee.endorsements import merge, recognise
from client_sdk.tee.families import Family
from client_sdk.wire import digests
from client_sdk.wire.attestation import AttestationBundle, EvidenceItem
from tests.simulators import nvidia as sim
from tests.simulators.attested import policy_for
from tests.simulators.insecure_appliance import NOW, Connection, InsecureAppliance, seeded

NONCE = seeded("the client's nonce")
TPM2 = {"ak_pins": ["11" * 32], "pcr_sets": [dict.fromkeys("02479", "11" * 32)]}


@dataclass
class Rack:
    """A machine without hardware protection, with GPUs; a fault changes one thing about the bundle or the policy."""

    maker: sim.Maker
    devices: Sequence[sim.Device]
    appliance: InsecureAppliance = field(default_factory=InsecureAppliance)
    demands: dict[str, Any] = field(default_factory=lambda: {"nvidia": {"count": 2}})
    gpu_nonce: bytes | None = None
    manifests: bool = True
    edit_named: Callable[[tuple[EvidenceItem, ...]], tuple[EvidenceItem, ...]] = lambda items: items
    edit_carried: Callable[[tuple[EvidenceItem, ...]], tuple[EvidenceItem, ...]] = lambda items: items

    def appraise(self) -> AttestationResult:
        connection = self.appliance.connect()
        items = self.items(connection)
        named = tuple((item.kind, digests.item_digest(item.kind, item.content)) for item in self.edit_named(items))
        bundle = self.appliance.bundle(
            NONCE,
            connection,
            edit_claims=lambda claims: replace(claims, devices=named),
            edit_items=lambda own: (*own, *self.edit_carried(items)),
        )
        own = [self.maker.manifest(component=part) for part in ("driver", "vbios")] if self.manifests else []
        return appraise(
            bundle,
            nonce=NONCE,
            channel=connection.channel,
            policy=policy_for(self.appliance, families=parse_families(self.demands, report_only=False)),
            now=NOW,
            endorsements=merge(recognise(document) for document in own),
        )

    def items(self, connection: Connection) -> tuple[EvidenceItem, ...]:
        bound = digests.channel_binder(connection.channel.spki, connection.channel.exported)
        nonce = self.gpu_nonce or digests.gpu_nonce(NONCE, bound)
        return tuple(
            EvidenceItem(kind="nvidia", content=device.item(sim.Report(nonce=nonce))) for device in self.devices
        )


@pytest.fixture(scope="module")
def maker() -> sim.Maker:
    return sim.Maker()


@pytest.fixture(scope="module")
def gpus(maker: sim.Maker) -> tuple[sim.Device, ...]:
    return maker.device(), maker.device()


@pytest.fixture
def rack(maker: sim.Maker, gpus: tuple[sim.Device, ...], monkeypatch: pytest.MonkeyPatch) -> Rack:
    with_test_roots = Family(folder="nvidia", primary=False, anchors=maker.anchors)
    monkeypatch.setitem(families.FAMILIES, "nvidia", with_test_roots)
    return Rack(maker, gpus)


def test_gpus_beside_a_machine_are_accepted_and_each_fact_says_who_stands_behind_it(rack: Rack) -> None:
    result = rack.appraise()
    assert len(result.claims.devices) == 2
    marks = {fact.name: fact.trust for fact in result.facts}
    assert marks["device id"] == "hardware-signed"
    assert marks["family"] == marks["insecure key id"] == "self-asserted"
    ids = {fact.value for fact in result.facts if fact.name == "device id"}
    assert len(ids) == 2
    passed = [check.name for check in result.checks if check.status == "passed"]
    assert passed.count("distinct devices") == 2
    assert "number of nvidia devices" in passed


def test_a_policy_may_name_other_families_besides(rack: Rack) -> None:
    rack.demands = {"tpm2": TPM2, "nvidia": {"count": 2}}
    assert rack.appraise().family == "insecure"


def change(**fields: Any) -> Callable[[Rack], None]:
    def apply(rack: Rack) -> None:
        for name, value in fields.items():
            setattr(rack, name, value)

    return apply


def primary_as_device(rack: Rack) -> None:
    """Evidence of a machine in a device's place. It would have to bind claims that name its own digest."""
    machine = AttestationBundle.parse(rack.appliance.bundle(NONCE, rack.appliance.connect())).evidence[0]
    rack.edit_named = rack.edit_carried = lambda items: (*items, machine)


FAULTS: dict[str, tuple[Rejection, Callable[[Rack], None]]] = {
    "family-not-named": (Rejection.FAMILY_NOT_ALLOWED, change(demands={"tpm2": TPM2})),
    "no-families-at-all": (Rejection.FAMILY_NOT_ALLOWED, change(demands={})),
    "device-twice": (Rejection.DEVICE_NOT_ALLOWED, lambda r: change(devices=[r.devices[0]] * 2)(r)),
    "too-few": (Rejection.DEVICE_NOT_ALLOWED, change(demands={"nvidia": {"count": 3}})),
    "none": (Rejection.DEVICE_NOT_ALLOWED, change(devices=())),
    "no-switch": (Rejection.DEVICE_NOT_ALLOWED, change(demands={"nvidia": {"gpus": 1, "switches": 1}})),
    "kind-not-demanded": (Rejection.DEVICE_NOT_ALLOWED, lambda r: change(devices=[r.maker.device(sim.SWITCH)])(r)),
    "B011-nonce-of-another-session": (Rejection.EVIDENCE_BINDING, change(gpu_nonce=seeded("another session"))),
    "B011-nonce-without-the-channel": (Rejection.EVIDENCE_BINDING, change(gpu_nonce=digests.gpu_nonce(NONCE, None))),
    "other-items-than-named": (Rejection.EVIDENCE_BINDING, change(edit_carried=lambda items: items[::-1])),
    "fewer-items-than-named": (Rejection.EVIDENCE_BINDING, change(edit_carried=lambda items: items[:1])),
    "more-items-than-named": (Rejection.EVIDENCE_BINDING, change(edit_named=lambda items: items[:1])),
    "machine-as-device": (Rejection.EVIDENCE_BINDING, primary_as_device),
    "architecture": (Rejection.PLATFORM_NOT_ALLOWED, change(demands={"nvidia": {"architectures": ["blackwell"]}})),
    "device-not-pinned": (Rejection.DEVICE_NOT_ALLOWED, change(demands={"nvidia": {"device_ids": ["11" * 32]}})),
}


@pytest.mark.parametrize(("code", "fault"), FAULTS.values(), ids=FAULTS.keys())
def test_one_fault_is_one_rejection(rack: Rack, code: Rejection, fault: Callable[[Rack], None]) -> None:
    fault(rack)
    with pytest.raises(VerificationError) as caught:
        rack.appraise()
    assert caught.value.code == code, caught.value
    assert caught.value.checks[-1].status == "failed"


def test_a_device_is_no_machine(rack: Rack) -> None:
    """GPU evidence first in the bundle: the policy names the family, and still it vouches for no machine."""
    connection = rack.appliance.connect()
    gpu = rack.items(connection)[0]
    bundle = rack.appliance.bundle(NONCE, connection, edit_items=lambda _: (gpu,))
    policy = policy_for(rack.appliance, families=parse_families(rack.demands, report_only=False))
    with pytest.raises(VerificationError) as caught:
        appraise(bundle, nonce=NONCE, channel=connection.channel, policy=policy, now=NOW)
    assert caught.value.code == Rejection.FAMILY_NOT_ALLOWED


def test_pinned_roots_refuse_the_simulators_devices(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Family(folder="nvidia", primary=False)
    monkeypatch.setitem(families.FAMILIES, "nvidia", genuine)
    with pytest.raises(VerificationError) as caught:
        rack.appraise()
    assert caught.value.code in (Rejection.CHAIN_NOT_TRUSTED, Rejection.BAD_SIGNATURE)


def test_b035_missing_manifests_leave_the_verdict_open(rack: Rack) -> None:
    rack.manifests = False
    with pytest.raises(UndecidedError, match="manifests"):
        rack.appraise()
