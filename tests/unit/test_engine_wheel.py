"""The build of llama.cpp that `make venv` installs: what names it, and what a failed one leaves behind."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("engine_wheel", SCRIPTS / "engine_wheel.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


def test_the_pinned_source_is_the_version_that_is_installed_and_required(script: ModuleType) -> None:
    source = script.pinned(ROOT / "image/lock.toml")
    assert f"llama_cpp_python=={source.version}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert f'"llama-cpp-python=={source.version}"' in (ROOT / "pyproject.toml").read_text()
    assert re.fullmatch("[0-9a-f]{64}", source.sha256)


def test_the_flags_are_those_of_the_image_too(script: ModuleType) -> None:
    image = (ROOT / "image/build/compiled.py").read_text()
    assert all(f'"{flag}"' in image for flag in script.FLAGS)


def test_a_wheel_is_named_by_everything_that_decides_what_is_compiled(script: ModuleType, tmp_path: Path) -> None:
    source = script.pinned(ROOT / "image/lock.toml")
    shutil.copytree(ROOT / script.NATIVE, tmp_path / script.NATIVE)
    files = sorted((tmp_path / script.NATIVE).iterdir())
    here = script.machine()
    names = [script.key(source, tmp_path, here)]
    assert names == [script.key(source, ROOT, here)]
    names += [script.key(source, tmp_path, {**here, fact: here[fact] + " "}) for fact in here]
    names.append(script.key(script.Source(version=source.version, sha256="0" * 64), tmp_path, here))
    for path in files:
        path.write_bytes(path.read_bytes() + b"\n")
        names.append(script.key(source, tmp_path, here))
    files[0].rename(files[0].with_suffix(".other"))
    names.append(script.key(source, tmp_path, here))
    assert len(set(names)) == len(names) == 4 + len(here) + len(files) - 1
    assert here["processor"]


def test_a_build_appears_whole_or_not_at_all(script: ModuleType, tmp_path: Path) -> None:
    source = script.pinned(ROOT / "image/lock.toml")
    folder = tmp_path / "engine" / "0123"
    said: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def fails(command: Sequence[str], extra: Mapping[str, str]) -> int:
        out = Path(command[command.index("-w") + 1])
        out.mkdir()
        (out / "llama_cpp_python-0.0.0-py3-none-linux_x86_64.whl").write_bytes(b"half")
        return 1

    def succeeds(command: Sequence[str], extra: Mapping[str, str]) -> int:
        said.append((command, extra))
        requirement = Path(command[command.index("-r") + 1]).read_text()
        assert requirement == f"llama-cpp-python=={source.version} --hash=sha256:{source.sha256}\n"
        return fails(command, extra) - 1

    assert script.build(source, ROOT, folder, fails) is None
    assert script.find(folder) is None
    assert list(folder.parent.iterdir()) == []
    wheel = script.build(source, ROOT, folder, succeeds)
    assert wheel is not None
    assert wheel == script.find(folder)
    assert list(folder.parent.iterdir()) == [folder]
    ((command, extra),) = said
    assert "--no-cache-dir" in command, "pip's cache does not know what a wheel was compiled from"
    assert str(ROOT / "native/llama_cpp/attested.cmake") in extra["CMAKE_ARGS"]


def test_it_prints_nothing_but_the_path(tmp_path: Path) -> None:
    """With the wheel at hand, as in every test run: `make venv` came before."""
    run = subprocess.run(
        [sys.executable, SCRIPTS / "engine_wheel.py", "--log", tmp_path / "log"],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = run.stdout.splitlines()
    assert Path(line).name.startswith("llama_cpp_python-")
    assert Path(line).is_file()
