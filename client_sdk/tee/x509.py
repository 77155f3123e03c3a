"""X.509 certificates and CRLs of hardware vendors (RFC 5280), read with `der` and checked with `cryptography`'s keys.

Vendor certificates have serial number 0, unknown critical extensions or surplus algorithm parameters, for which
general libraries refuse them. What a chain means is checked here: signature by the next key, validity at a given time,
issuer name, CA flag, revocation; which root is trusted comes from the family's pinned anchors.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee import der
from client_sdk.tee.der import CODE, Element
from client_sdk.tee.signed import PublicKey as PublicKey
from client_sdk.tee.signed import Signed as Signed
from client_sdk.tee.signed import load_key
from client_sdk.tee.signed import verify as verify
from client_sdk.wire.errors import WireError

_LIMIT_BYTES = 256 << 10
_MAX_CERTIFICATES = 32
_MAX_SAME_NAME = 8
_MAX_REVOKED = 8192
_MAX_SERIAL_BYTES = 64
OID_BASIC_CONSTRAINTS = "2.5.29.19"
OID_KEY_USAGE = "2.5.29.15"
_KEY_CERT_SIGN = 0x04  # bit 5 of the first byte
OID_SUBJECT_ALT_NAME = "2.5.29.17"
OID_COMMON_NAME = "2.5.4.3"
_PEM = re.compile(rb"-----BEGIN (CERTIFICATE|X509 CRL)-----([A-Za-z0-9+/=\s]+)-----END \1-----", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    oid: str
    critical: bool
    value: bytes


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
        return load_key(self.spki)

    @property
    def is_ca(self) -> bool:
        """May sign certificates: CA flag, and the key usage where one is stated (RFC 5280 4.2.1.3, 4.2.1.9)."""
        value = self.extension(OID_BASIC_CONSTRAINTS)
        if value is None:
            return False
        fields = der.read_one(value).expect(der.SEQUENCE, "basic constraints").children()
        if not fields or fields[0].tag != der.BOOLEAN or fields[0].content != b"\xff":
            return False
        usage = self.extension(OID_KEY_USAGE)
        if usage is None:
            return True
        bits = der.read_one(usage).expect(der.BIT_STRING, "key usage").content
        return len(bits) > 1 and bool(bits[1] & _KEY_CERT_SIGN)

    def path_length(self) -> int | None:
        """How many intermediates may follow this CA, None where it says nothing (RFC 5280 4.2.1.9)."""
        value = self.extension(OID_BASIC_CONSTRAINTS)
        fields = () if value is None else der.read_one(value).expect(der.SEQUENCE, "basic constraints").children()
        return der.integer(fields[1], "path length") if len(fields) > 1 else None

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
        extensions=_extensions(fields[6:], der.context(3)),
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
    revoked: frozenset[int] = frozenset()
    if rest and rest[0].tag == der.SEQUENCE:
        revoked = frozenset(_serials(rest.pop(0)))
    # One that covers only some certificates, or only what changed, says so in a critical extension (RFC 5280, 5.2).
    if any(extension.critical for extension in _extensions(rest, der.context(0))):
        raise WireError(CODE, "a CRL with critical extensions: it may not list everything that is revoked")
    return Crl(
        der=outer.encoded,
        signed=signed,
        issuer=issuer,
        this_update=this_update,
        next_update=next_update,
        revoked=revoked,
    )


def split(data: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """(DER certificates, DER CRLs) of a file: PEM blocks, or DER ones after another. Raises WireError."""
    if len(data) > _LIMIT_BYTES:
        raise WireError(CODE, f"larger than {_LIMIT_BYTES} bytes")
    # DER first: a certificate that carries a quote has the quote's own PEM chain inside.
    if (data[:1] == b"\x30" and data[1:2] >= b"\x80") or b"-----BEGIN" not in data:
        return _split_der(data)
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
    for below, (child, parent) in enumerate(itertools.pairwise(path)):
        if not parent.is_ca:
            raise AuthenticityError(Rejection.CHAIN_NOT_TRUSTED, f"{parent.common_name()!r} is not a CA certificate")
        limit = parent.path_length()
        if limit is not None and below > limit:
            raise AuthenticityError(
                Rejection.CHAIN_NOT_TRUSTED, f"{parent.common_name()!r} may not have {below} intermediates below it"
            )
        check_signature(child, parent)
    for certificate in path:
        check_validity(certificate, now, f"certificate {certificate.common_name()!r}")


def order_chain(leaf: Certificate, pool: Iterable[Certificate], anchor: Certificate) -> tuple[Certificate, ...]:
    """The way from `leaf` to `anchor` through `pool`, leaf first, without the anchor.

    By issuer and subject names; where several bear one name (a superseded intermediate, or one put there by somebody
    else), by the signature. Raises AuthenticityError CHAIN_NOT_TRUSTED when there is no way. `check_chain` verifies.
    """
    available = list({certificate.der: certificate for certificate in pool}.values())
    chain = [leaf]
    while chain[-1].issuer != anchor.subject:
        candidates = [certificate for certificate in available if certificate.subject == chain[-1].issuer]
        if not candidates or len(chain) > _MAX_CERTIFICATES:
            raise AuthenticityError(
                Rejection.CHAIN_NOT_TRUSTED, "the certificates given do not lead to the pinned root"
            )
        parent = candidates[0] if len(candidates) == 1 else signer_of(chain[-1], candidates)
        available.remove(parent)
        chain.append(parent)
    return tuple(chain)


def signer_of(child: Certificate, candidates: Sequence[Certificate]) -> Certificate:
    """The first of at most 8 candidates whose key signed `child`; the first of all where none did."""
    for candidate in candidates[:_MAX_SAME_NAME]:
        try:
            verify(candidate.public_key(), child.signed)
        except (AuthenticityError, WireError):
            continue
        return candidate
    return candidates[0]


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


def _serials(entries: Element) -> Iterator[int]:
    """The first field of each entry. Without objects for elements: a list may have thousands of entries."""
    data, at, count = entries.content, 0, 0
    while at < len(data):
        tag, inner, end = der.span(data, at)
        kind, start, stop = der.span(data, inner)
        count += 1
        if tag != der.SEQUENCE or kind != der.INTEGER or stop > end or not 1 <= stop - start <= _MAX_SERIAL_BYTES:
            raise WireError(CODE, "an entry of a revocation list is malformed")
        if count > _MAX_REVOKED:
            raise WireError(CODE, f"more than {_MAX_REVOKED} revoked certificates")
        yield int.from_bytes(data[start:stop], "big", signed=True)
        at = end


def _validity(element: Element) -> tuple[float, float]:
    times = element.expect(der.SEQUENCE, "validity").children()
    if len(times) != 2:
        raise WireError(CODE, "validity needs two times")
    return _time(times[0]), _time(times[1])


def _time(element: Element) -> float:
    """UTCTime YYMMDDHHMMSSZ (1950 to 2049) or GeneralizedTime YYYYMMDDHHMMSSZ (RFC 5280 4.1.2.5)."""
    if element.tag not in (der.UTC_TIME, der.GENERALIZED_TIME):
        raise WireError(CODE, f"a time has tag {element.tag:#04x}")
    text = element.content
    if element.tag == der.UTC_TIME:
        text = (b"19" if text[:2] >= b"50" else b"20") + text
    if len(text) != 15 or text[14:] != b"Z" or not text[:14].isdigit():
        raise WireError(CODE, "malformed time")
    month, day, hour, minute, second = (int(text[at : at + 2]) for at in range(4, 14, 2))
    try:
        return datetime.datetime(int(text[:4]), month, day, hour, minute, second, tzinfo=datetime.UTC).timestamp()
    except (ValueError, OverflowError):
        raise WireError(CODE, "malformed time") from None


def _extensions(fields: Sequence[Element], tag: int) -> tuple[Extension, ...]:
    wrapped = [element for element in fields if element.tag == tag]
    if not wrapped:
        return ()
    if len(wrapped) > 1:
        raise WireError(CODE, "more than one set of extensions")
    found = []
    for entry in der.read_one(wrapped[0].content).expect(der.SEQUENCE, "extensions").children(limit=64):
        parts = entry.expect(der.SEQUENCE, "extension").children()
        if len(parts) not in (2, 3):
            raise WireError(CODE, "malformed extension")
        critical = len(parts) == 3 and parts[1].expect(der.BOOLEAN, "critical").content != b"\x00"
        value = parts[-1].expect(der.OCTET_STRING, "extension value").content
        found.append(Extension(oid=der.oid(parts[0], "extension id"), critical=critical, value=value))
    return tuple(found)


def _split_der(data: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    certificates: list[bytes] = []
    crls: list[bytes] = []
    for count, element in enumerate(der.read_all(data)):
        if count == _MAX_CERTIFICATES:
            raise WireError(CODE, f"more than {_MAX_CERTIFICATES} certificates")
        block = element.expect(der.SEQUENCE, "certificate")
        (crls if _looks_like_crl(block) else certificates).append(block.encoded)
    return tuple(certificates), tuple(crls)


def _looks_like_crl(block: Element) -> bool:
    """In a CRL the signed part's third or fourth field is a time: ? version, algorithm, issuer, this update."""
    fields = block.first("certificate").children()
    kinds = [field.tag for field in fields[:4]]
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
