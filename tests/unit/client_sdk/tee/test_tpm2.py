"""Every check of TPM quotes has a quote that fails it alone, and a real quote loses by any changed byte."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509 as general_x509
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from client_sdk.checks import CheckLog
from client_sdk.errors import PolicyError, PolicyFileError, Rejection, UndecidedError, VerificationError
from client_sdk.tee.evidence import Endorsements, ForeignBinding, SessionBinding
from client_sdk.tee.families import FAMILIES
from client_sdk.tee.tpm2 import abi
from client_sdk.tee.tpm2.policy import Tpm2Policy, parse_policy
from client_sdk.tee.tpm2.verify import AuthenticTpm2, parse_evidence
from client_sdk.tee.x509 import parse_certificate
from client_sdk.wire import cbor, digests
from client_sdk.wire.errors import WireError
from tests.simulators import software_tpm as tpm
from tests.simulators.software_tpm import NOW, AkChain, Quote

FOLDER = Path(__file__).parents[3] / "vectors" / "tee" / "tpm2"
REAL = json.loads((FOLDER / "swtpm_pcrs.json").read_text())
SET = {str(register): value.hex() for register, value in tpm.PCRS.items()}


def pin(quote: Quote | None = None) -> str:
    return hashlib.sha256(tpm.public(quote or Quote())).hexdigest()


def policy(report_only: bool = False, **table: Any) -> Tpm2Policy:
    demanded: dict[str, Any] = {"ak_pins": [pin()]}
    if not report_only:
        demanded["pcr_sets"] = [SET]
    merged = {name: value for name, value in {**demanded, **table}.items() if value is not None}
    return parse_policy(merged, "families.tpm2", report_only)


def authenticate(
    quote: Quote | None = None, log: CheckLog | None = None, endorsements: Endorsements | None = None, **parts: bytes
) -> AuthenticTpm2:
    evidence = parse_evidence(tpm.item(quote, **parts))
    return evidence.authenticate(log or CheckLog(), endorsements or Endorsements(), now=NOW)


def appraise(
    quote: Quote | None, demanded: Tpm2Policy | None, endorsements: Endorsements | None = None, *, now: float = NOW
) -> CheckLog:
    log = CheckLog()
    authenticate(quote, endorsements=endorsements).appraise(log, demanded, now=now)
    return log


def real_item(**changed: bytes) -> bytes:
    r, s = decode_dss_signature((FOLDER / "swtpm_quote.sig.der").read_bytes())
    head = struct.pack(">HH", tpm.ECDSA, tpm.SHA256)
    fields = {
        "attest": (FOLDER / "swtpm_quote.msg").read_bytes(),
        "signature": head + tpm.sized(r.to_bytes(32, "big")) + tpm.sized(s.to_bytes(32, "big")),
        "ak-public": (FOLDER / "swtpm_ak.tpm2b_public.bin").read_bytes()[2:],
    }
    return cbor.encode({**fields, **changed})


def real_policy() -> Tpm2Policy:
    public = (FOLDER / "swtpm_ak.tpm2b_public.bin").read_bytes()[2:]
    table = {
        "ak_pins": [hashlib.sha256(public).hexdigest()],
        "pcr_sets": [REAL["pcrs"]],
        "allow_partial_boot": True,
        "allow_zero_pcrs": True,
        "reset_counts": [1],
        "restart_counts": [0],
        "require_safe_clock": True,
    }
    return parse_policy(table, "families.tpm2", False)


def test_tpm_swtpm_quote_is_accepted_with_its_key_registers_and_nonce() -> None:
    log = CheckLog()
    authentic = FAMILIES["tpm2"].parse_evidence(real_item()).authenticate(log, Endorsements(), now=NOW)
    authentic.check_foreign(log, ForeignBinding(nonce=bytes.fromhex(REAL["nonce_hex"])))
    authentic.appraise(log, real_policy(), now=NOW)
    assert all(check.status != "failed" for check in log.checks)
    facts = dict(authentic.facts)
    assert facts["TPM protection"] == "measured boot, not memory encryption"
    assert facts["TPM attestation key hierarchy"] == "endorsement"
    assert facts["TPM registers"] == "sha256:0,1,2,16"
    assert (authentic.mode, authentic.trust) == ("production", "key-signed")
    assert authentic.identity == hashlib.sha256((FOLDER / "swtpm_ak.tpm2b_public.bin").read_bytes()[2:]).digest()
    with pytest.raises(VerificationError, match="NONCE_MISMATCH"):
        authentic.check_foreign(CheckLog(), ForeignBinding(nonce=b"n" * 32))


def test_no_byte_of_a_real_quote_may_change_and_none_may_be_missing() -> None:
    content = real_item()
    demanded = real_policy()
    for at in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            with pytest.raises((WireError, VerificationError)):
                judge(bytes(changed), demanded)
    for size in range(len(content)):
        with pytest.raises(WireError):
            parse_evidence(content[:size])


def judge(content: bytes, demanded: Tpm2Policy) -> None:
    authentic = parse_evidence(content).authenticate(CheckLog(), Endorsements(), now=NOW)
    authentic.appraise(CheckLog(), demanded, now=NOW)


def test_the_structures_inside_refuse_every_truncation() -> None:
    quote = Quote()
    signed = tpm.attest(quote)
    whole = (
        (abi.parse_attest, signed),
        (abi.parse_signature, tpm.signature(quote, signed)),
        (abi.parse_public, tpm.public(quote)),
    )
    for parse, data in whole:
        parse(data)
        for size in range(len(data)):
            with pytest.raises(WireError):
                parse(data[:size])
        with pytest.raises(WireError, match="1 bytes after"):
            parse(data + b"\x00")
        with pytest.raises(WireError, match="larger than"):
            parse(data + bytes(4096))


def test_random_bytes_are_a_typed_error_in_little_time() -> None:
    dice = random.Random(7)
    content = real_item()
    started = time.perf_counter()
    for _ in range(2000):
        data = bytearray(content)
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        if bytes(data) == content:
            continue
        with pytest.raises((WireError, VerificationError)):
            judge(bytes(data), real_policy())
    assert time.perf_counter() - started < 10


def test_a_quote_is_verified_within_6_ms() -> None:
    content, demanded, took = real_item(), real_policy(), []
    for _ in range(20):
        started = time.perf_counter()
        judge(content, demanded)
        took.append(time.perf_counter() - started)
    assert min(took) < 0.006


@pytest.mark.parametrize(
    "quote",
    [
        Quote(),
        Quote(rsa_bits=2048, scheme=tpm.RSASSA),
        Quote(rsa_bits=2048, scheme=tpm.RSAPSS),
        Quote(rsa_bits=3072, scheme=tpm.RSASSA, hash=tpm.SHA384),
        Quote(hash=tpm.SHA512),
        Quote(bound=(tpm.NULL, 0)),
    ],
)
def test_keys_and_schemes_that_tpms_have_verify(quote: Quote) -> None:
    appraise(quote, policy(ak_pins=[pin(quote)]))


@pytest.mark.parametrize(
    ("quote", "code"),
    [
        (Quote(attributes=tpm.ATTRIBUTES & ~tpm.RESTRICTED), Rejection.BAD_KEY),
        (Quote(attributes=tpm.ATTRIBUTES & ~tpm.FIXED_TPM), Rejection.BAD_KEY),
        (Quote(attributes=tpm.ATTRIBUTES & ~tpm.FIXED_PARENT), Rejection.BAD_KEY),
        (Quote(attributes=tpm.ATTRIBUTES & ~tpm.ORIGIN), Rejection.BAD_KEY),
        (Quote(attributes=tpm.ATTRIBUTES & ~tpm.SIGN), Rejection.BAD_KEY),
        (Quote(attributes=tpm.ATTRIBUTES | tpm.DECRYPT), Rejection.BAD_KEY),
        (Quote(symmetric=b"\x00\x06\x00\x80\x00\x43"), Rejection.BAD_KEY),
        (Quote(rsa_bits=1024, scheme=tpm.RSASSA), Rejection.BAD_KEY),
        (Quote(rsa_bits=2048, rsa_exponent=3, scheme=tpm.RSASSA), Rejection.BAD_KEY),
        (Quote(curve=0x0004), Rejection.BAD_KEY),
        (Quote(point=(1, 1)), Rejection.BAD_KEY),
        (Quote(hash=tpm.SHA1), Rejection.BAD_ALGORITHM),
        (Quote(bound=(tpm.ECDSA, tpm.SHA384)), Rejection.BAD_ALGORITHM),
        (Quote(bound=(0x001A, tpm.SHA256)), Rejection.BAD_ALGORITHM),
        (Quote(rsa_bits=2048, scheme=tpm.RSASSA, bound=(0x0015, 0)), Rejection.BAD_ALGORITHM),
        (Quote(signer="another"), Rejection.BAD_SIGNATURE),
        (Quote(digest=b"d" * 31), Rejection.MALFORMED_EVIDENCE),
        (Quote(digest=b""), Rejection.MALFORMED_EVIDENCE),
        (Quote(pcrs={}), Rejection.MALFORMED_EVIDENCE),
        (Quote(certificate=tpm.ak_chain(AkChain(subject="another"))[2]), Rejection.ENDORSEMENT_MISMATCH),
        (Quote(certificate=b"junk"), Rejection.MALFORMED_CERTIFICATE),
    ],
)
def test_a_quote_that_is_wrong_in_one_way_is_refused_for_it(quote: Quote, code: Rejection) -> None:
    with pytest.raises(VerificationError) as raised:
        authenticate(quote)
    assert raised.value.code is code, raised.value
    assert raised.value.checks[-1].status == "failed"


def test_signatures_of_other_kinds_and_over_other_bytes_are_refused() -> None:
    ecc, pss = Quote(bound=(tpm.NULL, 0)), Quote(rsa_bits=2048, scheme=tpm.RSAPSS, bound=(tpm.NULL, 0))
    with pytest.raises(VerificationError, match="BAD_ALGORITHM"):
        authenticate(ecc, signature=tpm.signature(pss, tpm.attest(ecc)))
    for quote in (Quote(), pss, replace(pss, scheme=tpm.RSASSA)):
        with pytest.raises(VerificationError, match="BAD_SIGNATURE"):
            authenticate(quote, attest=tpm.attest(replace(quote, reset_count=8)))
    zero = struct.pack(">HH", tpm.ECDSA, tpm.SHA256) + tpm.sized(b"") + tpm.sized(b"")
    with pytest.raises(VerificationError, match="BAD_SIGNATURE"):
        authenticate(Quote(), signature=zero)


TWICE = struct.pack(">I", 2) + 2 * b"\x00\x0b\x03\x01\x00\x00"


@pytest.mark.parametrize(
    ("quote", "message"),
    [
        (Quote(magic=0xFF544346), "not made inside a TPM"),
        (Quote(type=0x8017), "instead of a quote"),
        (Quote(safe=2), "neither 0 nor 1"),
        (Quote(extra_data=b"e" * 67), "extraData"),
        (Quote(digest=b"d" * 65), "pcrDigest"),
        (Quote(selection=struct.pack(">I", 17)), "17 PCR banks"),
        (Quote(selection=struct.pack(">I", 0xFFFFFFFF)), "PCR banks"),
        (Quote(selection=b"\x00\x00\x00\x01\x00\x0b\x05" + bytes(5)), "5 bytes"),
        (Quote(selection=TWICE), "twice"),
        (Quote(attest_tail=b"\x00"), "bytes after TPMS_ATTEST"),
        (Quote(signature_tail=b"\x00"), "bytes after TPMT_SIGNATURE"),
        (Quote(public_tail=b"\x00"), "bytes after TPMT_PUBLIC"),
        (Quote(bound=(tpm.ECDSA, 0x0099)), "unknown hash"),
    ],
)
def test_malformed_structures_are_refused(quote: Quote, message: str) -> None:
    with pytest.raises(WireError, match=message):
        parse_evidence(tpm.item(quote))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"signature": b"\x00\x05\x00\x0b"}, "unknown scheme"),
        ({"signature": b"\x00\x14\x00\x0b\x02\x01" + bytes(513)}, "513 bytes"),
        ({"ak_public": b"\x00\x08\x00\x0b"}, "unknown type"),
        (
            {
                "ak_public": tpm.public(Quote(rsa_bits=2048)).replace(
                    b"\x08\x00\x00\x00\x00\x00", b"\x08\x01\x00\x00\x00\x00"
                )
            },
            "2049 bits",
        ),
        ({"other": b""}, "unknown|unexpected|other"),
    ],
)
def test_malformed_items_are_refused(parts: dict[str, bytes], message: str) -> None:
    with pytest.raises(WireError, match=message):
        parse_evidence(tpm.item(Quote(), **parts))


def test_a_key_with_a_key_derivation_is_read() -> None:
    numbers = tpm.ecc_key().public_key().public_numbers()
    area = struct.pack(">HHI", 0x23, tpm.SHA256, tpm.ATTRIBUTES) + tpm.sized(b"p" * 32) + b"\x00\x10\x00\x10"
    area += (
        b"\x00\x03\x00\x20\x00\x0b"
        + tpm.sized(numbers.x.to_bytes(32, "big"))
        + tpm.sized(numbers.y.to_bytes(32, "big"))
    )
    public = abi.parse_public(area)
    assert (public.policy, public.scheme, public.name[:2]) == (b"p" * 32, abi.ALG_NULL, b"\x00\x0b")


def test_what_tools_write_is_read_too() -> None:
    tools = {
        "signature": (FOLDER / "swtpm_quote.sig.der").read_bytes(),
        "ak-public": (FOLDER / "swtpm_ak.tpm2b_public.bin").read_bytes(),
    }
    judge(real_item(**tools), real_policy())
    der = tools["signature"]
    for size in range(len(der)):
        with pytest.raises(WireError):
            parse_evidence(real_item(signature=der[:size]))
    for at in range(len(der)):
        changed = bytearray(der)
        changed[at] ^= 0x81
        with pytest.raises((WireError, VerificationError)):
            judge(real_item(signature=bytes(changed)), real_policy())
    for wrong in (
        "3000",
        "3006020100020100",
        "3008020200010202ff01",
        "30060200020101",
        "3007020101020101ff",
        "3080" + "00" * 128,
    ):
        with pytest.raises((WireError, VerificationError)):
            judge(real_item(signature=bytes.fromhex(wrong)), real_policy())


def test_our_own_binding_is_the_labelled_hash_of_the_claims() -> None:
    claims = b"claims"
    expected = hashlib.sha256(b"attested-inference report-data v1\0" + claims).digest()
    assert digests.tpm_extra_data(claims) == expected
    binding = SessionBinding(claims=claims, nonce=b"n" * 32, binder=None, spki=None)
    authenticate(Quote(extra_data=expected)).check_session(CheckLog(), binding)
    for other in (digests.report_data(claims), b"", expected + b"\x00", hashlib.sha256(claims).digest()):
        with pytest.raises(VerificationError, match="EVIDENCE_BINDING"):
            authenticate(Quote(extra_data=other)).check_session(CheckLog(), binding)


def test_a_foreign_binding_is_compared_where_it_is_given() -> None:
    log = CheckLog()
    authentic = authenticate()
    assert dict(authentic.facts)["TPM attestation key hierarchy"].startswith("not a primary key")
    authentic.check_foreign(log, ForeignBinding())
    assert [check.status for check in log.checks] == ["not checked"]
    padded = authenticate(Quote(extra_data=b"value" + bytes(3)))
    padded.check_foreign(CheckLog(), ForeignBinding(report_data=b"value"))
    for bound in (ForeignBinding(report_data=b"value2"), ForeignBinding(nonce=b"value")):
        with pytest.raises(VerificationError):
            padded.check_foreign(CheckLog(), bound)


def test_the_policy_accepts_what_it_names_and_lists_what_it_does_not() -> None:
    statuses = {check.name: check.status for check in appraise(Quote(), policy()).checks}
    assert statuses == {
        "memory encryption": "not checked",
        "attestation key pinned": "passed",
        "attestation key certified": "not checked",
        "boot measurement": "passed",
        "reset count": "not checked",
        "restart count": "not checked",
        "TPM clock safe": "not checked",
        "TPM firmware version": "not checked",
    }
    pinned = policy(
        reset_counts=[6, 7], restart_counts=[2], firmware_versions=["0102030405060708"], require_safe_clock=True
    )
    checks = {check.name: check.status for check in appraise(Quote(), pinned).checks}
    assert [checks[name] for name in ("reset count", "restart count", "TPM clock safe", "TPM firmware version")] == [
        "passed"
    ] * 4
    other = {**SET, "4": "ee" * 32}
    appraise(Quote(), policy(pcr_sets=[other, SET]))


@pytest.mark.parametrize(
    ("quote", "table", "code"),
    [
        (Quote(), {"ak_pins": ["11" * 32]}, Rejection.PLATFORM_NOT_ALLOWED),
        (Quote(), {"reset_counts": [6]}, Rejection.PLATFORM_NOT_ALLOWED),
        (Quote(), {"restart_counts": [3]}, Rejection.PLATFORM_NOT_ALLOWED),
        (Quote(safe=0), {"require_safe_clock": True}, Rejection.PLATFORM_NOT_ALLOWED),
        (Quote(), {"firmware_versions": ["0000000000000000"]}, Rejection.TCB_NOT_ALLOWED),
        (Quote(), {"pcr_sets": [{**SET, "7": "ee" * 32}]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        (Quote(), {"pcr_sets": [{**SET, "8": "ee" * 32}]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        (Quote(pcrs={**tpm.PCRS, 23: b"z" * 32}), {}, Rejection.MEASUREMENT_NOT_ALLOWED),
        (Quote(pcrs={0: tpm.PCRS[0]}), {}, Rejection.MEASUREMENT_NOT_ALLOWED),
        (Quote(bank=tpm.SHA384), {}, Rejection.MEASUREMENT_NOT_ALLOWED),
        (Quote(digest=b"d" * 32), {}, Rejection.MEASUREMENT_NOT_ALLOWED),
    ],
)
def test_the_policy_refuses(quote: Quote, table: dict[str, Any], code: Rejection) -> None:
    with pytest.raises(PolicyError) as raised:
        appraise(quote, policy(**table))
    assert raised.value.code is code


def test_report_only_judges_all_but_the_registers() -> None:
    statuses = {check.name: check.status for check in appraise(Quote(), policy(report_only=True)).checks}
    assert (statuses["boot measurement"], statuses["attestation key pinned"]) == ("not checked", "passed")
    with pytest.raises(PolicyError, match="FAMILY_NOT_ALLOWED"):
        appraise(Quote(), None)


def chained(chain: AkChain | None = None, *, given: tuple[int, ...] = (0, 1)) -> tuple[Quote, Endorsements, str]:
    """A quote with its certificate, the certificates of the chain by index, and the root's pin."""
    made = tpm.ak_chain(chain or AkChain())
    pool = tuple(parse_certificate(made[index]) for index in given)
    return Quote(certificate=made[2]), Endorsements(certificates=pool), hashlib.sha256(made[0]).hexdigest()


