"""SEV-SNP under roots of our own: one property wrong at a time, up to the policy."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from client_sdk.checks import CheckLog
from client_sdk.errors import AuthenticityError, PolicyFileError, Rejection, UndecidedError, VerificationError
from client_sdk.policy.policy import Policy
from client_sdk.tee import x509
from client_sdk.tee.endorsements import merge, recognise
from client_sdk.tee.evidence import SessionBinding
from client_sdk.tee.snp import abi, certificates
from client_sdk.tee.snp.policy import SnpPolicy, parse_policy
from client_sdk.tee.snp.verify import AuthenticSnp, parse_evidence
from client_sdk.wire.errors import WireError
from tests.simulators import amd

NOW = amd.NOW
VLEK = {"flags": 1 << 2, "chip_id": bytes(64)}
MEASURED = {"measurements": [amd.MEASUREMENT.hex()]}


def authenticate(
    report: amd.Report | None = None,
    vek: amd.Vek | None = None,
    *,
    extra: tuple[bytes, ...] = (),
    now: float = NOW,
    certificate: bytes | None = None,
) -> tuple[AuthenticSnp, CheckLog]:
    chip, log = amd.chip(vek), CheckLog()
    endorsements = merge(recognise(part) for part in (certificate or chip.certificate, *extra))
    evidence = parse_evidence((report or amd.Report()).sign(chip.key), chip.anchors)
    return evidence.authenticate(log, endorsements, now=now), log


def refused(report: amd.Report | None = None, vek: amd.Vek | None = None, **more: object) -> str:
    with pytest.raises((WireError, VerificationError)) as caught:
        authenticate(report, vek, **more)  # type: ignore[arg-type]
    assert isinstance(caught.value, WireError | VerificationError)
    return str(caught.value.code)


def demand(table: Mapping[str, object]) -> SnpPolicy:
    return parse_policy(dict(table), "families.sev-snp", False)


def appraise(report: amd.Report, table: Mapping[str, object], vek: amd.Vek | None = None) -> dict[str, str]:
    authentic, log = authenticate(report, vek)
    authentic.appraise(log, demand({**MEASURED, **table}), now=NOW)
    return {check.name: check.status for check in log.checks}


# Reports and products


@pytest.mark.parametrize("product", ["Milan", "Genoa", "Turin"])
@pytest.mark.parametrize("version", [2, 3, 5])
@pytest.mark.parametrize("kind", ["VCEK", "VLEK"])
def test_b016_every_version_and_product_has_its_layout(product: str, version: int, kind: str) -> None:
    chip_id = amd.TURIN_CHIP_ID if product == "Turin" else amd.CHIP_ID
    report = amd.Report(version=version, product=product, chip_id=chip_id, flags=4 * (kind == "VLEK"))
    authentic, _ = authenticate(report, amd.Vek(kind=kind, product=product, chip_id=chip_id))
    assert authentic.product == product
    levels = dataclasses.asdict(amd.Tcb()) | ({} if product == "Turin" else {"fmc": None})
    assert dataclasses.asdict(authentic.tcb) == levels
    assert authentic.report.mitigations == ((3, 7) if version == 5 else None)
    assert any(name == "SNP mitigation vectors" for name, _ in authentic.facts) is (version == 5)


@pytest.mark.parametrize("version", [4, 6, 99])
def test_b016_a_signed_newer_version_has_no_verdict(version: int) -> None:
    with pytest.raises(UndecidedError, match=f"UNSUPPORTED_VERSION.*unsupported version {version}"):
        authenticate(amd.Report(version=version))


@pytest.mark.parametrize(("family", "model"), [(0x19, 0x20), (0x1A, 0x50), (0x1B, 0), (0x17, 0x31)])
def test_b016_a_signed_newer_processor_has_no_verdict(family: int, model: int) -> None:
    with pytest.raises(UndecidedError, match=r"UNSUPPORTED_VERSION: unsupported processor"):
        authenticate(amd.Report(raw={0x188: bytes((family, model))}))


@pytest.mark.parametrize(("model", "product"), [(0x0F, "Milan"), (0x10, "Genoa"), (0xA0, "Genoa"), (0xAF, "Genoa")])
def test_the_product_follows_from_the_processor(model: int, product: str) -> None:
    assert abi.product_of((0x19, model, 0)) == product


@pytest.mark.parametrize(
    ("version", "offset"),
    [(2, 0x188), (2, 0x19F), (3, 0x18B), (5, 0x19F), (3, 0x4C), (3, 0x4B), (3, 0x1EB), (3, 0x1EF), (3, 0x1F8),
     (2, 0x200), (5, 0x208), (5, 0x29F), (3, 0x48)],
)  # fmt: skip
def test_b005_reserved_bits_are_refused(version: int, offset: int) -> None:
    raw = {offset: b"\x20" if offset == 0x48 else b"\x01"}
    assert refused(amd.Report(version=version, raw=raw)) == Rejection.MALFORMED_EVIDENCE


@pytest.mark.parametrize("offset", [0x330, 0x400, 0x49F])
def test_bytes_after_the_signature_are_zero(offset: int) -> None:
    assert refused(amd.Report(after={offset: b"\x01"})) == Rejection.MALFORMED_EVIDENCE


def test_a_reserved_byte_in_a_tcb_is_refused() -> None:
    assert refused(amd.Report(raw={0x182: b"\x01"})) == Rejection.MALFORMED_EVIDENCE


def test_a_report_that_nothing_signs_is_refused() -> None:
    assert refused(amd.Report(flags=7 << 2 | 2)) == Rejection.BAD_KEY
    assert refused(amd.Report(algorithm=2)) == Rejection.BAD_ALGORITHM


# Certificates


def test_b014_levels_that_only_the_report_claims_are_refused() -> None:
    assert refused(amd.Report(tcb=amd.Tcb(snp=24)), amd.Vek(tcb=amd.Tcb(snp=3))) == Rejection.ENDORSEMENT_MISMATCH


@pytest.mark.parametrize("component", ["bootloader", "tee", "snp", "microcode", "fmc"])
def test_every_level_of_the_report_is_the_certificate_s(component: str) -> None:
    other = dataclasses.replace(amd.Tcb(), **{component: 99})
    report = amd.Report(product="Turin", chip_id=amd.TURIN_CHIP_ID, tcb=other)
    assert refused(report, amd.Vek(product="Turin", chip_id=amd.TURIN_CHIP_ID)) == Rejection.ENDORSEMENT_MISMATCH


def test_of_several_certificates_the_right_one_is_found() -> None:
    chip = amd.chip()
    old = amd.Vek(tcb=amd.Tcb(snp=1)).issue(chip.authority, chip.key)
    twin = amd.Vek(serial=8).issue(chip.authority, ec.generate_private_key(ec.SECP384R1()))
    for order in ((old, twin, chip.certificate), (chip.certificate, twin, old)):
        authentic, _ = authenticate(certificate=order[0], extra=order[1:])
        assert authentic.vek.certificate.der == chip.certificate
    assert refused(certificate=twin) == Rejection.BAD_SIGNATURE
    of_another_kind = amd.Vek(serial=9).issue(chip.authority, chip.authority.keys["ARK"])
    assert refused(certificate=twin, extra=(of_another_kind,)) == Rejection.BAD_KEY


def test_another_chip_another_kind_another_curve() -> None:
    assert refused(vek=amd.Vek(chip_id=b"\x07" * 64)) == Rejection.ENDORSEMENT_MISMATCH
    assert refused(amd.Report(chip_id=bytes(64)), amd.Vek(chip_id=bytes(64))) == Rejection.ENDORSEMENT_MISMATCH
    assert refused(amd.Report(flags=4)) == Rejection.ENDORSEMENT_MISMATCH
    assert refused(vek=amd.Vek(kind="VLEK")) == Rejection.ENDORSEMENT_MISMATCH
    chip = amd.chip()
    for key in (
        ec.generate_private_key(ec.SECP256R1()),
        rsa.generate_private_key(public_exponent=65537, key_size=2048),
    ):
        assert refused(certificate=amd.Vek().issue(chip.authority, key)) == Rejection.BAD_KEY


def test_a_report_of_another_product_than_its_certificate_is_refused() -> None:
    assert refused(amd.Report(raw={0x188: bytes((0x19, 0x11, 1))})) == Rejection.ENDORSEMENT_MISMATCH


def test_a_product_without_a_pinned_root_has_no_verdict() -> None:
    chip = amd.chip()
    evidence = parse_evidence(amd.Report().sign(chip.key), amd.authority("Genoa").anchors)
    with pytest.raises(UndecidedError, match="no root is known"):
        evidence.authenticate(CheckLog(), recognise(chip.certificate), now=NOW)


def test_self_made_roots_are_not_amd_s() -> None:
    """The pinned roots refuse a chain with the right names, whether it is given whole or not."""
    chip = amd.chip()
    whole = [chip.certificate, *(chip.authority.der(name) for name in ("ARK", "ASK", "ASVK"))]
    for given in (whole, whole[:1], [whole[0], whole[2]]):
        evidence = parse_evidence(amd.Report().sign(chip.key))
        with pytest.raises(AuthenticityError) as caught:
            evidence.authenticate(CheckLog(), merge(recognise(part) for part in given), now=NOW)
        assert caught.value.code == Rejection.CHAIN_NOT_TRUSTED


def test_b001_intermediates_that_are_given_are_used_and_checked() -> None:
    ca, other = amd.authority("Milan"), amd.authority("Milan", 1)
    authenticate(extra=(ca.der("ARK"), ca.der("ASK")))
    authenticate(extra=(ca.der("ASK"), amd.authority("Genoa").der("ASK")))
    assert refused(extra=(other.der("ASK"),)) == Rejection.BAD_SIGNATURE
    assert refused(extra=(other.der("ARK"),)) == Rejection.CHAIN_NOT_TRUSTED
    assert refused(extra=(ca.der("ARK"), other.der("ARK"))) == Rejection.CHAIN_NOT_TRUSTED
    assert refused(extra=(ca.der("ASVK"),)) == Rejection.CHAIN_NOT_TRUSTED
    assert refused(extra=(amd.authority("Genoa").der("ASK"),)) == Rejection.CHAIN_NOT_TRUSTED
    assert refused(extra=(amd.authority("Genoa").der("ARK"),)) == Rejection.CHAIN_NOT_TRUSTED


def test_a_vcek_under_the_asvk_or_under_another_leaf_is_refused() -> None:
    assert refused(vek=amd.Vek(issuer="ASVK")) == Rejection.CHAIN_NOT_TRUSTED
    assert refused(vek=amd.Vek(issuer="ARK")) == Rejection.CHAIN_NOT_TRUSTED


@pytest.mark.parametrize(("before", "after"), [(NOW + 1, NOW + 9), (NOW - 9, NOW - 1)])
def test_b046_certificates_count_only_while_they_are_valid(before: float, after: float) -> None:
    assert refused(vek=amd.Vek(not_before=before, not_after=after)) == Rejection.CERTIFICATE_NOT_VALID_NOW


@pytest.mark.parametrize("days", [-1001, 1001])
def test_b046_so_do_the_roots(days: int) -> None:
    vek = amd.Vek(not_before=NOW - 86_400 * 2000, not_after=NOW + 86_400 * 2000)
    assert refused(vek=vek, now=NOW + 86_400 * days) == Rejection.CERTIFICATE_NOT_VALID_NOW


@pytest.mark.parametrize(
    "changed",
    [{"2": None}, {"2": amd.ia5("")}, {"2": b"\x04\x05Milan"}, {"2": amd.ia5("Mi\nlan")},
     {"3.1": None}, {"3.3": b"\x02\x02\x01\x00"}, {"3.8": b"\x02\x01\x80"}, {"3.4": amd.integer(1)}, {"4": None},
     {"4": bytes(8)}, {"4": b""}, {"5": amd.ia5("CN=x")}, {"3.2": b"\x04\x01\x01"}, {"3.2": b""}],
)  # fmt: skip
def test_a_vcek_that_states_nonsense_is_refused(changed: Mapping[str, bytes | None]) -> None:
    assert refused(vek=amd.Vek(extensions=changed)) == Rejection.MALFORMED_CERTIFICATE


@pytest.mark.parametrize(
    "changed", [{"5": None}, {"4": amd.CHIP_ID}, {"5": b"\x16\x00"}, {"5": amd.ia5("x" * 100) * 2}]
)
def test_a_vlek_that_states_nonsense_is_refused(changed: Mapping[str, bytes | None]) -> None:
    report = amd.Report(flags=4, chip_id=bytes(64))
    assert refused(report, amd.Vek(kind="VLEK", extensions=changed)) == Rejection.MALFORMED_CERTIFICATE


def test_certificates_of_later_products_do_not_stand_in_the_way() -> None:
    chip = amd.chip()
    later = amd.Vek(extensions={"2": amd.ia5("Venice")}).issue(chip.authority, chip.key)
    authenticate(certificate=later, extra=(chip.certificate,))
    with pytest.raises(UndecidedError, match="ENDORSEMENTS_MISSING"):
        authenticate(certificate=later)
    with pytest.raises(UndecidedError, match="UNSUPPORTED_VERSION: unsupported processor"):
        authenticate(amd.Report(version=5, raw={0x188: bytes((0x1A, 0x50))}), certificate=later)


def test_a_chip_id_is_read_bare_and_as_an_octet_string() -> None:
    assert authenticate(vek=amd.Vek(extensions={"4": b"\x04\x40" + amd.CHIP_ID}))[0].vek.chip_id == amd.CHIP_ID
    assert refused(vek=amd.Vek(extensions={"4": b"\x04\x40" + amd.CHIP_ID[1:]})) == Rejection.MALFORMED_CERTIFICATE
    assert refused(vek=amd.Vek(extensions={"4": b"\x04\x3f" + amd.CHIP_ID[1:]})) == Rejection.MALFORMED_CERTIFICATE


def test_the_stepping_of_the_product_does_not_count() -> None:
    assert authenticate(vek=amd.Vek(extensions={"2": amd.ia5("Milan-B1")}))[0].product == "Milan"


# Revocation


def test_b001_revocation_lists_are_believed_only_as_far_as_they_are_signed_and_current() -> None:
    ca, other = amd.authority("Milan"), amd.authority("Milan", 1)
    ask = x509.parse_certificate(ca.der("ASK"))
    assert authenticate(extra=(ca.crl(),))[0].revocation == "current"
    assert authenticate(extra=(ca.crl(12345), ca.crl(from_now_s=-1_000_000)))[0].revocation == "current"
    assert authenticate(extra=(ca.crl(issuer="ASK"), amd.authority("Genoa").crl()))[0].revocation == "absent"
    assert refused(extra=(ca.crl(ask.serial),)) == Rejection.CERTIFICATE_REVOKED
    assert refused(extra=(ca.crl(), ca.crl(ask.serial, from_now_s=-1_000_000))) == Rejection.CERTIFICATE_REVOKED
    assert refused(extra=(ca.crl(7, issuer="ASK"),)) == Rejection.CERTIFICATE_REVOKED, "the VCEK itself"
    assert refused(extra=(ca.crl(from_now_s=-1_000_000),)) == Rejection.CERTIFICATE_NOT_VALID_NOW
    assert refused(extra=(ca.crl(from_now_s=60),)) == Rejection.CERTIFICATE_NOT_VALID_NOW
    assert refused(extra=(other.crl(),)) == Rejection.BAD_SIGNATURE
    assert refused(extra=(ca.crl(signer="ASK"),)) == Rejection.BAD_SIGNATURE


def test_a_current_list_can_be_demanded() -> None:
    demands = demand({**MEASURED, "require_crl": True})
    authentic, log = authenticate(extra=(amd.authority("Milan").crl(),))
    authentic.appraise(log, demands, now=NOW)
    authentic, log = authenticate()
    with pytest.raises(UndecidedError, match="ENDORSEMENTS_MISSING"):
        authentic.appraise(log, demands, now=NOW)
    assert [check.status for check in log.checks if check.name == "revocation"] == ["not checked"]


# Binding


def test_b011_a_session_s_report_data_binds_its_claims() -> None:
    claims = b"claims"
    bound = hashlib.sha512(b"attested-inference report-data v1\0" + claims).digest()
    session = SessionBinding(claims=claims, nonce=b"n" * 32, binder=None, spki=None)
    authenticate(amd.Report(report_data=bound))[0].check_session(CheckLog(), session)
    for other in (bytes(64), bound[:32] + bytes(32), hashlib.sha512(claims).digest()):
        with pytest.raises(AuthenticityError, match="EVIDENCE_BINDING"):
            authenticate(amd.Report(report_data=other))[0].check_session(CheckLog(), session)


# Policy


@pytest.mark.parametrize(
    ("report", "table", "code"),
    [
        ({"policy": 0x30000 | 1 << 19}, {}, Rejection.DEBUG_NOT_ALLOWED),
        ({"policy": 0x30000 | 1 << 18}, {}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({"policy": 0x10000}, {}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({"policy": 0x30000 | 1 << 26}, {}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({"policy": 0x30000 | 1 << 63}, {"allow_debug": True}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({"vmpl": 1}, {}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({"vmpl": 0xFFFFFFFF}, {"allow_vmpl": [0, 1, 2, 3]}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({"vmpl": 0}, {"allow_vmpl": [1]}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({"measurement": bytes(48)}, {}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({"measurement": b"\x4e" * 48}, {}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({}, {"measurements": ["4e" * 48]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({}, {"host_data": ["4e" * 32]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({}, {"family_ids": ["4e" * 16]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({}, {"image_ids": ["4e" * 16]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({}, {"id_key_digests": ["4e" * 48]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({"flags": 1}, {"author_key_digests": ["4e" * 48]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({}, {"author_key_digests": ["a0" * 48]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({}, {"chip_ids": ["4e" * 64]}, Rejection.DEVICE_NOT_ALLOWED),
        ({}, {"products": ["Genoa", "Turin"]}, Rejection.PLATFORM_NOT_ALLOWED),
        ({}, {"guest_forbidden": ["smt"]}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({}, {"guest_required": ["single-socket"]}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({}, {"platform_forbidden": ["smt"]}, Rejection.PLATFORM_NOT_ALLOWED),
        ({"platform_info": 0x05}, {"platform_required": ["alias-check-complete"]}, Rejection.PLATFORM_NOT_ALLOWED),
        ({}, {"min_tcb": {"bootloader": 5}}, Rejection.TCB_NOT_ALLOWED),
        ({}, {"min_tcb": {"tee": 2}}, Rejection.TCB_NOT_ALLOWED),
        ({}, {"min_tcb": {"snp": 24}}, Rejection.TCB_NOT_ALLOWED),
        ({}, {"min_tcb": {"microcode": 214}}, Rejection.TCB_NOT_ALLOWED),
        ({}, {"min_tcb": {"Milan": {"microcode": 214}}}, Rejection.TCB_NOT_ALLOWED),
        ({}, {"min_tcb": {"Genoa": {"microcode": 1}}}, Rejection.TCB_NOT_ALLOWED),
        ({}, {"min_guest_svn": 6}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({"policy": 0x30136}, {"min_abi": "1.55"}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({}, {"min_firmware": "1.56"}, Rejection.TCB_NOT_ALLOWED),
    ],
)  # fmt: skip
def test_b009_b032_what_the_policy_demands_and_is_different_is_refused(
    report: Mapping[str, object], table: Mapping[str, object], code: Rejection
) -> None:
    with pytest.raises(VerificationError) as caught:
        appraise(amd.Report(**report), table)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert caught.value.checks[-1].status == "failed"


def test_b038_what_the_policy_demands_and_is_there_is_listed_as_checked() -> None:
    everything = {
        "measurements": ["4E" * 48, amd.MEASUREMENT.hex()],
        "host_data": ["4d" * 32],
        "family_ids": ["fa" * 16],
        "image_ids": ["1a" * 16],
        "id_key_digests": ["1d" * 48],
        "author_key_digests": ["a0" * 48],
        "chip_ids": [amd.CHIP_ID.hex()],
        "products": ["Milan"],
        "guest_required": ["single-socket"],
        "guest_forbidden": ["cxl"],
        "platform_required": ["ecc", "alias-check-complete"],
        "platform_forbidden": ["tio"],
        "min_tcb": {"bootloader": 4, "tee": 1, "snp": 23, "microcode": 213},
        "min_guest_svn": 5,
        "min_abi": "1.55",
        "min_firmware": "1.55",
    }
    report = amd.Report(flags=1, policy=0x130137)
    checked = appraise(report, everything)
    assert {name for name, status in checked.items() if status == "not checked"} == {"revocation"}
    unpinned = appraise(report, {})
    assert unpinned.keys() == checked.keys()
    assert unpinned["host data"] == unpinned["minimum patch levels"] == unpinned["platform settings"] == "not checked"


@pytest.mark.parametrize(
    ("report", "table"),
    [
        ({"policy": 0x30000 | 1 << 19}, {"allow_debug": True}),
        ({"policy": 0x30000 | 1 << 18}, {"allow_migration_agent": True}),
        ({"vmpl": 2}, {"allow_vmpl": [0, 2]}),
    ],
)
def test_each_opt_in_admits_its_own_thing(report: Mapping[str, object], table: Mapping[str, object]) -> None:
    appraise(amd.Report(**report), table)  # type: ignore[arg-type]


def test_without_a_policy_of_its_own_nothing_is_accepted() -> None:
    with pytest.raises(VerificationError, match="FAMILY_NOT_ALLOWED"):
        authenticate()[0].appraise(CheckLog(), None, now=NOW)


def test_an_fmc_level_can_be_demanded_of_turin() -> None:
    vek = amd.Vek(product="Turin", chip_id=amd.TURIN_CHIP_ID)
    report = amd.Report(version=5, product="Turin", chip_id=amd.TURIN_CHIP_ID)
    appraise(report, {"products": ["Turin"], "min_tcb": {"fmc": 2}}, vek)
    for table in ({"products": ["Turin"], "min_tcb": {"fmc": 3}}, {"min_tcb": {"Turin": {"fmc": 3}}}):
        with pytest.raises(VerificationError, match="TCB_NOT_ALLOWED"):
            appraise(report, table, vek)
    parsed = abi.parse_report(report.sign(amd.report_key()))
    assert abi.vcek_path(parsed, "Turin").startswith("/vcek/v1/Turin/0102030405060708?fmcSPL=02&blSPL=04&")


def test_platform_bits_of_the_future_are_listed() -> None:
    assert appraise(amd.Report(platform_info=1 << 40), {})["unknown platform bits"] == "not checked"


@pytest.mark.parametrize(
    "table",
    [{}, {"measurements": []}, {"measurements": ["00" * 48]}, {"measurements": ["4d" * 47]}, {"measurements": ["any"]},
     {"measurements": "4d" * 48}, {**MEASURED, "rtmrs": []}, {**MEASURED, "products": ["Rome"]},
     {**MEASURED, "products": []}, {**MEASURED, "csp_ids": ["CN=x"]}, {**MEASURED, "allow_vmpl": [4]},
     {**MEASURED, "allow_vmpl": []}, {**MEASURED, "allow_debug": 1}, {**MEASURED, "min_tcb": {}},
     {**MEASURED, "min_tcb": 3}, {**MEASURED, "min_tcb": {"ucode": 3}}, {**MEASURED, "min_tcb": {"snp": 256}},
     {**MEASURED, "min_tcb": {"fmc": 1}}, {**MEASURED, "min_tcb": {"Milan": {"fmc": 1}}},
     {**MEASURED, "min_tcb": {"Milan": {}}}, {**MEASURED, "min_tcb": {"Milan": {"snp": 1}, "snp": 1}},
     {**MEASURED, "min_abi": "1"}, {**MEASURED, "min_abi": 1.51}, {**MEASURED, "min_abi": "1.256"},
     {**MEASURED, "min_guest_svn": -1}, {**MEASURED, "guest_required": ["smt"]}, {**MEASURED, "guest_forbidden": ["x"]},
     {**MEASURED, "platform_required": ["smt"]}, {**MEASURED, "chip_ids": ["1e550a8ee5cf9f4d"]}],
)  # fmt: skip
def test_b007_b023_b031_a_table_that_could_not_refuse_is_an_error(table: Mapping[str, object]) -> None:
    with pytest.raises(PolicyFileError, match=r"families\.sev-snp"):
        demand(table)


def test_the_table_survives_the_way_through_toml() -> None:
    tables: list[dict[str, object]] = [
        {**MEASURED},
        {**MEASURED, "allow_vlek": True, "csp_ids": ["CN=x"], "min_tcb": {"Turin": {"fmc": 1}, "Milan": {"snp": 2}}},
        {**MEASURED, "min_tcb": {"snp": 2}, "min_abi": "1.51", "min_guest_svn": 0, "platform_required": ["ecc"]},
    ]
    for table in tables:
        policy = Policy(models={"m": frozenset({b"m" * 32})}, families={"sev-snp": demand(table)})
        again = Policy.parse(policy.to_toml())
        assert again.families["sev-snp"] == policy.families["sev-snp"]
        assert again.digest == policy.digest
    assert demand(MEASURED).count == 1


# The host's certificate table


def test_the_host_s_certificate_table() -> None:
    chip = amd.chip()
    guids = abi.GUIDS
    table = amd.certificate_table(
        {guids["VCEK"].bytes: chip.certificate, guids["ASK"].bytes_le: chip.authority.der("ASK"), b"?" * 16: b"other"}
    )
    found = abi.parse_certificate_table(table)
    assert found == (chip.certificate, chip.authority.der("ASK"))
    assert abi.parse_certificate_table(bytes(24)) == ()
    for wrong in (b"", table[:30], table[:-6], (b"\x01" * 16 + b"\x18\0\0\0\0\0\0\0") + bytes(24), b"\x01" * 4096):
        with pytest.raises(WireError, match="certificate table"):
            abi.parse_certificate_table(wrong)
    entry = b"\x01" * 16 + b"\x00\x00\x00\x00\x01\x00\x00\x00"
    with pytest.raises(WireError, match="more than 32"):
        abi.parse_certificate_table(entry * 40)


def test_shipped_files_that_are_not_the_pinned_ones_are_refused() -> None:
    given = [x509.parse_certificate(amd.authority("Milan").der("ARK"))]
    with pytest.raises(AuthenticityError, match="CHAIN_NOT_TRUSTED"):
        certificates._pinned(given, b"\x01" * 32, "Milan")


def test_the_intermediate_of_the_other_kind_vouches_for_nothing_even_where_it_is_given() -> None:
    """VCEK <- ASK and VLEK <- ASVK: both intermediates are genuine, and neither stands in for the other."""
    ca = amd.authority("Milan")
    assert refused(vek=amd.Vek(issuer="ASVK"), extra=(ca.der("ASVK"),)) == Rejection.CHAIN_NOT_TRUSTED
    assert refused(vek=amd.Vek(issuer="ASVK"), extra=(ca.der("ASK"), ca.der("ASVK"))) == Rejection.CHAIN_NOT_TRUSTED
    vlek = amd.Vek(kind="VLEK", issuer="ASK")
    assert refused(amd.Report(flags=1 << 2), vlek, extra=(ca.der("ASK"),)) == Rejection.CHAIN_NOT_TRUSTED


def test_of_several_intermediates_of_one_name_the_one_that_signed_counts() -> None:
    ca, superseded = amd.authority("Milan"), amd.authority("Milan", 1)
    for extra in ((ca.der("ASK"), superseded.der("ASK")), (superseded.der("ASK"), ca.der("ASK"))):
        authenticate(extra=extra)
