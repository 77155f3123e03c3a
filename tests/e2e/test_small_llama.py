"""The small model that emulated machines are tested with: the same bytes every time, and it answers."""

from __future__ import annotations

from pathlib import Path

from appliance.models.store import ModelStore
from client_sdk import Appliance, Policy
from tests import small_llama
from tests.e2e.programs import Served, make_policy


def test_it_is_written_with_the_same_bytes_and_answers(tmp_path: Path, smollm2: Path) -> None:
    store = ModelStore(tmp_path / "attested-inference/models")
    small_llama.install(smollm2, store)
    before = store.get(small_llama.NAME).sha256
    small_llama.install(smollm2, store)
    assert store.verify(small_llama.NAME).sha256 == before
    arguments = ("--model", small_llama.NAME, "--attester", "insecure")
    environ = {"XDG_DATA_HOME": str(tmp_path)}
    policy = Policy.load(make_policy(tmp_path / "policy", arguments, environ))
    with (
        Served(tmp_path / "served", arguments, environ) as served,
        Appliance(served.url, policy=policy) as appliance,
    ):
        answers = [appliance.chat("Hello", model=small_llama.NAME, max_tokens=8, temperature=0).text for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].strip()
