"""NVIDIA evidence of a vendor of our own: one property wrong at a time, each found by its own check."""

from __future__ import annotations

import builtins
import datetime
import itertools
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cryptography import x509 as library
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp as library_ocsp

from client_sdk.checks import CheckLog
from client_sdk.errors import Check, Rejection, UndecidedError, VerificationError
from client_sdk.tee import x509
from client_sdk.tee.endorsements import merge, recognise
from client_sdk.tee.evidence import DeviceSetPolicy, Endorsements, ForeignBinding, SessionBinding
from client_sdk.tee.nvidia import abi, anchors, nras, ocsp, product, rim
from client_sdk.tee.nvidia.policy import NvidiaPolicy, parse_policy
from client_sdk.tee.nvidia.verify import AuthenticNvidia, parse_evidence
from client_sdk.wire import digests
from client_sdk.wire.errors import WireError
from tests.simulators import nvidia as sim
from tests.simulators.nvidia import BLACKWELL, HOPPER, NONCE, NOW, RUBIN, SWITCH, Device, Maker, Report

LOOSE = NvidiaPolicy(require_rim=False, kinds=frozenset({"gpu", "switch"}))


@dataclass(frozen=True)
class Rig:
    maker: Maker
    device: Device

    def authenticate(
        self, report: Report | None = None, *beside: bytes, device: Device | None = None, **more: Any
    ) -> AuthenticNvidia:
        log = more.pop("log", CheckLog())
        now = more.pop("now", NOW)
        content = (device or self.device).item(report, **more)
        parsed = parse_evidence(content, self.maker.anchors)
        return parsed.authenticate(log, merge(recognise(data) for data in beside), now=now)

    def appraise(
        self, policy: NvidiaPolicy, report: Report | None = None, *beside: bytes, **more: Any
    ) -> dict[str, Check]:
        log = CheckLog()
        self.authenticate(report, *beside, log=log, **more).appraise(log, policy, now=NOW)
        return {check.name: check for check in log.checks}

    def manifests(self) -> tuple[bytes, bytes]:
        return self.maker.manifest(component="driver"), self.maker.manifest(component="vbios")


@pytest.fixture(scope="module")
def rig() -> Rig:
    maker = Maker()
    return Rig(maker, maker.device())


def refused(code: Rejection, call: Any, *args: Any, **kwargs: Any) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        call(*args, **kwargs)
    assert caught.value.code is code, caught.value
    assert caught.value.checks[-1].status == "failed"
    return caught.value


# Chain, signature, firmware


def test_a_device_of_the_simulator_is_accepted(rig: Rig) -> None:
    device = rig.authenticate()
    assert (device.mode, device.trust, device.product.architecture) == ("production", "hardware-signed", "hopper")
    assert dict(device.facts)["firmware id"] == sim.FWID.hex()


def test_pinned_roots_refuse_the_simulators_chain(rig: Rig) -> None:
    parsed = parse_evidence(rig.device.item())
    refused(Rejection.CHAIN_NOT_TRUSTED, parsed.authenticate, CheckLog(), Endorsements(), now=NOW)


@pytest.mark.parametrize(("chip", "architecture"), [(BLACKWELL, "blackwell"), (SWITCH, "ls10"), (HOPPER, "hopper")])
def test_each_architecture(rig: Rig, chip: sim.Chip, architecture: str) -> None:
    assert rig.authenticate(device=rig.maker.device(chip)).product.architecture == architecture


@pytest.mark.parametrize("name", ["GR100 A01 GSP BROM", "XX", "something else"])
def test_a_product_unknown_here_is_undecided_B016(rig: Rig, name: str) -> None:
    with pytest.raises(UndecidedError, match="unsupported version of NVIDIA device"):
        rig.authenticate(device=rig.maker.device(replace(RUBIN, device=name)))


def test_time_outside_the_chains_validity_is_refused(rig: Rig) -> None:
    for now in (0, sim.AFTER.timestamp() + 1):
        refused(Rejection.CERTIFICATE_NOT_VALID_NOW, rig.authenticate, now=now)


def test_a_chain_of_another_depth_is_refused(rig: Rig) -> None:
    lower = sim.issue("lower", rig.device.chain[0], ca=False)
    chain = [lower.der, *(entry.der for entry in rig.device.chain)]
    refused(Rejection.CHAIN_NOT_TRUSTED, rig.authenticate, chain=chain)
    product_leaf = [rig.maker.product.der]
    assert "depth" in refused(Rejection.CHAIN_NOT_TRUSTED, rig.authenticate, chain=product_leaf).message
    refused(Rejection.CHAIN_NOT_TRUSTED, rig.authenticate, chain=[rig.maker.device_root.der])


def test_a_root_of_the_same_name_is_not_the_root(rig: Rig) -> None:
    root = sim.issue("Test Device Identity CA", None)
    forged = sim.issue("Test Product Identity", root)
    chain = [*(entry.der for entry in rig.device.chain[:3]), forged.der, root.der]
    refused(Rejection.BAD_SIGNATURE, rig.authenticate, chain=chain)


def test_a_signature_by_another_key_is_refused(rig: Rig) -> None:
    refused(Rejection.BAD_SIGNATURE, rig.authenticate, Report(spoil=True))
    refused(Rejection.BAD_SIGNATURE, rig.authenticate, Report(signer=ec.generate_private_key(ec.SECP384R1())))


