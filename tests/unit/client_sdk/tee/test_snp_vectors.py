"""Genuine SEV-SNP reports reach the verdict they must get, and no change to them is accepted."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import MalformedError, Rejection, SdkError, UndecidedError, VerificationError
from client_sdk.tee.endorsements import merge, recognise
from client_sdk.tee.evidence import Endorsements, ForeignBinding
from client_sdk.tee.families import FAMILIES
from client_sdk.tee.snp import abi
from client_sdk.tee.snp.certificates import find_veks
from client_sdk.tee.snp.policy import SnpPolicy, parse_policy
from client_sdk.tee.snp.verify import AuthenticSnp, parse_evidence
from client_sdk.wire.errors import WireError

FOLDER = Path(__file__).parents[3] / "vectors" / "tee" / "snp"
NOW = 1_790_000_000.0
OCTOBER_2025 = 1_760_000_000.0
MILAN_CHAIN, GENOA_CHAIN = "chain_milan_ask_ark_asvk.pem", "chain_genoa_ask_ark_asvk.pem"
OK = ("milan_v2_ok.report.bin", "milan_v2_ok.vcek.der")
AWS = ("milan_v3_vlek_aws.report.bin", "milan_v3_vlek_aws.vlek.der")


def vector(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def given(*names: str) -> Endorsements:
    return merge(recognise(vector(name)) for name in names)


def policy(**table: object) -> SnpPolicy:
    return parse_policy(dict(table), "families.sev-snp", True)


def judge(
    report: bytes, endorsements: Endorsements, demands: SnpPolicy | None = None, *, now: float = NOW
) -> tuple[AuthenticSnp, CheckLog]:
    log = CheckLog()
    authentic = parse_evidence(report).authenticate(log, endorsements, now=now)
    authentic.check_foreign(log, ForeignBinding())
    authentic.appraise(log, demands or policy(), now=now)
    return authentic, log


def refused(report: bytes, endorsements: Endorsements, demands: SnpPolicy | None = None, *, now: float = NOW) -> str:
    with pytest.raises(VerificationError) as caught:
        judge(report, endorsements, demands, now=now)
    assert caught.value.checks[-1].status == "failed"
    return caught.value.code


@pytest.mark.parametrize("chain", [(), (MILAN_CHAIN,)])
def test_snp_1_milan_v2_is_accepted(chain: Sequence[str]) -> None:
    report = vector(OK[0])
    pinned = policy(
        measurements=[report[0x90:0xC0].hex()],
        chip_ids=[report[0x1A0:0x1E0].hex()],
        products=["Milan"],
        min_tcb={"bootloader": 3, "tee": 0, "snp": 8, "microcode": 115},
    )
    authentic, log = judge(report, given(OK[1], *chain), pinned)
    assert (authentic.mode, authentic.trust, authentic.product) == ("production", "hardware-signed", "Milan")
    assert authentic.identity == report[0x1A0:0x1E0]
    assert authentic.tcb == abi.Tcb(bootloader=3, tee=0, snp=8, microcode=115)
    states = {check.name: check.status for check in log.checks}
    assert states["launch measurement"] == states["minimum patch levels"] == states["AMD certificate chain"] == "passed"
    assert states["revocation"] == states["report data"] == states["host data"] == "not checked"


def test_snp_2_debug_is_genuine_and_refused_unless_allowed() -> None:
    report, endorsements = vector("milan_v2_debug.report.bin"), given("milan_v2_debug.vcek.der", MILAN_CHAIN)
    assert refused(report, endorsements) == Rejection.DEBUG_NOT_ALLOWED
    judge(report, endorsements, policy(allow_debug=True))


def test_snp_6_vlek_is_accepted_only_where_the_policy_says_so() -> None:
    report, endorsements = vector(AWS[0]), given(AWS[1], MILAN_CHAIN)
    both = {"allow_vlek": True, "allow_vmpl": [0, 1]}
    authentic, _ = judge(report, endorsements, policy(**both), now=OCTOBER_2025)
    assert authentic.vek.csp == "CN=cc-us-east-2.amazonaws.com"
    assert authentic.identity == report[0x140:0x160], "the chip is masked"
    judge(report, endorsements, policy(**both, csp_ids=["CN=cc-us-east-2.amazonaws.com"]), now=OCTOBER_2025)
    for demands, code in (
        ({}, Rejection.PLATFORM_NOT_ALLOWED),
        ({"allow_vmpl": [0, 1]}, Rejection.PLATFORM_NOT_ALLOWED),
        ({"allow_vlek": True}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({**both, "csp_ids": ["CN=cc-eu-west-1.amazonaws.com"]}, Rejection.PLATFORM_NOT_ALLOWED),
        ({**both, "chip_ids": ["11" * 64]}, Rejection.DEVICE_NOT_ALLOWED),
    ):
        assert refused(report, endorsements, policy(**demands), now=OCTOBER_2025) == code
    assert refused(report, endorsements, policy(**both)) == Rejection.CERTIFICATE_NOT_VALID_NOW


def test_snp_7_milan_v3_is_accepted() -> None:
    authentic, _ = judge(vector("milan_v3_dstack.report.bin"), given("milan_v3_dstack.vcek.pem", MILAN_CHAIN))
    assert authentic.report.report_data.startswith(b"attest-test-fixture-2026")
    assert ("SNP certified patch levels", "bootloader 4, tee 0, snp 23, microcode 213") in authentic.facts


def test_snp_8_genoa_is_accepted() -> None:
    authentic, _ = judge(vector("genoa_v3_azure.report.bin"), given("genoa_v3_azure.vcek.pem", GENOA_CHAIN))
    assert authentic.product == "Genoa"
    judge(
        vector("genoa_v3_azure.report.bin"),
        given("genoa_v3_azure.vcek.pem", MILAN_CHAIN, GENOA_CHAIN),
        policy(min_tcb={"Genoa": {"microcode": 84}, "Milan": {"microcode": 255}}),
    )


@pytest.mark.parametrize("chain", [MILAN_CHAIN, "chain_turin_ask_ark_asvk.pem"])
def test_snp_9_a_chain_of_another_product_is_refused(chain: str) -> None:
    endorsements = given("genoa_v3_azure.vcek.pem", chain)
    assert refused(vector("genoa_v3_azure.report.bin"), endorsements) == Rejection.CHAIN_NOT_TRUSTED


def test_snp_11_a_vlek_needs_the_asvk_not_the_ask() -> None:
    endorsements, asvk = given(AWS[1], MILAN_CHAIN), "SEV-VLEK-Milan"
    without = tuple(one for one in endorsements.certificates if one.common_name() != asvk)
    demands = policy(allow_vlek=True, allow_vmpl=[1])
    code = refused(vector(AWS[0]), Endorsements(certificates=without), demands, now=OCTOBER_2025)
    assert code == Rejection.CHAIN_NOT_TRUSTED


def test_turin_certificates_are_read() -> None:
    (vek,) = find_veks(given("turin.vcek.der").certificates)
    assert (vek.product, vek.tcb) == ("Turin", abi.Tcb(fmc=0, bootloader=0, tee=0, snp=0, microcode=9))
    assert vek.chip_id == bytes.fromhex("1e550a8ee5cf9f4d") + bytes(56)


def test_the_revocation_lists_of_amd() -> None:
    report, endorsements = vector(OK[0]), given(OK[1], MILAN_CHAIN, "crl_milan.der", "crl_genoa.der")
    _, log = judge(report, endorsements, policy(require_crl=True), now=OCTOBER_2025)
    assert "revocation" not in [check.name for check in log.checks]
    assert refused(report, endorsements) == Rejection.CERTIFICATE_NOT_VALID_NOW
    with pytest.raises(UndecidedError, match="ENDORSEMENTS_MISSING"):
        judge(report, given(OK[1]), policy(require_crl=True), now=OCTOBER_2025)


def test_what_to_fetch_from_amd() -> None:
    report = abi.parse_report(vector(OK[0]))
    assert abi.vcek_path(report, "Milan") == (
        f"/vcek/v1/Milan/{report.chip_id.hex()}?blSPL=03&teeSPL=00&snpSPL=08&ucodeSPL=115"
    )
    assert abi.crl_path("Milan") == "/vcek/v1/Milan/crl"


# Changed


@pytest.mark.parametrize("names", [OK, AWS, ("genoa_v3_azure.report.bin", "genoa_v3_azure.vcek.pem")])
def test_snp_1_every_flipped_byte_is_refused(names: tuple[str, str]) -> None:
    """All bytes: those of the signed part and the signature, and those after them, which nothing signs."""
    report, endorsements = vector(names[0]), given(names[1])
    for position in range(len(report)):
        flipped = bytearray(report)
        flipped[position] ^= 1 << position % 8
        with pytest.raises((WireError, VerificationError)):
            parse_evidence(bytes(flipped)).authenticate(CheckLog(), endorsements, now=OCTOBER_2025)


def test_every_other_length_is_refused() -> None:
    report = vector(OK[0])
    for length in (*range(len(report)), 1185, 4096, 1 << 20):
        with pytest.raises(WireError, match="1184 bytes"):
            parse_evidence(report.ljust(length, b"\x00")[:length])


@pytest.mark.parametrize("value", [1, 6, 99, 256, 0xFFFFFFFF])
def test_b016_snp_1_an_unknown_version_is_named_and_never_accepted(value: int) -> None:
    changed = value.to_bytes(4, "little") + vector(OK[0])[4:]
    for endorsements in (given(OK[1]), Endorsements()):
        with pytest.raises((WireError, SdkError), match=rf"version {value}\b"):
            parse_evidence(changed).authenticate(CheckLog(), endorsements, now=NOW)


@pytest.mark.parametrize(
    ("offset", "value", "code"),
    [
        (0x34, 2, Rejection.BAD_ALGORITHM),
        (0x48, 1 << 2, Rejection.ENDORSEMENT_MISMATCH),
        (0x48, 7 << 2, Rejection.BAD_KEY),
        (0x48, 3 << 2, Rejection.BAD_KEY),
        (0x50, 0, Rejection.BAD_SIGNATURE),
        (0x90, 0, Rejection.BAD_SIGNATURE),
        (0x180, 9, Rejection.BAD_SIGNATURE),
        (0x1A0, 0, Rejection.ENDORSEMENT_MISMATCH),
        (0x2A0, 0, Rejection.BAD_SIGNATURE),
        (0x2A0 + 71, 1, Rejection.BAD_SIGNATURE),
        (0x2E8, 0, Rejection.BAD_SIGNATURE),
    ],
)
def test_snp_1_changed_fields_are_refused_by_name(offset: int, value: int, code: Rejection) -> None:
    changed = bytearray(vector(OK[0]))
    changed[offset] = value
    assert refused(bytes(changed), given(OK[1])) == code


def test_snp_1_the_key_of_another_chip_is_refused() -> None:
    assert refused(vector(OK[0]), given("milan_v2_debug.vcek.der")) == Rejection.ENDORSEMENT_MISMATCH
    judge(vector(OK[0]), given("milan_v2_debug.vcek.der", "turin.vcek.der", AWS[1], OK[1]))


def test_without_a_certificate_there_is_no_verdict() -> None:
    for endorsements in (Endorsements(), given(MILAN_CHAIN)):
        with pytest.raises(UndecidedError, match="ENDORSEMENTS_MISSING"):
            judge(vector(OK[0]), endorsements)


def test_every_flipped_byte_of_the_certificate_is_refused_or_unseen() -> None:
    """What a flip hides from the chain (a name, an extension id) leaves no verdict; nothing is accepted."""
    certificate = vector(OK[1])
    for position in range(0, len(certificate), 3):
        flipped = bytearray(certificate)
        flipped[position] ^= 1 << position % 8
        with pytest.raises((WireError, SdkError)):
            parse_evidence(vector(OK[0])).authenticate(CheckLog(), recognise(bytes(flipped)), now=NOW)


def test_other_bytes_are_a_typed_error_within_50_ms() -> None:
    others = [b"", b"\x00" * 1184, b"\xff" * 1184, os.urandom(1184), vector(MILAN_CHAIN)[:1184], b"{}" * 592]
    for content in others:
        started = time.thread_time()
        with pytest.raises(WireError) as caught:
            FAMILIES["sev-snp"].parse_evidence(content)
        assert time.thread_time() - started < 0.05
        assert MalformedError.of(caught.value).code == Rejection.MALFORMED_EVIDENCE


def test_foreign_bindings() -> None:
    report = vector("milan_v3_dstack.report.bin")
    authentic = parse_evidence(report).authenticate(CheckLog(), given("milan_v3_dstack.vcek.pem"), now=NOW)
    authentic.check_foreign(CheckLog(), ForeignBinding(report_data=b"attest-test-fixture-2026"))
    authentic.check_foreign(CheckLog(), ForeignBinding(report_data=report[0x50:0x90]))
    for expected in (b"attest-test-fixture-202", b"attest-test-fixture-2027", bytes(64), report[0x50:0x90] + b"\x00"):
        with pytest.raises(VerificationError, match="EVIDENCE_BINDING"):
            authentic.check_foreign(CheckLog(), ForeignBinding(report_data=expected))
    with pytest.raises(VerificationError, match="NONCE_MISMATCH"):
        authentic.check_foreign(CheckLog(), ForeignBinding(nonce=b"n" * 32))
