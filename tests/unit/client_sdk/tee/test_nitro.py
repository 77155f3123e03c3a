"""Every check of Nitro documents has a document that fails it alone."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import cbor2
import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import PolicyError, PolicyFileError, Rejection, VerificationError
from client_sdk.tee import anchors
from client_sdk.tee.evidence import Endorsements, ForeignBinding, SessionBinding
from client_sdk.tee.nitro import abi
from client_sdk.tee.nitro.policy import DEFAULT_MAX_DOCUMENT_AGE_S, NitroPolicy, parse_policy
from client_sdk.tee.nitro.verify import ROOT_FILE, AuthenticNitro, parse_evidence
from client_sdk.tee.x509 import Crl
from client_sdk.wire import foreign_cbor
from client_sdk.wire.errors import WireError
from tests.simulators import nitro
from tests.simulators.nitro import ABSENT, MODULE_ID, NOW, Chain, Shape

PINNED = {f"pcr{register}": nitro.PCRS[register].hex() for register in (0, 1, 2)}
CLAIMS, NONCE, SPKI = b"claims", b"n" * 32, b"spki" * 23
H = hashlib.sha512(b"attested-inference report-data v1\0" + CLAIMS).digest()


def policy(report_only: bool = False, **table: Any) -> NitroPolicy:
    demanded = {} if report_only else {"measurements": [PINNED]}
    return parse_policy({**demanded, **table}, "families.nitro", report_only)


def authenticate(shape: Shape, log: CheckLog | None = None, *, now: float = NOW) -> AuthenticNitro:
    evidence = parse_evidence(nitro.document(shape), nitro.root())
    return evidence.authenticate(log or CheckLog(), Endorsements(), now=now)


def rejected(shape: Shape, code: Rejection, *, now: float = NOW) -> VerificationError:
    with pytest.raises(VerificationError) as raised:
        authenticate(shape, now=now)
    assert raised.value.code is code, raised.value
    assert raised.value.checks[-1].status == "failed"
    return raised.value


def appraise(shape: Shape, demanded: NitroPolicy | None, *, now: float = NOW) -> CheckLog:
    log = CheckLog()
    authenticate(shape, now=NOW).appraise(log, demanded, now=now)
    return log


@pytest.mark.parametrize("shape", [Shape(), Shape(tagged=True), Shape(definite=True), Shape(nitrotpm=True)])
def test_whole_documents_verify(shape: Shape) -> None:
    authentic = authenticate(shape)
    assert authentic.document.kind == (abi.NITROTPM if shape.nitrotpm else abi.ENCLAVE)
    assert authentic.instance == "i-0a1b2c3d4e5f60718"
    assert authentic.region == "eu-central-1"


@pytest.mark.parametrize(
    ("shape", "code"),
    [
        (Shape(chain=Chain(root="impostor")), Rejection.CHAIN_NOT_TRUSTED),
        (Shape(cabundle=(1, 2, 3)), Rejection.CHAIN_NOT_TRUSTED),
        (Shape(cabundle=(3, 2, 1, 0)), Rejection.CHAIN_NOT_TRUSTED),
        (Shape(cabundle=(0, 2, 1, 3)), Rejection.CHAIN_NOT_TRUSTED),
        (Shape(cabundle=(0, 1, 3)), Rejection.CHAIN_NOT_TRUSTED),
        (Shape(cabundle=(0,)), Rejection.CHAIN_NOT_TRUSTED),
        (Shape(chain=Chain(leaf_is_ca=True)), Rejection.CHAIN_NOT_TRUSTED),
        (Shape(chain=Chain(not_authorities=frozenset({3}))), Rejection.CHAIN_NOT_TRUSTED),
        (Shape(chain=Chain(issuers_until=NOW - 1)), Rejection.CERTIFICATE_NOT_VALID_NOW),
        (Shape(chain=Chain(leaf_until=NOW - 1)), Rejection.CERTIFICATE_NOT_VALID_NOW),
        (Shape(chain=Chain(leaf_from=NOW + 1)), Rejection.CERTIFICATE_NOT_VALID_NOW),
        (Shape(payload={"timestamp": int((NOW - 60) * 1000)}), Rejection.CERTIFICATE_NOT_VALID_NOW),
        (Shape(payload={"timestamp": int((NOW + 10_900) * 1000)}), Rejection.CERTIFICATE_NOT_VALID_NOW),
        (Shape(signer="somebody else"), Rejection.BAD_SIGNATURE),
        (Shape(outer={3: bytes(96)}), Rejection.BAD_SIGNATURE),
        (Shape(outer={3: b"\xff" * 96}), Rejection.BAD_SIGNATURE),
        (Shape(chain=Chain(leaf_curve="secp256r1"), outer={3: b"s" * 96}), Rejection.BAD_KEY),
        (Shape(payload={"certificate": b"\x30\x03junk"}), Rejection.MALFORMED_CERTIFICATE),
        (Shape(payload={"cabundle": [b"junk"]}), Rejection.MALFORMED_CERTIFICATE),
    ],
)
def test_a_document_that_is_wrong_in_one_way_is_refused_for_it(shape: Shape, code: Rejection) -> None:
    rejected(shape, code)


def test_an_issuer_of_a_foreign_chain_with_the_right_names_is_refused() -> None:
    genuine, foreign = nitro.certificates(Chain()), nitro.certificates(Chain(root="impostor"))
    spliced = [genuine[0], *foreign[1:4]]
    rejected(Shape(chain=Chain(root="impostor"), payload={"cabundle": spliced}), Rejection.BAD_SIGNATURE)


def test_revocation_lists_count_where_they_are_given() -> None:
    made = nitro.certificates(Chain())
    evidence = parse_evidence(nitro.document(), nitro.root())

    def listed(*lists: Crl) -> CheckLog:
        log = CheckLog()
        evidence.authenticate(log, Endorsements(crls=lists), now=NOW)
        return log

    assert [check.status for check in listed().checks][-1] == "not checked"
    every = [nitro.revocation_list(issuer) for issuer in range(4)]
    statuses = [(check.name, check.status) for check in listed(*every).checks if "revocation" in check.name]
    assert len(statuses) == 4
    assert {status for _, status in statuses} == {"passed"}
    for bad, code in (
        (nitro.revocation_list(3, made[4]), Rejection.CERTIFICATE_REVOKED),
        (nitro.revocation_list(1, made[2]), Rejection.CERTIFICATE_REVOKED),
        (nitro.revocation_list(1, signer="impostor"), Rejection.BAD_SIGNATURE),
        (nitro.revocation_list(1, until=NOW - 1), Rejection.CERTIFICATE_NOT_VALID_NOW),
    ):
        with pytest.raises(VerificationError) as raised:
            listed(bad)
        assert raised.value.code is code


MALFORMED: list[Shape] = [
    Shape(protected=b"\xa1\x01\x26"),
    Shape(protected=b"\xa2\x01\x38\x22\x04\x41\x01"),
    Shape(protected=b""),
    Shape(outer={0: {1: -35}}),
    Shape(outer={1: {4: b"kid"}}),
    Shape(outer={1: []}),
    Shape(outer={2: None}),
    Shape(outer={2: {}}),
    Shape(outer={3: b"s" * 95}),
    Shape(outer={3: "s" * 96}),
    Shape(payload={"module_id": ABSENT}),
    Shape(payload={"module_id": ""}),
    Shape(payload={"module_id": "i-0\n"}),
    Shape(payload={"module_id": 7}),
    Shape(payload={"digest": "SHA256"}),
    Shape(payload={"digest": ABSENT}),
    Shape(payload={"timestamp": 0}),
    Shape(payload={"timestamp": -1}),
    Shape(payload={"timestamp": 1 << 63}),
    Shape(payload={"timestamp": True}),
    Shape(payload={"pcrs": {}}),
    Shape(payload={"pcrs": {0: b"x" * 32}}),
    Shape(payload={"pcrs": {0: "x" * 48}}),
    Shape(payload={"pcrs": {32: b"x" * 48}}),
    Shape(payload={"pcrs": {-1: b"x" * 48}}),
    Shape(payload={"pcrs": {"0": b"x" * 48}}),
    Shape(payload={"pcrs": dict.fromkeys(range(33), b"x" * 48)}),
    Shape(payload={"pcrs": [b"x" * 48]}),
    Shape(payload={"nitrotpm_pcrs": dict(nitro.NITROTPM_PCRS)}),
    Shape(payload={"certificate": b""}),
    Shape(payload={"certificate": None}),
    Shape(payload={"certificate": b"c" * 4097}),
    Shape(payload={"cabundle": []}),
    Shape(payload={"cabundle": [b"c"] * 17}),
    Shape(payload={"cabundle": ["c"]}),
    Shape(payload={"user_data": b"u" * 513}),
    Shape(payload={"nonce": b"n" * 513}),
    Shape(payload={"public_key": b"k" * 1025}),
    Shape(payload={"user_data": "text"}),
    Shape(payload={"unknown": None}),
]


@pytest.mark.parametrize("shape", MALFORMED)
def test_a_malformed_document_is_refused(shape: Shape) -> None:
    with pytest.raises(WireError) as raised:
        parse_evidence(nitro.document(shape), nitro.root())
    assert raised.value.code == "MALFORMED_EVIDENCE"


def test_duplicate_keys_are_refused_where_others_take_the_last() -> None:
    fields = nitro.payload_fields(Shape())
    encoded = nitro.encode_payload(fields)
    again = encoded[:-1] + cbor2.dumps("nonce") + cbor2.dumps(b"another") + b"\xff"
    assert cbor2.loads(again)["nonce"] == b"another"
    with pytest.raises(WireError, match="duplicate"):
        parse_evidence(nitro.document(raw_payload=again))


@pytest.mark.parametrize(
    "content",
    [
        cbor2.dumps(cbor2.CBORTag(98, [1])),
        cbor2.dumps([b"", {}, b""]),
        cbor2.dumps({1: 2}),
        cbor2.dumps("text"),
        b"\xd2",
        b"\xd8",
        b"",
    ],
)
def test_what_is_no_cose_sign1_is_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        parse_evidence(content)


@pytest.mark.parametrize(
    "content",
    [
        "fb3ff0000000000000",
        "f7",
        "f0",
        "ff",
        "1f",
        "3f",
        "1c",
        "5f4101ff",
        "7f6161ff",
        "61ff",
        "a1f401",
        "a1410102",
        "a2010201ff",
        "a2010101",
        "bf01",
        "9f",
        "c100",
        "0000",
        "81" * 10 + "00",
        "8182",
    ],
)
def test_the_reader_of_foreign_cbor_refuses(content: str) -> None:
    with pytest.raises(WireError):
        foreign_cbor.decode(bytes.fromhex(content), limit_bytes=64)


def test_the_reader_of_foreign_cbor_reads_what_others_write() -> None:
    value: Any = {"a": [1, -1, 24, 256, 70_000, 1 << 40, True, False, None, b"b", "text"], 5: {}, -3: []}
    assert foreign_cbor.decode(cbor2.dumps(value), limit_bytes=256) == value
    assert foreign_cbor.decode(bytes.fromhex("bf0102ff"), limit_bytes=8) == {1: 2}
    assert foreign_cbor.decode(bytes.fromhex("9f0102ff"), limit_bytes=8) == [1, 2]
    assert foreign_cbor.decode(bytes.fromhex("1800"), limit_bytes=8) == 0
    with pytest.raises(WireError, match="exceed"):
        foreign_cbor.decode(bytes(9), limit_bytes=8)
    with pytest.raises(WireError, match="too many"):
        foreign_cbor.decode(cbor2.dumps([0] * 5000), limit_bytes=1 << 16)


def test_our_own_binding_is_h_nonce_and_key() -> None:
    fields = {"user_data": H, "nonce": NONCE, "public_key": SPKI}
    binding = SessionBinding(claims=CLAIMS, nonce=NONCE, binder=None, spki=SPKI)
    log = CheckLog()
    authenticate(Shape(payload=fields)).check_session(log, binding)
    assert [check.status for check in log.checks] == ["passed"] * 3
    plain = {**fields, "public_key": None}
    authenticate(Shape(payload=plain)).check_session(CheckLog(), replace(binding, spki=None))
    for name, code in (
        ("user_data", Rejection.EVIDENCE_BINDING),
        ("nonce", Rejection.NONCE_MISMATCH),
        ("public_key", Rejection.EVIDENCE_BINDING),
    ):
        for other in (None, b"other", ABSENT):
            with pytest.raises(VerificationError) as raised:
                authenticate(Shape(payload={**fields, name: other})).check_session(CheckLog(), binding)
            assert raised.value.code is code


def test_a_foreign_binding_is_compared_where_it_is_given() -> None:
    log = CheckLog()
    authentic = authenticate(Shape(payload={"user_data": b"value" + bytes(3), "nonce": NONCE}))
    authentic.check_foreign(log, ForeignBinding(report_data=b"value", nonce=NONCE))
    assert [check.status for check in log.checks] == ["passed", "passed", "not checked"]
    with pytest.raises(VerificationError, match="EVIDENCE_BINDING"):
        authenticate(Shape()).check_foreign(CheckLog(), ForeignBinding(report_data=b"value"))
    with pytest.raises(VerificationError, match="NONCE_MISMATCH"):
        authenticate(Shape()).check_foreign(CheckLog(), ForeignBinding(nonce=NONCE))


def test_the_policy_accepts_what_it_names_and_lists_what_it_does_not() -> None:
    log = appraise(Shape(), policy())
    assert [(check.name, check.status) for check in log.checks] == [
        ("age of the document", "passed"),
        ("debug mode", "passed"),
        ("launch measurement", "passed"),
        ("module id", "not checked"),
    ]
    for module_id in (MODULE_ID, "i-0a1b2c3d4e5f60718"):
        assert appraise(Shape(), policy(module_ids=[module_id])).checks[-1].status == "passed"


@pytest.mark.parametrize(
    ("shape", "table", "now", "code"),
    [
        (Shape(), {"module_ids": ["i-0a1b2c3d"]}, NOW, Rejection.PLATFORM_NOT_ALLOWED),
        (Shape(), {"max_document_age_s": 60}, NOW + 61, Rejection.ATTESTATION_TOO_OLD),
        (Shape(), {}, NOW + DEFAULT_MAX_DOCUMENT_AGE_S + 1, Rejection.ATTESTATION_TOO_OLD),
        (Shape(), {}, NOW - 301, Rejection.CLOCK_SKEW),
        (Shape(), {"measurements": [{**PINNED, "pcr8": "11" * 48}]}, NOW, Rejection.MEASUREMENT_NOT_ALLOWED),
        (Shape(nitrotpm=True), {}, NOW, Rejection.MEASUREMENT_NOT_ALLOWED),
        (
            Shape(payload={"pcrs": {0: nitro.PCRS[0], 1: nitro.PCRS[1], 2: b"z" * 48}}),
            {},
            NOW,
            Rejection.MEASUREMENT_NOT_ALLOWED,
        ),
        (Shape(payload={"pcrs": {**nitro.PCRS, 0: bytes(48)}}), {}, NOW, Rejection.DEBUG_NOT_ALLOWED),
        (Shape(payload={"pcrs": {3: b"z" * 48}}), {}, NOW, Rejection.DEBUG_NOT_ALLOWED),
    ],
)
def test_the_policy_refuses(shape: Shape, table: dict[str, Any], now: float, code: Rejection) -> None:
    with pytest.raises(VerificationError) as raised:
        appraise(shape, policy(**table), now=now)
    assert raised.value.code is code


def test_b006_zero_registers_are_debug_and_no_pin_can_make_them_right() -> None:
    debug = Shape(payload={"pcrs": dict.fromkeys(range(16), bytes(48))})
    with pytest.raises(PolicyError, match="DEBUG_NOT_ALLOWED"):
        appraise(debug, policy())
    with pytest.raises(PolicyError, match="DEBUG_NOT_ALLOWED"):
        appraise(debug, policy(report_only=True))
    for zero in ("pcr0", "pcr1", "pcr2"):
        with pytest.raises(PolicyFileError, match=f"{zero}: all zeros pin nothing"):
            parse_policy({"measurements": [{**PINNED, zero: "00" * 48}]}, "families.nitro", False)
    statuses = {check.name: check.status for check in appraise(debug, policy(allow_debug=True)).checks}
    assert statuses["launch measurement"] == "not checked"
    assert dict(authenticate(debug).facts)["Nitro debug mode"] == "yes"


def test_b045_a_certificate_of_ten_years_makes_no_old_document_young() -> None:
    day_s = 86_400
    made = NOW - 40 * day_s
    lasting = Chain(leaf_from=made - 1, leaf_until=NOW + 3650 * day_s)
    old = Shape(chain=lasting, payload={"timestamp": int(made * 1000)})
    with pytest.raises(VerificationError, match="ATTESTATION_TOO_OLD"):
        appraise(old, policy(max_document_age_s=day_s))


def test_nitrotpm_documents_have_pins_of_their_own() -> None:
    pinned = {"pcr4": nitro.NITROTPM_PCRS[4].hex(), "pcr7": nitro.NITROTPM_PCRS[7].hex()}
    demanded = parse_policy({"nitrotpm_measurements": [pinned]}, "families.nitro", False)
    appraise(Shape(nitrotpm=True), demanded)
    for shape in (Shape(nitrotpm=True, payload={"nitrotpm_pcrs": {4: b"o" * 48}}), Shape()):
        with pytest.raises(PolicyError, match="MEASUREMENT_NOT_ALLOWED"):
            appraise(shape, demanded)


def test_report_only_judges_all_but_the_measurement() -> None:
    statuses = {check.name: check.status for check in appraise(Shape(), policy(report_only=True)).checks}
    assert statuses["launch measurement"] == "not checked"
    assert statuses["age of the document"] == "passed"


def test_without_a_policy_of_its_own_nothing_is_accepted() -> None:
    with pytest.raises(PolicyError, match="FAMILY_NOT_ALLOWED"):
        appraise(Shape(), None)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "measurements"),
        ({"measurements": []}, "measurements"),
        ({"measurements": "x"}, "measurements"),
        ({"measurements": ["x"]}, "a table of registers"),
        ({"measurements": [{"pcr0": "11" * 48}]}, "pcr1"),
        ({"measurements": [{**PINNED, "pcr16": "11" * 48}]}, "pcr16"),
        ({"measurements": [{**PINNED, "pcr0": "11" * 32}]}, "96 hex digits"),
        ({"measurements": [{**PINNED, "pcr0": "*"}]}, "96 hex digits"),
        ({"measurements": [{**PINNED, "pcr0": 5}]}, "96 hex digits"),
        ({"nitrotpm_measurements": [{"pcr7": "11" * 48}]}, "pcr4"),
        ({"measurements": [PINNED], "module_ids": []}, "module_ids"),
        ({"measurements": [PINNED], "module_ids": ["*"]}, "wildcard"),
        ({"measurements": [PINNED], "module_ids": [" "]}, "module_ids"),
        ({"measurements": [PINNED], "module_ids": [7]}, "module_ids"),
        ({"measurements": [PINNED], "max_document_age_s": 0}, "max_document_age_s"),
        ({"measurements": [PINNED], "max_document_age_s": 1.5}, "max_document_age_s"),
        ({"measurements": [PINNED], "max_document_age_s": True}, "max_document_age_s"),
        ({"measurements": [PINNED], "allow_debug": "yes"}, "allow_debug"),
        ({"measurements": [PINNED], "allow_anything": True}, "allow_anything"),
    ],
)
def test_a_policy_that_could_not_be_enforced_is_an_error(table: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyFileError, match=message):
        parse_policy(table, "families.nitro", False)


def test_a_policy_table_is_read_back_the_same() -> None:
    table = {
        "measurements": [PINNED, {**PINNED, "pcr8": "AB" * 48}, PINNED],
        "nitrotpm_measurements": [{"pcr4": "11" * 48}],
        "module_ids": [MODULE_ID],
        "max_document_age_s": 60,
        "allow_debug": True,
    }
    demanded = parse_policy(table, "families.nitro", False)
    assert len(demanded.enclave) == 2
    assert parse_policy(dict(demanded.to_table()), "families.nitro", False) == demanded
    assert demanded.count == 1
    for least in (policy(), policy(report_only=True)):
        assert parse_policy(dict(least.to_table()), "families.nitro", least.report_only) == least


def test_a_module_id_without_a_part_is_the_instance_itself() -> None:
    authentic = authenticate(Shape(payload={"module_id": "module"}, chain=Chain(leaf_name="module")))
    assert (authentic.instance, authentic.region) == ("module", "unknown")
    assert authentic.identity == b"module"


def test_an_exchanged_trust_anchor_is_no_trust_anchor() -> None:
    with pytest.raises(RuntimeError, match="not the one"):
        anchors.load_anchor(ROOT_FILE, "00" * 32)
