"""X.509 certificates and CRLs of hardware vendors (RFC 5280), read with `der` and checked with `cryptography`'s keys.

Vendor certificates have serial number 0, unknown critical extensions or surplus algorithm parameters, for which
general libraries refuse them. What a chain means is checked here: signature by the next key, validity at a given time,
issuer name, CA flag, revocation; which root is trusted comes from the family's pinned anchors.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import load_der_public_key

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee import der
from client_sdk.tee.der import CODE, Element
from client_sdk.wire.errors import WireError

PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey

_LIMIT_BYTES = 256 << 10
_MAX_CERTIFICATES = 32
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
OID_BASIC_CONSTRAINTS = "2.5.29.19"
OID_KEY_USAGE = "2.5.29.15"
OID_SUBJECT_ALT_NAME = "2.5.29.17"
OID_COMMON_NAME = "2.5.4.3"
_PEM = re.compile(
    rb"-----BEGIN (CERTIFICATE|X509 CRL)-----([A-Za-z0-9+/=\s]+)-----END (?:CERTIFICATE|X509 CRL)-----", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    oid: str
    critical: bool
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """What certificates and CRLs share: the signed bytes, the algorithm and the signature over them."""

    tbs: bytes
    algorithm: str
    parameters: bytes
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A parsed certificate; nothing about it is verified. Names are DER, times Unix seconds, `spki` DER."""

    der: bytes
    signed: Signed
    serial: int
    issuer: bytes
    subject: bytes
    not_before: float
    not_after: float
    spki: bytes
    extensions: tuple[Extension, ...]

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the whole certificate."""
        return hashlib.sha256(self.der).digest()

    def extension(self, oid: str) -> bytes | None:
        """The value of an extension, None where it is absent. Raises WireError where it is there twice."""
        values = [extension.value for extension in self.extensions if extension.oid == oid]
        if len(values) > 1:
            raise WireError(CODE, f"extension {oid} is there {len(values)} times")
        return values[0] if values else None

    def public_key(self) -> PublicKey:
        """Raises WireError for a key that is neither EC nor RSA."""
        return _load_key(self.spki)

    @property
    def is_ca(self) -> bool:
        value = self.extension(OID_BASIC_CONSTRAINTS)
        if value is None:
            return False
        fields = der.read_one(value).expect(der.SEQUENCE, "basic constraints").children()
        return bool(fields) and fields[0].tag == der.BOOLEAN and fields[0].content == b"\xff"

    def common_name(self) -> str:
        """The subject's last common name, "" where there is none."""
        return common_name(self.subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crl:
    """A parsed certificate revocation list; nothing about it is verified."""

    der: bytes
    signed: Signed
    issuer: bytes
    this_update: float
    next_update: float | None
    revoked: frozenset[int]


def parse_certificate(data: bytes) -> Certificate:
    """Parse one DER certificate. Raises WireError MALFORMED_CERTIFICATE."""
    outer, signed = _parse_signed(data, "certificate")
    fields = list(der.read_one(signed.tbs).children())
    if fields and fields[0].tag == der.context(0):
        fields.pop(0)
    if len(fields) < 6:
        raise WireError(CODE, "the certificate lacks fields")
    _check_same_algorithm(fields[1], outer)
    not_before, not_after = _validity(fields[3])
    return Certificate(
        der=outer.encoded,
        signed=signed,
        serial=der.integer(fields[0], "serial number"),
        issuer=fields[2].expect(der.SEQUENCE, "issuer").encoded,
        subject=fields[4].expect(der.SEQUENCE, "subject").encoded,
        not_before=not_before,
        not_after=not_after,
        spki=fields[5].expect(der.SEQUENCE, "public key").encoded,
        extensions=_extensions(fields[6:]),
    )


def parse_crl(data: bytes) -> Crl:
    """Parse one DER CRL. Raises WireError MALFORMED_CERTIFICATE."""
    outer, signed = _parse_signed(data, "CRL")
    fields = list(der.read_one(signed.tbs).children())
    if fields and fields[0].tag == der.INTEGER:
        fields.pop(0)
    if len(fields) < 3:
        raise WireError(CODE, "the CRL lacks fields")
    _check_same_algorithm(fields[0], outer)
    issuer, this_update, rest = fields[1].expect(der.SEQUENCE, "issuer").encoded, _time(fields[2]), fields[3:]
    next_update = None
    if rest and rest[0].tag in (der.UTC_TIME, der.GENERALIZED_TIME):
        next_update = _time(rest.pop(0))
    revoked: set[int] = set()
    if rest and rest[0].tag == der.SEQUENCE:
        for entry in rest[0].children(limit=1 << 16):
            parts = entry.expect(der.SEQUENCE, "revoked entry").children()
            if not parts:
                raise WireError(CODE, "a revoked entry is empty")
            revoked.add(der.integer(parts[0], "serial number"))
    return Crl(
        der=outer.encoded,
        signed=signed,
        issuer=issuer,
        this_update=this_update,
        next_update=next_update,
        revoked=frozenset(revoked),
    )


def split(data: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """(DER certificates, DER CRLs) of a file: PEM blocks, or DER ones after another. Raises WireError."""
    if len(data) > _LIMIT_BYTES:
        raise WireError(CODE, f"larger than {_LIMIT_BYTES} bytes")
    if b"-----BEGIN" not in data:
        blocks = [element.expect(der.SEQUENCE, "certificate").encoded for element in der.read_all(data)]
        certificates = tuple(block for block in blocks if not _looks_like_crl(block))
        return certificates, tuple(block for block in blocks if _looks_like_crl(block))
    found = _PEM.findall(data)
    if not found or len(found) > _MAX_CERTIFICATES or len(found) != data.count(b"-----BEGIN"):
        raise WireError(CODE, "PEM with unknown, damaged or too many blocks")
    decoded = [(kind, _base64(body)) for kind, body in found]
    return (
        tuple(body for kind, body in decoded if kind == b"CERTIFICATE"),
        tuple(body for kind, body in decoded if kind != b"CERTIFICATE"),
    )


def parse_certificates(data: bytes) -> tuple[Certificate, ...]:
    """All certificates of a PEM or DER file, in order. Raises WireError."""
    certificates, crls = split(data)
    if crls or not certificates:
        raise WireError(CODE, "expected certificates alone")
    return tuple(parse_certificate(block) for block in certificates)


def check_signature(child: Certificate | Crl, issuer: Certificate) -> None:
    """`child` is signed by the key of `issuer`. Raises AuthenticityError BAD_SIGNATURE, WireError for a bad key."""
    if child.issuer != issuer.subject:
        raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, "the issuer's name is not the next certificate's subject")
    verify(issuer.public_key(), child.signed)


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


def check_validity(certificate: Certificate, now: float, what: str) -> None:
    """`now` lies within the validity period. Raises AuthenticityError CERTIFICATE_NOT_VALID_NOW."""
    if not certificate.not_before <= now <= certificate.not_after:
        period = f"{_iso(certificate.not_before)} to {_iso(certificate.not_after)}"
        raise AuthenticityError(
            Rejection.CERTIFICATE_NOT_VALID_NOW, f"{what} is not valid at this time", expected=period, actual=_iso(now)
        )


def check_chain(chain: Sequence[Certificate], anchor: Certificate, now: float) -> None:
    """`chain` is leaf first; each is signed by the next, the last by `anchor` (or is it); all are valid at `now`.

    Every certificate but the leaf must be a CA. Raises AuthenticityError.
    """
    if not chain:
        raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, "the certificate chain is empty")
    path = [*chain] if chain[-1].der == anchor.der else [*chain, anchor]
    for child, parent in itertools.pairwise(path):
        if not parent.is_ca:
            raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, f"{parent.common_name()!r} is not a CA certificate")
        check_signature(child, parent)
    for certificate in path:
        check_validity(certificate, now, f"certificate {certificate.common_name()!r}")