def test_a_leaf_key_on_another_curve_is_refused(rig: Rig) -> None:
    refused(Rejection.BAD_KEY, rig.authenticate, device=rig.maker.device(curve=ec.SECP256R1()))


def test_the_leaf_of_another_device_is_refused(rig: Rig) -> None:
    other = rig.maker.device()
    chain = [other.chain[0].der, *(entry.der for entry in other.chain[1:])]
    refused(Rejection.BAD_SIGNATURE, rig.authenticate, chain=chain)


@pytest.mark.parametrize("chip", [HOPPER, BLACKWELL])
def test_firmware_of_another_id_than_certified_is_refused_B014(rig: Rig, chip: sim.Chip) -> None:
    report = Report(fields={**chip.fields, abi.FWID: bytes(47) + b"\x01"})
    error = refused(Rejection.ENDORSEMENT_MISMATCH, rig.authenticate, report, device=rig.maker.device(chip))
    assert error.expected == sim.FWID.hex()


def test_a_reported_firmware_id_needs_a_certified_one(rig: Rig) -> None:
    device = rig.maker.device(extensions=())
    refused(Rejection.ENDORSEMENT_MISMATCH, rig.authenticate, device=device)
    fields = {number: value for number, value in HOPPER.fields.items() if number != abi.FWID}
    assert rig.authenticate(Report(fields=fields), device=device).firmware is None


@pytest.mark.parametrize(
    "extension",
    [
        ("2.23.133.5.4.1", sim.der(0x30, sim.fwid(sim.FWID, bytes.fromhex("0609608648016503040201")))),
        ("2.23.133.5.4.1", sim.der(0x30, sim.fwid(sim.FWID[:32]))),
        ("2.23.133.5.4.1", sim.der(0x30)),
        ("2.23.133.5.4.1", sim.der(0x30, sim.der(0x30, b"\x06\x01\x2a"))),
        ("2.23.133.5.4.1.1", sim.der(0x30, sim.der(0x80, b"x"))),
        ("2.23.133.5.4.1.1", sim.der(0xA6)),
    ],
)
def test_a_malformed_firmware_id_is_malformed(rig: Rig, extension: tuple[str, bytes]) -> None:
    refused(Rejection.MALFORMED_CERTIFICATE, rig.authenticate, device=rig.maker.device(extensions=(extension,)))


def test_a_device_without_serial_number_shows_none(rig: Rig) -> None:
    rom = sim.issue(HOPPER.device, rig.maker.provisioner)
    leaf = sim.issue("leaf", rom, ca=False, extensions=(sim.composite_device_id(sim.FWID),))
    device = Device(chip=HOPPER, chain=(leaf, rom, rig.maker.provisioner, rig.maker.product))
    assert "device serial number" not in dict(rig.authenticate(device=device).facts)
    assert product.serial_number(x509.parse_certificate(rom.der)) == ""


def test_a_changed_trust_anchor_stops_the_program() -> None:
    with pytest.raises(RuntimeError, match="not the pinned"):
        anchors._load("nvidia_rim_root.pem", "00" * 32)


# The report's own fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (abi.DRIVER_VERSION, b"\xff"),
        (abi.DRIVER_VERSION, b"\x00"),
        (abi.DRIVER_VERSION, b"5" * 65),
        (abi.VBIOS_VERSION, b"\x01\x02\x03"),
        (abi.PROTECTED_PCIE, b"\x01"),
        (abi.PROTECTED_PCIE, b"\x55\x55"),
    ],
)
def test_malformed_fields_are_malformed(rig: Rig, field: int, value: bytes) -> None:
    refused(Rejection.MALFORMED_EVIDENCE, rig.authenticate, Report(fields={**HOPPER.fields, field: value}))


def test_an_unknown_feature_flag_is_undecided(rig: Rig) -> None:
    with pytest.raises(UndecidedError, match="unsupported feature flag 9"):
        rig.authenticate(Report(fields={**HOPPER.fields, abi.FEATURE_FLAG: b"\x09\x00"}))


@pytest.mark.parametrize("version", [0x10, 0x12, 0x13])
def test_other_versions_of_spdm_are_undecided_B016(rig: Rig, version: int) -> None:
    for report in (Report(version=version), Report(request=bytes([version, 0xE0, 1, 0xFF]) + NONCE + b"\x00")):
        with pytest.raises(UndecidedError, match=f"unsupported version 1.{version & 15} of SPDM"):
            rig.authenticate(report)


def typed_opaque(fields: dict[int, bytes], *, profile: int = 0, version: int = 1) -> bytes:
    head = b"NVDAOD" + struct.pack("<HBBH", profile, version, 0, 0)
    return head + b"".join(struct.pack("<HHH", n, 0, len(v)) + v for n, v in fields.items())


def test_opaque_data_with_kinds_of_value(rig: Rig) -> None:
    fields = dict(HOPPER.fields)
    assert rig.authenticate(Report(raw_opaque=typed_opaque(fields))).report.driver_version == "580.159.03"
    for opaque in (
        typed_opaque(fields, profile=1),
        typed_opaque(fields, version=2),
        sim.opaque_fields({**fields, abi.OPAQUE_VERSION: b"\x02\x00"}),
    ):
        with pytest.raises(UndecidedError, match="opaque data"):
            rig.authenticate(Report(raw_opaque=opaque))


