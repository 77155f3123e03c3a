"""Revocation of NVIDIA's certificates by OCSP answers (RFC 6960) that somebody fetched: nothing here asks the network.

An answer counts for the certificate it names by issuer and serial number. It is signed by that issuer or by a
responder the issuer certified for this one purpose, and is believed only between its own two times.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee import der, x509
from client_sdk.tee.x509 import Certificate
from client_sdk.wire.errors import WireError

_CODE = "MALFORMED_ENDORSEMENT"
_OID_EXTENDED_KEY_USAGE = "2.5.29.37"
_ALGORITHMS = {"sha1": hashlib.sha1, "sha256": hashlib.sha256, "sha384": hashlib.sha384, "sha512": hashlib.sha512}
_SIGNED_OVER = frozenset({"sha256", "sha384", "sha512"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A parsed answer about one certificate; nothing about it is verified."""

    response: ocsp.OCSPResponse
    single: ocsp.OCSPSingleResponse


def parse(data: bytes) -> tuple[Answer, ...]:
    """The answers in one DER OCSPResponse. Raises WireError MALFORMED_ENDORSEMENT."""
    try:
        response = ocsp.load_der_ocsp_response(data)
        if response.response_status is not ocsp.OCSPResponseStatus.SUCCESSFUL:
            raise WireError(_CODE, "the OCSP responder gave an error instead of an answer")
        return tuple(Answer(response=response, single=single) for single in response.responses)
    except (ValueError, UnsupportedAlgorithm) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(_CODE, "an OCSP answer that cannot be read") from None


def good(
    path: Sequence[Certificate], anchor: Certificate, answers: Iterable[Answer], *, now: float
) -> frozenset[bytes]:
    """Fingerprints of the certificates of a verified `path` (leaf first, under `anchor`) that an answer calls good.

    Every answer about one of them is judged. Raises AuthenticityError: CERTIFICATE_REVOKED (on hold and unknown
    included), BAD_SIGNATURE, CERTIFICATE_NOT_VALID_NOW for an answer outside its times.
    """
    given = tuple(answers)
    found = set()
    for certificate, issuer in zip(path, (*path[1:], anchor), strict=True):
        for answer in given:
            if _is_about(answer, certificate, issuer):
                _check_signer(answer.response, issuer, now)
                _check_status(answer, certificate, now)
                found.add(certificate.fingerprint)
    return frozenset(found)


def _is_about(answer: Answer, certificate: Certificate, issuer: Certificate) -> bool:
    single = answer.single
    digest = _ALGORITHMS.get(single.hash_algorithm.name)
    return (
        digest is not None
        and single.serial_number == certificate.serial
        and single.issuer_name_hash == digest(issuer.subject).digest()
        and single.issuer_key_hash == digest(_key_bits(issuer)).digest()
    )


def _key_bits(certificate: Certificate) -> bytes:
    return der.bit_string(der.read_one(certificate.spki).children()[1], "public key")


def _check_signer(response: ocsp.OCSPResponse, issuer: Certificate, now: float) -> None:
    key = issuer.public_key()
    for encoded in response.certificates[:4]:
        responder = x509.parse_certificate(encoded.public_bytes(Encoding.DER))
        if responder.spki == issuer.spki:
            continue
        x509.check_signature(responder, issuer)
        x509.check_validity(responder, now, "the OCSP responder's certificate")
        if not _may_answer(responder):
            raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, "the OCSP responder is not certified for answering")
        key = responder.public_key()
        break
    algorithm = response.signature_hash_algorithm
    if not isinstance(key, ec.EllipticCurvePublicKey) or algorithm is None or algorithm.name not in _SIGNED_OVER:
        raise AuthenticityError(Rejection.BAD_ALGORITHM, "the OCSP answer is not signed by ECDSA over SHA-2")
    try:
        key.verify(response.signature, response.tbs_response_bytes, ec.ECDSA(algorithm))
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "the OCSP answer's signature does not verify") from None


def _may_answer(responder: Certificate) -> bool:
    usage = responder.extension(_OID_EXTENDED_KEY_USAGE)
    if usage is None:
        return False
    purposes = [der.oid(entry, "purpose") for entry in der.read_one(usage).children()]
    return ExtendedKeyUsageOID.OCSP_SIGNING.dotted_string in purposes


def _check_status(answer: Answer, certificate: Certificate, now: float) -> None:
    single = answer.single
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
    until = single.next_update_utc
    if until is None or not single.this_update_utc <= moment < until:
        raise AuthenticityError(Rejection.CERTIFICATE_NOT_VALID_NOW, "the OCSP answer is not valid at this time")
    if single.certificate_status is not ocsp.OCSPCertStatus.GOOD:
        reason = "" if single.revocation_reason is None else f" ({single.revocation_reason.value})"
        raise AuthenticityError(
            Rejection.CERTIFICATE_REVOKED,
            f"the issuer calls certificate {certificate.common_name()!r} "
            f"{single.certificate_status.name.lower()}{reason}",
        )
