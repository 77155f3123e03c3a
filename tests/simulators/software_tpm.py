"""Quotes made without a TPM, by keys of our own: what a TPM signs and everything it never would.

Structures are packed here by hand from the TPM 2.0 Library, Part 2, so that reader and writer share no code.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding

from client_sdk.wire import cbor

NOW = 1_790_000_000.0
SHA1, SHA256, SHA384, SHA512 = 0x0004, 0x000B, 0x000C, 0x000D
RSASSA, RSAPSS, ECDSA, NULL = 0x0014, 0x0016, 0x0018, 0x0010
FIXED_TPM, FIXED_PARENT, ORIGIN, USER_WITH_AUTH, RESTRICTED, DECRYPT, SIGN = (
    1 << bit for bit in (1, 4, 5, 6, 16, 17, 18)
)
ATTRIBUTES = FIXED_TPM | FIXED_PARENT | ORIGIN | USER_WITH_AUTH | RESTRICTED | SIGN
PCRS: Mapping[int, bytes] = {register: bytes([register + 1]) * 32 for register in (0, 2, 4, 7, 9)}
ATTESTATION_PURPOSE = x509.ObjectIdentifier("2.23.133.8.3")

_HASHES = {SHA1: hashes.SHA1(), SHA256: hashes.SHA256(), SHA384: hashes.SHA384(), SHA512: hashes.SHA512()}
_DAY_S = 86_400


@functools.cache
def ecc_key(name: str = "ak", curve: str = "p256") -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1() if curve == "p256" else ec.SECP384R1())


@functools.cache
def rsa_key(bits: int = 2048, exponent: int = 65537) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(exponent, bits)


@dataclass(frozen=True, kw_only=True)
class Quote:
    """One quote. `scheme` and `hash` sign, `bound` is what the key's public area names (None: the same)."""

    extra_data: bytes = b"extra data"
    pcrs: Mapping[int, bytes] = field(default_factory=lambda: dict(PCRS))
    bank: int = SHA256
    magic: int = 0xFF544347
    type: int = 0x8018
    reset_count: int = 7
    restart_count: int = 2
    safe: int = 1
    firmware: int = 0x0102030405060708
    digest: bytes | None = None
    selection: bytes | None = None
    rsa_bits: int = 0
    rsa_exponent: int = 65537
    curve: int = 0x0003
    scheme: int = ECDSA
    hash: int = SHA256
    bound: tuple[int, int] | None = None
    attributes: int = ATTRIBUTES
    symmetric: bytes = b"\x00\x10"
    point: tuple[int, int] | None = None
    signer: str = "ak"
    certificate: bytes | None = None
    attest_tail: bytes = b""
    signature_tail: bytes = b""
    public_tail: bytes = b""


