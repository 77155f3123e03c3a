"""COSE_Sign1 (RFC 9052) with one algorithm, Ed25519, and OKP COSE_Keys with exactly the fields that identify them.

This module only lays bytes out and reads them; signing and verifying happen where keys live.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from client_sdk.wire import cbor
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader
from client_sdk.wire.names import (
    ALG_EDDSA,
    CURVE_ED25519,
    CURVE_X25519,
    HEADER_ALG,
    HEADER_CRIT,
    HEADER_KID,
    HEADER_TYP,
    SALT_BYTES,
    TAG_SIGN1,
)

_CODE = "MALFORMED_COSE"
_TAG = bytes((0xC0 | TAG_SIGN1,))

_ORDER = 2**252 + 27742317777372353535851937790883648493  # L, the order of the Ed25519 base point (RFC 8032)
# y-coordinates of the points of small order (and their non-canonical forms), sign bit cleared. A signature under such a
# key, or with such an R, can verify for many messages at once; OpenSSL accepts some of them.
_SMALL_ORDER_Y = frozenset(
    bytes.fromhex(text)
    for text in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign1:
    """A parsed COSE_Sign1. `protected` and `payload` are the bytes as received: nothing is ever re-encoded."""

    protected: bytes
    alg: int
    kid: bytes
    typ: str
    salt: bytes | None
    payload: bytes
    signature: bytes

    def signed_bytes(self) -> bytes:
        return signature_input(self.protected, self.payload)


def protected_header(*, kid: bytes, typ: str) -> bytes:
    return cbor.encode({HEADER_ALG: ALG_EDDSA, HEADER_KID: kid, HEADER_TYP: typ})


def signature_input(protected: bytes, payload: bytes) -> bytes:
    """Sig_structure of RFC 9052 section 4.4 with an empty external_aad."""
    return cbor.encode(["Signature1", protected, b"", payload])


def sign1(*, protected: bytes, salt: bytes | None, payload: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """A complete tagged COSE_Sign1. `sign` gets the Sig_structure and returns the 64-byte signature."""
    unprotected: Mapping[str, object] = {} if salt is None else {"salt": salt}
    signature = sign(signature_input(protected, payload))
    return _TAG + cbor.encode([protected, unprotected, payload, signature])


def parse_sign1(data: bytes, *, typ: str, salted: bool, limit_bytes: int) -> Sign1:
    """Parse a COSE_Sign1 whose protected `typ` must be `typ`. Raises WireError.

    The unprotected map is empty or, when `salted`, exactly {"salt": 32 bytes}. Algorithm, key id and type come from the
    protected header alone, which holds nothing else; a `crit` header names something we do not know and is refused.
    """
    if len(data) > limit_bytes:
        raise WireError(_CODE, f"{len(data)} bytes exceed the limit of {limit_bytes}")
    if data[:1] != _TAG:
        raise WireError(_CODE, f"tag {TAG_SIGN1} is missing")
    parts = cbor.decode(data[1:], limit_bytes=limit_bytes)
    if type(parts) is not list or len(parts) != 4:
        raise WireError(_CODE, "not an array of four")
    protected, unprotected, payload, signature = parts
    if type(protected) is not bytes or type(payload) is not bytes or type(signature) is not bytes:
        raise WireError(_CODE, "protected header, payload and signature must be byte strings")
    if len(signature) != 64:
        raise WireError(_CODE, f"signature has {len(signature)} bytes instead of 64")
    header = MapReader(cbor.decode(protected, limit_bytes=limit_bytes), "protected header", _CODE)
    if header.has(HEADER_CRIT):
        raise WireError(_CODE, "critical header parameters are not known here")
    result = Sign1(
        protected=protected,
        alg=header.take(HEADER_ALG, int),
        kid=header.bstr(HEADER_KID, 32),
        typ=header.text(HEADER_TYP),
        salt=_take_salt(unprotected, salted=salted),
        payload=payload,
        signature=signature,
    )
    header.finish()
    if result.typ != typ:
        raise WireError("MALFORMED_TYP", f"type is {result.typ!r} where {typ!r} is expected")
    return result


def _take_salt(unprotected: object, *, salted: bool) -> bytes | None:
    reader = MapReader(unprotected, "unprotected header", _CODE)
    salt = reader.bstr("salt", SALT_BYTES) if salted and reader.has("salt") else None
    reader.finish()
    return salt


def redacted(data: bytes, *, limit_bytes: int) -> bytes:
    """The same COSE_Sign1 with an empty unprotected map: signature intact, salt gone."""
    parts = cbor.decode(data[1:], limit_bytes=limit_bytes)
    if data[:1] != _TAG or type(parts) is not list or len(parts) != 4:
        raise WireError(_CODE, "not a tagged COSE_Sign1")
    return _TAG + cbor.encode([parts[0], {}, parts[2], parts[3]])


def okp_key(public: bytes, *, curve: int) -> bytes:
    """COSE_Key {1: 1 (OKP), -1: curve, -2: x} for a 32-byte public key (RFC 9053 section 7.2)."""
    if len(public) != 32 or curve not in (CURVE_ED25519, CURVE_X25519):
        raise ValueError("an OKP key here is 32 bytes on Ed25519 or X25519")
    return cbor.encode({1: 1, -1: curve, -2: public})


def parse_okp_key(data: bytes, *, curve: int) -> bytes:
    """The 32-byte public key of a COSE_Key with exactly the fields that `okp_key` writes. Raises WireError."""
    reader = MapReader(cbor.decode(data, limit_bytes=64), "COSE_Key", "MALFORMED_KEY")
    if reader.take(1, int) != 1 or reader.take(-1, int) != curve:
        raise WireError("MALFORMED_KEY", "not an OKP key on the expected curve")
    public = reader.bstr(-2, 32)
    reader.finish()
    return public


def key_id(cose_key: bytes) -> bytes:
    """SHA-256 of the COSE_Key with its required fields only (RFC 9679 thumbprint), 32 bytes."""
    return hashlib.sha256(cose_key).digest()


def has_small_order(point: bytes) -> bool:
    """True for the encodings of Ed25519 points whose order divides 8."""
    return point[:31] + bytes((point[31] & 0x7F,)) in _SMALL_ORDER_Y


def scalar_in_range(signature: bytes) -> bool:
    """True if S of the 64-byte signature is below L: no second signature can be derived from the first."""
    return int.from_bytes(signature[32:], "little") < _ORDER