BAD_REPORTS = {
    "not SPDM": Report(version=0x20),
    "another code": Report(code=0x7F),
    "request of another code": Report(request=b"\x11\xe1\x01\xff" + NONCE + b"\x00"),
    "request without signature": Report(request=b"\x11\xe0\x00\xff" + NONCE + b"\x00"),
    "request for one block": Report(request=b"\x11\xe0\x01\x05" + NONCE + b"\x00"),
    "no blocks": Report(raw_record=b"", blocks=0),
    "fewer blocks than told": Report(blocks=65),
    "more blocks than told": Report(blocks=63),
    "one index twice": Report(raw_record=sim.block(1, b"x") * 2, blocks=2),
    "another specification": Report(raw_record=struct.pack("<BBHBH", 1, 2, 4, 1, 1) + b"x", blocks=1),
    "sizes that disagree": Report(raw_record=struct.pack("<BBHBH", 1, 1, 5, 1, 1) + b"xy", blocks=1),
    "block beyond the record": Report(raw_record=struct.pack("<BBHBH", 1, 1, 8, 1, 5) + b"x", blocks=1),
    "opaque field cut": Report(raw_opaque=b"\x03\x00\x09\x00a"),
    "opaque head cut": Report(raw_opaque=b"\x03\x00\x09"),
    "opaque field twice": Report(raw_opaque=sim.opaque_fields({3: b"1"}) * 2),
    "typed opaque head cut": Report(raw_opaque=b"NVDAOD\x00"),
}


@pytest.mark.parametrize("report", BAD_REPORTS.values(), ids=BAD_REPORTS.keys())
def test_malformed_reports_are_malformed(rig: Rig, report: Report) -> None:
    with pytest.raises(WireError) as caught:
        parse_evidence(rig.device.item(report))
    assert caught.value.code == "MALFORMED_EVIDENCE"


def test_lengths_that_do_not_add_up_are_malformed(rig: Rig) -> None:
    request, response = rig.device.exchange()
    for wrong in (response[:-1], response + b"\x00", response[:7], b"\x11" * 70_000, response[:5] + b"\xff" * 3):
        with pytest.raises(WireError):
            abi.parse_report(request, wrong)
    with pytest.raises(WireError):
        abi.parse_report(request + b"\x00", response)
    for data in (b"", request, request + b"x" * 70_000):
        with pytest.raises(WireError):
            abi.split_report(data)


def test_items_are_read_strictly(rig: Rig) -> None:
    request, response = rig.device.exchange()
    chain = tuple(entry.der for entry in rig.device.chain)
    for wrong in ((), chain * 3, (b"\x30\x00",), ("text",)):
        content = abi.encode_item(abi.NvidiaItem(request=request, response=response, chain=wrong))  # type: ignore[arg-type]
        with pytest.raises(WireError):
            parse_evidence(content)


def test_pem_of_the_driver_becomes_der(rig: Rig) -> None:
    pem = rig.device.pem()
    assert abi.pem_to_der(pem + bytes(9)) == tuple(entry.der for entry in rig.device.chain)
    begin, end = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
    for wrong in (b"", pem * 3, pem + begin, begin + b"a" + end):
        with pytest.raises(WireError):
            abi.pem_to_der(wrong)


# Binding


def test_session_binding_is_the_nonce_of_this_connection(rig: Rig) -> None:
    nonce, binder = bytes(range(32)), bytes(32)
    report = Report(nonce=digests.gpu_nonce(nonce, binder))
    device = rig.authenticate(report)
    bound = SessionBinding(claims=b"", nonce=nonce, binder=binder, spki=None)
    device.check_session(CheckLog(), bound)
    for wrong in (replace(bound, nonce=bytes(32)), replace(bound, binder=bytes(31) + b"\x01")):
        refused(Rejection.EVIDENCE_BINDING, device.check_session, CheckLog(), wrong)
    unbound = rig.authenticate(Report(nonce=digests.gpu_nonce(nonce, None)))
    unbound.check_session(CheckLog(), replace(bound, binder=None))
    refused(Rejection.EVIDENCE_BINDING, unbound.check_session, CheckLog(), bound)


def test_foreign_binding_is_the_nonce_B011_B013(rig: Rig) -> None:
    device, log = rig.authenticate(), CheckLog()
    device.check_foreign(log, ForeignBinding(nonce=NONCE))
    device.check_foreign(log, ForeignBinding())
    assert [check.status for check in log.checks] == ["passed", "not checked"]
    refused(Rejection.NONCE_MISMATCH, device.check_foreign, CheckLog(), ForeignBinding(nonce=bytes(32)))
    refused(Rejection.EVIDENCE_BINDING, device.check_foreign, CheckLog(), ForeignBinding(report_data=NONCE))


# Policy on one device


PINS: list[tuple[str, object, object, Rejection]] = [
    ("architectures", {"hopper"}, {"blackwell"}, Rejection.PLATFORM_NOT_ALLOWED),
    ("driver_versions", {"580.159.03", "1.0"}, {"580.159"}, Rejection.TCB_NOT_ALLOWED),
    ("vbios_versions", {"96.00.74.00.20"}, {"96.00.74.00.2"}, Rejection.TCB_NOT_ALLOWED),
    ("modes", {"spt"}, {"mpt", "ppcie"}, Rejection.PLATFORM_NOT_ALLOWED),
    ("firmware_ids", {sim.FWID}, {bytes(47) + b"\x01"}, Rejection.MEASUREMENT_NOT_ALLOWED),
    ("device_ids", None, {bytes(31) + b"\x01"}, Rejection.DEVICE_NOT_ALLOWED),
    ("kinds", {"gpu"}, {"switch"}, Rejection.DEVICE_NOT_ALLOWED),
]


