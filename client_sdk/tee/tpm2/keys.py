"""Attestation keys: what makes one fit to sign quotes, and the signatures themselves."""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee.tpm2 import abi
from client_sdk.tee.x509 import PublicKey

_REQUIRED: Final = {
    "fixedTPM": abi.ATTRIBUTE_FIXED_TPM,
    "fixedParent": abi.ATTRIBUTE_FIXED_PARENT,
    "sensitiveDataOrigin": abi.ATTRIBUTE_SENSITIVE_DATA_ORIGIN,
    "restricted": abi.ATTRIBUTE_RESTRICTED,
    "sign": abi.ATTRIBUTE_SIGN,
}
_HASHES: Final[dict[int, hashes.HashAlgorithm]] = {
    0x000B: hashes.SHA256(),
    0x000C: hashes.SHA384(),
    0x000D: hashes.SHA512(),
}
_RSA_SCHEMES = (abi.ALG_RSASSA, abi.ALG_RSAPSS)
_MIN_RSA_BITS = 2048
_RSA_EXPONENT = 65537


def load(public: abi.Public) -> PublicKey:
    """The key as one that verifies. Raises AuthenticityError BAD_KEY for kinds, sizes and points that do not."""
    try:
        if public.kind == abi.ALG_RSA:
            if public.modulus.bit_length() < _MIN_RSA_BITS or public.exponent != _RSA_EXPONENT:
                raise AuthenticityError(Rejection.BAD_KEY, "an RSA attestation key of unusual size or exponent")
            return rsa.RSAPublicNumbers(public.exponent, public.modulus).public_key()
        if public.curve != abi.CURVE_P256:
            raise AuthenticityError(Rejection.BAD_KEY, "the attestation key's curve is not P-256")
        return ec.EllipticCurvePublicNumbers(public.x, public.y, ec.SECP256R1()).public_key()
    except ValueError:
        raise AuthenticityError(Rejection.BAD_KEY, "the attestation key is no valid key") from None


def check_attributes(public: abi.Public) -> None:
    """Only a restricted key refuses to sign structures made outside the TPM. Raises AuthenticityError BAD_KEY."""
    for name, bit in _REQUIRED.items():
        if not public.attributes & bit:
            raise AuthenticityError(Rejection.BAD_KEY, f"the attestation key lacks the attribute {name}")
    if public.attributes & abi.ATTRIBUTE_DECRYPT or public.symmetric != abi.ALG_NULL:
        raise AuthenticityError(Rejection.BAD_KEY, "the attestation key is a decryption key too")


def check_scheme(public: abi.Public, signature: abi.Signature) -> None:
    """The signature's scheme and hash are strong and those of the key. Raises AuthenticityError BAD_ALGORITHM."""
    if signature.hash not in _HASHES:
        raise AuthenticityError(Rejection.BAD_ALGORITHM, "a quote is signed with SHA-256 or longer")
    if public.scheme != abi.ALG_NULL and (public.scheme, public.scheme_hash) != (signature.scheme, signature.hash):
        raise AuthenticityError(Rejection.BAD_ALGORITHM, "the signature's scheme is not the one its key is bound to")
    if (public.kind == abi.ALG_RSA) != (signature.scheme in _RSA_SCHEMES):
        raise AuthenticityError(Rejection.BAD_ALGORITHM, "the signature's scheme does not fit the kind of key")


def verify(key: PublicKey, signature: abi.Signature, signed: bytes) -> None:
    """`signature` is over `signed` by `key`. Raises AuthenticityError BAD_SIGNATURE."""
    digest = _HASHES[signature.hash]
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(encode_dss_signature(signature.r, signature.s), signed, ec.ECDSA(digest))
        elif signature.scheme == abi.ALG_RSAPSS:
            # The salt is as long as the hash, or as fits (Part 1, annex B.7): AUTO takes both and no third.
            pss = padding.PSS(mgf=padding.MGF1(digest), salt_length=padding.PSS.AUTO)
            key.verify(signature.rsa, signed, pss, digest)
        else:
            key.verify(signature.rsa, signed, padding.PKCS1v15(), digest)
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "the quote's signature does not verify") from None