def test_a_certified_key_is_believed_by_its_root() -> None:
    quote, endorsements, root = chained()
    log = appraise(quote, policy(ak_pins=None, ak_roots=["ee" * 32, root]), endorsements)
    statuses = {check.name: check.status for check in log.checks}
    assert (statuses["attestation key certified"], statuses["attestation key pinned"]) == ("passed", "not checked")
    appraise(quote, policy(ak_roots=[root]), endorsements)
    with pytest.raises(PolicyError, match="PLATFORM_NOT_ALLOWED"):  # where both are named, both must hold
        appraise(quote, policy(ak_pins=["ee" * 32], ak_roots=[root]), endorsements)


@pytest.mark.parametrize(
    ("chain", "given", "code"),
    [
        (AkChain(purpose=None), (0, 1), Rejection.BAD_KEY),
        (AkChain(purpose=general_x509.ObjectIdentifier("1.3.6.1.5.5.7.3.1")), (0, 1), Rejection.BAD_KEY),
        (AkChain(until=NOW - 1), (0, 1), Rejection.CERTIFICATE_NOT_VALID_NOW),
        (AkChain(issuer_is_ca=False), (0, 1), Rejection.CHAIN_NOT_TRUSTED),
        (AkChain(), (0,), Rejection.CHAIN_NOT_TRUSTED),
    ],
)
def test_a_certificate_that_does_not_lead_to_the_root_is_refused(
    chain: AkChain, given: tuple[int, ...], code: Rejection
) -> None:
    quote, endorsements, root = chained(chain, given=given)
    with pytest.raises(VerificationError) as raised:
        appraise(quote, policy(ak_pins=None, ak_roots=[root]), endorsements)
    assert raised.value.code is code