@pytest.mark.parametrize(("key", "right", "wrong", "code"), PINS, ids=[pin[0] for pin in PINS])
def test_each_pin_accepts_and_refuses_B009_B032(
    rig: Rig, key: str, right: Iterable[object] | None, wrong: Iterable[object], code: Rejection
) -> None:
    matching = right if right is not None else {rig.authenticate().identity}
    rig.appraise(replace(LOOSE, **{key: frozenset(matching)}))
    refused(code, rig.appraise, replace(LOOSE, **{key: frozenset(wrong)}))


def test_protected_pcie_is_pinned_either_way(rig: Rig) -> None:
    on = Report(fields={**HOPPER.fields, abi.PROTECTED_PCIE: b"\xaa"})
    silent = Report(fields={n: v for n, v in HOPPER.fields.items() if n != abi.PROTECTED_PCIE})
    for report, wanted in ((on, True), (Report(), False)):
        assert rig.appraise(replace(LOOSE, protected_pcie=wanted), report)["protected PCIe"].status == "passed"
        refused(Rejection.PLATFORM_NOT_ALLOWED, rig.appraise, replace(LOOSE, protected_pcie=not wanted), report)
    error = refused(Rejection.PLATFORM_NOT_ALLOWED, rig.appraise, replace(LOOSE, protected_pcie=True), silent)
    assert (error.expected, error.actual) == ("on", "none")


def test_a_policy_of_another_family_is_refused(rig: Rig) -> None:
    refused(Rejection.FAMILY_NOT_ALLOWED, rig.authenticate().appraise, CheckLog(), None, now=NOW)


def test_devices_are_counted_by_kind_through_the_seam(rig: Rig) -> None:
    policy = NvidiaPolicy(gpus=1, switches=1, kinds=frozenset({"gpu", "switch"}))
    assert isinstance(policy, DeviceSetPolicy)
    assert policy.count == 2
    gpu, switch = rig.authenticate(), rig.authenticate(device=rig.maker.device(SWITCH))
    policy.check_devices(CheckLog(), [gpu, switch])
    refused(Rejection.DEVICE_NOT_ALLOWED, policy.check_devices, CheckLog(), [gpu, gpu])


def test_the_switches_that_links_lead_to_have_to_be_the_attested_ones(rig: Rig) -> None:
    policy = NvidiaPolicy(gpus=1, switches=1, kinds=frozenset({"gpu", "switch"}))
    switch = rig.authenticate(device=rig.maker.device(SWITCH))
    own, other = SWITCH.fields[abi.SWITCH_PDI], b"another!"

    def gpu(*links: bytes) -> AuthenticNvidia:
        return rig.authenticate(Report(fields={**HOPPER.fields, abi.SWITCH_PDI: b"".join(links)}))

    policy.check_devices(CheckLog(), [gpu(own, own, bytes(8), b"\xff" * 8), switch])
    error = refused(Rejection.DEVICE_NOT_ALLOWED, policy.check_devices, CheckLog(), [gpu(own, other), switch])
    assert "without evidence" in error.message
    refused(Rejection.MALFORMED_EVIDENCE, gpu, b"short")


# Manifests


def test_both_manifests_prove_all_measurements(rig: Rig) -> None:
    checks = rig.appraise(NvidiaPolicy(), None, *rig.manifests())
    assert checks["driver measurements"].detail == "19 of 19 match"
    assert checks["vbios measurements"].detail == "12 of 12 match"
    assert checks["measurement 35"].status == "not checked"
    assert checks["developer mode"].status == "passed"


def test_a_switch_needs_no_driver_manifest(rig: Rig) -> None:
    manifest = rig.maker.manifest(component="vbios", version="96.10.55.00.01", product="LS_10")
    checks = rig.appraise(replace(LOOSE, require_rim=True), None, manifest, device=rig.maker.device(SWITCH))
    assert checks["developer mode"].status == "passed"


@pytest.mark.parametrize("block", [1, 12, 21, 40])
def test_each_measurement_of_a_manifest_counts(rig: Rig, block: int) -> None:
    report = Report(measurements={block: bytes(48)})
    error = refused(Rejection.MEASUREMENT_NOT_ALLOWED, rig.appraise, LOOSE, report, *rig.manifests())
    assert error.actual == bytes(48).hex()
    assert f"measurement {block - 1} " in error.message


def test_a_measurement_that_is_missing_is_no_match_B020(rig: Rig) -> None:
    golden = {200: [sim.measured(201)]}
    manifest = rig.maker.manifest(component="vbios", golden=golden)
    assert refused(Rejection.MEASUREMENT_NOT_ALLOWED, rig.appraise, LOOSE, None, manifest).actual == "none"


def test_alternatives_and_inactive_measurements(rig: Rig) -> None:
    resources = sim.resource(60, [bytes(48)], active="False")
    golden = {0: [bytes(48), sim.measured(1)]}
    manifest = rig.maker.manifest(component="vbios", golden=golden, resources=resources)
    assert rig.appraise(LOOSE, None, manifest)["vbios measurements"].detail == "1 of 1 match"


