"""The proof of a build before it is used: golden digests, variants that die, other bits, older processors."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("llama_cpp")

import llama_cpp

from appliance.engine import inspection
from appliance.engine.host.deaths import processor_name
from appliance.engine.llama_cpp import libraries
from tests.integration.test_engine_deaths import Dying, dying

__all__ = ["dying"]
ROOT = Path(__file__).parents[2]
SITE = Path(llama_cpp.__file__).resolve().parents[1]
MODULE = "appliance.engine.llama_cpp.proof"
QEMU = shutil.which("qemu-x86_64")

pytestmark = pytest.mark.skipif(libraries.kernels() is None, reason="this build has none of this project's kernels")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_proof", ROOT / "scripts" / "engine_proof.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def variants() -> tuple[str, ...]:
    library = libraries.kernels()
    assert library is not None
    return tuple(name for name in libraries.VARIANTS if library.attested_variant_available(name.encode()))


def computed(*arguments: str, before: tuple[str, ...] = (), site: Path = SITE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    command = [*before, sys.executable, "-s", "-m", MODULE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("variant", variants())
def test_every_variant_of_this_machine_computes_the_golden_digests(script: ModuleType, variant: str) -> None:
    done = computed("--variant", variant)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["digests"] == script.golden()


def test_a_variant_that_dies_is_off_and_the_next_smaller_is_the_limit(script: ModuleType, dying: Dying) -> None:
    names = [name for name in variants() if name != "plain"]
    if len(names) < 2:
        pytest.skip("this processor has one variant alone")
    said: list[str] = []
    engine = script.Engine(
        site=SITE, compiler="g++ 12", processor="a Xeon", python=dying(signal.SIGILL, variant=names[-1])
    )
    proof = script.prove(engine, script.golden(), said.append)
    assert (proof.limit, proof.died) == (names[-2], names[-1])
    assert list(proof.proven) == names[:-1]
    assert said[-1].startswith(f"{names[-1]} died of SIGILL (signal 4) at '")
    assert said[-1].endswith(
        f"2 rows' on a Xeon, compiled by g++ 12: {names[-2]} is used, with the same bits and slower."
    )


def test_an_engine_that_always_dies_is_an_error_that_names_everything(script: ModuleType, dying: Dying) -> None:
    engine = script.Engine(site=SITE, compiler="g++ 12", processor="a Xeon", python=dying(signal.SIGSEGV))
    with pytest.raises(script.ProofError) as caught:
        script.prove(engine, script.golden(), lambda line: None)
    text = str(caught.value)
    assert "died of SIGSEGV (signal 11) at 'Q4_0 with avx2, 2 rows' on a Xeon, compiled by g++ 12" in text
    assert "CC and CXX" in text


def test_other_bits_are_refused(script: ModuleType) -> None:
    engine = script.Engine(site=SITE, compiler="g++ 12", processor="a Xeon")
    golden = {**script.golden(), "Q5_1": "0" * 64}
    with pytest.raises(
        script.ProofError, match=r"computes other bits than other builds for Q5_1 \([0-9a-f]{64}\) with avx2"
    ):
        script.prove(engine, golden, lambda line: None)


def test_the_recorded_limit_is_respected_and_shown(tmp_path: Path) -> None:
    names = [name for name in variants() if name != "plain"]
    if len(names) < 2:
        pytest.skip("this processor has one variant alone")
    shutil.copytree(SITE / "llama_cpp", tmp_path / "llama_cpp")
    folder = tmp_path / "llama_cpp" / "lib"
    record = {
        "limit": names[0],
        "proven": names[:1],
        "died": names[1],
        "processor": processor_name(),
        "library": hashlib.sha256((folder / "libggml-cpu.so").read_bytes()).hexdigest(),
    }
    (folder / libraries.PROOF).write_text(json.dumps(record))
    told = json.loads(computed(site=tmp_path).stdout)
    assert (told["in_use"], told["variants"]) == (names[0], ["plain", names[0]])
    assert inspection._proof(told["proof"]) == f"{names[0]}; {names[1]} is off: its process died when it was proven"
    for changed in ({"library": "0" * 64}, {"processor": "another"}):
        (folder / libraries.PROOF).write_text(json.dumps(record | changed))
        told = json.loads(computed(site=tmp_path).stdout)
        assert (told["in_use"], told["proof"]) == (names[-1], {})


def test_doctor_says_what_is_computed_with() -> None:
    found = dict(inspection.engine_lines(sys.executable))
    assert found["arithmetic"] == "attested-1"
    assert found["processor"] == processor_name()
    assert all(name in found["kernels"] for name in variants())


@pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64")
def test_a_processor_without_avx2_is_refused_before_the_library_is_loaded() -> None:
    done = computed(before=(str(QEMU), "-cpu", "Nehalem"))
    assert done.returncode == 3
    assert done.stderr.strip().splitlines()[-1] == (
        "this processor has no avx2, fma, f16c: the engine is compiled for x86-64-v3"
    )


@pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64")
def test_the_oldest_processor_that_is_served_computes_the_same_bits(script: ModuleType) -> None:
    """Haswell, emulated: AVX2 and nothing newer. Two formats, as the emulator takes a hundred times as long."""
    before = (str(QEMU), "-cpu", "Haswell")
    assert json.loads(computed(before=before).stdout)["variants"] == ["plain", "avx2"]
    done = computed("--variant", "avx2", "--formats", "Q4_1,Q4_K", before=before)
    found = json.loads(done.stdout)["digests"]
    assert set(found) == {"functions", "Q4_1", "Q4_K"}
    assert found.items() <= script.golden().items()
