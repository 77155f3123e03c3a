"""The keys of one boot: made in memory, never written, never exported, one purpose each (docs/attestation.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from appliance.listener.certificates import generate_tls_key
from client_sdk.wire import cose, names


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceKeys:
    """`tls` signs handshakes, `channel` channel proofs, `receipt` receipts and checkpoints; `sealing` opens HPKE.

    `air` signs AIR receipts and nothing else, where they are switched on.
    """

    tls: EllipticCurvePrivateKey
    channel: Ed25519PrivateKey
    receipt: Ed25519PrivateKey
    sealing: X25519PrivateKey
    air: Ed25519PrivateKey
    instance: bytes

    @property
    def tls_spki(self) -> bytes:
        """DER SubjectPublicKeyInfo, 91 bytes."""
        return self.tls.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    @property
    def channel_cose(self) -> bytes:
        return cose.okp_key(self.channel.public_key().public_bytes_raw(), curve=names.CURVE_ED25519)

    @property
    def receipt_cose(self) -> bytes:
        return cose.okp_key(self.receipt.public_key().public_bytes_raw(), curve=names.CURVE_ED25519)

    @property
    def air_cose(self) -> bytes:
        return cose.okp_key(self.air.public_key().public_bytes_raw(), curve=names.CURVE_ED25519)

    @property
    def sealing_cose(self) -> bytes:
        return cose.okp_key(self.sealing.public_key().public_bytes_raw(), curve=names.CURVE_X25519)


def make_keys(random_bytes: Callable[[int], bytes]) -> InstanceKeys:
    """Fresh keys and a fresh 16-byte instance id. The P-256 key comes from OpenSSL's own generator."""
    return InstanceKeys(
        tls=generate_tls_key(),
        channel=Ed25519PrivateKey.from_private_bytes(random_bytes(32)),
        receipt=Ed25519PrivateKey.from_private_bytes(random_bytes(32)),
        sealing=X25519PrivateKey.from_private_bytes(random_bytes(32)),
        air=Ed25519PrivateKey.from_private_bytes(random_bytes(32)),
        instance=random_bytes(16),
    )
