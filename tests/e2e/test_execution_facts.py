"""Eight choices, each on a path of its own: what the engine states of all of them fits the receipt, and verifies."""

from __future__ import annotations

import pytest

from appliance.api.schema import MAX_CHOICES
from appliance.inference import sampling
from client_sdk import Appliance, Policy
from client_sdk.wire.receipt import MAX_EXECUTION_FACTS
from tests.e2e.glass import GlassAppliance
from tests.e2e.programs import MODEL

pytestmark = pytest.mark.model


def test_the_facts_of_eight_choices_fit_a_receipt(glass: GlassAppliance, policy: Policy) -> None:
    with Appliance(glass.url, policy=policy) as appliance:
        answer = appliance.chat(
            "Repeat after me: one two three one two three one two three.",
            model=MODEL,
            n=MAX_CHOICES,
            max_tokens=24,
            temperature=1.3,
            stop=["zzz"],
            logprobs=True,
            top_logprobs=5,
            prompt_cache_key="facts",
        )
    execution = answer.receipt.claims.execution
    assert execution is not None
    names = {name.rpartition("/")[0] or name for name in execution}
    assert len(names) <= sampling.FACTS_PER_CHOICE
    assert len(names) * MAX_CHOICES <= MAX_EXECUTION_FACTS, "even if all of them differed"
    assert len(answer.texts) == MAX_CHOICES
