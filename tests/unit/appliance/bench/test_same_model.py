"""What may be compared at all: settings that leave the weights as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from appliance.bench.runs import Arm, Run
from appliance.bench.same_model import DifferentModel, check_same_model, check_same_weights
from appliance.boot.identities import model_facts
from appliance.cli.bench import bench
from appliance.config.settings import Config, load
from appliance.engine.generation.fake import FakeEngine
from appliance.models.errors import ModelNotInstalled
from appliance.models.manifest import ModelFacts
from appliance.models.store import ModelStore
from tests.unit.appliance.bench.test_decision import comparison
from tests.unit.appliance.engine.weights.test_gguf import MINIMAL, gguf

FINE, COARSE = gguf({**MINIMAL, "general.file_type": 7}), gguf({**MINIMAL, "general.file_type": 3})
SETTINGS = {
    "guessing ahead": '[engine]\nspeculation = "n-gram"\n',
    "reuse of prefixes": "[engine]\nprefix_cache_entries = 9\n",
    "threads": "[engine]\nthreads = 1\n",
}


def store_with(folder: Path, name: str, content: bytes) -> ModelStore:
    file = folder / f"{hashlib.sha256(content).hexdigest()[:8]}.gguf"
    file.write_bytes(content)
    store = ModelStore(folder / f"store of {file.name}")
    promise = ModelFacts(
        name=name, sha256=hashlib.sha256(content).digest(), size=len(content), licence="", source="test"
    )
    store.add(file, promise)
    return store


def named(name: str, engine: str = "") -> Config:
    return load(f'{engine}[[models]]\nname = "{name}"\n', environ={})


@pytest.mark.parametrize("engine", SETTINGS.values(), ids=SETTINGS)
def test_h06_settings_that_change_no_answer_may_be_compared(tmp_path: Path, engine: str) -> None:
    store = store_with(tmp_path, "m", FINE)
    configs = {Arm.BASELINE: named("m"), Arm.CANDIDATE: named("m", engine)}
    check_same_model(configs, dict.fromkeys(Arm, store))
    check_same_model({Arm.BASELINE: named("m")}, {Arm.BASELINE: store})


def test_h06_h08_other_weights_are_another_model_and_refused_whatever_they_are_called(tmp_path: Path) -> None:
    stores = {
        Arm.BASELINE: store_with(tmp_path, "m", FINE),
        Arm.CANDIDATE: store_with(tmp_path, "m", COARSE),
    }
    with pytest.raises(DifferentModel, match="another model, never a setting") as caught:
        check_same_model(dict.fromkeys(Arm, named("m")), stores)
    for content in (FINE, COARSE):
        assert hashlib.sha256(content).hexdigest() in str(caught.value)
    with pytest.raises(DifferentModel, match="m and m-coarse"):
        check_same_model({Arm.BASELINE: named("m"), Arm.CANDIDATE: named("m-coarse")}, stores)


def test_a_model_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    store = store_with(tmp_path, "m", FINE)
    with pytest.raises(ModelNotInstalled, match="other"):
        check_same_model(dict.fromkeys(Arm, named("other")), dict.fromkeys(Arm, store))


def test_h06_the_command_refuses_a_quantized_candidate_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # nothing could be started
    arguments: list[str] = []
    for arm, content in ((Arm.BASELINE, FINE), (Arm.CANDIDATE, COARSE)):
        store = store_with(tmp_path, "m", content)
        file = tmp_path / f"{arm.value}.toml"
        file.write_text(f'[store]\nmodels_dir = "{store.root}"\n[[models]]\nname = "m"\n')
        arguments += [f"--{arm.value}", str(file)]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 1
    assert "another model, never a setting" in done.stderr
    assert done.stdout == ""


def weighing(digest: bytes) -> Callable[[Run], Run]:
    return lambda each: replace(each, weights=((10, digest),))


def test_h08_what_receipts_say_of_the_weights_decides_in_the_end() -> None:
    same = [weighing(b"\x01" * 32)(each) for each in comparison(2.0)]
    check_same_weights(same)
    check_same_weights(same[:1])
    mixed = [weighing(bytes([each.arm is Arm.CANDIDATE]) * 32)(each) for each in same]
    with pytest.raises(DifferentModel, match=r"by their receipts .* 00{63} and (01){32}"):
        check_same_weights(mixed)


def test_h08_other_weights_are_another_identity_in_receipts() -> None:
    loaded = FakeEngine().model
    (size, digest), *rest = loaded.weights
    other = replace(loaded, weights=((size, bytes([digest[0] ^ 1, *digest[1:]])), *rest))
    assert model_facts("m", other).identity != model_facts("m", loaded).identity
    assert model_facts("m", other).to_map()["weights"] != model_facts("m", loaded).to_map()["weights"]
