"""What a session saw on the wire, kept for the tests of the published format, and how to read it without our code."""

from __future__ import annotations

from dataclasses import dataclass, field

from client_sdk.appraisal.session import AttestationRecord
from client_sdk.transport.protocol import VerifiedAnswer
from client_sdk.wire import digests
from tests import cddl
from tests import reference_decoder as reference


@dataclass
class Collected:
    """A callable for `Appliance(save=...)`: gets every verified answer."""

    answers: list[VerifiedAnswer] = field(default_factory=list)

    def __call__(self, answer: VerifiedAnswer) -> None:
        self.answers.append(answer)

    @property
    def statuses(self) -> set[str]:
        return {answer.receipt.claims.response.status for answer in self.answers}


def check_receipt(receipt: bytes, key: bytes) -> str:
    """Hold a receipt against the CDDL and the second decoder; returns its terminal status."""
    cddl.validate("receipt", receipt)
    payload, _ = reference.read_sign1(receipt, "receipt", key)
    cddl.validate("receipt-claims", payload)
    claims, _ = reference.read_receipt(receipt, key)
    status: str = claims[-70013]["status"]
    return status


def check_bundle(record: AttestationRecord) -> bytes:
    """The same for a bundle, the full one behind a continued one first; returns the receipt key in force."""
    known = {} if record.prior is None else {"claims": _claims(record.full)}
    if record.prior is not None:
        check_bundle(record.full)
    cddl.validate("bundle", record.bundle)
    cddl.validate("attestation-claims", _claims(record.full))
    bundle = reference.read_cbor(record.bundle)
    cddl.validate("channel-proof", bundle["channel-proof"])
    held = {"nonce": record.nonce, "spki": record.channel.spki, "exported": record.channel.exported, **known}
    key: bytes = reference.check_bundle(record.bundle, held)["receipt-key"]
    return key


def check_answer(answer: VerifiedAnswer) -> str:
    """Everything of one answer; returns its terminal status."""
    key = check_bundle(answer.attestation)
    status = check_receipt(answer.receipt.raw, key)
    claims, salt = reference.read_receipt(answer.receipt.raw, key)
    assert answer.body is not None
    assert salt is not None
    assert claims[-70004] == digests.sha256(_claims(answer.attestation.full))
    assert reference.link(answer.receipt.raw) == answer.receipt.digest
    if -70015 not in claims:
        reference.check_content(claims, salt, {"request": answer.exchange.request_body, "response": answer.body})
        return status
    read = reference.check_stream(answer.body, key, answer.exchange.request_body)
    assert read == claims
    for block in reference.blocks(answer.body):
        if block.startswith(b": checkpoint "):
            check_checkpoint(reference._decode64(block, b": checkpoint "), key)
    return status


def check_checkpoint(checkpoint: bytes, key: bytes) -> None:
    cddl.validate("checkpoint", checkpoint)
    payload, _ = reference.read_sign1(checkpoint, "checkpoint", key)
    cddl.validate("checkpoint-payload", payload)


def _claims(record: AttestationRecord) -> bytes:
    claims: bytes = reference.read_cbor(record.bundle)["claims"]
    return claims