def test_the_decoders_measurement_counts_where_it_is_on(rig: Rig) -> None:
    manifest = rig.maker.manifest(golden={35: [bytes(48)], 0: [sim.measured(1)]})
    on = Report(fields={**HOPPER.fields, abi.NVDEC0_STATUS: b"\xaa"})
    rig.appraise(LOOSE, None, manifest)
    refused(Rejection.MEASUREMENT_NOT_ALLOWED, rig.appraise, LOOSE, on, manifest)
    odd = Report(fields={**HOPPER.fields, abi.NVDEC0_STATUS: b"\x01"})
    refused(Rejection.PLATFORM_NOT_ALLOWED, rig.appraise, LOOSE, odd, manifest)
    absent = Report(fields={n: v for n, v in HOPPER.fields.items() if n != abi.NVDEC0_STATUS})
    refused(Rejection.MEASUREMENT_NOT_ALLOWED, rig.appraise, LOOSE, absent, manifest)


def test_manifests_that_claim_the_same_index_are_refused(rig: Rig) -> None:
    driver = rig.maker.manifest(golden={5: [sim.measured(6)]})
    vbios = rig.maker.manifest(component="vbios", golden={5: [sim.measured(6)]})
    refused(Rejection.ENDORSEMENT_MISMATCH, rig.appraise, LOOSE, None, driver, vbios)


def test_manifests_are_chosen_by_product_and_version(rig: Rig) -> None:
    other_product = rig.maker.manifest(product="GB100", version="1.2.3")
    rig.appraise(LOOSE, None, other_product)
    other_version = rig.maker.manifest(version="580.159.04")
    refused(Rejection.ENDORSEMENT_MISMATCH, rig.appraise, LOOSE, None, other_version)
    rig.appraise(LOOSE, None, other_version, rig.maker.manifest())


def test_a_missing_manifest_is_undecided_and_named_B035(rig: Rig) -> None:
    driver, vbios = rig.manifests()
    for given, missing in ((driver, "vbios 96"), (vbios, "driver 580")):
        with pytest.raises(UndecidedError, match=missing):
            rig.appraise(NvidiaPolicy(), None, given)


def test_manifests_signed_by_others_are_refused_B001(rig: Rig) -> None:
    maker = rig.maker
    stranger = sim.issue("Test RIM Signer", None, ca=False)
    cases = [
        (Rejection.CHAIN_NOT_TRUSTED, maker.manifest(signer=stranger, chain=(stranger,))),
        (Rejection.BAD_SIGNATURE, maker.manifest(signer=stranger, chain=(maker.rim_signer, maker.rim_ca))),
        (Rejection.CHAIN_NOT_TRUSTED, maker.manifest(chain=(maker.rim_signer,))),
        (Rejection.BAD_SIGNATURE, maker.manifest().replace(b'name="GH100"', b'name="GH101"')),
        (Rejection.BAD_SIGNATURE, maker.manifest().replace(b"ecdsa-sha384", b"ecdsa-sha256")),
    ]
    for code, document in cases:
        refused(code, rig.authenticate, None, document)
    late = sim.AFTER.timestamp() + 1
    with pytest.raises(VerificationError) as caught:
        rim.authenticate(maker.manifest(), maker.anchors.rim, now=late)
    assert caught.value.code is Rejection.CERTIFICATE_NOT_VALID_NOW


_HEAD = f'<SoftwareIdentity xmlns="{sim._SWID}" xmlns:ns2="{sim._SHA384_NS}" name="x">'
_META = '<Meta colloquialVersion="580.159.03" product="GH100"/>'
_GOOD = sim.resource(0, [bytes(48)])
BAD_MANIFESTS = {
    "another root element": f'<Other xmlns="{sim._SWID}">{_META}<Payload/></Other>',
    "no meta": f"{_HEAD}<Payload>{_GOOD}</Payload></SoftwareIdentity>",
    "two payloads": f"{_HEAD}{_META}<Payload>{_GOOD}</Payload><Payload/></SoftwareIdentity>",
    "no product": f'{_HEAD}<Meta colloquialVersion="1.2"/><Payload>{_GOOD}</Payload></SoftwareIdentity>',
    "nothing active": f"{_HEAD}{_META}<Payload/></SoftwareIdentity>",
    "one index twice": f"{_HEAD}{_META}<Payload>{_GOOD}{_GOOD}</Payload></SoftwareIdentity>",
    "odd activity": f"{_HEAD}{_META}<Payload>{_GOOD.replace('True', 'yes')}</Payload></SoftwareIdentity>",
    "no index": f"{_HEAD}{_META}<Payload>{_GOOD.replace(' index=', ' ix=')}</Payload></SoftwareIdentity>",
    "index too high": f"{_HEAD}{_META}<Payload>{sim.resource(255, [bytes(48)])}</Payload></SoftwareIdentity>",
    "another size": f"{_HEAD}{_META}<Payload>{sim.resource(0, [bytes(48)], size=32)}</Payload></SoftwareIdentity>",
    "no value": f"{_HEAD}{_META}<Payload>{sim.resource(0, [])}</Payload></SoftwareIdentity>",
    "short value": f"{_HEAD}{_META}<Payload>{sim.resource(0, [bytes(32)])}</Payload></SoftwareIdentity>",
    "no hex": f"{_HEAD}{_META}<Payload>{_GOOD.replace('0000', 'zzzz')}</Payload></SoftwareIdentity>",
}


