"""Evidence inside certificates: genuine ones of other stacks, and made ones of every scheme with one thing wrong."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cbor2
import pytest
from cryptography import x509 as px
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from client_sdk.checks import CheckLog
from client_sdk.errors import PolicyFileError, UndecidedError, VerificationError
from client_sdk.policy.policy import parse_families
from client_sdk.tee import x509
from client_sdk.tee.certificate import carriers, formats
from client_sdk.tee.certificate.policy import CertificatePolicy, parse_policy
from client_sdk.tee.certificate.verify import AttestedCertificate, Question, verify_certificate
from client_sdk.tee.evidence import Endorsements, ForeignBinding, ParsedEvidence
from client_sdk.tee.nitro.verify import parse_evidence as parse_nitro
from client_sdk.tee.sgx.verify import parse_evidence as parse_sgx
from client_sdk.tee.tdx.verify import parse_evidence as parse_tdx
from client_sdk.wire import digests, names
from client_sdk.wire.errors import WireError
from tests.simulators import intel, nitro
from tests.unit.client_sdk.tee.test_der import tlv

VECTORS = Path(__file__).parents[3] / "vectors" / "tee"
GRAMINE = (VECTORS / "certificates/ratls_gramine.cert.pem").read_bytes()
SGX_SDK = (VECTORS / "certificates/ratls_intel-sgxsdk.cert.pem").read_bytes()
EVERVAULT = (VECTORS / "nitro/ratls_prod_2023-01-18.cert.pem").read_bytes()
IN_2024 = 1706745600.0
NOW = float(intel.NOW)
KEY, OTHER = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
LONG = CertificatePolicy(max_evidence_age_s=3_000_000_000)
SGX_SIDE, TDX_SIDE = intel.Intel(tee=intel.SGX), intel.Intel()
Extra = tuple[str, bytes, bool]


def spki_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


SPKI = spki_of(KEY)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def certificate(extensions: Sequence[Extra], *, key: ec.EllipticCurvePrivateKey = KEY, **more: Any) -> bytes:
    """A self-signed certificate with raw extensions."""
    name = px.Name([px.NameAttribute(px.NameOID.COMMON_NAME, more.get("name", "peer"))])
    start = datetime.datetime.fromtimestamp(NOW - more.get("age_s", 60), datetime.UTC)
    builder = (
        px.CertificateBuilder()
        .subject_name(name)
        .issuer_name(more.get("issuer", name))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(seconds=more.get("life_s", 86_400)))
    )
    for oid, value, critical in extensions:
        builder = builder.add_extension(px.UnrecognizedExtension(px.ObjectIdentifier(oid), value), critical=critical)
    if "san" in more:
        builder = builder.add_extension(px.SubjectAlternativeName([px.DNSName(n) for n in more["san"]]), critical=False)
    return builder.sign(more.get("signer", key), hashes.SHA256()).public_bytes(Encoding.DER)


def parse(family: str, content: bytes) -> ParsedEvidence:
    """The families' own parsers, with the simulators' roots."""
    roots: Mapping[str, Any] = {
        "sgx": partial(parse_sgx, root=SGX_SIDE.root()),
        "tdx": partial(parse_tdx, root=TDX_SIDE.root()),
        "nitro": partial(parse_nitro, anchor=nitro.root()),
    }
    return roots[family](content)  # type: ignore[no-any-return]


POLICIES = parse_families({"sgx": {}, "tdx": {}, "nitro": {}}, report_only=True)
COLLATERAL = Endorsements(collateral=(SGX_SIDE.collateral(), TDX_SIDE.collateral()))


def judge(data: bytes, log: CheckLog | None = None, **more: Any) -> AttestedCertificate:
    question = Question(
        policies=more.get("policies", POLICIES),
        endorsements=more.get("endorsements", COLLATERAL),
        binding=more.get("binding", ForeignBinding()),
        now=more.get("now", NOW),
        certificate=more.get("certificate", CertificatePolicy()),
        parse=more.get("parse", parse),
    )
    return verify_certificate(data, log or CheckLog(), question)


def refused(data: bytes, **more: Any) -> str:
    with pytest.raises(VerificationError) as caught:
        judge(data, **more)
    return str(caught.value.code)


def sgx_quote(report_data: bytes) -> bytes:
    return intel.quote(SGX_SIDE, intel.enclave_body(report_data=report_data.ljust(64, b"\x00")))


def tdx_quote(report_data: bytes, version: int = 4) -> bytes:
    return intel.quote(TDX_SIDE, intel.TdBody(report_data=report_data.ljust(64, b"\x00"), version=version))


def nsm(user_data: bytes) -> bytes:
    made = nitro.Shape(payload={"user_data": user_data, "timestamp": int(nitro.NOW * 1000)})
    return nitro.document(made)


def ccc(quote: Any = None, claims: Mapping[str, Any] | None = None, tag: int = 60000) -> Extra:
    named = {"pubkey-hash": cbor2.dumps([1, sha256(SPKI)])} if claims is None else dict(claims)
    encoded = cbor2.dumps(named)
    made = sgx_quote(sha256(encoded)) if quote is None else quote
    return names.OID_CCC, cbor2.dumps(cbor2.CBORTag(tag, [made, encoded])), False


def cmw(value: Any) -> Extra:
    return names.OID_CMW, tlv(0x04, cbor2.dumps(value)), False


def cmw_json(value: Any) -> Extra:
    return names.OID_CMW, tlv(0x0C, json.dumps(value).encode()), False


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def dstack_scale(kind: int, evidence: bytes) -> bytes:
    size = len(evidence)
    length = struct.pack("<H", size << 2 | 1) if size < 1 << 14 else struct.pack("<I", size << 2 | 2)
    return b"\x00" + bytes([kind]) + length + evidence + b"whatever follows"


def msgpack(value: Any) -> bytes:
    """As much MessagePack as the tests need."""
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(msgpack(k) + msgpack(v) for k, v in value.items())
    if isinstance(value, str):
        return bytes([0xD9, len(value)]) + value.encode()
    if isinstance(value, bytes):
        return b"\xc5" + struct.pack(">H", len(value)) + value
    if isinstance(value, list):
        return b"\xdc" + struct.pack(">H", len(value)) + b"".join(msgpack(item) for item in value)
    if value is None:
        return b"\xc0"
    return (
        bytes([value]) if value < 128 else bytes([0xCC, value]) if value < 256 else b"\xce" + struct.pack(">I", value)
    )


def dstack_v1(kind: str, data: Mapping[str, Any], version: int = 1) -> bytes:
    return msgpack({"version": version, "platform": {"kind": kind, "data": dict(data)}, "stack": None})


RATLS = hashlib.sha512(b"ratls-cert:" + SPKI).digest()
OWN = digests.certificate_report_data(SPKI)
TDX_MEDIA = names.MEDIA_TYPE_PREFIX + "tdx"

PINNED = Question(policies={}, endorsements=Endorsements(), binding=ForeignBinding(), now=0).parse

GOOD: Mapping[str, Extra] = {
    "ccc sgx": ccc(),
    "ccc tdx": ccc(tdx_quote(sha256(cbor2.dumps({"pubkey-hash": cbor2.dumps([1, sha256(SPKI)])})))),
    "ccc sha384": ccc(claims={"pubkey-hash": cbor2.dumps([7, hashlib.sha384(SPKI).digest()])}),
    "ccc sha512 and more": ccc(claims={"pubkey-hash": cbor2.dumps([8, hashlib.sha512(SPKI).digest()]), "more": b"x"}),
    "intel": (carriers.OID_INTEL, sgx_quote(sha256(SPKI)) + bytes(100), False),
    "intel twice": (carriers.OID_INTEL_TWICE, sgx_quote(sha256(SPKI)), False),
    "intel tdx 5": (carriers.OID_INTEL, tdx_quote(sha256(SPKI), version=5), False),
    "cmw record": cmw([TDX_MEDIA, tdx_quote(OWN)]),
    "cmw record of evidence": cmw([TDX_MEDIA, tdx_quote(OWN), 4]),
    "cmw of unknown type": cmw([30001, tdx_quote(sha256(SPKI))]),
    "cmw sha512": cmw(["application/x", tdx_quote(hashlib.sha512(SPKI).digest())]),
    "cmw tag": cmw(cbor2.CBORTag(1668546817 + 600, sgx_quote(OWN))),
    "cmw collection": cmw({"__cmwc_t": "tag:x", "a": [1, b"endorsement", 2], "b": {"c": [TDX_MEDIA, tdx_quote(OWN)]}}),
    "cmw json": cmw_json([TDX_MEDIA, b64(tdx_quote(OWN))]),
    "cmw json collection": cmw_json({"a": ["text/plain", b64(b"x")], "b": [TDX_MEDIA, b64(tdx_quote(OWN)), 4]}),
    "dstack quote": (carriers.OID_DSTACK_QUOTE, tlv(4, tdx_quote(RATLS)), False),
    "dstack scale": (carriers.OID_DSTACK, tlv(4, dstack_scale(0, tdx_quote(RATLS))), False),
    "dstack scale long": (carriers.OID_DSTACK, tlv(4, dstack_scale(1, tdx_quote(RATLS) + bytes(20_000))), False),
    "dstack msgpack": (carriers.OID_DSTACK, tlv(4, dstack_v1("tdx", {"quote": list(tdx_quote(RATLS))})), False),
    "dstack msgpack bin": (carriers.OID_DSTACK, tlv(4, dstack_v1("gcp-tdx", {"quote": tdx_quote(RATLS)})), False),
}


@pytest.mark.parametrize("name", GOOD)
def test_each_scheme_binds_the_key(name: str) -> None:
    log = CheckLog()
    found = judge(certificate([GOOD[name]]), log)
    assert len(found.evidence) == len(found.schemes) == 1
    assert "evidence binds the certificate's key" in [check.name for check in log.checks if check.status == "passed"]
    assert "freshness" in [check.name for check in log.checks if check.status == "not checked"]


@pytest.mark.parametrize("name", GOOD)
def test_b043_evidence_moved_to_another_key_is_refused(name: str) -> None:
    """Also where the collateral is missing: what does not even claim to bind the key is a no, not a perhaps."""
    moved = certificate([GOOD[name]], key=OTHER)
    assert refused(moved) == "EVIDENCE_BINDING"
    assert refused(moved, endorsements=Endorsements()) == "EVIDENCE_BINDING"
    with pytest.raises(UndecidedError):
        judge(certificate([GOOD[name]]), endorsements=Endorsements())


NITRO_NOW = nitro.NOW + 60


def nitro_certificate(extensions: Sequence[Extra], **more: Any) -> bytes:
    return certificate(extensions, age_s=NOW - nitro.NOW, **more)


@pytest.mark.parametrize(
    ("extension", "user_data"),
    [
        (lambda d: cmw([names.MEDIA_TYPE_PREFIX + "nitro", d]), OWN),
        (lambda d: cmw(["application/eat+cwt", d]), SPKI),
        (lambda d: (carriers.OID_DSTACK, tlv(4, dstack_scale(2, d)), False), RATLS),
        (lambda d: (carriers.OID_DSTACK, tlv(4, dstack_v1("nitro-enclave", {"nsm_quote": d})), False), SPKI),
    ],
)
def test_nitro_in_extensions(extension: Any, user_data: bytes) -> None:
    judge(nitro_certificate([extension(nsm(user_data))]), now=NITRO_NOW)
    assert refused(nitro_certificate([extension(nsm(b"x" * 64))]), now=NITRO_NOW) == "EVIDENCE_BINDING"
    assert refused(nitro_certificate([extension(nsm(user_data))], key=OTHER), now=NITRO_NOW) == "EVIDENCE_BINDING"


def test_nitro_among_the_alternative_names() -> None:
    name = nsm(SPKI).hex() + ".example.com"
    judge(nitro_certificate([], san=["example.com", name]), now=NITRO_NOW)
    assert refused(nitro_certificate([], san=[name], key=OTHER), now=NITRO_NOW) == "EVIDENCE_BINDING"
    assert refused(nitro_certificate([], san=[name, name]), now=NITRO_NOW) == "MALFORMED_EVIDENCE"
    assert refused(nitro_certificate([], san=["x" * 600 + ".example.com"]), now=NITRO_NOW) == "MALFORMED_EVIDENCE"


def test_genuine_nitro_certificate() -> None:
    genuine = parse_families({"nitro": {}}, report_only=True)
    more: dict[str, Any] = {"policies": genuine, "parse": PINNED}
    at = datetime.datetime(2023, 1, 18, 13, 10, tzinfo=datetime.UTC).timestamp()
    found = judge(EVERVAULT, now=at, **more)
    assert found.schemes == ("alternative name",)
    assert refused(EVERVAULT, now=at + 86_400, **more) == "CERTIFICATE_NOT_VALID_NOW"
    assert refused(EVERVAULT, now=at + 4 * 365 * 86_400, **more) == "CERTIFICATE_NOT_VALID_NOW"
    leaf, issuer = x509.split(EVERVAULT)[0]
    judge(leaf, now=at, **more)
    other = certificate([], name="cages.evervault.com")
    judge(leaf + other, now=at, **more)  # an authority that did not issue it says nothing
    spoilt = leaf[:-1] + bytes([leaf[-1] ^ 1])
    assert refused(spoilt + issuer, now=at, **more) == "BAD_SIGNATURE"


@pytest.mark.parametrize("data", [GRAMINE, SGX_SDK], ids=["gramine", "intel-sgxsdk"])
def test_genuine_sgx_certificates(data: bytes) -> None:
    """They parse, they bind their keys, and their enclaves are debug ones."""
    policies = parse_families({"sgx": {}}, report_only=True)
    more: dict[str, Any] = {
        "policies": policies,
        "parse": PINNED,
        "now": IN_2024,
        "certificate": LONG,
    }
    parsed = x509.parse_certificates(data)[0]
    for carried in carriers.find(parsed):
        report_data = formats.carried_report_data(carried.family, carried.content)
        assert report_data in {value.ljust(64, b"\x00") for value in carried.expected}
    assert refused(data, **more) == "DEBUG_NOT_ALLOWED"
    assert len(carriers.find(parsed)) == (2 if data is GRAMINE else 1)


def test_sgx_sample_quote_is_not_taken_for_the_binding() -> None:
    found = carriers.find(x509.parse_certificates(SGX_SDK)[0])
    assert [carried.scheme for carried in found] == ["CCC"]
    alone = certificate([(carriers.OID_SGX_SAMPLE, sgx_quote(sha256(SPKI)), False)])
    assert refused(alone) == "MALFORMED_EVIDENCE"


def test_two_pieces_of_evidence_must_both_bind_the_key() -> None:
    judge(certificate([GOOD["ccc sgx"], GOOD["intel twice"]]))
    wrong = (carriers.OID_INTEL, sgx_quote(sha256(spki_of(OTHER))), False)
    assert refused(certificate([GOOD["ccc sgx"], wrong])) == "EVIDENCE_BINDING"


def test_second_evidence_extension_of_one_kind_is_refused() -> None:
    name = px.ObjectIdentifier(names.OID_CCC)
    with pytest.raises(ValueError, match="already been set"):
        certificate([GOOD["ccc sgx"], GOOD["ccc sgx"]])
    data = certificate([GOOD["ccc sgx"], ("2.23.133.5.4.8", GOOD["ccc sgx"][1], False)])
    encoded = tlv(6, bytes.fromhex("678105050408"))
    doubled = data.replace(encoded, tlv(6, bytes.fromhex("678105050409")))
    assert name.dotted_string == names.OID_CCC
    outer = x509.parse_certificate(doubled)
    with pytest.raises(WireError):
        carriers.find(outer)
    assert refused(doubled) in ("BAD_SIGNATURE", "MALFORMED_CERTIFICATE")


def test_b045_the_verifier_has_a_limit_of_its_own() -> None:
    old = certificate([GOOD["ccc sgx"]], age_s=40 * 86_400, life_s=10 * 365 * 86_400)
    assert refused(old) == "ATTESTATION_TOO_OLD"
    judge(old, certificate=CertificatePolicy(max_evidence_age_s=41 * 86_400))


def test_b046_validity_comes_before_any_work_on_evidence() -> None:
    for age in (2 * 86_400, -60):
        data = certificate([GOOD["ccc sgx"]], age_s=age)
        log = CheckLog()
        with pytest.raises(VerificationError) as caught:
            judge(data, log, parse=None)  # nothing would parse it
        assert caught.value.code == "CERTIFICATE_NOT_VALID_NOW"
        assert len(log.checks) == 2


def test_b050_what_the_holder_wrote_is_asserted_only() -> None:
    app = ("1.3.6.1.4.1.62397.1.3", b"\x04\x05admin", False)
    found = judge(certificate([GOOD["ccc sgx"], app], name="bank.example"))
    assert ("certificate subject", "bank.example") in found.asserted
    assert any("62397.1.3" in name for name, _ in found.asserted)
    assert "bank.example" not in str([evidence.facts for evidence in found.evidence])


def test_b061_our_extension_may_be_critical_and_an_unknown_one_may_not() -> None:
    oid, value, _ = GOOD["ccc sgx"]
    judge(certificate([(oid, value, True)]))
    assert refused(certificate([GOOD["ccc sgx"], ("1.2.3.4", b"\x05\x00", True)])) == "BAD_CERTIFICATE"
    judge(certificate([GOOD["ccc sgx"], ("1.2.3.4", b"\x05\x00", False)]))


def test_a_self_signed_certificate_is_signed_by_its_key() -> None:
    assert refused(certificate([GOOD["ccc sgx"]], signer=OTHER)) == "BAD_SIGNATURE"
    elsewhere = px.Name([px.NameAttribute(px.NameOID.COMMON_NAME, "an authority")])
    judge(certificate([GOOD["ccc sgx"]], signer=OTHER, issuer=elsewhere))


def test_claims_changed() -> None:
    oid, value, _ = GOOD["ccc sgx"]
    quote, claims = cbor2.loads(value).value
    changed = cbor2.dumps({**cbor2.loads(claims), "more": 1})
    assert (
        refused(certificate([(oid, cbor2.dumps(cbor2.CBORTag(60000, [quote, changed])), False)])) == "EVIDENCE_BINDING"
    )


def test_what_the_caller_expects_beyond_the_key() -> None:
    nonce = b"\x07" * 32
    with_nonce = certificate([ccc(claims={"pubkey-hash": cbor2.dumps([1, sha256(SPKI)]), "nonce": nonce})])
    judge(with_nonce, binding=ForeignBinding(nonce=nonce))
    assert refused(with_nonce, binding=ForeignBinding(nonce=b"\x08" * 32)) == "NONCE_MISMATCH"
    assert refused(certificate([GOOD["intel"]]), binding=ForeignBinding(nonce=nonce)) == "NONCE_MISMATCH"
    judge(certificate([GOOD["intel"]]), binding=ForeignBinding(report_data=sha256(SPKI)))
    assert refused(certificate([GOOD["intel"]]), binding=ForeignBinding(report_data=nonce)) == "EVIDENCE_BINDING"


def test_families_that_the_policy_does_not_name() -> None:
    assert refused(certificate([GOOD["cmw record"]]), policies={"sgx": POLICIES["sgx"]}) == "FAMILY_NOT_ALLOWED"
    unknown = cmw([names.MEDIA_TYPE_PREFIX + "other", b"x"])
    assert refused(certificate([unknown])) == "FAMILY_NOT_ALLOWED"
    insecure = cmw([names.MEDIA_TYPE_PREFIX + "insecure", b"x"])
    assert refused(certificate([insecure])) == "FAMILY_NOT_ALLOWED"


def test_dstack_event_log_comes_along() -> None:
    log = (carriers.OID_DSTACK_EVENTS, tlv(4, b"[]"), False)
    found = carriers.find(x509.parse_certificate(certificate([GOOD["dstack quote"], log])))
    assert [(entry.kind, entry.content) for entry in found[0].endorsements.event_logs] == [("dstack", b"[]")]


def test_dstack_chain_of_an_snp_machine_comes_along() -> None:
    report = struct.pack("<I", 3) + bytes(1180)
    chain = [list(certificate([])), certificate([])]
    value = dstack_v1("sev-snp", {"report": report, "cert_chain": chain})
    found = carriers.find(x509.parse_certificate(certificate([(carriers.OID_DSTACK, tlv(4, value), False)])))
    assert (found[0].family, len(found[0].endorsements.certificates)) == ("sev-snp", 2)
    assert formats.carried_report_data("sev-snp", report) == bytes(64)
    sniffed = carriers.find(x509.parse_certificate(certificate([cmw(["x/y", report])])))
    assert sniffed[0].family == "sev-snp"


def test_tpm_evidence_in_a_cmw() -> None:
    found = carriers.find(x509.parse_certificate(certificate([cmw([names.MEDIA_TYPE_PREFIX + "tpm2", b"\xa0"])])))
    assert found[0].expected == (sha256(b"attested-inference certificate v1\x00" + SPKI),)


@pytest.mark.parametrize(
    "extension",
    [
        (carriers.OID_DSTACK, tlv(4, b"\x00\x09\x00"), False),
        (carriers.OID_DSTACK, tlv(4, b"\x00"), False),
        (carriers.OID_DSTACK, tlv(4, b"\x01\x00"), False),
        (carriers.OID_DSTACK, tlv(4, dstack_v1("tdx", {}, version=2)), False),
        (carriers.OID_DSTACK, tlv(4, dstack_v1("cca", {})), False),
        ccc(b"x", tag=60001),
        ccc(b"x", tag=60002),
    ],
)
def test_unknown_versions_are_undecided(extension: Extra) -> None:
    with pytest.raises(UndecidedError) as caught:
        judge(certificate([extension]))
    assert caught.value.code == "UNSUPPORTED_VERSION"


QUOTE = tdx_quote(OWN)


@pytest.mark.parametrize(
    "extension",
    [
        ccc(b"x", tag=60003),
        ccc(5),
        ccc(b"x" * 47),
        ccc(b"\x04\x00\x02\x00\x07" + bytes(700)),
        ccc(claims={}),
        ccc(claims={"pubkey-hash": cbor2.dumps([2, b""])}),
        ccc(claims={"pubkey-hash": cbor2.dumps([1])}),
        ccc(claims={"pubkey-hash": cbor2.dumps([1, sha256(SPKI)]), "nonce": 5}),
        (names.OID_CCC, b"", False),
        (names.OID_CCC, cbor2.dumps([b"a", b"b"]), False),
        (names.OID_CCC, cbor2.dumps(cbor2.CBORTag(60000, [b"a"])), False),
        (carriers.OID_INTEL, QUOTE[:500], False),
        (carriers.OID_INTEL, QUOTE[:640], False),
        (names.OID_CMW, QUOTE, False),
        (names.OID_CMW, tlv(4, b"\xff"), False),
        cmw([]),
        cmw([1]),
        cmw(5),
        cmw([1, "text"]),
        cmw([1, b"x", "4"]),
        cmw([1, b"x"]),
        cmw({"__cmwc_t": "x"}),
        cmw({"a": [1, QUOTE], "b": [1, QUOTE]}),
        cmw(cbor2.CBORTag(5, b"x")),
        cmw(cbor2.CBORTag(1668546817, 5)),
        cmw_json([TDX_MEDIA, 5]),
        cmw_json([TDX_MEDIA, "#"]),
        cmw_json("x"),
        (names.OID_CMW, tlv(0x0C, b"{"), False),
        (names.OID_CMW, tlv(0x0C, b'{"a":1,"a":2}'), False),
        (names.OID_CMW, tlv(0x0C, b"[1.5]"), False),
        (names.OID_CMW, tlv(0x0C, b'{"a":' * 9 + b"{}" + b"}" * 9), False),
        (names.OID_CMW, tlv(0x0C, b'{"a":' * 30_000), False),
        (carriers.OID_DSTACK_QUOTE, QUOTE, False),
        (carriers.OID_DSTACK, tlv(4, b"\x00\x00\x03"), False),
        (carriers.OID_DSTACK, tlv(4, b"\x00\x00\xff\xff"), False),
        (carriers.OID_DSTACK, tlv(4, dstack_v1("tdx", {"quote": "text"})), False),
        (carriers.OID_DSTACK, tlv(4, dstack_v1("tdx", {"quote": [300]})), False),
        (carriers.OID_DSTACK, tlv(4, dstack_v1("sev-snp", {"report": b"", "cert_chain": 1})), False),
        (carriers.OID_DSTACK, tlv(4, msgpack({"version": 1, "platform": []})), False),
        cmw([names.MEDIA_TYPE_PREFIX + "sev-snp", b"short"]),
    ],
)
def test_malformed(extension: Extra) -> None:
    policies = {**POLICIES, **parse_families({"sev-snp": {}}, report_only=True)}
    assert refused(certificate([extension]), policies=policies).startswith("MALFORMED_")


def test_readers() -> None:
    value = {"a": [1, -2, b"x", "y", {3: {}}], "b": 1 << 40, "c": 70_000, "d": 300}
    assert formats.read_cbor(cbor2.dumps(value)) == value
    for bad in (
        b"",
        b"\xff",
        b"\xf5",
        b"\xf9\x00\x00",
        b"\x9f\xff",
        b"\x61\xff",
        b"\xa2\x01\x01\x01\x01",
        b"\xa1\x80\x01",
    ):
        with pytest.raises(WireError):
            formats.read_cbor(bad)
    for bad in (
        b"\x81" * 9 + b"\x01",
        b"\x9b" + b"\xff" * 8,
        b"\xbb" + b"\xff" * 8,
        b"\x5b" + b"\xff" * 8,
        b"\x01\x01",
    ):
        with pytest.raises(WireError):
            formats.read_cbor(bad)
    packed = b"\x84\xa1a\x93\x01\xc0\xc3\xa1b\xc4\x01x\xa1c\xde\x00\x01\x01\x02\xa1d\xcf" + bytes(7) + b"\x09"
    assert formats.read_msgpack(packed) == {"a": [1, None, True], "b": b"x", "c": {1: 2}, "d": 9}
    for bad in (
        b"",
        b"\xc1",
        b"\xca\x00\x00\x00\x00",
        b"\x91" * 9 + b"\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\x01\x01",
        b"\xd9\x01\xff",
    ):
        with pytest.raises(WireError):
            formats.read_msgpack(bad)
    assert formats.read_scale_bytes(b"\x04x", 0) == b"x"
    assert formats.sniff(b"nothing") is None
    assert formats.sniff(b"\x84rest") == "nitro"
    with pytest.raises(WireError):
        formats.carried_report_data("tdx", b"short")


def test_policy_table() -> None:
    assert parse_policy({}, "certificate").max_evidence_age_s == 86_400
    assert parse_policy({"max_evidence_age_s": 60}, "certificate").max_evidence_age_s == 60
    for wrong in ({"max_evidence_age_s": 0}, {"max_evidence_age_s": True}, {"max_evidence_age_s": "1"}, {"x": 1}):
        with pytest.raises(PolicyFileError):
            parse_policy(dict(wrong), "certificate")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(GOOD)), st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_any_change_of_an_extension_is_read_or_refused(name: str, at: int, put: bytes) -> None:
    oid, value, _ = GOOD[name]
    at %= len(value)
    data = certificate([(oid, value[:at] + put + value[at + len(put) :], False)])
    try:
        judge(data)
    except (VerificationError, UndecidedError):
        pass


def test_every_flipped_byte_of_a_certificate_is_refused() -> None:
    """But for the names: then an authority seems to have signed it, which nothing here asks for."""
    data = certificate([GOOD["ccc sgx"]])
    name = x509.parse_certificate(data).issuer
    starts = (data.index(name), data.rindex(name))
    for at in (*range(400), *range(400, len(data), 11)):
        spoilt = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            judge(spoilt)
        except (VerificationError, UndecidedError):
            continue
        assert any(start <= at < start + len(name) for start in starts)