def test_a_certificate_for_another_purpose_needs_an_opt_in() -> None:
    quote, endorsements, root = chained(AkChain(purpose=None))
    appraise(quote, policy(ak_pins=None, ak_roots=[root], allow_any_certified_key=True), endorsements)


def test_without_certificate_or_root_there_is_no_yes() -> None:
    quote, endorsements, root = chained()
    with pytest.raises(VerificationError, match="CHAIN_NOT_TRUSTED"):
        appraise(Quote(), policy(ak_roots=[root]), endorsements)
    with pytest.raises(UndecidedError, match="ENDORSEMENTS_MISSING"):
        appraise(quote, policy(ak_roots=[root]), Endorsements())
    with pytest.raises(UndecidedError, match="ENDORSEMENTS_MISSING"):
        appraise(quote, policy(ak_roots=["ee" * 32]), endorsements)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "anybody's key"),
        ({"ak_pins": ["11" * 32]}, "any boot"),
        ({"pcr_sets": [SET]}, "anybody's key"),
        ({"ak_pins": [], "pcr_sets": [SET]}, "ak_pins"),
        ({"ak_pins": ["00" * 32], "pcr_sets": [SET]}, "all zeros"),
        ({"ak_pins": ["11" * 31], "pcr_sets": [SET]}, "64 hex digits"),
        ({"ak_roots": ["*"], "pcr_sets": [SET]}, "64 hex digits"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [{}]}, "a table of registers"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [{**SET, "24": "11" * 32}]}, "no such register"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [{**SET, "0": "00" * 32}]}, "all zeros"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [{**SET, "0": "11" * 20}]}, "64 hex digits"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [{"0": "11" * 32, "9": "11" * 32}]}, "covers the boot"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [dict.fromkeys("0247", "11" * 32)]}, "covers the boot"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [SET], "reset_counts": [-1]}, "reset_counts"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [SET], "reset_counts": [True]}, "reset_counts"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [SET], "firmware_versions": ["01"]}, "16 hex digits"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [SET], "require_safe_clock": 1}, "require_safe_clock"),
        ({"ak_pins": ["11" * 32], "pcr_sets": [SET], "anything": 1}, "anything"),
    ],
)
def test_a_policy_that_could_not_be_enforced_is_an_error(table: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyFileError, match=message):
        parse_policy(table, "families.tpm2", False)


def test_a_policy_table_is_read_back_the_same() -> None:
    table = {
        "ak_pins": ["AB" * 32],
        "ak_roots": ["11" * 32],
        "pcr_sets": [{"0": "00" * 32}, SET],
        "reset_counts": [3, 1],
        "restart_counts": [0],
        "firmware_versions": ["0102030405060708"],
        "require_safe_clock": True,
        "allow_partial_boot": True,
        "allow_zero_pcrs": True,
        "allow_any_certified_key": True,
    }
    for demanded in (parse_policy(table, "families.tpm2", False), policy(), policy(report_only=True)):
        assert parse_policy(dict(demanded.to_table()), "families.tpm2", True) == demanded
        assert demanded.count == 1


def test_an_item_carries_the_key_s_certificate_where_there_is_one() -> None:
    quote = Quote()
    parts = {"attest": tpm.attest(quote), "public": tpm.public(quote)}
    parts["signature"] = tpm.signature(quote, parts["attest"])
    for certificate in (None, b"DER"):
        assert abi.parse_item(abi.encode_item(**parts, certificate=certificate)).certificate == certificate
