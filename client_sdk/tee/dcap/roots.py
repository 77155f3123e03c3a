"""The trust anchor of all DCAP evidence: Intel's SGX Root CA, pinned by fingerprint."""

from __future__ import annotations

from client_sdk.tee.anchors import load_anchor
from client_sdk.tee.x509 import Certificate

ROOT_FILE = "intel_sgx_root_ca.pem"
ROOT_FINGERPRINT = "44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3"


def intel_root() -> Certificate:
    """The pinned Intel SGX Root CA."""
    return load_anchor(ROOT_FILE, ROOT_FINGERPRINT)
