"""Azure's SNP machines: genuine evidence, and each link from AMD to the boot broken on its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import PolicyFileError, Rejection, UndecidedError, VerificationError
from client_sdk.policy.policy import Policy
from client_sdk.tee.azure import abi
from client_sdk.tee.azure.policy import AzurePolicy, parse_policy
from client_sdk.tee.azure.verify import AuthenticAzure, parse_evidence
from client_sdk.tee.endorsements import recognise
from client_sdk.tee.evidence import Endorsements, ForeignBinding, SessionBinding
from client_sdk.wire import cbor, digests
from client_sdk.wire.errors import WireError
from tests.simulators import amd, azure
from tests.simulators.azure import Machine

FOLDER = Path(__file__).parents[3] / "vectors" / "tee" / "snp"
SET = {str(register): value.hex() for register, value in azure.PCRS.items()}
PINNED: Mapping[str, object] = {"measurements": [amd.MEASUREMENT.hex()], "pcr_sets": [SET]}


def authenticate(machine: Machine | None = None, vek: amd.Vek | None = None) -> tuple[AuthenticAzure, CheckLog]:
    chip, log = amd.chip(vek), CheckLog()
    evidence = parse_evidence((machine or Machine()).item(chip), chip.anchors)
    return evidence.authenticate(log, recognise(chip.certificate), now=amd.NOW), log


def refused(machine: Machine, vek: amd.Vek | None = None) -> str:
    with pytest.raises((WireError, VerificationError)) as caught:
        authenticate(machine, vek)
    assert isinstance(caught.value, WireError | VerificationError)
    return str(caught.value.code)


def demand(table: Mapping[str, object], *, report_only: bool = False) -> AzurePolicy:
    return parse_policy(dict(table), "families.azure-snp-vtpm", report_only)


def appraise(machine: Machine, table: Mapping[str, object]) -> dict[str, str]:
    authentic, log = authenticate(machine)
    authentic.appraise(log, demand({**PINNED, **table}), now=amd.NOW)
    return {check.name: check.status for check in log.checks}


def genuine(**changed: bytes) -> bytes:
    """The vector's parts in our item; the paravisor's header, which nothing signs, is made anew."""
    parts = {
        name: (FOLDER / f"genoa_v3_azure.{file}").read_bytes()
        for name, file in (
            ("report", "report.bin"),
            ("runtime", "hcl-runtime.json"),
            ("attest", "vtpm-quote.msg"),
            ("signature", "vtpm-quote.sig"),
        )
    } | changed
    return abi.encode_item(
        hcl_report=azure.hcl_report(parts["report"], parts["runtime"]),
        runtime_json=parts["runtime"],
        attest=parts["attest"],
        signature=parts["signature"],
    )


def endorsed() -> Endorsements:
    return recognise((FOLDER / "genoa_v3_azure.vcek.pem").read_bytes())


def test_snp_8_genuine_evidence_of_azure_is_accepted() -> None:
    log = CheckLog()
    authentic = parse_evidence(genuine()).authenticate(log, endorsed(), now=amd.NOW)
    authentic.check_foreign(log, ForeignBinding())
    authentic.appraise(log, demand({}, report_only=True), now=amd.NOW)
    facts = dict(authentic.facts)
    assert facts["Azure machine id"] == "390CBCF5-6C67-4D9B-98EF-C3F1699CC8FC"
    assert (facts["Azure secure boot"], facts["Azure console"]) == ("on", "on")
    assert facts["vTPM registers"] == "sha256:" + ",".join(str(register) for register in range(24))
    assert authentic.identity == authentic.snp.report.chip_id
    authentic.check_foreign(log, ForeignBinding(nonce=authentic.item.attest.extra_data))


@pytest.mark.parametrize("part", ["hcl-runtime.json", "vtpm-quote.msg", "vtpm-quote.sig"])
def test_every_flipped_byte_of_it_is_refused(part: str) -> None:
    name = {"hcl-runtime.json": "runtime", "vtpm-quote.msg": "attest", "vtpm-quote.sig": "signature"}[part]
    whole, endorsements = (FOLDER / f"genoa_v3_azure.{part}").read_bytes(), endorsed()
    for position in range(0, len(whole), 1 if len(whole) < 300 else 3):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        with pytest.raises((WireError, VerificationError)):
            parse_evidence(genuine(**{name: bytes(flipped)})).authenticate(CheckLog(), endorsements, now=amd.NOW)


def test_every_truncation_of_it_is_refused() -> None:
    whole = genuine()
    for length in range(0, len(whole), 7):
        with pytest.raises(WireError):
            parse_evidence(whole[:length])


def test_a_simulated_machine_is_accepted() -> None:
    authentic, _ = authenticate()
    assert (authentic.mode, authentic.trust) == ("production", "hardware-signed")
    authenticate(Machine(marshalled=False))
    states = appraise(Machine(), {})
    assert states["boot measurement"] == states["launch measurement"] == "passed"
    assert states["secure boot"] == states["console"] == states["machine id"] == states["vTPM clock"] == "not checked"
    demands = {"require_secure_boot": True, "forbid_console": True, "require_safe_clock": True}
    everything = appraise(Machine(), {**demands, "vm_ids": ["390cbcf5-6c67-4d9b-98ef-c3f1699cc8fc"]})
    assert everything["secure boot"] == everything["console"] == everything["machine id"] == "passed"


@pytest.mark.parametrize(
    ("machine", "code"),
    [
        (Machine(report_data=b"\x01" * 64), Rejection.ENDORSEMENT_MISMATCH),
        (Machine(report_type=4), Rejection.MALFORMED_EVIDENCE),
        (Machine(hash_type=2), Rejection.MALFORMED_EVIDENCE),
        (Machine(fields={"runtime-json": b"{}"}), Rejection.MALFORMED_EVIDENCE),
        (Machine(fields={"hcl-report": b"HCLA" + bytes(100)}), Rejection.MALFORMED_EVIDENCE),
        (Machine(fields={"hcl-report": b"HCLB" + bytes(2600)}), Rejection.MALFORMED_EVIDENCE),
        (Machine(fields={"signature": b"s" * 256}), Rejection.BAD_SIGNATURE),
        (Machine(fields={"signature": b"\x00\x14\x00\x0c\x00\x01s"}), Rejection.MALFORMED_EVIDENCE),
        (Machine(fields={"signature": b"\x00\x16\x00\x0b\x00\x01s"}), Rejection.MALFORMED_EVIDENCE),
        (Machine(fields={"attest": azure.quote(azure.PCRS, b"other")}), Rejection.BAD_SIGNATURE),
        (Machine(fields={"surplus": b""}), Rejection.MALFORMED_EVIDENCE),
        (Machine(pcrs={}), Rejection.MALFORMED_EVIDENCE),
        (Machine(key={"kid": "other"}), Rejection.MALFORMED_EVIDENCE),
        (Machine(key={"kid": "HCLEkPub"}), Rejection.MALFORMED_EVIDENCE),
        (Machine(key={"kty": "EC"}), Rejection.MALFORMED_EVIDENCE),
        (Machine(key={"n": 5}), Rejection.MALFORMED_EVIDENCE),
        (Machine(key={"n": ""}), Rejection.MALFORMED_EVIDENCE),
        (Machine(key={"n": "*"}), Rejection.MALFORMED_EVIDENCE),
        (Machine(key={"n": "A" * 685}), Rejection.MALFORMED_EVIDENCE),
        (Machine(key={"n": "_" * 100}), Rejection.BAD_KEY),
        (Machine(key={"e": "AA"}), Rejection.BAD_KEY),
        (Machine(configuration={"padding": "x" * 9000}), Rejection.MALFORMED_EVIDENCE),
    ],
)
def test_each_broken_link_is_refused(machine: Machine, code: Rejection) -> None:
    assert refused(machine) == code


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"{}", b'{"keys": 3}', b'{"keys": [], "keys": []}', b"[" * 9000])
def test_runtime_json_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(WireError, match="MALFORMED_EVIDENCE"):
        abi.parse_runtime(text)


def test_what_the_paravisor_does_not_state_is_not_made_up() -> None:
    configuration = {"secure-boot": 1, "vmUniqueId": 7}
    facts = dict(authenticate(Machine(configuration=configuration))[0].facts)
    assert (facts["Azure secure boot"], facts["Azure console"]) == ("not stated", "not stated")
    assert facts["Azure machine id"] == "not stated"
    facts = dict(authenticate(Machine(configuration={"secure-boot": False}))[0].facts)
    assert facts["Azure secure boot"] == "off"
    assert not abi.parse_runtime(Machine(key={}).runtime().replace(b'"vm-configuration"', b'"other"')).vm_id


def test_the_report_inside_is_judged_like_any_other() -> None:
    assert refused(Machine(), amd.Vek(tcb=amd.Tcb(snp=1))) == Rejection.ENDORSEMENT_MISMATCH
    with pytest.raises(UndecidedError, match="ENDORSEMENTS_MISSING"):
        parse_evidence(genuine()).authenticate(CheckLog(), Endorsements(), now=amd.NOW)
    for report, code in (
        (amd.Report(policy=0x30000 | 1 << 19), Rejection.DEBUG_NOT_ALLOWED),
        (amd.Report(measurement=b"\x01" * 48), Rejection.MEASUREMENT_NOT_ALLOWED),
    ):
        with pytest.raises(VerificationError) as caught:
            appraise(Machine(report=report), {})
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("machine", "table", "code"),
    [
        (Machine(pcrs={**azure.PCRS, 4: b"x" * 32}), {}, Rejection.MEASUREMENT_NOT_ALLOWED),
        (Machine(pcrs={**azure.PCRS, 9: b"x" * 32}), {}, Rejection.MEASUREMENT_NOT_ALLOWED),
        (Machine(pcrs={0: azure.PCRS[0]}), {}, Rejection.MEASUREMENT_NOT_ALLOWED),
        (Machine(configuration={}), {"require_secure_boot": True}, Rejection.PLATFORM_NOT_ALLOWED),
        (Machine(configuration={"console-enabled": True}), {"forbid_console": True}, Rejection.PLATFORM_NOT_ALLOWED),
        (Machine(), {"vm_ids": ["00000000-0000-0000-0000-000000000000"]}, Rejection.PLATFORM_NOT_ALLOWED),
    ],
)
def test_what_the_policy_demands_of_the_machine(machine: Machine, table: Mapping[str, object], code: Rejection) -> None:
    with pytest.raises(VerificationError) as caught:
        appraise(machine, table)
    assert caught.value.code == code


def test_bindings() -> None:
    claims = b"claims"
    session = SessionBinding(claims=claims, nonce=b"n" * 32, binder=None, spki=None)
    authentic, _ = authenticate(Machine(extra_data=digests.tpm_extra_data(claims)))
    authentic.check_session(CheckLog(), session)
    other, _ = authenticate()
    with pytest.raises(VerificationError, match="EVIDENCE_BINDING"):
        other.check_session(CheckLog(), session)
    other.check_foreign(CheckLog(), ForeignBinding(report_data=b"e" * 32, nonce=b"e" * 32))
    with pytest.raises(VerificationError, match="EVIDENCE_BINDING"):
        other.check_foreign(CheckLog(), ForeignBinding(report_data=b"f" * 32))
    with pytest.raises(VerificationError, match="NONCE_MISMATCH"):
        other.check_foreign(CheckLog(), ForeignBinding(nonce=b"e" * 31))
    with pytest.raises(VerificationError, match="FAMILY_NOT_ALLOWED"):
        other.appraise(CheckLog(), None, now=amd.NOW)


@pytest.mark.parametrize(
    "table",
    [{}, {"measurements": ["4d" * 48]}, {"pcr_sets": [SET]}, {**PINNED, "ak_pins": ["11" * 32]},
     {**PINNED, "vm_ids": ["x"]}, {**PINNED, "pcr_sets": [{"0": "11" * 32}]}, {**PINNED, "require_secure_boot": "yes"}],
)  # fmt: skip
def test_a_table_that_could_not_refuse_is_an_error(table: Mapping[str, object]) -> None:
    with pytest.raises(PolicyFileError, match=r"families\.azure-snp-vtpm"):
        demand(table)


def test_the_table_survives_the_way_through_toml() -> None:
    vm_ids = {"vm_ids": ["390cbcf5-6c67-4d9b-98ef-c3f1699cc8fc"]}
    for table in (PINNED, {**PINNED, **vm_ids}):
        policy = Policy(models={"m": frozenset({b"m" * 32})}, families={"azure-snp-vtpm": demand(table)})
        assert Policy.parse(policy.to_toml()).digest == policy.digest
    assert "pcr_sets" not in demand({}, report_only=True).to_table()
    assert demand(PINNED).count == 1


def test_an_item_of_another_shape_is_malformed() -> None:
    for content in (b"", cbor.encode([]), cbor.encode({}), b"\xff" * 40000, genuine() + b"\x00"):
        with pytest.raises(WireError):
            parse_evidence(content)
