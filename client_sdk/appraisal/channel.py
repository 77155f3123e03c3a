"""What ties an attestation to one TLS connection: its key, its exporter, and the channel key that answers on it."""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk import signatures
from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection
from client_sdk.wire import cose, digests
from client_sdk.wire.attestation import AttestationClaims, ChannelProof
from client_sdk.wire.names import LIMIT_CHANNEL_PROOF_BYTES, SPKI_P256_BYTES, TYP_CHANNEL_PROOF

# DER of SubjectPublicKeyInfo up to the point: id-ecPublicKey, prime256v1, BIT STRING, uncompressed (RFC 5480).
_SPKI_P256_PREFIX = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFacts:
    """What the TLS stack says of one connection.

    `spki` is the DER SubjectPublicKeyInfo of the certificate presented on it, `exported` the 32 bytes of
    TLS-Exporter("Attestation", nonce, 32) (RFC 8446 section 7.5). `holder_asserted` marks facts that come from a file
    instead of a live connection: whoever holds the file says so.
    """

    spki: bytes
    exported: bytes
    holder_asserted: bool = False


def check_tls_key(log: CheckLog, claims: AttestationClaims, channel: ChannelFacts | None) -> None:
    if channel is None:
        if claims.tls_key is not None:
            log.reject("TLS key", Rejection.TLS_KEY_MISMATCH, "the claims name a TLS key where there is no TLS")
        log.not_checked("TLS key", "no TLS on this connection")
        return
    usable = len(channel.spki) == SPKI_P256_BYTES and channel.spki.startswith(_SPKI_P256_PREFIX)
    log.require(usable, "TLS key type", Rejection.BAD_TLS_KEY, "the TLS key is not an uncompressed P-256 key")
    log.equal("TLS key", Rejection.TLS_KEY_MISMATCH, expected=digests.sha256(channel.spki), actual=claims.tls_key)


def check_binder(log: CheckLog, name: str, binder: bytes | None, channel: ChannelFacts | None) -> bytes | None:
    """The binder is this connection's own: a relay that holds the TLS key still has another exporter value."""
    if channel is None:
        if binder is not None:
            log.reject(name, Rejection.BINDER_MISMATCH, "a binder for a TLS connection came where there is no TLS")
        log.not_checked(name, "no TLS on this connection")
        return None
    if binder is None:
        log.reject(name, Rejection.BINDER_MISSING, "no binder, so nothing ties the answer to this connection")
    expected = digests.channel_binder(channel.spki, channel.exported)
    log.equal(name, Rejection.BINDER_MISMATCH, expected=expected, actual=binder)
    return binder


def authenticate_proof(log: CheckLog, proof_bytes: bytes, channel_key: bytes, claims_digest: bytes) -> ChannelProof:
    with log.step("channel proof well formed"):
        sign1 = cose.parse_sign1(
            proof_bytes, typ=TYP_CHANNEL_PROOF, salted=False, limit_bytes=LIMIT_CHANNEL_PROOF_BYTES
        )
    with log.step("channel proof authentic"):
        signatures.authenticate(sign1, channel_key)
    with log.step("channel proof payload"):
        proof = ChannelProof.parse(sign1.payload)
    log.equal("claims in the channel proof", Rejection.CLAIMS_MISMATCH, expected=claims_digest, actual=proof.claims)
    return proof
