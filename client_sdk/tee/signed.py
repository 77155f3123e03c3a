"""Signatures over certificates and CRLs: which algorithms there are, and the keys they verify under.

ECDSA, RSASSA-PKCS1-v1_5 and RSASSA-PSS with SHA-256, SHA-384 and SHA-512 (RFC 4055, 5758); nothing older.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import load_der_public_key

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee import der
from client_sdk.tee.der import CODE
from client_sdk.wire.errors import WireError

PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey

_MIN_RSA_BITS, _MAX_RSA_BITS = 2048, 8192
_ECDSA: dict[str, hashes.HashAlgorithm] = {
    "1.2.840.10045.4.3.2": hashes.SHA256(),
    "1.2.840.10045.4.3.3": hashes.SHA384(),
    "1.2.840.10045.4.3.4": hashes.SHA512(),
}
_RSA_PKCS1: dict[str, hashes.HashAlgorithm] = {
    "1.2.840.113549.1.1.11": hashes.SHA256(),
    "1.2.840.113549.1.1.12": hashes.SHA384(),
    "1.2.840.113549.1.1.13": hashes.SHA512(),
}
_RSA_PSS = "1.2.840.113549.1.1.10"
_HASHES: dict[str, hashes.HashAlgorithm] = {
    "2.16.840.1.101.3.4.2.1": hashes.SHA256(),
    "2.16.840.1.101.3.4.2.2": hashes.SHA384(),
    "2.16.840.1.101.3.4.2.3": hashes.SHA512(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """What certificates and CRLs share: the signed bytes, the algorithm and the signature over them."""

    tbs: bytes
    algorithm: str
    parameters: bytes
    signature: bytes


def verify(key: PublicKey, signed: Signed) -> None:
    """The signature of `signed` verifies under `key`. Raises AuthenticityError BAD_SIGNATURE or BAD_ALGORITHM."""
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signed.signature, signed.tbs, ec.ECDSA(_hash(_ECDSA, signed.algorithm)))
        elif signed.algorithm == _RSA_PSS:
            digest, salt_length = _pss_parameters(signed.parameters)
            pss = padding.PSS(mgf=padding.MGF1(digest), salt_length=salt_length)
            key.verify(signed.signature, signed.tbs, pss, digest)
        else:
            key.verify(signed.signature, signed.tbs, padding.PKCS1v15(), _hash(_RSA_PKCS1, signed.algorithm))
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "a certificate's signature does not verify") from None


@functools.lru_cache(maxsize=64)
def load_key(spki: bytes) -> PublicKey:
    """The key of a DER SubjectPublicKeyInfo. Raises WireError for one that is neither EC nor RSA, or of bad size."""
    try:
        key = load_der_public_key(spki)
    except (ValueError, UnsupportedAlgorithm):
        raise WireError(CODE, "the public key cannot be read") from None
    if not isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey):
        raise WireError(CODE, "the public key is neither EC nor RSA")
    if isinstance(key, rsa.RSAPublicKey) and not _MIN_RSA_BITS <= key.key_size <= _MAX_RSA_BITS:
        raise WireError(CODE, f"an RSA key of {key.key_size} bits")
    return key


def _hash(table: dict[str, hashes.HashAlgorithm], algorithm: str) -> hashes.HashAlgorithm:
    found = table.get(algorithm)
    if found is None:
        raise AuthenticityError(Rejection.BAD_ALGORITHM, f"signature algorithm {algorithm} does not fit the key")
    return found


def _pss_parameters(parameters: bytes) -> tuple[hashes.HashAlgorithm, int]:
    """Hash and salt length of RSASSA-PSS-params (RFC 4055 section 3.1); MGF1 must use the same hash."""
    fields = {e.tag: der.read_one(e.content) for e in der.read_one(parameters).expect(der.SEQUENCE, "PSS").children()}
    try:
        digest = _HASHES[der.oid(fields[der.context(0)].children()[0], "PSS hash")]
        mgf_hash = der.oid(fields[der.context(1)].children()[1].children()[0], "MGF1 hash")
        salt_length = der.integer(fields[der.context(2)], "PSS salt length")
    except (KeyError, IndexError):
        raise AuthenticityError(Rejection.BAD_ALGORITHM, "RSASSA-PSS with unsupported parameters") from None
    if _HASHES.get(mgf_hash) is not digest or not 0 <= salt_length <= 64:
        raise AuthenticityError(Rejection.BAD_ALGORITHM, "RSASSA-PSS with unsupported parameters")
    return digest, salt_length
