"""Every way in runs the same checks: live and asynchronous, from a saved answer, from the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client_sdk import Appliance, AsyncAppliance, Policy, Rejection, UnsafeAcceptInsecure, VerificationError
from client_sdk.cli.main import run
from client_sdk.offline.saved import save_answer, verify_saved
from client_sdk.transport.protocol import VerifiedAnswer
from tests.simulators.insecure_appliance import MODEL
from tests.simulators.wired_appliance import WiredAppliance

OTHER = bytes(range(1, 33))
QUESTION = "What is two plus two?"


@pytest.fixture
def wired() -> Iterator[WiredAppliance]:
    with WiredAppliance() as appliance:
        yield appliance


@pytest.fixture
def policy(wired: WiredAppliance) -> Policy:
    return Policy(models={MODEL: frozenset({wired.simulator.model.identity})}, insecure=UnsafeAcceptInsecure())


@pytest.fixture
def saved(wired: WiredAppliance, policy: Policy, tmp_path: Path) -> Path:
    kept: list[VerifiedAnswer] = []
    with Appliance(wired.url, policy=policy, save=kept.append) as appliance:
        appliance.chat(QUESTION, model=MODEL)
    save_answer(tmp_path / "answer", kept[0], policy_digest=policy.digest)
    return tmp_path / "answer"


STRICTER = {
    Rejection.MODEL_NOT_ALLOWED: lambda p: replace(p, models={MODEL: frozenset({OTHER})}),
    Rejection.CONFIG_NOT_ALLOWED: lambda p: replace(p, configs=frozenset({OTHER})),
    Rejection.DEVICE_NOT_ALLOWED: lambda p: replace(p, devices=frozenset({"abacus"})),
    Rejection.ARITHMETIC_NOT_ALLOWED: lambda p: replace(p, arithmetic=frozenset({"attested-2"})),
    Rejection.REQUIRED_CLAIM_MISSING: lambda p: replace(p, required_claims=frozenset({"gpu"})),
}


def code_of(error: pytest.ExceptionInfo[VerificationError]) -> tuple[Rejection, str]:
    """The code, and the name of the check that failed: the list of checks is one list."""
    return error.value.code, error.value.checks[-1].name


async def ask_async(url: str, policy: Policy) -> None:
    async with AsyncAppliance(url, policy=policy) as appliance:
        await appliance.chat(QUESTION, model=MODEL)


@pytest.mark.parametrize("code", STRICTER, ids=str)
def test_b024_no_way_in_skips_a_check_of_another(
    code: Rejection, wired: WiredAppliance, policy: Policy, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    strict = STRICTER[code](policy)
    with pytest.raises(VerificationError) as live, Appliance(wired.url, policy=strict) as appliance:
        appliance.chat(QUESTION, model=MODEL)
    with pytest.raises(VerificationError) as later:
        asyncio.run(ask_async(wired.url, strict))
    with pytest.raises(VerificationError) as offline:
        verify_saved(saved, strict)
    assert code_of(live) == code_of(later) == code_of(offline)
    assert live.value.code == code

    file = tmp_path / "policy.toml"
    file.write_text(strict.to_toml())
    capsys.readouterr()
    assert run(["verify", str(saved), "--policy", str(file), "--json"]) == 10
    said = json.loads(capsys.readouterr().out)
    assert (said["result"], said["code"], said["checks"][-1]["name"]) == ("reject", code.value, code_of(live)[1])


def test_b041_a_wrong_pin_in_the_file_alone_is_enforced(wired: WiredAppliance, policy: Policy, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(replace(policy, models={MODEL: frozenset({OTHER})}).to_toml())
    with Appliance(wired.url, policy=file) as appliance, pytest.raises(VerificationError) as caught:
        appliance.chat(QUESTION, model=MODEL)  # no option given, nothing asked for: defaults verify
    assert caught.value.code == Rejection.MODEL_NOT_ALLOWED
    assert wired.inference == []
    file.write_text(policy.to_toml())
    with Appliance(wired.url, policy=file) as appliance:
        assert appliance.chat(QUESTION, model=MODEL).text