@pytest.mark.parametrize("text", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS.keys())
def test_malformed_manifests_are_malformed(rig: Rig, text: str) -> None:
    refused(Rejection.MALFORMED_ENDORSEMENT, rig.authenticate, None, rig.maker.sign_xml(text))


@pytest.mark.parametrize(
    "text",
    [
        f'{_HEAD}{_META}<Payload>{_GOOD}<Resource type="OpaqueData"/></Payload></SoftwareIdentity>',
        f"{_HEAD}{_META}<Payload>{_GOOD}<Other/></Payload></SoftwareIdentity>",
        f'{_HEAD}<Meta colloquialVersion="next" product="GH100"/><Payload>{_GOOD}</Payload></SoftwareIdentity>',
    ],
)
def test_manifests_with_unknown_contents_are_undecided(rig: Rig, text: str) -> None:
    with pytest.raises(UndecidedError, match="unsupported version"):
        rig.authenticate(None, rig.maker.sign_xml(text))


def test_bad_xml_is_malformed_and_quick(rig: Rig) -> None:
    manifest = rig.maker.manifest()
    bomb = b'<!DOCTYPE x [<!ENTITY a "' + b"a" * 1000 + b'">]><x>&a;</x>'
    certificate = b"<ds:X509Certificate>"
    for document in (
        b"<",
        b"<x/>",
        b"<x>" * 1000,
        bomb,
        b"<!DOCTYPE x>" + manifest,
        b"<x>" + b" " * (300 << 10) + b"</x>",
        manifest.replace(certificate, certificate + b"!"),
        manifest.replace(b"<ds:SignedInfo>", b"<ds:Unsigned>").replace(b"</ds:SignedInfo>", b"</ds:Unsigned>"),
        manifest.replace(b"xml-c14n11", b"xml-c14n99"),
    ):
        with pytest.raises((VerificationError, WireError)):
            rim.authenticate(document, rig.maker.anchors.rim, now=NOW)


def test_a_signature_around_something_else_is_refused(rig: Rig) -> None:
    """Wrapping: the signed manifest moved below another root that carries other values."""
    manifest = rig.maker.manifest()
    start = manifest.index(b"<ds:Signature")
    outer = manifest[:start].replace(sim.measured(21).hex().encode(), bytes(48).hex().encode())
    wrapped = outer + manifest[start:].replace(b"</SoftwareIdentity>", b"") + manifest + b"</SoftwareIdentity>"
    with pytest.raises((VerificationError, WireError)):
        rim.authenticate(wrapped, rig.maker.anchors.rim, now=NOW)


def test_without_the_extra_manifests_are_undecided(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in ("signxml", "lxml"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    manifest = rig.maker.manifest()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UndecidedError, match=r"attested-inference\[nvidia\]"):
        rig.authenticate(None, manifest)


# Revocation


def issuers(rig: Rig) -> list[sim.Issued]:
    return [*rig.device.chain, rig.maker.device_root]


def every_answer(rig: Rig, **options: Any) -> tuple[bytes, ...]:
    return rig.maker.ocsp_answers(issuers(rig)[1:], **options)


def test_answers_for_all_of_the_chain_satisfy_a_policy_that_requires_them(rig: Rig) -> None:
    policy = replace(LOOSE, ocsp="required")
    assert rig.appraise(policy, None, *every_answer(rig))["OCSP"].detail == "3 certificates are good"
    for missing in range(3):
        given = [answer for number, answer in enumerate(every_answer(rig)) if number != missing]
        with pytest.raises(UndecidedError, match="OCSP answers are needed"):
            rig.appraise(policy, None, *given)


def test_the_signers_of_manifests_need_answers_too(rig: Rig) -> None:
    policy = replace(LOOSE, ocsp="required")
    beside = (*every_answer(rig), rig.maker.manifest())
    with pytest.raises(UndecidedError, match="Test RIM Signer"):
        rig.appraise(policy, None, *beside)
    signers = [rig.maker.rim_signer, rig.maker.rim_ca, rig.maker.rim_root]
    rig.appraise(policy, None, *beside, *rig.maker.ocsp_answers(signers))


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (library_ocsp.OCSPCertStatus.REVOKED, library.ReasonFlags.certificate_hold),
        (library_ocsp.OCSPCertStatus.REVOKED, library.ReasonFlags.key_compromise),
        (library_ocsp.OCSPCertStatus.UNKNOWN, None),
    ],
)
def test_nv_12_a_certificate_on_hold_or_revoked_is_refused_required_or_not(
    rig: Rig, status: library_ocsp.OCSPCertStatus, reason: library.ReasonFlags | None
) -> None:
    for number in range(3):
        answers = list(every_answer(rig))
        answers[number] = every_answer(rig, status=status, reason=reason)[number]
        error = refused(Rejection.CERTIFICATE_REVOKED, rig.authenticate, None, *answers)
        assert reason is None or reason.value in error.message


def test_answers_outside_their_times_are_refused(rig: Rig) -> None:
    for window in ((NOW - 20, NOW - 10), (NOW + 10, NOW + 20)):
        refused(Rejection.CERTIFICATE_NOT_VALID_NOW, rig.authenticate, None, *every_answer(rig, window=window))


