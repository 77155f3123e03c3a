"""Certificates and CRLs: genuine vendors' ones, and made ones in which one property is wrong."""

from __future__ import annotations

import base64
import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509 as px
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from client_sdk.errors import AuthenticityError, VerificationError
from client_sdk.tee import der, signed, x509
from client_sdk.tee.x509 import Certificate
from client_sdk.wire.errors import WireError
from tests.unit.client_sdk.tee.test_der import tlv

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NOW = START.timestamp() + 86_400
KEYS: dict[str, Any] = {name: ec.generate_private_key(ec.SECP384R1()) for name in ("root", "sub", "leaf", "other")}
RSA = rsa.generate_private_key(65537, 2048)


def name(text: str) -> px.Name:
    return px.Name([px.NameAttribute(px.NameOID.COMMON_NAME, text)])


def make(
    subject: str,
    issuer: str,
    *,
    ca: bool = True,
    path: int | None = None,
    usage: bool | None = None,
    **more: Any,
) -> Certificate:
    key, signer = more.get("key", KEYS[subject]), more.get("signer", KEYS[issuer])
    builder = (
        px.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key.public_key())
        .serial_number(more.get("serial", 7))
        .not_valid_before(more.get("before", START))
        .not_valid_after(more.get("after", START + datetime.timedelta(days=30)))
        .add_extension(px.BasicConstraints(ca=ca, path_length=path), critical=True)
    )
    if usage is not None:
        flags = dict.fromkeys(
            ("key_encipherment", "data_encipherment", "key_agreement", "crl_sign", "encipher_only", "decipher_only"),
            False,
        )
        builder = builder.add_extension(
            px.KeyUsage(digital_signature=True, content_commitment=False, key_cert_sign=usage, **flags), critical=True
        )
    digest = more.get("digest", hashes.SHA384())
    made = builder.sign(signer, digest, rsa_padding=more.get("padding"))
    return x509.parse_certificate(made.public_bytes(Encoding.DER))


ROOT = make("root", "root")
SUB = make("sub", "root")
LEAF = make("leaf", "sub", ca=False)


def crl(serials: tuple[int, ...] = (), *, signer: str = "sub", **more: Any) -> bytes:
    builder = (
        px.CertificateRevocationListBuilder()
        .issuer_name(name(more.get("issuer", "sub")))
        .last_update(START)
        .next_update(START + datetime.timedelta(days=10))
    )
    for serial in serials:
        entry = px.RevokedCertificateBuilder().serial_number(serial).revocation_date(START).build()
        builder = builder.add_revoked_certificate(entry)
    if more.get("critical"):
        builder = builder.add_extension(
            px.IssuingDistributionPoint(None, None, True, False, None, False, False), critical=True
        )
    else:
        builder = builder.add_extension(px.CRLNumber(1), critical=False)
    return builder.sign(KEYS[signer], hashes.SHA384()).public_bytes(Encoding.DER)


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises((VerificationError, WireError)) as caught:
        call()
    return str(caught.value.code)  # type: ignore[union-attr]


def test_a_chain() -> None:
    chain = x509.order_chain(LEAF, [ROOT, SUB], ROOT)
    assert [c.common_name() for c in chain] == ["leaf", "sub"]
    x509.check_chain(chain, ROOT, NOW)
    x509.check_chain([*chain, ROOT], ROOT, NOW)
    assert LEAF.fingerprint != SUB.fingerprint
    assert (ROOT.is_ca, LEAF.is_ca) == (True, False)
    assert code_of(lambda: x509.check_chain([], ROOT, NOW)) == "CHAIN_NOT_TRUSTED"
    assert code_of(lambda: x509.check_chain([LEAF], ROOT, NOW)) == "CHAIN_NOT_TRUSTED"
    assert code_of(lambda: x509.order_chain(LEAF, [], ROOT)) == "CHAIN_NOT_TRUSTED"
    assert code_of(lambda: x509.order_chain(LEAF, [SUB], make("other", "other"))) == "CHAIN_NOT_TRUSTED"


