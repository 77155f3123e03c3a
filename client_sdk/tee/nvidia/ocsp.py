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
from cryptography.hazmat.primitives import hashes
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
_SIGNED_OVER = {"sha256": hashes.SHA256(), "sha384": hashes.SHA384(), "sha512": hashes.SHA512()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A parsed answer about one certificate; nothing about it is verified.

    `certificate_id` is (hash algorithm, hash of the issuer's name, hash of its key, serial number), `signed_over` the
    hash algorithm of the signature; both name algorithms as `cryptography` does.
    """

    certificate_id: tuple[str, bytes, bytes, int]
    status: ocsp.OCSPCertStatus
    reason: str | None
    this_update: datetime.datetime
    next_update: datetime.datetime | None
    signed: bytes
    signature: bytes
    signed_over: str | None
    certificates: tuple[bytes, ...]


def parse(data: bytes) -> tuple[Answer, ...]:
    """The answers in one DER OCSPResponse. Raises WireError MALFORMED_ENDORSEMENT."""
    try:
        response = ocsp.load_der_ocsp_response(data)
        if response.response_status is ocsp.OCSPResponseStatus.SUCCESSFUL:
            return tuple(_read(response, single) for single in response.responses)
    except (ValueError, OverflowError, UnsupportedAlgorithm):
        raise WireError(_CODE, "an OCSP answer that cannot be read") from None
    raise WireError(_CODE, "the OCSP responder gave an error instead of an answer")


def _read(response: ocsp.OCSPResponse, single: ocsp.OCSPSingleResponse) -> Answer:
    """All fields at once: the library decodes each when it is asked for it, and raises then."""
    reason, algorithm = single.revocation_reason, response.signature_hash_algorithm
    return Answer(
        certificate_id=(
            single.hash_algorithm.name,
            single.issuer_name_hash,
            single.issuer_key_hash,
            single.serial_number,
        ),
        status=single.certificate_status,
        reason=None if reason is None else reason.value,
        this_update=single.this_update_utc,
        next_update=single.next_update_utc,
        signed=response.tbs_response_bytes,
        signature=response.signature,
        signed_over=None if algorithm is None else algorithm.name,
        certificates=tuple(certificate.public_bytes(Encoding.DER) for certificate in response.certificates[:4]),
    )


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
                _check_signer(answer, issuer, now)
                _check_status(answer, certificate, now)
                found.add(certificate.fingerprint)
    return frozenset(found)


def _is_about(answer: Answer, certificate: Certificate, issuer: Certificate) -> bool:
    algorithm, *named = answer.certificate_id
    digest = _ALGORITHMS.get(algorithm)
    if digest is None:
        return False
    return named == [digest(issuer.subject).digest(), digest(_key_bits(issuer)).digest(), certificate.serial]


def _key_bits(certificate: Certificate) -> bytes:
    return der.bit_string(der.read_one(certificate.spki).children()[1], "public key")


def _check_signer(answer: Answer, issuer: Certificate, now: float) -> None:
    key = issuer.public_key()
    for encoded in answer.certificates:
        responder = x509.parse_certificate(encoded)
        if responder.spki == issuer.spki:
            continue
        x509.check_signature(responder, issuer)
        x509.check_validity(responder, now, "the OCSP responder's certificate")
        if not _may_answer(responder):
            raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, "the OCSP responder is not certified for answering")
        key = responder.public_key()
        break
    algorithm = _SIGNED_OVER.get(answer.signed_over or "")
    if not isinstance(key, ec.EllipticCurvePublicKey) or algorithm is None:
        raise AuthenticityError(Rejection.BAD_ALGORITHM, "the OCSP answer is not signed by ECDSA over SHA-2")
    try:
        key.verify(answer.signature, answer.signed, ec.ECDSA(algorithm))
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "the OCSP answer's signature does not verify") from None


def _may_answer(responder: Certificate) -> bool:
    usage = responder.extension(_OID_EXTENDED_KEY_USAGE)
    if usage is None:
        return False
    purposes = [der.oid(entry, "purpose") for entry in der.read_one(usage).children()]
    return ExtendedKeyUsageOID.OCSP_SIGNING.dotted_string in purposes


def _check_status(answer: Answer, certificate: Certificate, now: float) -> None:
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
    if answer.next_update is None or not answer.this_update <= moment < answer.next_update:
        raise AuthenticityError(Rejection.CERTIFICATE_NOT_VALID_NOW, "the OCSP answer is not valid at this time")
    if answer.status is not ocsp.OCSPCertStatus.GOOD:
        reason = f" ({answer.reason})" if answer.reason else ""
        raise AuthenticityError(
            Rejection.CERTIFICATE_REVOKED,
            f"the issuer calls certificate {certificate.common_name()!r} {answer.status.name.lower()}{reason}",
        )
