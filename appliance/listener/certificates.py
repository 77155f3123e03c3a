"""The appliance's TLS identity: one key per boot, short certificates, one TLS context per certificate.

The certificate proves nothing by itself; trust comes from the attestation, which names the SHA-256 of this key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import SSL

COMMON_NAME = "attested-inference"
HOST_NAME = "localhost"
BACKDATE_S = 600
LIFETIME_S = 86_400
ALPN_HTTP11 = b"http/1.1"


class NoCommonProtocol(SSL.Error):
    """The client offers ALPN protocols, but not http/1.1 (RFC 7301 section 3.2: fatal no_application_protocol)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateExtension:
    """An additional non-critical X.509 extension: dotted OID and the DER inside extnValue."""

    oid: str
    der: bytes


def generate_tls_key() -> ec.EllipticCurvePrivateKey:
    """A fresh ECDSA P-256 key; it lives in memory only, for this boot."""
    return ec.generate_private_key(ec.SECP256R1())


def issue_certificate(
    key: ec.EllipticCurvePrivateKey,
    *,
    issued_at: float,
    random_bytes: Callable[[int], bytes],
    lifetime_s: int = LIFETIME_S,
    extensions: Sequence[CertificateExtension] = (),
) -> x509.Certificate:
    """Self-sign a certificate for `key`: notBefore = issued_at - 10 min, valid for `lifetime_s` (24 h at most).

    `issued_at` is Unix seconds. Raises ValueError for a lifetime outside (10 min, 24 h].
    """
    if not BACKDATE_S < lifetime_s <= LIFETIME_S:
        raise ValueError(f"a certificate lives more than {BACKDATE_S} s and at most {LIFETIME_S} s, not {lifetime_s}")
    not_before = datetime.fromtimestamp(int(issued_at) - BACKDATE_S, UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, COMMON_NAME)])
    # RFC 5280 4.1.2.2: positive, at most 20 octets; the fixed top bits keep it non-zero and positive.
    serial = int.from_bytes(bytes([0x40]) + random_bytes(19))
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(not_before)
        .not_valid_after(not_before + timedelta(seconds=lifetime_s))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST_NAME)]), critical=False)
    )
    for extension in extensions:
        unrecognized = x509.UnrecognizedExtension(x509.ObjectIdentifier(extension.oid), extension.der)
        builder = builder.add_extension(unrecognized, critical=False)
    return builder.sign(key, hashes.SHA256())


def _select_alpn(_connection: SSL.Connection, offered: list[bytes]) -> bytes:
    if ALPN_HTTP11 in offered:
        return ALPN_HTTP11
    raise NoCommonProtocol("the client does not speak http/1.1")


def make_server_context(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> SSL.Context:
    """A TLS 1.3-only server context that can resume nothing: no tickets, no session cache, no early data.

    OpenSSL still emits NewSessionTicket messages (the bindings cannot set their number to 0); with OP_NO_TICKET they
    are references into a session cache that is switched off, so that presenting one leads to a full handshake.
    """
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_max_proto_version(SSL.TLS1_3_VERSION)
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_verify(SSL.VERIFY_NONE)
    context.set_alpn_select_callback(_select_alpn)
    context.use_privatekey(key)
    context.use_certificate(certificate)
    return context


class CertificateRotator:
    """Hands out the TLS context for new connections and renews the certificate, not the key, at half life.

    Renewal happens on demand, in under a millisecond, so that no timer can die and leave an expired certificate. A
    connection keeps the context it was accepted with: pyOpenSSL refuses to change a used one.
    """

    def __init__(
        self,
        key: ec.EllipticCurvePrivateKey,
        *,
        now: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        lifetime_s: int = LIFETIME_S,
        extensions: Sequence[CertificateExtension] = (),
    ) -> None:
        """`now` gives Unix seconds; `random_bytes(n)` n bytes for the serial number. Issues the first certificate."""
        self._key = key
        self._now = now
        self._random_bytes = random_bytes
        self._lifetime_s = lifetime_s
        self._extensions = tuple(extensions)
        self._issued_at = 0.0
        self._context: SSL.Context
        self.certificate: x509.Certificate
        self.renew()

    def context(self) -> SSL.Context:
        """The context for a connection accepted now."""
        age_s = self._now() - self._issued_at
        # A clock that was set back would otherwise serve a certificate that is not valid yet.
        if age_s >= self._lifetime_s / 2 or age_s < -BACKDATE_S / 2:
            self.renew()
        return self._context

    def renew(self) -> None:
        """Issue a new certificate at once; existing connections are unaffected."""
        issued_at = self._now()
        certificate = issue_certificate(
            self._key,
            issued_at=issued_at,
            random_bytes=self._random_bytes,
            lifetime_s=self._lifetime_s,
            extensions=self._extensions,
        )
        self._context = make_server_context(self._key, certificate)
        self._issued_at = issued_at
        self.certificate = certificate
