"""The published CDDL as a test oracle: `validate(kind, data)` checks bytes against `docs/wire.cddl`.

The validator (cddl-verifier) shares no code with ours, closes every map and follows `.cbor` into embedded bytes. CDDL
says nothing about determinism, signatures or relations between fields: those are other tests.
"""

from __future__ import annotations

import functools
from pathlib import Path

from cddl_verifier import Validator  # type: ignore[import-untyped]

WIRE_CDDL = Path(__file__).parents[1] / "docs" / "wire.cddl"

KINDS = (
    "receipt",
    "receipt-claims",
    "checkpoint",
    "checkpoint-payload",
    "stream-context",
    "attestation-request",
    "attestation-claims",
    "bundle",
    "channel-proof",
    "channel-proof-payload",
    "insecure-evidence",
    "insecure-statement",
    "tpm2-evidence",
    "model-identity-input",
    "engine-digest-input",
    "item-digest-input",
)


class CddlMismatch(ValueError):
    """The bytes are not of that kind; the message carries the validator's reasons."""


def validate(kind: str, data: bytes) -> None:
    """Raise CddlMismatch unless `data` is exactly one CBOR item of `kind` (one of KINDS), embedded CBOR included."""
    if kind not in KINDS:
        raise KeyError(f"{kind!r} is not one of {', '.join(KINDS)}")
    result = _validator().validate(data, root_type=kind)
    if not result.valid:
        reasons = "; ".join(f"{entry.path_text}: {entry.message}" for entry in result.diagnostics[:6])
        raise CddlMismatch(f"{kind}: {reasons}")


@functools.cache
def _validator() -> Validator:
    return Validator(WIRE_CDDL)
