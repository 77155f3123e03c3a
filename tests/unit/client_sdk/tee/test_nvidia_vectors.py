"""Genuine evidence of NVIDIA devices: each file reaches its verdict, and no byte of it can be changed."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection, UndecidedError, VerificationError
from client_sdk.offline.evidence import ForeignFiles, ForeignPolicy, judge
from client_sdk.tee.endorsements import recognise
from client_sdk.tee.evidence import Endorsements, ForeignBinding
from client_sdk.tee.nvidia import abi, foreign, nras, rim, verify
from client_sdk.tee.nvidia.anchors import pinned
from client_sdk.tee.nvidia.policy import parse_policy
from client_sdk.tee.nvidia.verify import AuthenticNvidia, parse_evidence
from client_sdk.wire.errors import WireError

VECTORS = Path(__file__).parents[3] / "vectors" / "tee" / "nvidia"
NOW = datetime.fromisoformat("2025-02-01T00:00:00+00:00").timestamp()
REPORT_ONLY = ForeignPolicy.parse("version = 1\n[families.nvidia]\n", report_only=True)


def read(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def item(name: str) -> bytes:
    """The wire item of a report and the chain of the same name."""
    (content,) = foreign.read_items(read(f"{name}.report.bin"), [read(f"{name}.chain.pem")])
    return content


def authenticate(content: bytes, endorsements: Endorsements | None = None, now: float = NOW) -> AuthenticNvidia:
    return parse_evidence(content).authenticate(CheckLog(), endorsements or Endorsements(), now=now)


def judged(name: str, *beside: str, nonce: bytes | None = None, policy: ForeignPolicy = REPORT_ONLY, now: float = NOW):
    files = ForeignFiles(family="nvidia", evidence=read(name), endorsements=[read(other) for other in beside])
    return judge(files, policy, ForeignBinding(nonce=nonce), now=now)


def facts(name: str) -> dict[str, str]:
    return {fact.name: fact.value for fact in judged(f"{name}.report.bin", f"{name}.chain.pem").facts}


def test_nv_1_hopper_with_firmware_id() -> None:
    shown = facts("hopper_580.159.03")
    assert (shown["driver version"], shown["VBIOS version"], shown["chip"]) == (
        "580.159.03",
        "96.00.74.00.20",
        "GH100",
    )
    assert (shown["kind"], shown["mode"], shown["protected PCIe"]) == ("gpu", "spt", "off")
    report = parse_evidence(item("hopper_580.159.03")).report
    assert report.nonce.hex() == "5bb22e377702d4e1e8215a903ba094826b9ac7f731dee1fe8102958bf2840aca"
    assert len(report.measurements) == 64
    assert shown["firmware id"] == report.opaque[abi.FWID].hex()


def test_nv_2_older_driver_and_its_vbios_manifest() -> None:
    rims = "rim_vbios_96.00.5E.00.01.xml"
    verdict = judged("hopper_535.86.09.report.bin", "hopper_535.86.09.chain.pem", rims)
    by_name = {check.name: check for check in verdict.checks}
    assert by_name["vbios measurements"].detail == "12 of 12 match"
    assert by_name["driver measurements"].status == "not checked"
    assert by_name["firmware id"].status == "not checked"
    assert by_name["developer mode"].status == "not checked"


def test_nv_2_mismatching_manifest_fails_at_index_9() -> None:
    with pytest.raises(VerificationError, match="measurement 9") as caught:
        judged("hopper_535.86.09.report.bin", "hopper_535.86.09.chain.pem", "rim_vbios_96.00.5E.00.01_mismatch.xml")
    assert caught.value.code is Rejection.MEASUREMENT_NOT_ALLOWED
    assert caught.value.expected
    assert caught.value.actual


def test_nv_3_blackwell_has_its_firmware_id_elsewhere() -> None:
    shown = facts("blackwell_575.32")
    assert (shown["architecture"], shown["driver version"], shown["VBIOS version"]) == (
        "blackwell",
        "575.32",
        "97.00.88.00.0F",
    )
    device = authenticate(item("blackwell_575.32"))
    assert device.firmware == device.report.opaque[abi.FWID]


def test_nv_5_switch() -> None:
    shown = facts("switch_ls10")
    assert (shown["kind"], shown["architecture"], shown["VBIOS version"]) == ("switch", "ls10", "96.10.55.00.01")
    assert shown["switch ids"] == "203eb31ad9ed0008"
    assert "driver version" not in shown


def test_nv_6_badsig() -> None:
    with pytest.raises(VerificationError) as caught:
        judged("hopper_bad_signature.report.bin", "hopper_535.86.09.chain.pem")
    assert caught.value.code is Rejection.BAD_SIGNATURE


def test_nv_9_evidence_json_with_its_nonce() -> None:
    nonce = bytes.fromhex("e97b23a1718095a0e9e35edca810768c70a6a5a389b705e753b197912bc11576")
    verdict = judged("hopper_590.12.evidence.json", nonce=nonce)
    assert (verdict.binding, verdict.fresh) == ("nonce", True)
    shown = {fact.name: fact.value for fact in verdict.facts}
    assert (shown["driver version"], shown["mode"], shown["protected PCIe"]) == ("590.12", "ppcie", "on")


def test_nv_9_another_nonce_is_refused_B011() -> None:
    with pytest.raises(VerificationError) as caught:
        judged("hopper_590.12.evidence.json", nonce=bytes(31) + b"\x01")
    assert caught.value.code is Rejection.NONCE_MISMATCH


def test_nv_11_switch_evidence_json() -> None:
    nonce = bytes.fromhex("931d8dd0add203ac3d8b4fbde75e115278eefcdceac5b87671a748f32364dfcb")
    assert judged("switch_ls10.evidence.json", nonce=nonce).binding == "nonce"


def test_nv_12_certhold_is_no_yes_where_ocsp_is_required() -> None:
    assert judged("hopper_ocsp_certhold.evidence.json").binding == "not-checked"
    required = ForeignPolicy.parse('version = 1\n[families.nvidia]\nocsp = "required"\n', report_only=True)
    with pytest.raises(UndecidedError, match="OCSP") as caught:
        judged("hopper_ocsp_certhold.evidence.json", policy=required)
    assert caught.value.code == "ENDORSEMENTS_MISSING"


def test_without_manifests_a_full_policy_reaches_no_verdict_B035() -> None:
    full = ForeignPolicy.parse("version = 1\n[families.nvidia]\n", report_only=False)
    with pytest.raises(UndecidedError, match=r"driver 580\.159\.03 and vbios 96\.00\.74\.00\.20"):
        judged("hopper_580.159.03.report.bin", "hopper_580.159.03.chain.pem", policy=full)


def test_driver_manifest_of_another_version_is_refused() -> None:
    with pytest.raises(VerificationError) as caught:
        judged("hopper_535.86.09.report.bin", "hopper_535.86.09.chain.pem", "rim_driver_gh100_550.144.03.xml")
    assert (caught.value.code, caught.value.actual) == (Rejection.ENDORSEMENT_MISMATCH, "535.86.09")


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("name", "version", "active", "first", "last"),
    [
        ("rim_driver_gh100_550.144.03.xml", "550.144.03", 21, "2024-12-30T16:56:50Z", "2026-12-30T16:56:50Z"),
        ("rim_vbios_96.00.5E.00.01.xml", "96.00.5E.00.01", 12, "2023-06-23T12:00:00Z", "2025-06-21T12:00:00Z"),
        ("rim_vbios_96.00.5E.00.01_mismatch.xml", "96.00.5E.00.01", 12, "2023-12-14T00:00:00Z", "2025-12-11T00:00:00Z"),
    ],
)
def test_genuine_manifest_within_its_window(name: str, version: str, active: int, first: str, last: str) -> None:
    for now in (moment(first), moment(last)):
        manifest = rim.authenticate(read(name), pinned().rim, now=now)
        assert (manifest.version, manifest.product, len(manifest.golden)) == (version, "GH100", active)
    for now in (moment(first) - 3 * 86_400, moment(last) + 3 * 86_400):
        with pytest.raises(VerificationError) as caught:
            rim.authenticate(read(name), pinned().rim, now=now)
        assert caught.value.code is Rejection.CERTIFICATE_NOT_VALID_NOW


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("rim_driver_bad_signature.xml", Rejection.BAD_SIGNATURE),
        ("rim_driver_bad_chain.xml", Rejection.CHAIN_NOT_TRUSTED),
    ],
)
def test_manifest_that_is_not_nvidias_is_refused_B001(name: str, code: Rejection) -> None:
    with pytest.raises(VerificationError) as caught:
        authenticate(item("hopper_580.159.03"), recognise(read(name)))
    assert caught.value.code is code


def test_token_of_the_service_is_read_and_has_expired() -> None:
    token = read("nras_v3_expired.detached_eat.json")
    with pytest.raises(VerificationError) as caught:
        nras.authenticate(token, None, now=NOW)
    assert caught.value.code is Rejection.CERTIFICATE_NOT_VALID_NOW
    with pytest.raises(UndecidedError, match="key set"):
        nras.authenticate(token, None, now=1749605457)
    with pytest.raises(VerificationError, match="not in the key set"):
        nras.authenticate(token, b'{"keys": []}', now=1749605457)
    with pytest.raises(VerificationError):
        nras.authenticate(token, None, now=1749605458)


def test_token_with_one_changed_device_is_refused() -> None:
    document = json.loads(read("nras_v3_expired.detached_eat.json"))
    document[1]["GPU-0"] = document[0][1]
    with pytest.raises(VerificationError) as caught:
        nras.authenticate(json.dumps(document).encode(), None, now=1749605457)
    assert caught.value.code is Rejection.ENDORSEMENT_MISMATCH


def test_token_offered_as_evidence_is_refused() -> None:
    with pytest.raises(VerificationError) as caught:
        judged("nras_v3_expired.detached_eat.json")
    assert caught.value.code is Rejection.MALFORMED_EVIDENCE


@pytest.mark.parametrize("name", ["hopper_580.159.03", "blackwell_575.32", "switch_ls10"])
def test_every_byte_of_a_genuine_report_is_signed(name: str) -> None:
    report, device = read(f"{name}.report.bin"), authenticate(item(name))
    for position in range(len(report)):
        flipped = report[:position] + bytes([report[position] ^ 1]) + report[position + 1 :]
        try:
            parsed = abi.parse_report(*abi.split_report(flipped))
        except (WireError, abi.UnsupportedReport):
            continue
        with pytest.raises(VerificationError):
            verify._check_signature(parsed, device.path[0])


def test_every_byte_of_a_genuine_chain_counts() -> None:
    parsed = abi.parse_item(item("hopper_580.159.03"))
    for number in range(4):
        for position in range(len(parsed.chain[number])):
            changed = bytearray(parsed.chain[number])
            changed[position] ^= 0x20
            chain = (*parsed.chain[:number], bytes(changed), *parsed.chain[number + 1 :])
            with pytest.raises((VerificationError, WireError, UndecidedError)):
                authenticate(abi.encode_item(replace(parsed, chain=chain)))


def test_the_root_in_a_chain_is_optional_and_never_believed() -> None:
    parsed = abi.parse_item(item("hopper_580.159.03"))
    assert len(parsed.chain) == 5
    authenticate(abi.encode_item(replace(parsed, chain=parsed.chain[:4])))
    other = abi.parse_item(item("switch_ls10")).chain
    for wrong in (parsed.chain[:3], parsed.chain[1:], parsed.chain[4:], (other[0], *parsed.chain[1:]), other):
        with pytest.raises(VerificationError) as caught:
            authenticate(abi.encode_item(replace(parsed, chain=wrong)))
        assert caught.value.code in {Rejection.CHAIN_NOT_TRUSTED, Rejection.BAD_SIGNATURE}


def test_every_truncation_is_malformed_and_quick() -> None:
    report, whole = read("switch_ls10.report.bin"), item("switch_ls10")
    started = time.process_time()
    for length in range(len(report)):
        with pytest.raises(WireError):
            abi.parse_report(*abi.split_report(report[:length]))
    for length in range(0, len(whole), 5):
        with pytest.raises(WireError):
            parse_evidence(whole[:length])
    assert time.process_time() - started < 5


def test_one_device_in_two_entries_counts_once() -> None:
    one = json.loads(read("hopper_590.12.evidence.json"))[0]
    files = ForeignFiles(family="nvidia", evidence=json.dumps([one, one]).encode())
    with pytest.raises(VerificationError) as caught:
        judge(files, REPORT_ONLY, ForeignBinding(), now=NOW)
    assert caught.value.code is Rejection.DEVICE_NOT_ALLOWED


def test_two_devices_are_counted_by_kind() -> None:
    both = [json.loads(read(f"{name}.evidence.json"))[0] for name in ("hopper_590.12", "switch_ls10")]
    files = ForeignFiles(family="nvidia", evidence=json.dumps(both).encode())
    for table, fits in (
        ("count = 2", True),
        ("gpus = 1", True),
        ("gpus = 1\nswitches = 1", False),  # the GPU's links lead to other switches
        ("gpus = 2", False),
        ("count = 3", False),
        ("gpus = 0\nswitches = 2", False),
    ):
        policy = ForeignPolicy.parse(f"version = 1\n[families.nvidia]\n{table}\n", report_only=True)
        if fits:
            assert judge(files, policy, ForeignBinding(), now=NOW).facts
            continue
        with pytest.raises(VerificationError) as caught:
            judge(files, policy, ForeignBinding(), now=NOW)
        assert caught.value.code is Rejection.DEVICE_NOT_ALLOWED


@pytest.mark.parametrize(
    ("key", "value"),
    [("nonce", "00" * 32), ("arch", "BLACKWELL"), ("driver_version", "1.2"), ("vbios_version", "96.00.74.00.21")],
)
def test_words_beside_a_report_have_to_be_its_own_B028(key: str, value: str) -> None:
    (entry,) = json.loads(read("hopper_590.12.evidence.json"))
    truth = {"driver_version": "590.12", "vbios_version": "96.00.a5.00.01"}
    assert foreign.read_items(json.dumps([entry | truth]).encode(), [])
    with pytest.raises(WireError, match=key):
        foreign.read_items(json.dumps([entry | {key: value}]).encode(), [])


def test_wrong_families_and_junk_are_typed_errors_within_bounds() -> None:
    for junk in (
        b"\x00",
        b"\x11",
        b"\x11\xe0",
        b"\xa3",
        b"[",
        b"{}",
        b"[1]",
        b"[[]]",
        b"[" * 100_000,
        b"\xff" * 70_000,
    ):
        started = time.perf_counter()
        with pytest.raises((WireError, UndecidedError)):
            [parse_evidence(content) for content in foreign.read_items(junk, [])]
        assert time.perf_counter() - started < 0.5
    for name in ("nvidia/rim_vbios_96.00.5E.00.01.xml", "nvidia/hopper_580.159.03.chain.pem"):
        with pytest.raises(WireError):
            parse_evidence((VECTORS.parent / name).read_bytes())


def test_identity_is_the_device_not_its_firmware() -> None:
    device = authenticate(item("hopper_580.159.03"))
    assert len(device.identity) == 32
    names = ("hopper_580.159.03", "hopper_535.86.09", "blackwell_575.32", "switch_ls10")
    assert len({authenticate(item(name)).identity for name in names}) == 4
    parse_policy({"device_ids": [device.identity.hex()]}, "families.nvidia", True)


def test_a_report_alone_waits_for_its_chain() -> None:
    with pytest.raises(UndecidedError, match="chain"):
        judged("hopper_580.159.03.report.bin")
    with pytest.raises(UndecidedError, match="chain"):
        judged("hopper_580.159.03.report.bin", "rim_vbios_96.00.5E.00.01.xml")
    response = read("hopper_580.159.03.report.bin")[abi.REQUEST_BYTES :]
    with pytest.raises(WireError, match="request"):
        foreign.read_items(response, [read("hopper_580.159.03.chain.pem")])


def test_chain_may_lie_beside_in_any_order_of_files() -> None:
    beside = ["rim_vbios_96.00.5E.00.01.xml", "hopper_535.86.09.chain.pem"]
    assert judged("hopper_535.86.09.report.bin", *beside).facts


def test_verifying_is_quick_when_warm() -> None:
    content = item("hopper_580.159.03")
    times = []
    for _ in range(9):
        started = time.perf_counter()
        authenticate(content)
        times.append(time.perf_counter() - started)
    assert sorted(times)[4] < 0.06, "median; the bench has the real bound of 12 ms"


def test_evidence_of_another_root_is_refused() -> None:
    swapped = parse_evidence(item("hopper_580.159.03"), replace(pinned(), device=pinned().rim))
    with pytest.raises(VerificationError) as caught:
        swapped.authenticate(CheckLog(), Endorsements(), now=NOW)
    assert caught.value.code is Rejection.CHAIN_NOT_TRUSTED
