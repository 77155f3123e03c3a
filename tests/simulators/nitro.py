"""AWS Nitro with a root of our own: whole chains and documents, in which a test changes one property.

The certificates have the names, extensions and lifetimes of genuine ones; the payload is an indefinite-length map, as
the Nitro Secure Module writes it.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cbor2
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding

from client_sdk.tee.x509 import Certificate, Crl, parse_certificate, parse_crl

NOW = 1_790_000_000.0
MODULE_ID = "i-0a1b2c3d4e5f60718-enc0123456789abcdef"
PCRS: Mapping[int, bytes] = {
    register: bytes([register + 1]) * 48 if register in (0, 1, 2, 4) else bytes(48) for register in range(16)
}
NITROTPM_PCRS: Mapping[int, bytes] = {register: bytes([register + 65]) * 48 for register in range(24)}
ABSENT = object()
"""A payload field with this value is left out."""

_NAMES = (
    "aws.nitro-enclaves",
    "0123456789abcdef.eu-central-1.aws.nitro-enclaves",
    "fedcba9876543210.zonal.eu-central-1.aws.nitro-enclaves",
    "i-0a1b2c3d4e5f60718.eu-central-1.aws.nitro-enclaves",
)
_DAY_S = 86_400


@functools.cache
def key(name: str, curve: str = "secp384r1") -> ec.EllipticCurvePrivateKey:
    """A key by name: the same one for every test of a run."""
    return ec.generate_private_key(ec.SECP384R1() if curve == "secp384r1" else ec.SECP256R1())


@dataclass(frozen=True, kw_only=True)
class Chain:
    """How the certificates are made. `root` names the root's key, `not_authorities` issuers that are no CAs."""

    root: str = "root"
    leaf_curve: str = "secp384r1"
    leaf_is_ca: bool = False
    not_authorities: frozenset[int] = frozenset()
    leaf_from: float = NOW - 3
    leaf_until: float = NOW + 10_800
    issuers_until: float = NOW + _DAY_S
    leaf_name: str = f"{MODULE_ID}.eu-central-1.aws"


@functools.cache
def certificates(chain: Chain) -> tuple[bytes, ...]:
    """Root, issuers, leaf: DER."""
    names = [*_NAMES, chain.leaf_name]
    keys = [key(chain.root), *(key(name) for name in _NAMES[1:]), key("leaf", chain.leaf_curve)]
    made = [_root(chain.root)]
    for index in range(1, len(names)):
        leaf = index == len(names) - 1
        authority = chain.leaf_is_ca if leaf else index not in chain.not_authorities
        period = (chain.leaf_from, chain.leaf_until) if leaf else (NOW - _DAY_S, chain.issuers_until)
        builder = _builder(names[index], names[index - 1], keys[index], period, authority=authority)
        made.append(builder.sign(keys[index - 1], hashes.SHA384()).public_bytes(Encoding.DER))
    return tuple(made)


@functools.cache
def _root(name: str) -> bytes:
    """One certificate per root key: anchors are compared byte for byte."""
    period = (NOW - 1000 * _DAY_S, NOW + 1000 * _DAY_S)
    builder = _builder(_NAMES[0], _NAMES[0], key(name), period, authority=True)
    return builder.sign(key(name), hashes.SHA384()).public_bytes(Encoding.DER)


def _builder(
    subject: str, issuer: str, owner: ec.EllipticCurvePrivateKey, period: tuple[float, float], *, authority: bool
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(owner.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(period[0]))
        .not_valid_after(_moment(period[1]))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )


def revocation_list(issuer: int, revoked: bytes | None = None, *, signer: str = "", until: float = NOW + _DAY_S) -> Crl:
    """The list of the chain's issuer by index (0: root) with one revoked certificate, or none; `signer` lies."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(_name(_NAMES[issuer]))
        .last_update(_moment(NOW - _DAY_S))
        .next_update(_moment(until))
    )
    if revoked is not None:
        serial = x509.load_der_x509_certificate(revoked).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(_moment(NOW - 60)).build()
        builder = builder.add_revoked_certificate(entry)
    own = "root" if issuer == 0 else _NAMES[issuer]
    return parse_crl(builder.sign(key(signer or own), hashes.SHA384()).public_bytes(Encoding.DER))


def root(chain: Chain | None = None) -> Certificate:
    """The anchor to verify by."""
    return parse_certificate(certificates(chain or Chain())[0])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One document. `payload` overrides fields by name (ABSENT: left out), `outer` parts of the COSE_Sign1 by index.

    `cabundle` picks certificates of the chain by index, root first.
    """

    chain: Chain = field(default_factory=Chain)
    payload: Mapping[str, Any] = field(default_factory=dict)
    nitrotpm: bool = False
    cabundle: tuple[int, ...] = (0, 1, 2, 3)
    signer: str = "leaf"
    outer: Mapping[int, Any] = field(default_factory=dict)
    tagged: bool = False
    definite: bool = False
    protected: bytes = b"\xa1\x01\x38\x22"


def payload_fields(shape: Shape) -> dict[str, Any]:
    made = certificates(shape.chain)
    fields: dict[str, Any] = {
        "module_id": MODULE_ID,
        "digest": "SHA384",
        "timestamp": int(NOW * 1000),
        "nitrotpm_pcrs" if shape.nitrotpm else "pcrs": dict(NITROTPM_PCRS if shape.nitrotpm else PCRS),
        "certificate": made[-1],
        "cabundle": [made[index] for index in shape.cabundle],
        "public_key": None,
        "user_data": None,
        "nonce": None,
        **shape.payload,
    }
    return {name: value for name, value in fields.items() if value is not ABSENT}


def document(shape: Shape | None = None, *, raw_payload: bytes | None = None) -> bytes:
    """A signed document; `raw_payload` is signed in place of the shape's."""
    shape = shape or Shape()
    payload = raw_payload if raw_payload is not None else encode_payload(payload_fields(shape), shape.definite)
    signed = cbor2.dumps(["Signature1", shape.protected, b"", payload])
    signer = key(shape.signer, shape.chain.leaf_curve)
    size = (signer.curve.key_size + 7) // 8
    r, s = decode_dss_signature(signer.sign(signed, ec.ECDSA(hashes.SHA384())))
    parts: list[Any] = [shape.protected, {}, payload, r.to_bytes(size, "big") + s.to_bytes(size, "big")]
    for index, value in shape.outer.items():
        parts[index] = value
    return cbor2.dumps(cbor2.CBORTag(18, parts) if shape.tagged else parts)


def encode_payload(fields: Mapping[str, Any], definite: bool = False) -> bytes:
    if definite:
        return cbor2.dumps(dict(fields))
    return b"\xbf" + b"".join(cbor2.dumps(name) + cbor2.dumps(value) for name, value in fields.items()) + b"\xff"


def _name(common: str) -> x509.Name:
    pairs = (("2.5.4.6", "US"), ("2.5.4.10", "Amazon"), ("2.5.4.11", "AWS"), ("2.5.4.3", common))
    return x509.Name([x509.NameAttribute(x509.ObjectIdentifier(oid), value) for oid, value in pairs])


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
