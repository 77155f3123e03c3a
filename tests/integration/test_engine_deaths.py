"""Native code that dies, injected into the real worker: the start says what died, where, and what to do."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engine.embedding.supervisor import SupervisedEmbedder
from appliance.engine.host.deaths import WorkerDied, processor_name
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import EngineSettings, RestartPolicy
from appliance.engine.types import ChatMessage, GenerationJob, SamplingParams
from appliance.errors import BootError, EngineFailed
from tests import minilm

pytestmark = pytest.mark.model

SHA256 = bytes.fromhex("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
SIZE = 98_362_432

# Stands before the library that evaluates, and dies at so many tokens where the named variant is in use.
DYING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef int (*compute)(void *, void *);
typedef int64_t (*elements)(void *);
typedef void * (*by_name)(void *, const char *);
typedef const char * (*named)(void);

static void * of(const char * library, const char * symbol) {
    void * found = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
    return found ? dlsym(found, symbol) : 0;
}

/* The tokens of an evaluation are a one-dimensional input of 32-bit integers: leaf or node named "inp_tokens". */
static int64_t tokens_of(void * graph) {
    by_name get = (by_name) of("libggml-base.so.0", "ggml_graph_get_tensor");
    elements count = (elements) of("libggml-base.so.0", "ggml_nelements");
    void * tokens = get(graph, "inp_tokens");
    return tokens ? count(tokens) : 0;
}

int ggml_backend_sched_graph_compute_async(void * sched, void * graph) {
    named variant = (named) of("libggml-cpu.so.0", "attested_variant");
    int meant = !*VARIANT || (variant && strcmp(variant(), VARIANT) == 0);
    if (meant && tokens_of(graph) >= ROWS && access(FLAG, F_OK) == 0) {
        DIE;
    }
    compute real = (compute) of("libggml-base.so.0", "ggml_backend_sched_graph_compute_async");
    return real(sched, graph);
}
"""
WAYS = {
    signal.SIGILL: "__builtin_trap()",
    signal.SIGSEGV: "*(volatile int *) 8 = 1",
}
Dying = Callable[..., str]


@pytest.fixture
def dying(tmp_path: Path) -> Dying:
    """A Python whose native code dies by a signal, with several rows and the named variant ("": any)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the engine is compiled here, so there is a compiler"

    def make(by: signal.Signals, *, variant: str = "", armed: bool = True) -> str:
        flag, source, library = tmp_path / "armed", tmp_path / "dying.c", tmp_path / "dying.so"
        if armed:
            flag.touch()
        text = DYING.replace("DIE;", f"{WAYS[by]};").replace("ROWS", "2")
        source.write_text(text.replace("VARIANT", f'"{variant}"').replace("FLAG", f'"{flag}"'))
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nLD_PRELOAD={library} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return str(python)

    return make


def settings_for(model: Path, python: str) -> EngineSettings:
    return EngineSettings(
        model_paths=(model,),
        sha256=SHA256,
        size_bytes=SIZE,
        worker_python=python,
        context_length=512,
        restart=RestartPolicy(initial_s=0.05, max_s=0.2, stall_s=5.0),
    )


async def started(settings: EngineSettings) -> SupervisedEngine:
    engine = SupervisedEngine(settings)
    await engine.start(lambda phase, fraction: None)
    return engine


@pytest.mark.parametrize("by", list(WAYS))
async def test_a_death_at_the_start_names_everything_needed_to_mend_it(
    smollm2: Path, dying: Dying, by: signal.Signals
) -> None:
    with pytest.raises(WorkerDied) as caught:
        await started(settings_for(smollm2, dying(by)))
    text = str(caught.value)
    for part in (by.name, "libggml-cpu", "llama.cpp 0.", processor_name(), "make venv", "kernels "):
        assert part in text
    assert caught.value.build is not None
    assert caught.value.build.kernels is not None


async def test_a_variant_that_dies_is_passed_over_and_receipts_say_so(
    smollm2: Path, dying: Dying, caplog: pytest.LogCaptureFixture
) -> None:
    plain = await started(settings_for(smollm2, sys.executable))
    best = plain.info.kernels
    await plain.stop(5.0)
    if best in (None, "plain", "avx2"):
        pytest.skip(f"this processor has nothing smaller than {best}")
    engine = await started(settings_for(smollm2, dying(signal.SIGILL, variant=str(best))))
    try:
        assert engine.info.kernels not in (None, "plain", best)
        assert "SIGILL" in caplog.text
        assert f"Trying the smaller variant {engine.info.kernels}" in caplog.text
        events = [event async for event in engine.generate(job())]
        assert events[0].execution["kernels-passed-over"] == best  # type: ignore[union-attr]
    finally:
        await engine.stop(5.0)


async def test_a_configured_variant_is_refused_when_it_dies_or_is_not_there(smollm2: Path, dying: Dying) -> None:
    dead = replace(settings_for(smollm2, dying(signal.SIGSEGV, variant="avx2")), kernels="avx2")
    with pytest.raises(WorkerDied, match="SIGSEGV"):
        await started(dead)
    with pytest.raises(BootError, match=r"engine\.kernels is 'avx1024', and this processor has plain"):
        await started(replace(settings_for(smollm2, sys.executable), kernels="avx1024"))


async def test_a_later_death_names_the_same_in_the_log(
    smollm2: Path, dying: Dying, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine = await started(settings_for(smollm2, dying(signal.SIGSEGV, armed=False)))
    try:
        (tmp_path / "armed").touch()
        async with asyncio.timeout(20):
            with pytest.raises(EngineFailed) as caught:
                async for _ in engine.generate(job()):
                    pass
            assert "SIGSEGV" not in str(caught.value)  # what died concerns the operator
            while "is lost" not in caplog.text:
                await asyncio.sleep(0.01)
        for part in ("SIGSEGV", "libggml-cpu", str(engine.info.kernels), processor_name(), "make venv"):
            assert part in caplog.text
    finally:
        os.unlink(tmp_path / "armed")
        await engine.stop(5.0)


async def test_an_embedding_model_is_proved_alike(minilm_gguf: Path, dying: Dying) -> None:
    settings = replace(
        settings_for(minilm_gguf, dying(signal.SIGILL)),
        sha256=minilm.GGUF_SHA256,
        size_bytes=minilm_gguf.stat().st_size,
        context_length=256,
    )
    with pytest.raises(WorkerDied, match="SIGILL"):
        await SupervisedEmbedder(settings).start(lambda phase, fraction: None)


def job() -> GenerationJob:
    return GenerationJob(
        job_id=bytes(16),
        prompt=(ChatMessage(role="user", content="Count to ten."),),
        sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=4),
        template_date="2026-12-01",
    )