@pytest.mark.parametrize(
    ("sub", "now", "code"),
    [
        ({"ca": False}, NOW, "CHAIN_NOT_TRUSTED"),
        ({"usage": False}, NOW, "CHAIN_NOT_TRUSTED"),
        ({"usage": True}, NOW, None),
        ({"path": 0}, NOW, None),
        ({"signer": KEYS["other"]}, NOW, "BAD_SIGNATURE"),
        ({"after": START + datetime.timedelta(hours=1)}, NOW, "CERTIFICATE_NOT_VALID_NOW"),
        ({"before": START + datetime.timedelta(days=2)}, NOW, "CERTIFICATE_NOT_VALID_NOW"),
        ({}, START.timestamp() - 1, "CERTIFICATE_NOT_VALID_NOW"),
        ({}, float("nan"), "CERTIFICATE_NOT_VALID_NOW"),
        ({}, 1e30, "CERTIFICATE_NOT_VALID_NOW"),
    ],
)
def test_one_property_of_the_intermediate(sub: dict[str, Any], now: float, code: str | None) -> None:
    chain = (LEAF, make("sub", "root", **sub))
    if code is None:
        x509.check_chain(chain, ROOT, now)
    else:
        assert code_of(lambda: x509.check_chain(chain, ROOT, now)) == code


def test_path_length_of_the_root() -> None:
    short = make("root", "root", path=0)
    assert code_of(lambda: x509.check_chain((LEAF, SUB), short, NOW)) == "CHAIN_NOT_TRUSTED"
    assert make("leaf", "root", ca=False, path=None).path_length() is None


def test_of_several_with_one_name_the_signer_is_taken() -> None:
    """A superseded intermediate, or one that somebody stapled, does not stand in the way of the genuine one."""
    fakes = [make("sub", "root", key=KEYS["other"], serial=n) for n in range(10, 13)]
    unreadable = make("sub", "sub", key=ed25519.Ed25519PrivateKey.generate(), serial=20)
    chain = x509.order_chain(LEAF, [unreadable, *fakes, SUB, SUB], ROOT)
    assert chain[1] is SUB
    x509.check_chain(chain, ROOT, NOW)
    wrong = x509.order_chain(LEAF, fakes, ROOT)
    assert code_of(lambda: x509.check_chain(wrong, ROOT, NOW)) == "BAD_SIGNATURE"


def test_a_circle_ends() -> None:
    circle = [make("other", "sub", signer=KEYS["sub"]), make("sub", "other")]
    assert code_of(lambda: x509.order_chain(LEAF, circle, ROOT)) == "CHAIN_NOT_TRUSTED"


def test_revocation() -> None:
    x509.check_not_revoked(LEAF, x509.parse_crl(crl()), SUB, NOW)
    x509.check_not_revoked(LEAF, x509.parse_crl(crl((8, 9))), SUB, NOW)
    cases: list[tuple[bytes, float, str]] = [
        (crl((7,)), NOW, "CERTIFICATE_REVOKED"),
        (crl(signer="other"), NOW, "BAD_SIGNATURE"),
        (crl(issuer="other"), NOW, "CHAIN_NOT_TRUSTED"),
        (crl(), START.timestamp() - 1, "CERTIFICATE_NOT_VALID_NOW"),
        (crl(), START.timestamp() + 10 * 86_400, "CERTIFICATE_NOT_VALID_NOW"),
    ]
    for data, now, code in cases:
        assert code_of(lambda d=data, n=now: x509.check_not_revoked(LEAF, x509.parse_crl(d), SUB, n)) == code  # type: ignore[misc]
    assert code_of(lambda: x509.parse_crl(crl(critical=True))) == "MALFORMED_CERTIFICATE"


RSA_CASES = [
    (hashes.SHA256(), padding.PKCS1v15()),
    (hashes.SHA512(), padding.PKCS1v15()),
    (hashes.SHA384(), padding.PSS(mgf=padding.MGF1(hashes.SHA384()), salt_length=48)),
    (hashes.SHA256(), padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=32)),
]


