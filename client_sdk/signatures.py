"""Ed25519 signatures over COSE_Sign1 structures, checked under one known key: never "whichever key fits"."""

from __future__ import annotations

import functools
import hmac

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.wire import cose
from client_sdk.wire.names import ALG_EDDSA, CURVE_ED25519


def check_algorithm(sign1: cose.Sign1) -> None:
    """The protected algorithm is EdDSA (-8, RFC 9053 section 2.2). Raises AuthenticityError BAD_ALGORITHM."""
    if sign1.alg != ALG_EDDSA:
        raise AuthenticityError(
            Rejection.BAD_ALGORITHM, "signature algorithm", expected=str(ALG_EDDSA), actual=str(sign1.alg)
        )


def check_public_key(public: bytes) -> None:
    """A key of small order signs everything at once and is refused. Raises AuthenticityError BAD_KEY."""
    if cose.has_small_order(public):
        raise AuthenticityError(Rejection.BAD_KEY, "the public key is a point of small order")


def check_signature(sign1: cose.Sign1, public: bytes) -> None:
    """The signature verifies under `public`, a raw 32-byte Ed25519 key whose thumbprint is the kid (RFC 8032, 9679).

    Small-order keys and R and an S outside the group order are refused before the library sees them: OpenSSL accepts
    some of them. Raises AuthenticityError WRONG_KEY, BAD_KEY or BAD_SIGNATURE.
    """
    key_id = _key_id(public)
    if not hmac.compare_digest(sign1.kid, key_id):
        raise AuthenticityError(
            Rejection.WRONG_KEY, "signed under another key", expected=key_id.hex(), actual=sign1.kid.hex()
        )
    check_public_key(public)
    if cose.has_small_order(sign1.signature[:32]) or not cose.scalar_in_range(sign1.signature):
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "the signature is not in its one canonical form")
    try:
        _loaded(public).verify(sign1.signature, sign1.signed_bytes())
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "the signature does not verify") from None


def authenticate(sign1: cose.Sign1, public: bytes) -> None:
    """`check_algorithm`, then `check_signature`."""
    check_algorithm(sign1)
    check_signature(sign1, public)


@functools.lru_cache(maxsize=64)
def _key_id(public: bytes) -> bytes:
    return cose.key_id(cose.okp_key(public, curve=CURVE_ED25519))


@functools.lru_cache(maxsize=64)
def _loaded(public: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public)
