"""The trust anchor of all DCAP evidence: Intel's SGX Root CA, pinned by fingerprint."""

from __future__ import annotations

import functools
import importlib.resources

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee import x509

ROOT_FILE = "intel_sgx_root_ca.pem"
ROOT_FINGERPRINT = bytes.fromhex("44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3")


@functools.cache
def intel_root() -> x509.Certificate:
    """The pinned Intel SGX Root CA. Raises AuthenticityError where the installed file is another certificate."""
    file = importlib.resources.files("client_sdk.tee") / "trust_anchors" / ROOT_FILE
    return checked_root(file.read_bytes())


def checked_root(pem: bytes) -> x509.Certificate:
    """The one certificate of `pem`, if it is the pinned one. Raises AuthenticityError, WireError."""
    (root,) = x509.parse_certificates(pem)
    if root.fingerprint != ROOT_FINGERPRINT:
        raise AuthenticityError(
            Rejection.CHAIN_NOT_TRUSTED,
            "the installed Intel root is not the pinned one",
            expected=ROOT_FINGERPRINT.hex(),
            actual=root.fingerprint.hex(),
        )
    return root