@pytest.mark.parametrize(("digest", "pad"), RSA_CASES)
def test_rsa(digest: hashes.HashAlgorithm, pad: Any) -> None:
    made = make("other", "other", key=RSA, signer=RSA, digest=digest, padding=pad)
    x509.verify(made.public_key(), made.signed)
    assert code_of(lambda: x509.verify(made.public_key(), LEAF.signed)) == "BAD_ALGORITHM"
    assert code_of(lambda: x509.verify(LEAF.public_key(), made.signed)) == "BAD_ALGORITHM"


def test_pss_parameters_are_those_that_are_known() -> None:
    sha384 = tlv(0x30, bytes.fromhex("0609608648016503040202"))
    mgf = tlv(0x30, bytes.fromhex("06092a864886f70d010108") + sha384)

    def verified(parameters: bytes) -> str:
        made = signed.Signed(tbs=b"", algorithm="1.2.840.113549.1.1.10", parameters=parameters, signature=bytes(256))
        return code_of(lambda: signed.verify(RSA.public_key(), made))

    whole = tlv(0xA0, sha384) + tlv(0xA1, mgf) + tlv(0xA2, b"\x02\x01\x30")
    assert verified(tlv(0x30, whole)) == "BAD_SIGNATURE"
    sha1 = tlv(0x30, bytes.fromhex("06052b0e03021a"))
    for wrong in (
        b"",
        tlv(0xA0, sha1) + whole[len(tlv(0xA0, sha384)) :],
        tlv(0xA0, sha384) + tlv(0xA1, tlv(0x30, b"")) + tlv(0xA2, b"\x02\x01\x30"),
        tlv(0xA0, sha384) + tlv(0xA1, mgf) + tlv(0xA2, b"\x02\x01\x7f"),
        tlv(0xA0, sha384) + tlv(0xA1, mgf.replace(b"\x04\x02\x02", b"\x04\x02\x01")) + tlv(0xA2, b"\x02\x01\x30"),
    ):
        assert verified(tlv(0x30, wrong)) == "BAD_ALGORITHM"
    assert verified(b"") == "MALFORMED_CERTIFICATE"


def test_keys() -> None:
    edwards = ed25519.Ed25519PrivateKey.generate().public_key()
    spki = edwards.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for data in (b"", b"\x30\x00", spki):
        assert code_of(lambda d=data: signed.load_key(d)) == "MALFORMED_CERTIFICATE"  # type: ignore[misc]
    for size in (64, 128, 2048):  # 512 bits are too few for PSS with SHA-512, 16384 too many to wait for
        numbers = tlv(0x30, tlv(2, b"\x00" + b"\xff" * size) + b"\x02\x03\x01\x00\x01")
        spki = tlv(0x30, bytes.fromhex("300d06092a864886f70d0101010500") + tlv(3, b"\x00" + numbers))
        assert code_of(lambda d=spki: signed.load_key(d)) == "MALFORMED_CERTIFICATE"  # type: ignore[misc]


def rebuilt(change: Callable[[list[bytes]], object], data: bytes = LEAF.der) -> bytes:
    """The certificate with changed fields of its signed part."""
    outer = der.read_one(data).children()
    fields = [child.encoded for child in outer[0].children()]
    change(fields)
    return tlv(0x30, tlv(0x30, b"".join(fields)) + outer[1].encoded + outer[2].encoded)


def times(*values: bytes) -> bytes:
    return tlv(0x30, b"".join(values))


UTC, GENERALIZED = 0x17, 0x18


@pytest.mark.parametrize(
    ("tag", "text", "moment"),
    [
        (UTC, b"700101000000Z", 0.0),
        (UTC, b"490101000000Z", 2493072000.0),
        (UTC, b"500101000000Z", -631152000.0),
        (GENERALIZED, b"20500101000000Z", 2524608000.0),
        (GENERALIZED, b"99991231235959Z", 253402300799.0),
        (UTC, b"7001010000Z", None),
        (UTC, b"700101000000+0000", None),
        (UTC, b"20700101000000Z", None),
        (UTC, b"70010100000 Z", None),
        (GENERALIZED, b"700101000000Z", None),
        (GENERALIZED, b"00000101000000Z", None),
        (GENERALIZED, b"20260229000000Z", None),
        (GENERALIZED, b"20260101000060Z", None),
        (GENERALIZED, b"20260101000000.5Z", None),
        (0x0C, b"700101000000Z", None),
    ],
)
def test_times(tag: int, text: bytes, moment: float | None) -> None:
    end = tlv(GENERALIZED, b"20990101000000Z")
    data = rebuilt(lambda fields: fields.__setitem__(4, times(tlv(tag, text), end)))
    if moment is None:
        assert code_of(lambda: x509.parse_certificate(data)) == "MALFORMED_CERTIFICATE"
    else:
        assert x509.parse_certificate(data).not_before == moment


