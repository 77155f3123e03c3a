"""Write every vector again: `python -m tests.vectors.make_vectors`. Same input, same bytes, on every machine.

A vector is one `vector.json`: what it is, its bytes in hex and, for an honest one, what a verifier holds (`held`). A
vector with a fault names its honest twin instead, which differs in nothing else and must be accepted.
"""

# ruff: noqa: E501 - one fault a line is a table, and reads as one
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from client_sdk.wire import attestation
from tests.vectors import faults_other, faults_receipt
from tests.vectors import honest as h

HERE = Path(__file__).parent


def honest_vectors() -> Iterator[tuple[str, dict[str, Any]]]:
    key = {"key": h.RECEIPT.cose_key().hex()}
    asked = {**key, "request": h.REQUEST_BODY.hex()}
    evaluated = {
        "prompt_text": h.PROMPT_TEXT,
        "prompt_tokens": h.PROMPT_TOKENS,
        "outputs": [{"text": h.OUTPUT_TEXT, "tokens": h.OUTPUT_TOKENS}],
        "stop": h.STOP,
    }
    embedded = {**key, "request": h.EMBEDDING_REQUEST.hex()}
    vectors = {**embedded, "inputs": h.INPUTS, "input_tokens": h.INPUT_TOKENS, "vectors": h.VECTORS}
    claims = h.attestation_claims().encode()
    channel = {"nonce": h.NONCE.hex(), "spki": h.spki().hex(), "exported": h.EXPORTED.hex()}
    again = h.seed("second nonce")
    continued = attestation.AttestationBundle(channel_proof=h.channel_proof(claims, nonce=again)).encode()
    request = attestation.AttestationRequest(nonce=again, have=h.attested()).encode()
    error = h.ERROR_BODY.hex()
    table: tuple[tuple[str, str, str, bytes, Mapping[str, Any]], ...] = (
        ("000-whole-answer", "a complete answer in one piece", "receipt", h.sealed(h.whole_answer()), {**asked, **evaluated, "response": h.RESPONSE_BODY.hex()}),
        ("001-streamed-answer", "the receipt of a stream", "receipt", h.sealed(h.streamed_answer()), {**asked, **evaluated}),
        ("002-refusal", "an unknown model", "receipt", h.sealed(h.refusal()), {**asked, "response": error}),
        ("003-engine-error", "the engine died after some tokens", "receipt", h.sealed(h.engine_error()), {**asked, **evaluated, "response": error}),
        ("004-event-stream", "frames, padding, two checkpoints, receipt", "event-stream", b"".join(h.event_stream()), asked),
        ("005-checkpoint", "the checkpoint after frame 3", "checkpoint", h.checkpoint(3), key),
        ("006-full-bundle", "claims, insecure evidence, channel proof", "bundle", h.bundle(claims), channel),
        ("007-continued-bundle", "the channel proof alone", "bundle", continued, {**channel, "nonce": again.hex(), "claims": claims.hex()}),
        ("008-attestation-request", "asks to continue", "attestation-request", request, {}),
        ("009-redacted-receipt", "the salt left out, the signature intact", "receipt", h.sealed(h.whole_answer(), salt=None), key),
        ("010-embedding", "two vectors of two dimensions", "receipt", h.sealed(h.embedding()), {**vectors, "response": h.EMBEDDING_RESPONSE.hex()}),
        ("011-embedding-interrupted", "the deadline passed before there were vectors", "receipt", h.sealed(h.interrupted_embedding()), {**embedded, "response": error}),
    )  # fmt: skip
    for name, what, kind, data, held in table:
        yield name, {"what": what, "kind": kind, "data": data.hex(), "held": dict(held)}


def fault_vectors() -> Iterator[tuple[str, dict[str, Any]]]:
    for group in (faults_receipt.faults, faults_other.faults):
        for fault in group():
            yield (
                fault.name,
                {
                    "what": fault.what,
                    "kind": fault.kind,
                    "bugs": list(fault.bugs),
                    "stage": fault.stage,
                    "code": fault.code,
                    "cddl_refuses": fault.cddl,
                    "twin": fault.twin,
                    "data": fault.data.hex(),
                },
            )


def files() -> dict[str, str]:
    """Every vector file by its path under this folder."""
    vectors = [*honest_vectors(), *fault_vectors()]
    made = {f"{name}/vector.json": json.dumps(vector, indent=1) + "\n" for name, vector in vectors}
    assert len(made) == len(vectors), "two vectors with one name"
    return made


def main() -> None:
    for path, content in files().items():
        target = HERE / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
