"""What a death by signal says, and which variant of the kernels is tried after it."""

from __future__ import annotations

import signal

import pytest

from appliance.engine.host.deaths import Build, KernelChoice, WorkerDied, describe_death, faulted, processor_name

BUILD = Build(
    library="lib/libggml-cpu.so", version="0.3.36", kernels="avx512-vnni", variants=("plain", "avx2", "avx512-vnni")
)


def died(build: Build | None = BUILD, *, by: int = signal.SIGILL) -> WorkerDied:
    return WorkerDied(describe_death(by, build), faulted=faulted(by), build=build)


@pytest.mark.parametrize("number", [signal.SIGILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_death_names_library_version_variant_processor_and_remedy(number: signal.Signals) -> None:
    text = describe_death(number, BUILD)
    for part in (number.name, "lib/libggml-cpu.so", "0.3.36", "avx512-vnni", processor_name(), "make venv"):
        assert part in text


def test_before_anything_was_said_the_installed_library_is_named() -> None:
    assert "libggml-cpu" in describe_death(signal.SIGSEGV, None)


def test_memory_and_unknown_signals_have_remedies_of_their_own() -> None:
    assert "out-of-memory" in describe_death(signal.SIGKILL, BUILD)
    assert "signal 40" in describe_death(40, BUILD)
    assert not faulted(signal.SIGKILL)


def test_the_next_smaller_variant_is_tried_once() -> None:
    choice = KernelChoice("auto")
    assert choice.name == ""
    assert choice.pass_over(died())
    assert choice.name == "avx2"
    assert choice.facts() == {"kernels-passed-over": "avx512-vnni"}
    assert not choice.pass_over(died())


@pytest.mark.parametrize(
    "death",
    [
        died(by=signal.SIGKILL),
        died(None),
        died(Build(library="x", version="0", kernels="avx2", variants=("plain", "avx2"))),
        died(Build(library="x", version="0", kernels=None, variants=())),
    ],
    ids=["out-of-memory", "before-it-spoke", "nothing-smaller", "no-kernels"],
)
def test_deaths_that_no_other_variant_mends(death: WorkerDied) -> None:
    choice = KernelChoice("auto")
    assert not choice.pass_over(death)
    assert choice.facts() == {}


def test_a_configured_variant_is_never_replaced() -> None:
    choice = KernelChoice("avx512-vnni")
    assert choice.name == "avx512-vnni"
    assert not choice.pass_over(died())