EXTENSION = tlv(0x30, bytes.fromhex("0603550403") + tlv(4, b"x"))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.__delitem__(slice(3, None)),
        lambda f: f.__setitem__(2, f[2].replace(b"\x04\x03\x03", b"\x04\x03\x02")),  # another algorithm inside
        lambda f: f.__setitem__(4, times(tlv(UTC, b"700101000000Z"))),
        lambda f: f.__setitem__(3, tlv(0x31, b"")),
        lambda f: f.append(f[-1]),  # two sets of extensions
        lambda f: f.__setitem__(-1, tlv(0xA3, tlv(0x30, EXTENSION * 65))),
        lambda f: f.__setitem__(-1, tlv(0xA3, tlv(0x30, tlv(0x30, b"")))),
        lambda f: f.__setitem__(-1, tlv(0xA3, b"")),
    ],
)
def test_malformed_parts(change: Callable[[list[bytes]], object]) -> None:
    assert code_of(lambda: x509.parse_certificate(rebuilt(change))) == "MALFORMED_CERTIFICATE"


def test_an_extension_that_is_there_twice() -> None:
    made = x509.parse_certificate(rebuilt(lambda f: f.__setitem__(-1, tlv(0xA3, tlv(0x30, EXTENSION * 2)))))
    assert code_of(lambda: made.extension("2.5.4.3")) == "MALFORMED_CERTIFICATE"
    assert made.extension("2.5.4.4") is None
    assert made.is_ca is False
    assert made.path_length() is None


def test_parts_of_other_counts() -> None:
    for data in (b"", b"\x30\x00", tlv(0x30, b"\x30\x00" * 3), tlv(0x30, b"\x30\x00" * 4), b"\x30" * 50):
        assert code_of(lambda d=data: x509.parse_certificate(d)) == "MALFORMED_CERTIFICATE"  # type: ignore[misc]
        assert code_of(lambda d=data: x509.parse_crl(d)) == "MALFORMED_CERTIFICATE"  # type: ignore[misc]
    assert code_of(lambda: x509.parse_certificate(bytes(300 << 10))) == "MALFORMED_CERTIFICATE"


def test_names_without_what_is_usual() -> None:
    for content in (b"", tlv(0x31, b""), tlv(0x31, tlv(0x30, b"")), tlv(0x31, tlv(0x30, bytes.fromhex("0603550403")))):
        assert x509.common_name(tlv(0x30, content)) == ""


def pem(kind: str, data: bytes) -> bytes:
    return f"-----BEGIN {kind}-----\n{base64.encodebytes(data).decode()}-----END {kind}-----\n".encode()


def test_files() -> None:
    certificates = pem("CERTIFICATE", LEAF.der) + b"a comment\n" + pem("CERTIFICATE", SUB.der)
    assert [c.der for c in x509.parse_certificates(certificates)] == [LEAF.der, SUB.der]
    both = x509.split(certificates + pem("X509 CRL", CRL))
    assert both == ((LEAF.der, SUB.der), (CRL,))
    assert x509.split(LEAF.der + CRL + SUB.der) == ((LEAF.der, SUB.der), (CRL,))
    for junk in (
        b"",
        CRL,
        pem("X509 CRL", CRL),
        pem("PUBLIC KEY", LEAF.der),
        pem("CERTIFICATE", LEAF.der).replace(b"END CERTIFICATE", b"END X509 CRL"),
        b"-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\n" + b"A" * 1000,
        pem("CERTIFICATE", LEAF.der) * 33,
        LEAF.der * 33,
        b"\x30\x00",
        b"\x30\x02\x30\x00",
        b"\x30\x02\x02\x00",
        bytes(300 << 10),
        b"\x30\x00" * 100_000,
    ):
        started = time.perf_counter()
        assert code_of(lambda d=junk: x509.parse_certificates(d)) == "MALFORMED_CERTIFICATE"  # type: ignore[misc]
        assert time.perf_counter() - started < 0.5


