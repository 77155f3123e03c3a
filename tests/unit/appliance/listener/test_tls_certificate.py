from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from OpenSSL import SSL

from appliance.listener.certificates import (
    CertificateExtension,
    CertificateRotator,
    generate_tls_key,
    issue_certificate,
)

NOW = 1_800_000_000.0


def fixed(count: int) -> bytes:
    return b"\xff" * count


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def make_rotator(clock: Clock) -> CertificateRotator:
    serials = itertools.count(1)
    return CertificateRotator(generate_tls_key(), now=clock, random_bytes=lambda n: next(serials).to_bytes(n))


def test_a_certificate_is_backdated_short_and_self_signed():
    key = generate_tls_key()
    certificate = issue_certificate(key, issued_at=NOW, random_bytes=fixed)
    assert certificate.not_valid_before_utc == datetime.fromtimestamp(NOW, UTC) - timedelta(minutes=10)
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == timedelta(hours=24)
    certificate.verify_directly_issued_by(certificate)
    assert certificate.serial_number.bit_length() < 160
    assert certificate.public_key() == key.public_key()


def test_extensions_are_carried_and_not_critical():
    extension = CertificateExtension(oid="1.3.6.1.5.5.7.1.35", der=b"\x04\x02hi")
    certificate = issue_certificate(generate_tls_key(), issued_at=NOW, random_bytes=fixed, extensions=[extension])
    found = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(extension.oid))
    assert not found.critical
    assert found.value.public_bytes() == extension.der


@pytest.mark.parametrize("lifetime_s", [0, 600, 86_401])
def test_a_lifetime_out_of_bounds_is_refused(lifetime_s):
    with pytest.raises(ValueError, match="lives"):
        issue_certificate(generate_tls_key(), issued_at=NOW, random_bytes=fixed, lifetime_s=lifetime_s)


def test_renewal_at_half_life_keeps_the_key_and_changes_certificate_and_context():
    clock = Clock()
    rotator = make_rotator(clock)
    first, context = rotator.certificate, rotator.context()
    clock.now += 43_199
    assert rotator.context() is context
    clock.now += 1
    assert rotator.context() is not context
    assert rotator.certificate.serial_number != first.serial_number
    assert rotator.certificate.public_key() == first.public_key()


def test_a_clock_set_back_gets_a_certificate_that_is_valid_then():
    clock = Clock()
    rotator = make_rotator(clock)
    clock.now -= 3600
    rotator.context()
    assert rotator.certificate.not_valid_before_utc < datetime.fromtimestamp(clock.now, UTC)


def test_a_connection_keeps_the_certificate_of_its_context():
    clock = Clock()
    rotator = make_rotator(clock)
    connection = SSL.Connection(rotator.context(), None)
    first = rotator.certificate
    rotator.renew()
    assert connection.get_certificate(as_cryptography=True) == first
