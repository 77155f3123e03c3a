"""Another installation as the candidate: what it is given, and what is said where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from appliance.bench.environment import describe, describe_installation
from appliance.bench.served import ServedConfig, changed_settings, interpreter, measurable, of_another_python
from appliance.config.settings import load
from appliance.errors import BootError


def test_another_installation_gets_what_differs_from_the_defaults_and_has_its_own_for_the_rest() -> None:
    config = measurable(load('[engine]\nslots = 3\n[[models]]\nname = "m"\ncontext_length = 99\n', environ={}))
    text = changed_settings(config)
    assert load(text, environ={}) == config
    assert "slots = 3" in text
    assert "context_length = 99" in text
    for absent in ("batch_tokens", "kv_tokens", "pooling", "max_body_bytes"):
        assert absent not in text


def test_this_installation_is_described_as_another_one_would_be() -> None:
    described = describe_installation(Path(sys.executable), {"PYTHONPATH": "/nowhere", "PATH": "/usr/bin:/bin"})
    ours = describe()
    assert (described["version"], described["source"]) == (ours["version"], ours["source"])


def test_an_interpreter_without_the_appliance_is_named(tmp_path: Path) -> None:
    with pytest.raises(BootError, match="nowhere cannot be run: FileNotFoundError"):
        describe_installation(tmp_path / "nowhere", {})
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(BootError, match="no installation of the appliance"):
        describe_installation(bare, {})
    config = load('[[models]]\nname = "m"\n', environ={})
    with pytest.raises(BootError, match="No module named appliance"), ServedConfig(config, {}, bare):
        pass
    with pytest.raises(BootError, match="cannot run"), ServedConfig(config, {}, tmp_path / "nowhere"):
        pass


def test_nothing_of_this_installation_leaks_into_another() -> None:
    assert interpreter(None) == [sys.executable]
    assert interpreter(Path("/x/python")) == ["/x/python", "-P"]
    assert of_another_python({"PYTHONPATH": "a", "PYTHONHOME": "b", "HOME": "c"}) == {"HOME": "c"}