CRL = crl((1, 2))


def test_pem_inside_der_is_not_looked_at() -> None:
    inner = tlv(0xA3, tlv(0x30, tlv(0x30, bytes.fromhex("0603550404") + tlv(4, pem("CERTIFICATE", SUB.der)))))
    data = rebuilt(lambda f: f.__setitem__(-1, inner))
    assert [c.der for c in x509.parse_certificates(data)] == [data]


def test_many_revoked_entries_are_refused_in_time() -> None:
    outer = der.read_one(CRL).children()
    fields = [child.encoded for child in outer[0].children()]
    fields[5] = tlv(0x30, bytes.fromhex("3003020101") * 9000)
    data = tlv(0x30, tlv(0x30, b"".join(fields)) + outer[1].encoded + outer[2].encoded)
    assert code_of(lambda: x509.parse_crl(data)) == "MALFORMED_CERTIFICATE"
    fields[5] = tlv(0x30, b"\x30\x00")
    data = tlv(0x30, tlv(0x30, b"".join(fields)) + outer[1].encoded + outer[2].encoded)
    assert code_of(lambda: x509.parse_crl(data)) == "MALFORMED_CERTIFICATE"
    del fields[3:]
    data = tlv(0x30, tlv(0x30, b"".join(fields[:2])) + outer[1].encoded + outer[2].encoded)
    assert code_of(lambda: x509.parse_crl(data)) == "MALFORMED_CERTIFICATE"


def minimal_crl(*fields: bytes) -> bytes:
    outer = der.read_one(CRL).children()
    return tlv(0x30, tlv(0x30, b"".join(fields)) + outer[1].encoded + outer[2].encoded)


def test_a_crl_of_version_1_without_end() -> None:
    outer = der.read_one(CRL).children()
    algorithm, issuer = outer[1].encoded, SUB.subject
    parsed = x509.parse_crl(minimal_crl(algorithm, issuer, tlv(UTC, b"260101000000Z")))
    assert (parsed.next_update, parsed.revoked) == (None, frozenset())


def test_every_flipped_byte_is_refused() -> None:
    """Every byte of a certificate is signed, or tied to what is signed."""
    for original, issuer in ((LEAF, SUB), (make("leaf", "sub", ca=False, signer=KEYS["sub"]), SUB)):
        for at in range(len(original.der)):
            data = original.der[:at] + bytes([original.der[at] ^ 0x01]) + original.der[at + 1 :]
            with pytest.raises((AuthenticityError, WireError)):
                x509.check_signature(x509.parse_certificate(data), issuer)
            with pytest.raises(WireError):
                x509.parse_certificate(original.der[:at])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(LEAF.der) - 1), st.binary(min_size=1, max_size=6))
def test_any_change_is_parsed_or_refused(at: int, put: bytes) -> None:
    for source, parse in ((LEAF.der, x509.parse_certificate), (CRL, x509.parse_crl)):
        data = source[: at % len(source)] + put + source[at % len(source) + len(put) :]
        try:
            parsed = parse(data)
        except WireError:
            continue
        if isinstance(parsed, Certificate):
            for ask in (parsed.common_name, parsed.public_key, lambda p=parsed: p.is_ca, parsed.path_length):  # type: ignore[misc]
                try:
                    ask()
                except WireError:
                    pass


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_any_file_is_split_or_refused(data: bytes) -> None:
    for junk in (data, pem("CERTIFICATE", data), b"\x30\x82" + len(data).to_bytes(2, "big") + data):
        try:
            certificates, crls = x509.split(junk)
            for block in certificates:
                x509.parse_certificate(block)
            for block in crls:
                x509.parse_crl(block)
        except WireError:
            pass
