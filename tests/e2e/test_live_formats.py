"""What an appliance sends, held against the published CDDL and read by the decoder that shares no code with it."""

from __future__ import annotations

from typing import Any

import pytest

from client_sdk import Appliance, ApplianceError, Policy
from tests import cddl
from tests import reference_decoder as reference
from tests.e2e.evidence import Collected, check_answer, check_bundle
from tests.e2e.programs import MODEL, Served

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def seen(server: Served, policy: Policy, collected: Collected) -> Collected:
    """Answers of every form on two connections, on top of what earlier tests of the session have kept."""
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "stop": ["zzz"]}
    with Appliance(server.url, policy=policy, save=collected) as appliance:
        stream = iter(appliance.stream("Tell me a story.", **ask))
        next(stream)
        appliance.chat("Hello", **ask)
        list(stream)
        client: Any = appliance.openai()
        client.completions.create(prompt="One, two", **ask)
        list(client.completions.create(prompt="One, two", stream=True, **ask))
        for fault in ({"temperature": 99}, {"max_tokens": 10**6}, {"model": "absent"}):
            with pytest.raises(ApplianceError) as caught:
                appliance.chat("Hello", **{**ask, **fault})
            assert caught.value.verified
    return collected


def test_every_answer(seen: Collected) -> None:
    statuses = [check_answer(answer) for answer in seen.answers]
    assert {"complete", "refused"} <= set(statuses)
    assert any(answer.attestation.prior is not None for answer in seen.answers), "a continued attestation is among them"


def test_a_change_of_any_map_is_no_match(seen: Collected) -> None:
    answer = seen.answers[0]
    payload, _ = reference.read_sign1(answer.receipt.raw, "receipt", check_bundle(answer.attestation))
    claims = reference.read_cbor(payload)
    for key in claims:
        with pytest.raises(cddl.CddlMismatch):
            cddl.validate("receipt-claims", reference.write_cbor({**claims, key: 1.5}))
    with pytest.raises(cddl.CddlMismatch):
        cddl.validate("receipt-claims", reference.write_cbor({**claims, -70099: 1}))


def test_the_receipt_served_later(server: Served, policy: Policy) -> None:
    """By its address it is byte for byte the one delivered; redacted it is the same receipt without the salt."""
    with Appliance(server.url, policy=policy) as appliance:
        answer = appliance.chat("Hello", model=MODEL, max_tokens=2)
        later = appliance.http.get(f"/v1/receipts/{answer.response_id}")
        redacted = appliance.http.get(f"/v1/receipts/{answer.response_id}", params={"redact": "1"})
    assert later.content == answer.receipt.raw
    assert later.headers["content-type"] == "application/cose"
    cddl.validate("receipt", redacted.content)
    assert reference.link(redacted.content) == answer.receipt.digest
    assert reference.read_receipt(redacted.content)[1] is None