def test_a_responder_has_to_be_certified_by_the_issuer_for_answering(rig: Rig) -> None:
    path = [rig.maker.provisioner, rig.maker.product]
    good = sim.issue("responder", rig.maker.product, ca=False, answers=True)
    rig.authenticate(None, *rig.maker.ocsp_answers(path, responder=good))
    plain = sim.issue("responder", rig.maker.product, ca=False)
    refused(Rejection.CHAIN_NOT_TRUSTED, rig.authenticate, None, *rig.maker.ocsp_answers(path, responder=plain))
    foreign = sim.issue("responder", rig.maker.device_root, ca=False, answers=True)
    refused(Rejection.CHAIN_NOT_TRUSTED, rig.authenticate, None, *rig.maker.ocsp_answers(path, responder=foreign))
    old = sim.issue("responder", rig.maker.product, ca=False, answers=True, window=(sim.BEFORE, sim.BEFORE))
    refused(Rejection.CERTIFICATE_NOT_VALID_NOW, rig.authenticate, None, *rig.maker.ocsp_answers(path, responder=old))


def test_an_answer_signed_by_another_key_is_refused(rig: Rig) -> None:
    (answer,) = rig.maker.ocsp_answers([rig.maker.provisioner, rig.maker.product])
    signature = library_ocsp.load_der_ocsp_response(answer).signature
    changed = signature[:-1] + bytes([signature[-1] ^ 1])
    refused(Rejection.BAD_SIGNATURE, rig.authenticate, None, answer.replace(signature, changed))


@pytest.mark.parametrize("algorithm", [hashes.SHA3_384()])
def test_an_answer_over_another_hash_is_refused(rig: Rig, algorithm: hashes.HashAlgorithm) -> None:
    answers = rig.maker.ocsp_answers([rig.maker.provisioner, rig.maker.product], algorithm=algorithm)
    refused(Rejection.BAD_ALGORITHM, rig.authenticate, None, *answers)


def test_answers_about_others_do_not_count(rig: Rig) -> None:
    other = rig.maker.device()
    answers = rig.maker.ocsp_answers([*other.chain[:2]])
    assert rig.authenticate(None, *answers).vouched.not_revoked == frozenset()


def test_answers_that_name_certificates_by_an_unknown_hash_do_not_count(rig: Rig) -> None:
    (answer,) = ocsp.parse(every_answer(rig)[0])
    _, *named = answer.certificate_id
    odd = replace(answer, certificate_id=("md5", *named))
    assert ocsp.good(rig.authenticate().path, rig.maker.anchors.device, [odd], now=NOW) == frozenset()


def test_malformed_answers_are_malformed(rig: Rig) -> None:
    refusal = library_ocsp.OCSPResponseBuilder.build_unsuccessful(library_ocsp.OCSPResponseStatus.TRY_LATER)
    for data in (refusal.public_bytes(Encoding.DER), b"\x30\x03\x0a\x01\x00", b"\x30\x05\x0a\x01\x00\xa0\x00"):
        refused(Rejection.MALFORMED_ENDORSEMENT, rig.authenticate, None, data)
    for data in (b"", b"\x00" * 40):
        with pytest.raises(WireError):
            ocsp.parse(data)


def test_a_revocation_list_given_is_judged(rig: Rig) -> None:
    def crl(issuer: sim.Issued, *revoked: sim.Issued) -> bytes:
        moment = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
        builder = library.CertificateRevocationListBuilder().issuer_name(issuer.certificate.subject)
        builder = builder.last_update(moment - datetime.timedelta(days=1))
        builder = builder.next_update(moment + datetime.timedelta(days=1))
        for entry in revoked:
            number = entry.certificate.serial_number
            builder = builder.add_revoked_certificate(
                library.RevokedCertificateBuilder().serial_number(number).revocation_date(moment).build()
            )
        return builder.sign(issuer.key, hashes.SHA384()).public_bytes(Encoding.DER)

    maker, log = rig.maker, CheckLog()
    rig.authenticate(None, crl(maker.product), crl(maker.rim_ca), maker.manifest(), log=log)
    assert ("device revocation lists", "passed") in [(check.name, check.status) for check in log.checks]
    refused(Rejection.CERTIFICATE_REVOKED, rig.authenticate, None, crl(maker.product, maker.provisioner))
    beside = (maker.manifest(), crl(maker.rim_ca, maker.rim_signer))
    refused(Rejection.CERTIFICATE_REVOKED, rig.authenticate, None, *beside)


# The attestation service


REQUIRED = replace(LOOSE, require_nras=True)


def test_a_clean_verdict_satisfies_a_policy_that_requires_it(rig: Rig) -> None:
    token = rig.maker.token([rig.maker.device(), rig.device])
    checks = rig.appraise(REQUIRED, None, token, rig.maker.jwks())
    assert checks["attestation service's verdict"].status == "passed"


def test_a_verdict_about_others_or_unverified_is_undecided(rig: Rig) -> None:
    with pytest.raises(UndecidedError, match="token about this device"):
        rig.appraise(REQUIRED)
    with pytest.raises(UndecidedError, match="token about this device"):
        rig.appraise(REQUIRED, None, rig.maker.token([rig.maker.device()]), rig.maker.jwks())
    with pytest.raises(UndecidedError, match="key set"):
        rig.appraise(REQUIRED, None, rig.maker.token([rig.device]))
    with pytest.raises(UndecidedError, match="key set"):
        rig.appraise(REQUIRED, None, *[rig.maker.token([rig.device])] * 2)
    assert rig.appraise(LOOSE, None, rig.maker.token([rig.device]))["OCSP"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"claims": {"measres": "fail"}},
        {"claims": {"secboot": False}},
        {"claims": {"dbgstat": "enabled"}},
        {"overall": {"x-nvidia-overall-att-result": False}},
    ],
)
def test_a_verdict_with_a_fault_is_refused_required_or_not(rig: Rig, overrides: dict[str, Any]) -> None:
    token = rig.maker.token([rig.device], **overrides)
    for policy in (REQUIRED, LOOSE):
        refused(Rejection.PLATFORM_NOT_ALLOWED, rig.appraise, policy, None, token, rig.maker.jwks())