def order_chain(leaf: Certificate, pool: Iterable[Certificate], anchor: Certificate) -> tuple[Certificate, ...]:
    """The way from `leaf` to `anchor` through `pool`, by issuer and subject names, leaf first, without the anchor.

    Raises AuthenticityError CHAIN_NOT_TRUSTED when there is none. Names only: `check_chain` verifies.
    """
    available = {certificate.subject: certificate for certificate in pool}
    chain = [leaf]
    while chain[-1].issuer != anchor.subject:
        parent = available.pop(chain[-1].issuer, None)
        if parent is None or len(chain) > _MAX_CERTIFICATES:
            raise AuthenticityError(
                Rejection.CHAIN_NOT_TRUSTED, "the certificates given do not lead to the pinned root"
            )
        chain.append(parent)
    return tuple(chain)


def check_not_revoked(certificate: Certificate, crl: Crl, issuer: Certificate, now: float) -> None:
    """`crl` is of the certificate's issuer, signed, in its window, and does not list it. Raises AuthenticityError."""
    check_signature(crl, issuer)
    if crl.this_update > now or (crl.next_update is not None and now >= crl.next_update):
        raise AuthenticityError(Rejection.CERTIFICATE_NOT_VALID_NOW, "the revocation list is not valid at this time")
    if certificate.serial in crl.revoked:
        raise AuthenticityError(
            Rejection.CERTIFICATE_REVOKED, f"certificate {certificate.common_name()!r} is revoked by its issuer"
        )


