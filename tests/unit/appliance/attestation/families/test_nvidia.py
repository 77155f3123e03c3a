"""Evidence of GPUs: collected over the nonce of this session, named in the claims, all devices or none."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.attestation.attester import choose_devices
from appliance.attestation.families.insecure import InsecureAttester
from appliance.attestation.families.nvidia import DriverNvml, NvidiaDevices, NvmlFailure, create
from appliance.attestation.limiter import QuoteLimiter
from appliance.attestation.responder import Responder, Statement
from appliance.boot.instance_keys import make_keys
from appliance.config.settings import AttestationConfig
from appliance.errors import AttestationUnavailable, BootError
from appliance.listener.connection import ChannelState
from client_sdk.appraisal.verifier import appraise
from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection, VerificationError
from client_sdk.policy.policy import Policy
from client_sdk.tee.evidence import Endorsements, SessionBinding
from client_sdk.tee.nvidia.policy import parse_policy
from client_sdk.tee.nvidia.verify import parse_evidence
from client_sdk.wire import digests
from client_sdk.wire.attestation import AttestationBundle, AttestationRequest, EvidenceItem
from tests.simulators.nvidia import NOW, Maker
from tests.simulators.nvml import Library

NONCE = bytes(range(32))
MODEL = b"i" * 32
POLICY = f'version = 1\nunsafe_accept_insecure = true\n[models]\nm = ["{MODEL.hex()}"]\n'


@pytest.fixture(scope="module")
def maker() -> Maker:
    return Maker()


@pytest.fixture
def library(maker: Maker) -> Library:
    return Library([maker.device(), maker.device()])


def responder(devices: NvidiaDevices | None) -> Responder:
    keys = make_keys(lambda size: bytes(range(1, size + 1)))
    return Responder(
        attester=InsecureAttester(b"s" * 32),
        devices=() if devices is None else (devices,),
        statement=Statement(
            receipt_key=keys.receipt_cose,
            channel_key=keys.channel_cose,
            sealing_key=keys.sealing_cose,
            config=b"c" * 32,
            models={"m": MODEL},
            mode="insecure",
            instance=keys.instance,
        ),
        sign_channel=keys.channel.sign,
        clock=lambda: NOW,
        monotonic=lambda: 50.0,
        limiter=QuoteLimiter(per_s=1.0, burst=100, max_waiting=8, monotonic=lambda: 50.0),
        max_continued_s=600,
    )


async def bundle_of(devices: NvidiaDevices | None) -> AttestationBundle:
    one = responder(devices)
    try:
        channel = ChannelState(tls=None, peer="p", opened_at=0.0)
        return await one.answer(AttestationRequest(nonce=NONCE), channel)
    finally:
        one.close()


async def test_each_gpu_signs_the_nonce_of_this_session_and_the_claims_name_its_item(
    maker: Maker, library: Library
) -> None:
    bundle = await bundle_of(create(lambda _name: library))
    gpus = bundle.evidence[1:]
    assert [item.kind for item in gpus] == ["nvidia", "nvidia"]
    bound = SessionBinding(claims=bundle.claims or b"", nonce=NONCE, binder=None, spki=None)
    seen = set()
    for item in gpus:
        assert digests.item_digest("nvidia", item.content) in (bundle.claims or b"")
        log = CheckLog()
        device = parse_evidence(item.content, maker.anchors).authenticate(log, Endorsements(), now=NOW)
        device.check_session(log, bound)
        device.appraise(log, parse_policy({}, "families.nvidia", True), now=NOW)
        with pytest.raises(VerificationError) as caught:
            device.check_session(CheckLog(), replace(bound, nonce=b"m" * 32))
        assert caught.value.code is Rejection.EVIDENCE_BINDING
        seen.add(device.identity)
    assert len(seen) == 2


def judge(bundle: AttestationBundle, families: str) -> None:
    appraise(bundle.encode(), nonce=NONCE, channel=None, policy=Policy.parse(POLICY + families), now=NOW)


async def test_a_gpu_that_is_not_nvidias_is_refused_and_so_is_garbage_B033(library: Library) -> None:
    wanted = "[families.nvidia]\n"
    bundle = await bundle_of(create(lambda _name: library))
    with pytest.raises(VerificationError) as caught:
        judge(bundle, wanted)
    assert caught.value.code is Rejection.CHAIN_NOT_TRUSTED
    garbage = replace(bundle, evidence=(bundle.evidence[0], EvidenceItem(kind="nvidia", content=b'{"ok": true}')))
    for families in (wanted, ""):
        with pytest.raises(VerificationError) as caught:
            judge(garbage, families)
        assert caught.value.code in {Rejection.MALFORMED_CBOR, Rejection.MALFORMED_EVIDENCE}


async def test_a_policy_that_demands_gpus_refuses_an_appliance_without_them_B023() -> None:
    bundle = await bundle_of(None)
    judge(bundle, "")
    for table in ("", "gpus = 1\n", "switches = 1\n"):
        with pytest.raises(VerificationError, match="devices have evidence") as caught:
            judge(bundle, f"[families.nvidia]\n{table}")
        assert caught.value.code is Rejection.DEVICE_NOT_ALLOWED


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetConfComputeGpuAttestationReport",
        "nvmlDeviceGetConfComputeGpuCertificate",
    ],
)
def test_a_failure_of_nvml_leaves_no_device_out(library: Library, function: str) -> None:
    devices = create(lambda _name: library)
    library.fails = frozenset({function})
    with pytest.raises(AttestationUnavailable, match="Not Supported"):
        devices.collect(NONCE)


def test_reports_that_cannot_be_used_are_unavailable(maker: Maker, library: Library) -> None:
    devices = create(lambda _name: library)
    for report in (replace(library.report, version=0x12), replace(library.report, raw_record=b"x")):
        library.report = report
        with pytest.raises(AttestationUnavailable, match="cannot be used"):
            devices.collect(NONCE)
    library.report, library.spoilt_nonce = Library([]).report, bytes(32)
    with pytest.raises(AttestationUnavailable, match="another nonce"):
        devices.collect(NONCE)
    library.devices = []
    with pytest.raises(AttestationUnavailable, match="0 GPUs"):
        devices.collect(NONCE)


def test_a_machine_without_confidential_gpus_does_not_start(maker: Maker) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    cases = (
        (absent, r"attested-inference\[nvml\]"),
        (lambda _name: Library([maker.device()], feature=0), "switched off"),
        (lambda _name: Library([]), "no GPU"),
        (lambda _name: Library([], fails=frozenset({"nvmlInit"})), "cannot be asked"),
    )
    for load, message in cases:
        with pytest.raises(BootError, match=message):
            create(load)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver of NVIDIA's")
def test_the_real_library_is_asked_and_finds_no_driver_here() -> None:
    with pytest.raises(NvmlFailure):
        DriverNvml(importlib.import_module("pynvml"))


def test_devices_are_chosen_by_name() -> None:
    assert choose_devices(AttestationConfig()) == ()
    with pytest.raises(BootError, match="unknown; known: none, nvidia"):
        choose_devices(AttestationConfig(devices="other"))
    if not Path("/dev/nvidiactl").exists():
        with pytest.raises(BootError, match="cannot be asked"):
            choose_devices(AttestationConfig(devices="nvidia"))
