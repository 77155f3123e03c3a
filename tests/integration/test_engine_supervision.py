"""The worker process: what it may hold, and what happens when it dies or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import EngineSettings, RestartPolicy
from appliance.engine.types import ChatMessage, Delta, EngineEvent, GenerationJob, SamplingParams
from appliance.errors import EngineFailed, Unavailable

pytestmark = pytest.mark.model

SHA256 = bytes.fromhex("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
SIZE = 98_362_432


def settings_for(model: Path) -> EngineSettings:
    return EngineSettings(
        model_paths=(model,),
        sha256=SHA256,
        size_bytes=SIZE,
        worker_python=sys.executable,
        context_length=512,
        restart=RestartPolicy(initial_s=0.05, max_s=0.2, stall_s=1.5),
    )


@pytest.fixture
async def engine(smollm2: Path) -> AsyncIterator[SupervisedEngine]:
    made = SupervisedEngine(settings_for(smollm2))
    await made.start(lambda phase, fraction: None)
    yield made
    await made.stop(5.0)


def job(number: int, *, max_tokens: int | None = 8) -> GenerationJob:
    return GenerationJob(
        job_id=number.to_bytes(16, "big"),
        prompt=(ChatMessage(role="user", content=f"Count from {number} to a thousand, slowly."),),
        sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=max_tokens),
        template_date="2026-12-01",
    )


async def collect(engine: SupervisedEngine, wanted: GenerationJob, seen: list[EngineEvent]) -> None:
    async for event in engine.generate(wanted):
        seen.append(event)


async def text_of(engine: SupervisedEngine, wanted: GenerationJob) -> str:
    seen: list[EngineEvent] = []
    await collect(engine, wanted, seen)
    return "".join(event.text for event in seen if isinstance(event, Delta))


async def streaming(engine: SupervisedEngine, number: int) -> tuple[asyncio.Task[None], list[EngineEvent]]:
    seen: list[EngineEvent] = []
    task = asyncio.create_task(collect(engine, job(number, max_tokens=None), seen))
    while len(seen) < 4 and not task.done():
        await asyncio.sleep(0.005)
    return task, seen


async def test_kill_in_mid_stream_fails_that_answer_and_the_next_one_works(engine: SupervisedEngine) -> None:
    before = await text_of(engine, job(1))
    task, seen = await streaming(engine, 2)
    queued = asyncio.create_task(text_of(engine, job(3)))
    await asyncio.sleep(0)
    pid = engine.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        for each in (task, queued):
            with pytest.raises(EngineFailed) as caught:
                await each
            assert caught.value.code == "engine_failed"
    assert len(seen) >= 4
    async with asyncio.timeout(10):
        assert await text_of(engine, job(4, max_tokens=1))  # waits for the restart
        assert await text_of(engine, job(1)) == before
    assert engine.restarts == 1
    assert engine.worker_pid not in (None, pid)
    assert (engine.active, engine.queued) == (0, 0)


async def test_b184_a_wedged_worker_is_replaced(engine: SupervisedEngine) -> None:
    task, _ = await streaming(engine, 1)
    pid = engine.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        with pytest.raises(EngineFailed):
            await task
        assert not engine.ready
        assert await text_of(engine, job(2))
    assert engine.ready
    assert engine.worker_pid != pid


async def test_the_engine_names_its_arithmetic_and_the_variant_in_use(
    smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = SupervisedEngine(settings_for(smollm2))
    with caplog.at_level("INFO"):
        await made.start(lambda phase, fraction: None)
    try:
        assert made.info.arithmetic == "attested-1"
        assert made.info.kernels in ("plain", "avx2", "avx-vnni", "avx512-vnni", "amx-int8")
        assert f"arithmetic attested-1, kernels {made.info.kernels}" in caplog.text
    finally:
        await made.stop(5.0)


async def test_an_idle_worker_stays(engine: SupervisedEngine) -> None:
    pid = engine.worker_pid
    await asyncio.sleep(2.0)  # longer than stall_s
    assert engine.worker_pid == pid
    assert engine.ready


async def test_a_restart_that_does_not_come_in_time_is_503_with_retry_after(smollm2: Path) -> None:
    policy = RestartPolicy(initial_s=20.0, max_s=20.0, wait_s=0.2)
    engine = SupervisedEngine(replace(settings_for(smollm2), restart=policy))
    await engine.start(lambda phase, fraction: None)
    try:
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            while engine.ready:
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable) as caught:
            await text_of(engine, job(1))
        assert caught.value.code == "engine_restarting"
        assert caught.value.retry_after_s is not None
        assert 10 <= caught.value.retry_after_s <= 22
    finally:
        await engine.stop(5.0)


async def test_what_the_worker_holds(engine: SupervisedEngine) -> None:
    await text_of(engine, job(1))
    proc = Path(f"/proc/{engine.worker_pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 400_000  # kB: model, context, interpreter
    limits = (proc / "limits").read_text()
    core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert core.split()[4:6] == ["0", "0"]
    assert (proc / "maps").stat().st_uid == 0  # not dumpable: the kernel gives its files to root
    if os.geteuid() != 0:
        return
    names = {line.partition(b"=")[0].decode() for line in (proc / "environ").read_bytes().split(b"\0") if line}
    assert names == {"PATH", "LANG", "GGML_NO_BACKTRACE", "GOMP_SPINCOUNT"}
    held = {os.readlink(link).split(":")[0] for link in (proc / "fd").iterdir()}
    assert held == {"/dev/null", "socket", "/memfd"}
    assert "libllama" in (proc / "maps").read_text()


async def test_b159_five_loads_and_unloads_leave_nothing_behind(smollm2: Path) -> None:
    """Neither memory nor files nor processes, and an answer in progress is told that its model goes."""
    resident: list[int] = []
    files: list[int] = []
    before = _sealed_copies()  # of engines that other tests have not left yet
    for number in range(5):
        engine = SupervisedEngine(settings_for(smollm2))
        await engine.start(lambda phase, fraction: None)
        pid = engine.worker_pid
        assert pid is not None
        assert await text_of(engine, job(number))
        task, _ = await streaming(engine, number + 100)
        async with asyncio.timeout(5):
            await engine.stop(5.0)
            with pytest.raises(Unavailable) as caught:
                await task
        assert caught.value.code == "shutting_down"
        assert not _alive(pid)
        assert not engine.ready
        assert not _sealed_copies() - before, "the sealed copy of the model"
        assert "memfd" not in Path("/proc/self/maps").read_text()
        files.append(len(_own_files()))
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident.append(int(status["VmRSS"].split()[0]))
    assert files == files[:1] * 5
    assert resident[-1] - resident[0] < 16_384, f"kB after each round: {resident}"


async def test_the_worker_dies_with_its_supervisor(smollm2: Path) -> None:
    program = f"""
        import asyncio, os, sys
        from pathlib import Path
        from appliance.engine.settings import EngineSettings
        from appliance.engine.host.supervisor import SupervisedEngine

        async def main():
            settings = EngineSettings(
                model_paths=(Path({str(smollm2)!r}),), sha256=bytes.fromhex({SHA256.hex()!r}), size_bytes={SIZE},
                worker_python=sys.executable, context_length=512,
            )
            engine = SupervisedEngine(settings)
            await engine.start(lambda phase, fraction: None)
            print(engine.worker_pid, flush=True)
            os.kill(os.getpid(), 9)

        asyncio.run(main())
    """
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        timeout=30,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    async with asyncio.timeout(5):
        while _alive(pid):
            await asyncio.sleep(0.01)


def _sealed_copies() -> set[int]:
    """Inode numbers of this process's memory files."""
    return {link.stat().st_ino for link in _own_files() if "memfd" in os.readlink(link)}


def _own_files() -> list[Path]:
    """Links of this process's open files that are still open when they are read."""
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