def common_name(name: bytes) -> str:
    """The last common name of a DER Name, "" where there is none."""
    found = ""
    for rdn in der.read_one(name).children():
        for attribute in rdn.children():
            parts = attribute.children()
            if len(parts) == 2 and der.oid(parts[0], "attribute type") == OID_COMMON_NAME:
                found = parts[1].content.decode("utf-8", "replace")
    return found


def _parse_signed(data: bytes, what: str) -> tuple[Element, Signed]:
    if len(data) > _LIMIT_BYTES:
        raise WireError(CODE, f"{what} larger than {_LIMIT_BYTES} bytes")
    outer = der.read_one(data).expect(der.SEQUENCE, what)
    parts = outer.children()
    if len(parts) != 3:
        raise WireError(CODE, f"{what} has {len(parts)} parts instead of 3")
    algorithm = parts[1].expect(der.SEQUENCE, "signature algorithm").children()
    if not algorithm:
        raise WireError(CODE, "the signature algorithm is empty")
    return outer, Signed(
        tbs=parts[0].expect(der.SEQUENCE, what).encoded,
        algorithm=der.oid(algorithm[0], "signature algorithm"),
        parameters=b"".join(element.encoded for element in algorithm[1:]),
        signature=der.bit_string(parts[2], "signature"),
    )


def _check_same_algorithm(inner: Element, outer: Element) -> None:
    """RFC 5280 4.1.1.2: the algorithm outside, which nothing signs, is the one inside."""
    if inner.encoded != outer.children()[1].encoded:
        raise WireError(CODE, "the signature algorithm outside the signed part is another one than inside")


def _validity(element: Element) -> tuple[float, float]:
    times = element.expect(der.SEQUENCE, "validity").children()
    if len(times) != 2:
        raise WireError(CODE, "validity needs two times")
    return _time(times[0]), _time(times[1])


def _time(element: Element) -> float:
    formats = {der.UTC_TIME: "%y%m%d%H%M%SZ", der.GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
    fmt = formats.get(element.tag)
    if fmt is None:
        raise WireError(CODE, f"a time has tag {element.tag:#04x}")
    try:
        moment = datetime.datetime.strptime(element.content.decode("ascii"), fmt).replace(tzinfo=datetime.UTC)
    except ValueError:
        raise WireError(CODE, "malformed time") from None
    if element.tag == der.UTC_TIME and moment.year >= 2050:  # RFC 5280 4.1.2.5.1; strptime turns at 1969
        moment = moment.replace(year=moment.year - 100)
    return moment.timestamp()


def _extensions(fields: Sequence[Element]) -> tuple[Extension, ...]:
    wrapped = [element for element in fields if element.tag == der.context(3)]
    if not wrapped:
        return ()
    found = []
    for entry in der.read_one(wrapped[0].content).expect(der.SEQUENCE, "extensions").children(limit=64):
        parts = entry.expect(der.SEQUENCE, "extension").children()
        if len(parts) not in (2, 3):
            raise WireError(CODE, "malformed extension")
        critical = len(parts) == 3 and parts[1].expect(der.BOOLEAN, "critical").content != b"\x00"
        value = parts[-1].expect(der.OCTET_STRING, "extension value").content
        found.append(Extension(oid=der.oid(parts[0], "extension id"), critical=critical, value=value))
    return tuple(found)


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


@functools.lru_cache(maxsize=64)
def _load_key(spki: bytes) -> PublicKey:
    try:
        key = load_der_public_key(spki)
    except (ValueError, UnsupportedAlgorithm):
        raise WireError(CODE, "the public key cannot be read") from None
    if not isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey):
        raise WireError(CODE, "the public key is neither EC nor RSA")
    return key


def _looks_like_crl(block: bytes) -> bool:
    """In a CRL the third field of the signed part, after version and algorithm and issuer, is a time."""
    parts = der.read_one(block).children()
    kinds = [field.tag for field in parts[0].children()[:4]] if parts else []
    return kinds[:1] != [der.context(0)] and any(tag in (der.UTC_TIME, der.GENERALIZED_TIME) for tag in kinds)


def _base64(body: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        raise WireError(CODE, "PEM with bad base64") from None


def _iso(moment: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return str(moment)
