"""The roots NVIDIA signs under, pinned: of device certificates and of reference manifests (trust_anchors/README.md)."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from dataclasses import dataclass

from client_sdk.tee.x509 import Certificate, parse_certificates

_DEVICE = ("nvidia_device_root.pem", "102bf659d5419614c9d8e6aecebc80454eb26b1df6a769ac720b9a690b167b48")
_RIM = ("nvidia_rim_root.pem", "12977b5115acb0381179279fffeb5a8c4d264971ebb32298023a465fa41df5d1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """`device` is the root of device certificates, `rim` the root of reference manifests' signers."""

    device: Certificate
    rim: Certificate


@functools.cache
def pinned() -> Anchors:
    """NVIDIA's own roots. A file that differs from its fingerprint here stops the program."""
    return Anchors(device=_load(*_DEVICE), rim=_load(*_RIM))


def _load(name: str, fingerprint: str) -> Certificate:
    data = importlib.resources.files("client_sdk.tee").joinpath("trust_anchors", name).read_bytes()
    (certificate,) = parse_certificates(data)
    if hashlib.sha256(certificate.der).hexdigest() != fingerprint:
        raise RuntimeError(f"trust anchor {name} is not the pinned certificate")
    return certificate
