"""The pinned roots of hardware vendors, shipped with the package and compared with their fingerprints when loaded."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources

from client_sdk.tee.x509 import Certificate, parse_certificates


@functools.lru_cache(maxsize=32)
def load_anchor(file: str, fingerprint: str) -> Certificate:
    """The one certificate in trust_anchors/`file`, whose SHA-256 is `fingerprint` (hex).

    A file that was exchanged is no verdict about any evidence but a broken installation: RuntimeError.
    """
    data = resources.files("client_sdk.tee").joinpath("trust_anchors", file).read_bytes()
    certificate = parse_certificates(data)[0]
    if hashlib.sha256(certificate.der).hexdigest() != fingerprint:
        raise RuntimeError(f"the trust anchor {file} is not the one this version was released with")
    return certificate
