"""The policy table of NVIDIA devices: closed, full-length, and never one that could refuse nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from client_sdk.errors import PolicyFileError, UndecidedError
from client_sdk.policy.policy import Policy
from client_sdk.tee.families import FAMILIES
from client_sdk.tee.nvidia import abi, foreign
from client_sdk.tee.nvidia.policy import NvidiaPolicy, parse_policy
from client_sdk.tee.nvidia.verify import parse_evidence
from client_sdk.wire.errors import WireError
from tests.simulators import nvidia as sim
from tests.simulators.nvidia import SWITCH, Device, Maker, Report

WHERE = "families.nvidia"
FULL: dict[str, object] = {
    "count": 12,
    "gpus": 8,
    "switches": 4,
    "kinds": ["gpu", "switch"],
    "require_rim": True,
    "require_nras": True,
    "ocsp": "required",
    "architectures": ["hopper", "ls10"],
    "driver_versions": ["580.159.03"],
    "vbios_versions": ["96.00.5e.00.01"],
    "modes": ["ppcie"],
    "protected_pcie": True,
    "device_ids": ["ab" * 32],
    "firmware_ids": ["AB" * 48],
}


def parse(table: dict[str, object], *, report_only: bool = False) -> NvidiaPolicy:
    return parse_policy(dict(table), WHERE, report_only)


def test_defaults_are_one_gpu_with_both_manifests() -> None:
    policy = parse({})
    assert (policy.count, policy.kinds, policy.require_rim, policy.ocsp) == (1, {"gpu"}, True, "not-checked")


def test_report_only_needs_no_manifests_and_takes_any_kind() -> None:
    policy = parse({}, report_only=True)
    assert (policy.require_rim, policy.kinds) == (False, {"gpu", "switch"})
    assert parse({"require_rim": True, "kinds": ["gpu"]}, report_only=True) == NvidiaPolicy()


def test_switches_demanded_are_switches_accepted() -> None:
    assert parse({"switches": 2}).kinds == {"gpu", "switch"}
    assert parse({"gpus": 8, "switches": 4}).count == 12


@pytest.mark.parametrize("table", [{}, FULL, {"protected_pcie": False, "require_rim": False, "require_nras": True}])
def test_the_table_reads_back_as_the_same_policy(table: dict[str, object]) -> None:
    policy = parse(table)
    assert parse(policy.to_table()) == policy
    assert parse(policy.to_table()).to_table() == policy.to_table()


BAD: list[dict[str, object]] = [
    {"count": 0},
    {"count": True},
    {"count": 65},
    {"gpus": -1},
    {"gpus": 64, "switches": 1},
    {"kinds": []},
    {"kinds": ["gpu", "toaster"]},
    {"kinds": ["gpu"], "switches": 1},
    {"kinds": ["switch"], "gpus": 1},
    {"require_rim": False},
    {"require_rim": "yes"},
    {"ocsp": "maybe"},
    {"ocsp": True},
    {"architectures": ["volta"]},
    {"architectures": []},
    {"architectures": ["*"]},
    {"driver_versions": [""]},
    {"driver_versions": "580"},
    {"modes": ["off"]},
    {"protected_pcie": 1},
    {"device_ids": ["ab" * 31]},
    {"device_ids": ["00" * 32]},
    {"device_ids": ["ab" * 48]},
    {"firmware_ids": ["ab" * 32]},
    {"firmware_ids": ["any"]},
    {"allow_debug": True},
]


@pytest.mark.parametrize("table", BAD, ids=[json.dumps(table)[:60] for table in BAD])
def test_a_table_that_pins_nothing_or_cannot_be_enforced_is_an_error_B007_B023_B031(table: dict[str, object]) -> None:
    with pytest.raises(PolicyFileError, match=r"families\.nvidia\."):
        parse(table)


def test_devices_alone_vouch_for_no_machine() -> None:
    assert not FAMILIES["nvidia"].primary
    with pytest.raises(PolicyFileError, match="vouches for a machine"):
        Policy.parse(f'version = 1\n[models]\nm = ["{"ab" * 32}"]\n[families.nvidia]\n')


def test_a_whole_policy_reads_back() -> None:
    text = (
        f'version = 1\nunsafe_accept_insecure = true\n[models]\nm = ["{"ab" * 32}"]\n'
        f'[families.nvidia]\nswitches = 1\nprotected_pcie = true\ndevice_ids = ["{"cd" * 32}"]\n'
    )
    policy = Policy.parse(text)
    assert Policy.parse(policy.to_toml()).digest == policy.digest
    assert policy.families["nvidia"].count == 1


# Files that others wrote


@pytest.fixture(scope="module")
def device() -> Device:
    return Maker().device()


def cmw(device: Device, **changes: Any) -> bytes:
    records = {
        "__cmwc_t": "tag:nvidia.com,2026:evidence-item/v1",
        "evidence": [
            "application/vnd.nvidia.spdm-measurement-transcript",
            sim.base64url(b"".join(device.exchange())),
        ],
        "certificate": ["application/vnd.nvidia.pem-cert-chain", sim.base64url(device.pem())],
        "nonce": ["application/octet-stream", sim.base64url(sim.NONCE)],
        **changes,
    }
    item = {key: value for key, value in records.items() if value is not None}
    return json.dumps({"__cmwc_t": "tag:nvidia.com,2026:verifier-input", "nonce": [], "gpu_0": item}).encode()


def test_a_collection_becomes_items(device: Device) -> None:
    (content,) = foreign.read_items(cmw(device), [])
    assert parse_evidence(content).report.nonce == sim.NONCE
    assert len(foreign.read_items(cmw(device, nonce=None), [])) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": ["application/octet-stream", sim.base64url(bytes(32))]},
        {"nonce": ["text/plain", "x"]},
        {"evidence": None},
        {"evidence": ["application/vnd.nvidia.spdm-measurement-transcript", 5]},
        {"evidence": ["application/vnd.nvidia.spdm-measurement-transcript"]},
        {"certificate": ["application/vnd.nvidia.pem-cert-chain", "!"]},
        {"certificate": ["application/vnd.nvidia.pem-cert-chain", ""]},
    ],
)
def test_a_malformed_collection_is_malformed(device: Device, changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        foreign.read_items(cmw(device, **changes), [])


def test_other_versions_in_files_are_undecided(device: Device) -> None:
    with pytest.raises(UndecidedError, match="unsupported version"):
        foreign.read_items(cmw(device, __cmwc_t="tag:nvidia.com,2026:evidence-item/v2"), [])
    report = b"".join(device.exchange(Report(version=0x12)))
    with pytest.raises(UndecidedError, match=r"1\.2 of SPDM"):
        foreign.read_items(report, [device.pem()])


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"evidence": "AA=="},
        {"evidence": 5, "certificate": ""},
        {"evidence": "AA==", "certificate": ""},
        {"evidence": "A", "certificate": "AA"},
        {"__cmwc_t": "x"},
    ],
)
def test_malformed_json_is_malformed(document: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        foreign.read_items(json.dumps(document).encode(), [])


def test_empty_giant_and_doubled_files_are_malformed(device: Device) -> None:
    for data in (b"", b"\x00" * (2 << 20), b'{"evidence": "", "evidence": ""}', b"[" + b"{}," * 9999 + b"{}]"):
        with pytest.raises(WireError):
            foreign.read_items(data, [])
    assert foreign.read_items(b"\xa3anything", []) == (b"\xa3anything",)


def test_the_chain_beside_a_report_is_the_one_with_a_leaf(device: Device) -> None:
    report = b"".join(device.exchange())
    authority = device.chain[-1].certificate.public_bytes(sim.Encoding.PEM)
    beside = [b"<xml/>", b"{}", b"junk", authority, device.pem(), b"later"]
    (content,) = foreign.read_items(report, beside)
    assert abi.parse_item(content).chain == tuple(entry.der for entry in device.chain)
    assert beside == [b"<xml/>", b"{}", b"junk", authority, b"later"]


def test_a_switch_states_no_driver() -> None:
    switch = Maker().device(SWITCH)
    entry = {
        "arch": "LS10",
        "nonce": sim.NONCE.hex(),
        "vbios_version": "96.10.55.00.01",
        "evidence": sim.base64.b64encode(b"".join(switch.exchange())).decode(),
        "certificate": sim.base64.b64encode(switch.pem()).decode(),
    }
    assert len(foreign.read_items(json.dumps(entry).encode(), [])) == 1
    with pytest.raises(WireError, match="driver_version"):
        foreign.read_items(json.dumps({**entry, "driver_version": "1.0"}).encode(), [])
