"""Decode throughput: the supervised engine against a bare `llama_decode` loop, same model, threads and prompt.

    python tests/bench/bench_engine.py [--tokens 128] [--rounds 4]

Both live at the same time and take turns in the order A B B A, so that drift of a shared machine cancels out. The
figure is the ratio engine / bare of each pair; absolute speeds are printed only for orientation.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import EngineSettings
from appliance.engine.types import Delta, GenerationJob, SamplingParams
from tests.bench.harness import PROMPT, BareLoop, Figure, pulled_model, report

CONTEXT = 512
N_BATCH = 256


async def supervised(engine: SupervisedEngine, tokens: int, number: int) -> tuple[float, list[int]]:
    """Seconds from the first token to the last, as the serving process sees them, and the tokens."""
    sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=tokens)
    job = GenerationJob(job_id=number.to_bytes(16, "big"), prompt=PROMPT, sampling=sampling, template_date="2026-12-01")
    made: list[int] = []
    start = end = 0.0
    async for event in engine.generate(job):
        if isinstance(event, Delta):
            end = time.perf_counter()
            start = start or end
            made.append(int.from_bytes(event.token_ids, "little"))
    return end - start, made


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    model = pulled_model()
    content = model.read_bytes()
    engine = SupervisedEngine(
        EngineSettings(
            model_paths=(model,),
            sha256=hashlib.sha256(content).digest(),
            size_bytes=len(content),
            worker_python=sys.executable,
            context_length=CONTEXT,
            n_batch=N_BATCH,
        )
    )
    await engine.start(lambda phase, fraction: None)
    bare = BareLoop(model, threads=engine.info.threads, context=CONTEXT, n_batch=N_BATCH)
    try:
        await measure(engine, bare, options.tokens, options.rounds)
    finally:
        bare.close()
        await engine.stop(5.0)


async def measure(engine: SupervisedEngine, bare: BareLoop, tokens: int, rounds: int) -> None:
    await asyncio.to_thread(bare.run, tokens)
    await supervised(engine, tokens, 0)
    ratios: list[float] = []
    for number in range(1, 2 * rounds + 1):
        bare_first = number % 2 == 1
        first = await asyncio.to_thread(bare.run, tokens) if bare_first else await supervised(engine, tokens, number)
        second = await supervised(engine, tokens, number) if bare_first else await asyncio.to_thread(bare.run, tokens)
        (alone, expected), (ours, made) = (first, second) if bare_first else (second, first)
        if expected != made:
            raise SystemExit("the two did not sample the same tokens: nothing to compare")
        ratios.append(alone / ours)
    figure = Figure(name="supervised engine / bare loop", samples=ratios, unit="ratio", target=">= 0.97")
    report("engine", [figure], threads=engine.info.threads, tokens=tokens)


if __name__ == "__main__":
    asyncio.run(main())