def test_a_verdict_for_another_nonce_is_refused(rig: Rig) -> None:
    other = {"eat_nonce": bytes(32).hex()}
    token = rig.maker.token([rig.device], claims=other, overall=other)
    refused(Rejection.NONCE_MISMATCH, rig.appraise, LOOSE, None, token, rig.maker.jwks())


TOKENS: list[tuple[dict[str, Any], dict[str, Any], Rejection]] = [
    ({"claims": {"iss": "https://elsewhere"}}, {}, Rejection.CHAIN_NOT_TRUSTED),
    ({"claims": {"exp": NOW}}, {}, Rejection.CERTIFICATE_NOT_VALID_NOW),
    ({"overall": {"nbf": NOW + 1}}, {}, Rejection.CERTIFICATE_NOT_VALID_NOW),
    ({"claims": {"exp": "never"}}, {}, Rejection.MALFORMED_ENDORSEMENT),
    ({"claims": {"eat_nonce": "other"}}, {}, Rejection.ENDORSEMENT_MISMATCH),
    ({"overall": {"submods": {}}}, {}, Rejection.ENDORSEMENT_MISMATCH),
    ({"header": {"alg": "none"}}, {}, Rejection.BAD_ALGORITHM),
    ({"header": {"crit": ["x"]}}, {}, Rejection.MALFORMED_ENDORSEMENT),
    ({"header": {"kid": 5}}, {}, Rejection.MALFORMED_ENDORSEMENT),
    ({}, {"kid": "another"}, Rejection.CHAIN_NOT_TRUSTED),
    ({}, {"x": sim.base64url(b"\x01")}, Rejection.MALFORMED_ENDORSEMENT),
    ({}, {"x": 5}, Rejection.MALFORMED_ENDORSEMENT),
]


@pytest.mark.parametrize(("token", "keys", "code"), TOKENS)
def test_tokens_that_do_not_hold_are_refused(
    rig: Rig, token: dict[str, Any], keys: dict[str, Any], code: Rejection
) -> None:
    refused(code, rig.authenticate, None, rig.maker.token([rig.device], **token), rig.maker.jwks(**keys))


def test_a_token_signed_by_another_key_is_refused(rig: Rig) -> None:
    token = rig.maker.token([rig.device])
    refused(Rejection.BAD_SIGNATURE, rig.authenticate, None, token, Maker().jwks())
    text = rig.maker.jwt({}, {})
    short = replace(nras._parse_jwt(text), signature=b"short")
    with pytest.raises(VerificationError, match="length"):
        nras._check_signature(short, nras._parse_keys(rig.maker.jwks()))


def test_malformed_tokens_and_keys_are_malformed() -> None:
    jwt = "e30.e30.e30"
    for token in (
        b"[" * 10_000,
        b"[1, 2]",
        b"[1]",
        b'[["JWT", "x"], {}]',
        b'[["JWT", "x"], {"a": "b"}]',
        b'[["JWT", 5], {"a": "b"}]',
        f'[["JWT", "{jwt}"], {{"a": "{jwt}"}}]'.encode(),
        b'[["JWT", "W10.W10.W10"], {"a": "b"}]',
        b'[["JWT", "?.?.?"], {"a": "b"}]',
        b'[["JWT", "x"], {"a": 1, "a": 2}]',
        b" " * (300 << 10),
        b"[" + b"{}," * 9999 + b"{}]",
        b"[" * 1000,
    ):
        with pytest.raises(WireError):
            nras.authenticate(token, None, now=NOW)
    for keys in (b"[]", b"{}", b'{"keys": 5}', b"x"):
        with pytest.raises(WireError):
            nras._parse_keys(keys)
    assert nras._parse_keys(b'{"keys": [5, {"kty": "RSA"}]}') == {}


# Through the whole of the seam


def test_the_policy_table_is_what_the_devices_are_judged_by(rig: Rig) -> None:
    table: dict[str, object] = {
        "count": 1,
        "driver_versions": ["580.159.03"],
        "vbios_versions": ["96.00.74.00.20"],
        "device_ids": [rig.authenticate().identity.hex()],
        "firmware_ids": [sim.FWID.hex()],
        "ocsp": "required",
        "modes": ["spt"],
        "protected_pcie": False,
        "architectures": ["hopper"],
        "require_nras": True,
    }
    policy = parse_policy(table, "families.nvidia", False)
    signers = [rig.maker.rim_signer, rig.maker.rim_ca, rig.maker.rim_root]
    beside = itertools.chain(
        rig.manifests(),
        every_answer(rig),
        rig.maker.ocsp_answers(signers),
        [rig.maker.token([rig.device]), rig.maker.jwks()],
    )
    checks = rig.appraise(policy, None, *beside)
    open_ones = {name for name, check in checks.items() if check.status == "not checked"}
    assert open_ones == {"device revocation lists", "measurement 35"}
