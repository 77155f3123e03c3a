"""An appliance that asks for keys: who gets in, whose receipts are whose, what a refusal without receipt is worth."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client_sdk import Appliance, ApplianceError, Policy, PolicyError, Rejection
from tests.e2e.programs import MODEL, Served, make_policy, outcome, run_client, run_program

pytestmark = pytest.mark.model
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 2}


@pytest.fixture(scope="module")
def key_file(workspace: Path) -> Path:
    return workspace / "keys.json"


def new_key(key_file: Path, *options: str) -> str:
    made = run_program("appliance", "keys", "--file", str(key_file), "new", *options)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@pytest.fixture(scope="module")
def key(key_file: Path) -> str:
    return new_key(key_file, "--label", "first")


@pytest.fixture(scope="module")
def other_key(key_file: Path) -> str:
    return new_key(key_file, "--label", "second")


@pytest.fixture(scope="module")
def guarded(workspace: Path, key_file: Path, key: str, other_key: str) -> Iterator[Served]:
    assert key != other_key
    environ = {"APPLIANCE_KEYS_FILE": str(key_file), "APPLIANCE_ENGINE_MAX_ACTIVE": "2"}
    with Served(workspace / "guarded", environ=environ) as served:
        yield served


@pytest.fixture(scope="module")
def guarded_policy(workspace: Path, guarded: Served) -> Path:
    return make_policy(workspace / "guarded-policy", environ=guarded.environ)


@pytest.mark.parametrize("wrong", [None, "ak-not-a-key"])
def test_without_a_key_there_is_no_answer(guarded: Served, guarded_policy: Path, wrong: str | None) -> None:
    """401 has no receipt by design, and the SDK says that nothing vouches for it."""
    with Appliance(guarded.url, policy=guarded_policy, api_key=wrong) as appliance:
        assert appliance.attest().claims.mode == "insecure", "attestation needs no key"
        for ask in (appliance.chat, lambda *a, **k: list(appliance.stream(*a, **k))):
            with pytest.raises(ApplianceError) as caught:
                ask("Hello", **ASK)
            assert (caught.value.status, caught.value.verified) == (401, False)


def test_one_key_one_chain_over_all_connections(guarded: Served, guarded_policy: Path, key: str) -> None:
    policy = replace(Policy.load(guarded_policy), require_gap_free_chain=True)
    with Appliance(guarded.url, policy=policy, api_key=key) as appliance, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda number: appliance.chat(f"{number}", **ASK), range(6)))
        claims = sorted((answer.receipt.claims for answer in answers), key=lambda c: c.sequence)
        assert [c.sequence for c in claims] == list(range(claims[0].sequence, claims[0].sequence + 6))
        assert len({c.chain for c in claims}) == 1
        assert appliance.receipt_gaps() == ()


def test_a_gap_in_a_chain_is_told(guarded: Served, guarded_policy: Path, key: str) -> None:
    """Another holder of the same key has asked in between: for whoever insists on seeing everything, that is a NO."""
    policy = replace(Policy.load(guarded_policy), require_gap_free_chain=True)
    appliance = Appliance(guarded.url, policy=policy, api_key=key)
    appliance.chat("Hello", **ASK)
    with Appliance(guarded.url, policy=guarded_policy, api_key=key) as other:
        other.chat("Hello", **ASK)
    appliance.chat("Hello", **ASK)
    assert len(appliance.receipt_gaps()) == 1
    with pytest.raises(PolicyError) as caught:
        appliance.close()
    assert caught.value.code == Rejection.RECEIPT_CHAIN_GAP


def test_receipts_belong_to_their_key(guarded: Served, guarded_policy: Path, key: str, other_key: str) -> None:
    with Appliance(guarded.url, policy=guarded_policy, api_key=key) as appliance:
        answer = appliance.chat("Hello", **ASK)
        path = f"/v1/receipts/{answer.response_id}"
        assert appliance.http.get(path).content == answer.receipt.raw
    with Appliance(guarded.url, policy=guarded_policy, api_key=other_key) as other:
        assert other.http.get(path).status_code == 404
        assert other.chat("Hello", **ASK).receipt.claims.chain != answer.receipt.claims.chain
        assert other.http.get("/metrics").status_code in (401, 403)


def test_a_full_appliance_says_so(guarded: Served, guarded_policy: Path, key: str) -> None:
    """429 with Retry-After, before the body is read: no receipt, and the SDK says so."""
    with Appliance(guarded.url, policy=guarded_policy, api_key=key) as appliance:
        running: list[Any] = [iter(appliance.stream("Tell a long story.", model=MODEL, max_tokens=2000, seed=5))]
        next(running[0])
        running.append(iter(appliance.stream("Hello", model=MODEL, max_tokens=2000, seed=5, top_k=1)))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(next, running[1])
            refused = None
            while refused is None and not waiting.done():
                response = appliance.http.post("/v1/chat/completions", json={**ASK, "messages": []})
                refused = response if response.status_code == 429 else None
            for stream in running[:1]:
                stream.close()
            waiting.result(30)
        running[1].close()
        assert refused is not None
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.extensions["verified"] is False
        assert appliance.chat("Hello", **ASK).text is not None


def test_the_key_comes_from_the_environment(guarded: Served, guarded_policy: Path, key: str) -> None:
    arguments = ["chat", guarded.url, "--policy", str(guarded_policy), "--model", MODEL, "--max-tokens", "2", "--json"]
    without = run_client(*arguments, "Hello")
    assert without.returncode == 20
    assert "without a receipt" in outcome(without)["message"]
    with_key = run_client(*arguments, "--api-key-env", "THE_KEY", "Hello", environ={"THE_KEY": key})
    assert with_key.returncode == 0
    assert key not in with_key.stdout + with_key.stderr


def test_a_key_is_never_written(guarded: Served, key_file: Path, key: str) -> None:
    assert key not in key_file.read_text()
    assert key not in guarded.output()


@pytest.mark.parametrize("spoilt", ["", " ", "secret-4711\n", "secret 4711", "s\u00e9cret-4711", "secret-4711\r\nx: y"])
def test_a_key_that_no_header_can_carry(guarded: Served, guarded_policy: Path, spoilt: str) -> None:
    """Told before anything is sent, and never quoted: HTTP libraries put the whole header into their message."""
    with pytest.raises(ValueError) as caught:
        Appliance(guarded.url, policy=guarded_policy, api_key=spoilt)
    assert "4711" not in str(caught.value)
