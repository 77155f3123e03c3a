"""TLS 1.3 for the verifier, without I/O: pyOpenSSL over memory BIOs, exporter included.

No X.509 path is validated: trust comes from the attestation that follows. What is checked before it is that the
certificate is one an appliance would make: P-256, valid now, self-signed, nothing critical that we do not know.
"""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtensionOID
from OpenSSL import SSL

from client_sdk.errors import AuthenticityError, MalformedError, Rejection

BIO_READ_BYTES = 65_536
SPKI_BYTES = 91
CERTIFICATE_SKEW_S = 300
MAX_CERTIFICATE_LIFETIME = timedelta(hours=24)
ALPN_HTTP11 = b"http/1.1"

_KNOWN_CRITICAL = frozenset(
    {
        ExtensionOID.BASIC_CONSTRAINTS,
        ExtensionOID.KEY_USAGE,
        ExtensionOID.EXTENDED_KEY_USAGE,
        ExtensionOID.SUBJECT_ALTERNATIVE_NAME,
    }
)


class TlsFailure(OSError):
    """TLS broke at the protocol level (alert, garbage, a cut stream). Trouble of the network, not a verdict."""


class Channel(Protocol):
    """What an attestation needs to know of the connection it runs on."""

    @property
    def spki(self) -> bytes:
        """DER SubjectPublicKeyInfo of the leaf the server presented on this connection, 91 bytes (P-256)."""

    @property
    def suite(self) -> str:
        """Name of the TLS 1.3 cipher suite."""

    def export(self, label: str, length: int, context: bytes) -> bytes:
        """TLS exporter (RFC 8446 section 7.5) of this connection, `length` bytes."""


def make_client_context() -> SSL.Context:
    """TLS 1.3 only, no session cache, so nothing is ever resumed. Certificates are judged by `check_certificate`."""
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_max_proto_version(SSL.TLS1_3_VERSION)
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_verify(SSL.VERIFY_NONE)
    context.set_alpn_protos([ALPN_HTTP11])
    return context


def check_certificate(certificate: x509.Certificate, *, now: float) -> bytes:
    """Check a leaf and return its SPKI (DER, 91 bytes). `now` is Unix seconds.

    Raises MalformedError (MALFORMED_CERTIFICATE) and AuthenticityError (BAD_TLS_KEY, CERTIFICATE_NOT_VALID_NOW,
    BAD_CERTIFICATE). Steps: key type, validity (at most 24 h, 300 s of skew), critical extensions, self-signature.
    """
    try:
        key = certificate.public_key()
        extensions = list(certificate.extensions)
        algorithm = certificate.signature_hash_algorithm
        names_match = certificate.issuer == certificate.subject
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise MalformedError(Rejection.MALFORMED_CERTIFICATE, "the server's certificate cannot be parsed") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise AuthenticityError(Rejection.BAD_TLS_KEY, "the server's TLS key is not ECDSA P-256")
    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    # The DER that the peer sent must be this canonical, uncompressed form, or both sides would hash different bytes.
    if len(spki) != SPKI_BYTES or spki not in certificate.tbs_certificate_bytes:
        raise AuthenticityError(Rejection.BAD_TLS_KEY, "the server's TLS key is not an uncompressed point")
    _check_validity(certificate, now)
    unknown = [extension.oid for extension in extensions if extension.critical and extension.oid not in _KNOWN_CRITICAL]
    if unknown:
        oid = unknown[0].dotted_string
        raise AuthenticityError(Rejection.BAD_CERTIFICATE, f"the certificate has an unknown critical extension {oid}")
    if not names_match or algorithm is None:
        raise AuthenticityError(Rejection.BAD_CERTIFICATE, "the server's certificate is not self-signed")
    _check_self_signature(certificate, key, algorithm)
    return spki


def _check_validity(certificate: x509.Certificate, now: float) -> None:
    moment = datetime.fromtimestamp(now, UTC)
    skew = timedelta(seconds=CERTIFICATE_SKEW_S)
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    window = f"{start.isoformat()} to {end.isoformat()}"
    if moment < start - skew or moment > end + skew:
        raise AuthenticityError(
            Rejection.CERTIFICATE_NOT_VALID_NOW,
            "the server's certificate is not valid now",
            expected=window,
            actual=moment.isoformat(timespec="seconds"),
        )
    if end - start > MAX_CERTIFICATE_LIFETIME:
        raise AuthenticityError(Rejection.BAD_CERTIFICATE, "the certificate lives more than 24 hours", actual=window)


