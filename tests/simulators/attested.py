"""A client that has attested a simulated appliance: what most tests of the SDK start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from client_sdk.appraisal.verifier import AttestationResult, appraise
from client_sdk.policy.policy import Policy, UnsafeAcceptInsecure
from client_sdk.receipts.stream import StreamVerifier
from client_sdk.receipts.verify import VerifiedReceipt, verify_receipt
from tests.simulators.insecure_appliance import (
    NOW,
    Answer,
    Connection,
    InsecureAppliance,
    Options,
    Stream,
    StreamBlock,
    chat_request,
    seeded,
)


@dataclass(frozen=True, kw_only=True)
class Attested:
    appliance: InsecureAppliance
    policy: Policy
    nonce: bytes
    connection: Connection
    result: AttestationResult

    def answer(self, options: Options | None = None, **parameters: Any) -> Answer:
        return self.appliance.answer(chat_request(**parameters), self.connection, options=options)

    def stream(self, options: Options | None = None, **parameters: Any) -> Stream:
        return self.appliance.stream(chat_request(stream=True, **parameters), self.connection, options=options)

    def verify(self, answer: Answer, *, policy: Policy | None = None) -> VerifiedReceipt:
        return verify_receipt(answer.receipt, answer.exchange, self.result, policy or self.policy)

    def verifier(self, stream: Stream, *, accept_redacted: bool = False) -> StreamVerifier:
        return StreamVerifier(
            stream.head,
            attestation=self.result,
            policy=self.policy,
            clock=lambda: NOW + 1,
            accept_redacted=accept_redacted,
        )

    def read(self, stream: Stream, blocks: tuple[StreamBlock, ...] | None = None) -> tuple[bytes, VerifiedReceipt]:
        """Everything released of the stream, or of `blocks` in its place, fed block by block."""
        verifier = self.verifier(stream)
        released = []
        for block in stream.blocks if blocks is None else blocks:
            released += verifier.feed(block.raw)
        rest, receipt = verifier.finish()
        return b"".join(released + rest), receipt


def policy_for(appliance: InsecureAppliance, **overrides: Any) -> Policy:
    """The policy that accepts exactly this appliance."""
    fields: Mapping[str, Any] = {
        "models": {appliance.model.name: frozenset({appliance.model.identity})},
        "insecure": UnsafeAcceptInsecure(),
        **overrides,
    }
    return Policy(**fields)


def attested(appliance: InsecureAppliance | None = None, *, connection: str = "connection", **policy: Any) -> Attested:
    appliance = appliance or InsecureAppliance()
    accepted = policy_for(appliance, **policy)
    nonce = seeded(f"{connection} nonce")
    fresh = appliance.connect(connection)
    bundle = appliance.bundle(nonce, fresh)
    result = appraise(bundle, nonce=nonce, channel=fresh.channel, policy=accepted, now=NOW)
    return Attested(
        appliance=appliance,
        policy=accepted,
        nonce=nonce,
        connection=appliance.attested(nonce, fresh),
        result=result,
    )


def with_policy(client: Attested, **overrides: Any) -> Attested:
    return replace(client, policy=policy_for(client.appliance, **overrides))
