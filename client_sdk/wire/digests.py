"""Labelled hashes, salted commitments and the digests that people pin. Every hash input is labelled."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from client_sdk.wire import cbor

_PREFIX = b"attested-inference "


def sha256(data: bytes) -> bytes:
    """Plain SHA-256: for SPKI, key identifiers, files and claims bytes as received, nothing else."""
    return hashlib.sha256(data).digest()


def labelled(label: str, data: bytes) -> bytes:
    """D(label, data) = SHA-256("attested-inference " || label || 0x00 || data), 32 bytes."""
    return hashlib.sha256(_PREFIX + label.encode() + b"\x00" + data).digest()


def commitment(salt: bytes, label: str, data: bytes) -> bytes:
    """C(label, data) = HMAC-SHA-256(HMAC-SHA-256(salt, label), data), 32 bytes.

    Without the 32-byte salt the content cannot be guessed and tested; with `inner_key(salt, label)` one field can be
    opened without opening the others.
    """
    return hmac.digest(inner_key(salt, label), data, "sha256")


def inner_key(salt: bytes, label: str) -> bytes:
    """The key that opens the one commitment made under `label`."""
    return hmac.digest(salt, label.encode(), "sha256")


def report_data(claims: bytes) -> bytes:
    """H, the 64 bytes that hardware evidence signs for these attestation claims."""
    return hashlib.sha512(_PREFIX + b"report-data v1\x00" + claims).digest()


def tpm_extra_data(claims: bytes) -> bytes:
    """The 32 bytes a TPM signs as extraData for these attestation claims: SHA-256 where `report_data` has SHA-512."""
    return labelled("report-data v1", claims)


def certificate_report_data(spki: bytes) -> bytes:
    """The 64 bytes that evidence inside a TLS certificate signs: its key alone (SPKI DER), under a label of its own."""
    return hashlib.sha512(_PREFIX + b"certificate v1\x00" + spki).digest()


def certificate_extra_data(spki: bytes) -> bytes:
    """The same for a TPM: SHA-256 where `certificate_report_data` has SHA-512."""
    return labelled("certificate v1", spki)


def channel_binder(spki: bytes, exported: bytes) -> bytes:
    """SHA-256(SPKI DER || 32 bytes of TLS exporter output): this very connection and this very key."""
    return hashlib.sha256(spki + exported).digest()


def model_identity(
    *,
    format_name: str,
    weights: Sequence[tuple[int, bytes]],
    tokenizer: bytes,
    chat_template: bytes | None,
    files: Sequence[tuple[int, bytes]] = (),
    adapters: Sequence[tuple[int, bytes]] = (),
) -> bytes:
    """The identity of a model by content: no file names, no alias.

    `weights` and `files` (index and configuration files) are (size in bytes, SHA-256) and are sorted here by SHA-256;
    `adapters` keep their order of application. `tokenizer` and `chat_template` are 32-byte digests.
    """

    def listed(entries: Sequence[tuple[int, bytes]]) -> list[list[object]]:
        return [[size, digest] for size, digest in entries]

    return labelled(
        "model v1",
        cbor.encode(
            {
                "format": format_name,
                "weights": listed(sorted(weights, key=lambda entry: entry[1])),
                "files": listed(sorted(files, key=lambda entry: entry[1])),
                "tokenizer": tokenizer,
                "chat-template": chat_template,
                "adapters": listed(adapters),
            }
        ),
    )


def config_digest(configured: Mapping[str, object]) -> bytes:
    """D("config v1", ...) over what was configured: "auto" stays "auto"."""
    return labelled("config v1", cbor.encode(configured))


def engine_digest(libraries: Sequence[tuple[str, bytes]]) -> bytes:
    """D("engine v1", sorted [basename, SHA-256] of the native libraries mapped in the worker)."""
    return labelled("engine v1", cbor.encode([[name, digest] for name, digest in sorted(libraries)]))


def device_digest(facts: Mapping[str, object]) -> bytes:
    """D("device v1", facts of the device). Depends on the host: a fact to record, rarely one to pin."""
    return labelled("device v1", cbor.encode(facts))


def item_digest(kind: str, content: bytes) -> bytes:
    """D("item v1", dCBOR([kind, content])) of one evidence item, as named in the claims' `devices`."""
    return labelled("item v1", cbor.encode([kind, content]))


def gpu_nonce(nonce: bytes, binder: bytes | None) -> bytes:
    """The 32-byte nonce a GPU signs: tied to the CPU's claims by their nonce and binder (none: the empty string)."""
    return labelled("gpu v1", nonce + (binder or b""))


def receipt_link(redacted_receipt: bytes) -> bytes:
    """D("receipt v1", receipt with an empty unprotected map): what the next receipt of a chain calls `previous`."""
    return labelled("receipt v1", redacted_receipt)