def _check_self_signature(
    certificate: x509.Certificate, key: ec.EllipticCurvePublicKey, algorithm: hashes.HashAlgorithm
) -> None:
    if not isinstance(algorithm, hashes.SHA256 | hashes.SHA384 | hashes.SHA512):
        raise AuthenticityError(Rejection.BAD_CERTIFICATE, "the certificate's signature uses a weak hash")
    try:
        key.verify(certificate.signature, certificate.tbs_certificate_bytes, ec.ECDSA(algorithm))
    except InvalidSignature as error:
        raise AuthenticityError(Rejection.BAD_CERTIFICATE, "the certificate's self-signature is wrong") from error


class TlsSession:
    """The client's end of one TLS connection as a state machine: bytes in, bytes out, no socket.

    Everything may raise TlsFailure. After each call, send what `outgoing()` returns.
    """

    def __init__(self, context: SSL.Context, *, server_name: str | None) -> None:
        self._connection = SSL.Connection(context, None)
        self._connection.set_connect_state()
        if server_name is not None:
            self._connection.set_tlsext_host_name(server_name.encode("ascii"))
        self._ended = False
        self._spki: bytes | None = None

    @property
    def spki(self) -> bytes:
        """See Channel. RuntimeError before the handshake is complete and the certificate checked."""
        if self._spki is None:
            raise RuntimeError("the TLS handshake is not complete")
        return self._spki

    @property
    def suite(self) -> str:
        """See Channel."""
        return self._connection.get_cipher_name() or ""

    def export(self, label: str, length: int, context: bytes) -> bytes:
        """See Channel. RuntimeError before the handshake is complete."""
        if self._spki is None:
            raise RuntimeError("the TLS handshake is not complete")
        return self._connection.export_keying_material(label.encode("ascii"), length, context)

    def handshake(self, *, now: float) -> bool:
        """Continue the handshake; True once it is complete and the certificate has passed `check_certificate`."""
        try:
            self._connection.do_handshake()
        except SSL.WantReadError:
            if self._ended:
                raise TlsFailure("the connection ended during the TLS handshake") from None
            return False
        except SSL.Error as error:
            raise TlsFailure(f"the TLS handshake failed: {_reason(error)}") from error
        certificate = self._connection.get_peer_certificate(as_cryptography=True)
        if certificate is None:
            raise AuthenticityError(Rejection.BAD_CERTIFICATE, "the server presented no certificate")
        self._spki = check_certificate(certificate, now=now)
        return True

    def incoming(self, data: bytes) -> None:
        """Take bytes from the network; b"" is its end."""
        if data:
            self._connection.bio_write(data)
        else:
            self._ended = True
            self._connection.bio_shutdown()

    def outgoing(self) -> bytes:
        """Bytes for the network, possibly none."""
        parts = []
        while True:
            try:
                parts.append(self._connection.bio_read(BIO_READ_BYTES))
            except SSL.WantReadError:
                return b"".join(parts)

    def encrypt(self, data: bytes | memoryview) -> None:
        """Turn plaintext into records for `outgoing()`."""
        try:
            self._connection.sendall(data)
        except SSL.Error as error:
            raise TlsFailure(f"TLS cannot send: {_reason(error)}") from error

    def peek(self) -> bytes | None:
        """As `decrypt(1)`, but the byte stays."""
        return self._receive(1, socket.MSG_PEEK)

    def decrypt(self, max_bytes: int) -> bytes | None:
        """Up to `max_bytes` of plaintext, None if more network bytes are needed, b"" after close_notify.

        A connection that ends without close_notify is a TlsFailure: its last answer may have been cut.
        """
        return self._receive(max_bytes, 0)

    def _receive(self, max_bytes: int, flags: int) -> bytes | None:
        try:
            return self._connection.recv(max_bytes, flags)
        except SSL.WantReadError:
            if self._ended:
                raise TlsFailure("the connection was cut without close_notify") from None
            return None
        except SSL.ZeroReturnError:
            return b""
        except SSL.Error as error:
            raise TlsFailure(f"the TLS connection broke: {_reason(error)}") from error

    def close(self) -> None:
        """Queue close_notify, if TLS is in a state to send one."""
        try:
            self._connection.shutdown()
        except SSL.Error:
            return  # not connected yet, or broken already: the socket's close has to do


def _reason(error: SSL.Error) -> str:
    """OpenSSL's own words for what happened, without arguments from the peer."""
    for entry in error.args[0] if error.args and isinstance(error.args[0], list) else ():
        return str(entry[-1]) or "unknown"
    return "the connection ended" if isinstance(error, SSL.SysCallError) else "unknown"