def sized(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def select(registers: Mapping[int, bytes], bank: int) -> bytes:
    """TPML_PCR_SELECTION of one bank."""
    bits = sum(1 << register for register in registers)
    return struct.pack(">IHB", 1, bank, 3) + bits.to_bytes(3, "little")


def attest(quote: Quote) -> bytes:
    joined = b"".join(value for _, value in sorted(quote.pcrs.items()))
    name = {SHA1: "sha1", SHA256: "sha256", SHA384: "sha384", SHA512: "sha512"}[quote.hash]
    digest = hashlib.new(name, joined).digest() if quote.digest is None else quote.digest
    return (
        struct.pack(">IH", quote.magic, quote.type)
        + sized(b"\x00\x0b" + b"q" * 32)
        + sized(quote.extra_data)
        + struct.pack(">QIIBQ", 123_456, quote.reset_count, quote.restart_count, quote.safe, quote.firmware)
        + (select(quote.pcrs, quote.bank) if quote.selection is None else quote.selection)
        + sized(digest)
        + quote.attest_tail
    )


def public(quote: Quote) -> bytes:
    kind = 0x0001 if quote.rsa_bits else 0x0023
    scheme, scheme_hash = (quote.scheme, quote.hash) if quote.bound is None else quote.bound
    head = struct.pack(">HHI", kind, SHA256, quote.attributes) + sized(b"") + quote.symmetric
    head += struct.pack(">H", scheme) + (b"" if scheme in (NULL, 0x0015) else struct.pack(">H", scheme_hash))
    if scheme == 0x001A:
        head += b"\x00\x01"
    if quote.rsa_bits:
        key = rsa_key(quote.rsa_bits, quote.rsa_exponent).public_key().public_numbers()
        exponent = 0 if key.e == 65537 else key.e
        return (
            head
            + struct.pack(">HI", quote.rsa_bits, exponent)
            + sized(key.n.to_bytes(-(-quote.rsa_bits // 8), "big"))
            + quote.public_tail
        )
    numbers = ecc_key("ak").public_key().public_numbers()
    x, y = quote.point or (numbers.x, numbers.y)
    return (
        head
        + struct.pack(">HH", quote.curve, NULL)
        + sized(x.to_bytes(32, "big"))
        + sized(y.to_bytes(32, "big"))
        + quote.public_tail
    )


def signature(quote: Quote, signed: bytes) -> bytes:
    digest = _HASHES[quote.hash]
    head = struct.pack(">HH", quote.scheme, quote.hash)
    if not quote.rsa_bits:
        r, s = decode_dss_signature(ecc_key(quote.signer).sign(signed, ec.ECDSA(digest)))
        return head + sized(r.to_bytes(32, "big")) + sized(s.to_bytes(32, "big")) + quote.signature_tail
    key = rsa_key(quote.rsa_bits, quote.rsa_exponent)
    if quote.scheme == RSAPSS:
        pss = padding.PSS(mgf=padding.MGF1(digest), salt_length=digest.digest_size)
        return head + sized(key.sign(signed, pss, digest)) + quote.signature_tail
    return head + sized(key.sign(signed, padding.PKCS1v15(), digest)) + quote.signature_tail


def item(quote: Quote | None = None, **parts: bytes) -> bytes:
    """The evidence item of a quote; `parts` replaces its fields by name (`ak_public` for ak-public)."""
    quote = quote or Quote()
    signed = attest(quote)
    fields: dict[str, bytes] = {
        "attest": signed,
        "signature": signature(quote, signed),
        "ak-public": public(quote),
    }
    if quote.certificate is not None:
        fields["ak-cert"] = quote.certificate
    return cbor.encode({**fields, **{name.replace("_", "-"): value for name, value in parts.items()}})


@dataclass(frozen=True, kw_only=True)
class AkChain:
    """Root, issuer and a certificate of the attestation key."""

    subject: str = "ak"
    purpose: x509.ObjectIdentifier | None = ATTESTATION_PURPOSE
    until: float = NOW + _DAY_S
    issuer_is_ca: bool = True


@functools.cache
def ak_chain(chain: AkChain) -> tuple[bytes, bytes, bytes]:
    """Root, issuer, leaf: DER."""
    made = []
    rows = (("TPM root", "TPM root"), ("TPM issuer", "TPM root"), ("AK", "TPM issuer"))
    owners = (ecc_key("root"), ecc_key("issuer"), ecc_key(chain.subject))
    for index, (subject, issuer) in enumerate(rows):
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(issuer))
            .public_key(owners[index].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_moment(NOW - _DAY_S))
            .not_valid_after(_moment(chain.until if index == 2 else NOW + 10 * _DAY_S))
            .add_extension(
                x509.BasicConstraints(ca=index == 0 or (index == 1 and chain.issuer_is_ca), path_length=None),
                critical=True,
            )
        )
        if index == 2 and chain.purpose is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([chain.purpose]), critical=False)
        made.append(builder.sign(owners[max(index - 1, 0)], hashes.SHA256()).public_bytes(Encoding.DER))
    return made[0], made[1], made[2]


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.ObjectIdentifier("2.5.4.3"), common)])


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
