from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from OpenSSL import SSL

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.transport.tls import TlsFailure, TlsSession, check_certificate, make_client_context

NOW = 1_800_000_000.0
P256 = ec.generate_private_key(ec.SECP256R1())


def make(
    key=P256,
    *,
    signer=None,
    start=-600,
    end=85_800,
    critical=(),
    issuer="a",
    padding=0,
    digest: hashes.HashAlgorithm | None = hashes.SHA256(),  # noqa: B008
):
    """A certificate an appliance would make, with what a test changes."""
    moment = datetime.fromtimestamp(NOW, UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a")]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(moment + timedelta(seconds=start))
        .not_valid_after(moment + timedelta(seconds=end))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    if padding:
        filler = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.99999.2"), bytes(padding))
        builder = builder.add_extension(filler, critical=False)
    for oid in critical:
        builder = builder.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), b"\x05\x00"), True)
    return builder.sign(signer or key, digest)


def handshake(certificate, key, *, server_max=None, now=NOW) -> TlsSession:
    """Run a whole handshake in memory."""
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    if server_max:
        context.set_max_proto_version(server_max)
    context.use_privatekey(key)
    context.use_certificate(certificate)
    server = SSL.Connection(context, None)
    server.set_accept_state()
    session = TlsSession(make_client_context(), server_name="localhost")
    while not session.handshake(now=now):
        if data := session.outgoing():
            server.bio_write(data)
        try:
            server.do_handshake()
        except SSL.WantReadError:
            pass
        except SSL.Error as error:
            raise TlsFailure("server") from error
        finally:
            try:
                session.incoming(server.bio_read(65_536))
            except SSL.WantReadError:
                pass
    return session


def test_a_good_certificate_gives_its_key():
    spki = check_certificate(make(), now=NOW)
    assert spki == P256.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert len(spki) == 91


@pytest.mark.parametrize("offset", [-600 - 299, 85_800 + 299])
def test_a_small_difference_of_clocks_is_allowed(offset):
    check_certificate(make(), now=NOW + offset)


BAD = {
    "rsa": (Rejection.BAD_TLS_KEY, make(rsa.generate_private_key(65537, 2048))),
    "p384": (Rejection.BAD_TLS_KEY, make(ec.generate_private_key(ec.SECP384R1()))),
    "ed25519": (Rejection.BAD_TLS_KEY, make(ed25519.Ed25519PrivateKey.generate(), digest=None)),
    "expired": (Rejection.CERTIFICATE_NOT_VALID_NOW, make(start=-80_000, end=-301)),
    "not-yet-valid": (Rejection.CERTIFICATE_NOT_VALID_NOW, make(start=301, end=1000)),
    "ten-years": (Rejection.BAD_CERTIFICATE, make(end=315_360_000)),
    "unknown-critical": (Rejection.BAD_CERTIFICATE, make(critical=["1.3.6.1.4.1.99999.1"])),
    "other-signer": (Rejection.BAD_CERTIFICATE, make(signer=ec.generate_private_key(ec.SECP256R1()))),
    "other-issuer": (Rejection.BAD_CERTIFICATE, make(issuer="b")),
}


@pytest.mark.parametrize("name", BAD)
def test_one_fault_is_one_rejection(name):
    code, certificate = BAD[name]
    with pytest.raises(AuthenticityError) as caught:
        check_certificate(certificate, now=NOW)
    assert caught.value.code is code


def test_a_compressed_key_is_refused():
    der = make(padding=300).public_bytes(Encoding.DER)
    spki = P256.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    point = P256.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    compressed = bytes.fromhex("3039301306072a8648ce3d020106082a8648ce3d030107032200") + point
    mutated = der.replace(spki, compressed)
    # Two lengths shrink with it: those of the certificate and of its signed part.
    shrunk = len(spki) - len(compressed)
    for position in (2, 6):
        length = int.from_bytes(mutated[position : position + 2]) - shrunk
        mutated = mutated[:position] + length.to_bytes(2) + mutated[position + 2 :]
    with pytest.raises(AuthenticityError) as caught:
        check_certificate(x509.load_der_x509_certificate(mutated), now=NOW)
    assert caught.value.code is Rejection.BAD_TLS_KEY


def test_the_session_refuses_a_bad_certificate_before_it_is_usable():
    key = ec.generate_private_key(ec.SECP384R1())
    with pytest.raises(AuthenticityError, match="BAD_TLS_KEY"):
        handshake(make(key), key)
    with pytest.raises(AuthenticityError, match="CERTIFICATE_NOT_VALID_NOW"):
        handshake(make(), P256, now=NOW + 100_000)


def test_only_tls_1_3_is_spoken():
    assert handshake(make(), P256).suite.startswith("TLS_")
    with pytest.raises(TlsFailure):
        handshake(make(), P256, server_max=SSL.TLS1_2_VERSION)


def test_nothing_is_exported_before_the_handshake():
    session = TlsSession(make_client_context(), server_name=None)
    with pytest.raises(RuntimeError):
        session.export("Attestation", 32, b"")
    with pytest.raises(RuntimeError):
        session.spki  # noqa: B018


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", os.urandom(300), b"\x16\x03\x03\x00\x05aaaaa"])
def test_garbage_in_the_handshake_is_a_tls_failure(data):
    session = TlsSession(make_client_context(), server_name=None)
    assert not session.handshake(now=NOW)
    session.incoming(data)
    session.incoming(b"")
    with pytest.raises(TlsFailure):
        session.handshake(now=NOW)


def test_an_end_without_close_notify_is_a_tls_failure():
    session = handshake(make(), P256)
    assert session.decrypt(100) is None
    session.incoming(b"")
    with pytest.raises(TlsFailure):
        session.decrypt(100)
