"""Genuine Nitro documents: the verdict each must get, and no byte of them that may change."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
from cryptography import x509 as general_x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from client_sdk.checks import CheckLog
from client_sdk.errors import AuthenticityError, FreshnessError, PolicyError, Rejection, VerificationError
from client_sdk.tee.evidence import Endorsements, ForeignBinding
from client_sdk.tee.families import FAMILIES
from client_sdk.tee.nitro.policy import NitroPolicy, parse_policy
from client_sdk.tee.nitro.verify import AuthenticNitro, parse_evidence
from client_sdk.wire.errors import WireError

FOLDER = Path(__file__).parents[3] / "vectors" / "tee" / "nitro"
PROD, DEBUG, SPKI = "prod_2025-12-25a.cose.cbor", "debug_2025-12-25.cose.cbor", "debug_2023-09-18_spki.cose.cbor"
PROD_NOW, DEBUG_NOW, SPKI_NOW = 1_766_678_659.0, 1_766_650_847.0, 1_695_049_411.0
PROD_PCRS = {
    "pcr0": "eb7d0dab08ff41546d7e5659aee883af7b32bb2e58e46815b719f9f7bfae7b880188a10d86317e6509923740526cf74a",
    "pcr1": "0343b056cd8485ca7890ddd833476d78460aed2aa161548e4e26bedf321726696257d623e8805f3f605946b3d8b0c6aa",
    "pcr2": "d7b0a76788c1be24898bd148117ea1239578ba0e72f5d87a33a6c6476026675b6f996940f062e0e3f0b5edd2ddf78811",
    "pcr4": "7b3574ad9b7e88ec8335e8ce967315fac77218441e97eea9795de704d7f2678d0b298ecda39b544c1689669f48cba5e8",
}
EXPECTED_USER_DATA = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")


def vector(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def policy(**extra: object) -> NitroPolicy:
    return parse_policy({"measurements": [PROD_PCRS], **extra}, "families.nitro", False)


def judge(
    content: bytes, now: float, demanded: NitroPolicy | None = None, bound: ForeignBinding | None = None
) -> tuple[AuthenticNitro, CheckLog]:
    log = CheckLog()
    authentic = parse_evidence(content).authenticate(log, Endorsements(), now=now)
    authentic.check_foreign(log, bound or ForeignBinding())
    authentic.appraise(log, demanded or policy(), now=now)
    return authentic, log


def spki_of(data: bytes) -> bytes:
    key = general_x509.load_der_x509_certificate(data).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def test_nitro_1_is_accepted_inside_its_window() -> None:
    authentic, log = judge(vector(PROD), PROD_NOW, bound=ForeignBinding(report_data=EXPECTED_USER_DATA))
    assert all(check.status != "failed" for check in log.checks)
    assert {check.name for check in log.checks if check.status == "passed"} >= {
        "Nitro certificate chain",
        "Nitro document signature",
        "time of signing",
        "user data",
        "debug mode",
        "launch measurement",
    }
    assert authentic.identity == b"i-0827e799ec9232d44-enc019b5640fdf630d6"
    assert (authentic.mode, authentic.trust, authentic.region) == ("production", "hardware-signed", "us-east-1")
    assert dict(authentic.facts)["PCR0"] == PROD_PCRS["pcr0"]
    assert FAMILIES["nitro"].parse_evidence(vector(PROD))


def test_nitro_1_refuses_another_nonce_and_other_user_data() -> None:
    with pytest.raises(FreshnessError, match="NONCE_MISMATCH"):
        judge(vector(PROD), PROD_NOW, bound=ForeignBinding(nonce=b"n" * 32))
    for other in (b"\x00" + EXPECTED_USER_DATA[1:], EXPECTED_USER_DATA + b"\x01", EXPECTED_USER_DATA.ljust(65, b"\0")):
        with pytest.raises(AuthenticityError, match="EVIDENCE_BINDING"):
            judge(vector(PROD), PROD_NOW, bound=ForeignBinding(report_data=other))


@pytest.mark.parametrize("register", ["pcr0", "pcr1", "pcr2", "pcr4"])
def test_nitro_1_refuses_any_other_register(register: str) -> None:
    other = {**PROD_PCRS, register: "11" * 48}
    demanded = parse_policy({"measurements": [other]}, "families.nitro", False)
    with pytest.raises(PolicyError, match="MEASUREMENT_NOT_ALLOWED"):
        judge(vector(PROD), PROD_NOW, demanded)


def test_nitro_1_passes_by_any_of_the_sets() -> None:
    other = {**PROD_PCRS, "pcr0": "11" * 48}
    judge(vector(PROD), PROD_NOW, parse_policy({"measurements": [other, PROD_PCRS]}, "families.nitro", False))


def test_nitro_3_debug_is_refused() -> None:
    with pytest.raises(PolicyError) as raised:
        judge(vector(DEBUG), DEBUG_NOW)
    assert raised.value.code is Rejection.DEBUG_NOT_ALLOWED
    done = [check.name for check in raised.value.checks if check.status == "passed"]
    assert "Nitro document signature" in done


def test_nitro_6_debug_spki_binds_the_key_of_its_certificate_and_no_other() -> None:
    with pytest.raises(PolicyError, match="DEBUG_NOT_ALLOWED"):
        judge(vector(SPKI), SPKI_NOW)
    key = spki_of(vector("debug_2023-09-18_spki.tlscert.der"))
    _, log = judge(vector(SPKI), SPKI_NOW, policy(allow_debug=True), ForeignBinding(report_data=key))
    assert ("launch measurement", "not checked") in [(check.name, check.status) for check in log.checks]
    pem = general_x509.load_pem_x509_certificate(vector("ratls_prod_2023-01-18.cert.pem"))
    other = ForeignBinding(report_data=spki_of(pem.public_bytes(Encoding.DER)))
    with pytest.raises(AuthenticityError, match="EVIDENCE_BINDING"):
        judge(vector(SPKI), SPKI_NOW, policy(allow_debug=True), other)


def test_nitro_7_expired_is_refused() -> None:
    for now in (1_766_707_200.0, PROD_NOW + 10_801, PROD_NOW - 4):
        with pytest.raises(AuthenticityError) as raised:
            judge(vector(PROD), now)
        assert raised.value.code is Rejection.CERTIFICATE_NOT_VALID_NOW


def test_the_document_in_a_certificate_of_2023_is_accepted_in_its_window() -> None:
    certificate = general_x509.load_pem_x509_certificate(vector("ratls_prod_2023-01-18.cert.pem"))
    names = certificate.extensions.get_extension_for_class(general_x509.SubjectAlternativeName).value
    text = names.get_values_for_type(general_x509.DNSName)[1]
    document = bytes.fromhex(text.split(".")[0])
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    reported = parse_policy({}, "families.nitro", True)
    authentic, _ = judge(document, 1_674_047_239.0, reported, ForeignBinding(report_data=key))
    assert authentic.document.pcrs[0].hex().startswith("d265a83f")
    with pytest.raises(AuthenticityError, match="CERTIFICATE_NOT_VALID_NOW"):
        judge(document, PROD_NOW, reported, ForeignBinding(report_data=key))


def refused(content: bytes, now: float) -> None:
    """No yes, no crash: one of the two errors."""
    with pytest.raises((WireError, VerificationError)):
        parse_evidence(content).authenticate(CheckLog(), Endorsements(), now=now)


def test_no_byte_of_a_genuine_document_may_change() -> None:
    content = vector(PROD)
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        refused(bytes(changed), PROD_NOW)


def test_no_truncation_and_no_trailing_byte_is_accepted() -> None:
    for name, now in ((PROD, PROD_NOW), (SPKI, SPKI_NOW)):
        content = vector(name)
        for size in range(len(content)):
            with pytest.raises(WireError):
                parse_evidence(content[:size])
        refused(content + b"\x00", now)


def test_a_document_is_verified_within_8_ms() -> None:
    content, took = vector(PROD), []
    for _ in range(20):
        started = time.perf_counter()
        parse_evidence(content).authenticate(CheckLog(), Endorsements(), now=PROD_NOW)
        took.append(time.perf_counter() - started)
    assert min(took) < 0.008


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\x9f" * 32_000,
        b"\x81" * 32_000,
        b"\xbf" + b"\x61a\x01" * 8_000,
        b"\x84\x44\xa1\x01\x38\x22\xa0\x5b\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xbb\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xd2" * 10_000,
        b"-----BEGIN CERTIFICATE-----\n" * 500,
        bytes(40_000),
    ],
    ids=lambda junk: f"{junk[:4].hex()}-{len(junk)}",
)
def test_junk_is_a_typed_error_in_little_time_and_memory(junk: bytes) -> None:
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(WireError):
        parse_evidence(junk)
    took = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 0.5  # 50 ms without the tracing
    assert peak < 8 << 20
