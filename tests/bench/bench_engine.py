"""Decode throughput: the supervised engine against a bare `llama_decode` loop, same model, threads and prompt.

    python tests/bench/bench_engine.py MODEL.gguf [--tokens 128] [--rounds 4]

Both live at the same time and take turns in the order A B B A, so that drift of a shared machine cancels out. The
figure is the ratio engine / bare of each pair; absolute speeds are printed only for orientation.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from appliance.engine.settings import EngineSettings
from appliance.engine.supervisor import SupervisedEngine
from appliance.engine.types import Delta, GenerationJob, SamplingParams

PROMPT = "Once upon a time, in a village by the sea, there lived"
CONTEXT = 512
N_BATCH = 256

BARE = """
import json, sys, time
import llama_cpp as L

path, prompt, context, batch, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
quiet = L.llama_log_callback(lambda level, text, data: None)
L.llama_log_set(quiet, None)
L.llama_backend_init()
mp = L.llama_model_default_params()
model = L.llama_model_load_from_file(path.encode(), mp)
cp = L.llama_context_default_params()
cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = context, batch, batch, 1
cp.n_threads = cp.n_threads_batch = threads
cp.flash_attn_type, cp.no_perf = 1, True
ctx = L.llama_init_from_model(model, cp)
vocab = L.llama_model_get_vocab(model)
raw = prompt.encode()
buffer = (L.llama_token * 256)()
count = L.llama_tokenize(vocab, raw, len(raw), buffer, 256, False, False)
sampler = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
L.llama_sampler_chain_add(sampler, L.llama_sampler_init_greedy())
memory = L.llama_get_memory(ctx)
one = (L.llama_token * 1)()
for line in sys.stdin:
    tokens = int(line)
    L.llama_memory_seq_rm(memory, 0, 0, -1)
    assert L.llama_decode(ctx, L.llama_batch_get_one(buffer, count)) == 0
    made = [L.llama_sampler_sample(sampler, ctx, -1)]
    start = time.perf_counter()
    while len(made) < tokens:
        one[0] = made[-1]
        assert L.llama_decode(ctx, L.llama_batch_get_one(one, 1)) == 0
        made.append(L.llama_sampler_sample(sampler, ctx, -1))
    print(json.dumps([time.perf_counter() - start, made]), flush=True)
"""


class Bare:
    """The loop without anything around it, in a process of its own."""

    def __init__(self, model: Path, threads: int) -> None:
        arguments = [str(model), PROMPT, str(CONTEXT), str(N_BATCH), str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", BARE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    async def run(self, tokens: int) -> tuple[float, list[int]]:
        return await asyncio.to_thread(self._run, tokens)

    def _run(self, tokens: int) -> tuple[float, list[int]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        elapsed, made = json.loads(self._process.stdout.readline())
        return elapsed, made

    def close(self) -> None:
        self._process.communicate()


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
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    content = options.model.read_bytes()
    engine = SupervisedEngine(
        EngineSettings(
            model_paths=(options.model,),
            sha256=hashlib.sha256(content).digest(),
            size_bytes=len(content),
            worker_python=sys.executable,
            context_length=CONTEXT,
            n_batch=N_BATCH,
        )
    )
    await engine.start(lambda phase, fraction: None)
    bare = Bare(options.model, engine.info.threads)
    try:
        await measure(engine, bare, options.tokens, options.rounds)
    finally:
        bare.close()
        await engine.stop(5.0)


async def measure(engine: SupervisedEngine, bare: Bare, tokens: int, rounds: int) -> None:
    await bare.run(tokens)
    await supervised(engine, tokens, 0)
    ratios: list[float] = []
    print(f"{engine.info.threads} thread(s), {tokens} tokens a run")
    print(f"{'round':>5} {'order':>6} {'bare tok/s':>11} {'engine tok/s':>13} {'ratio':>7}")
    for number in range(1, 2 * rounds + 1):
        bare_first = number % 2 == 1
        first = await bare.run(tokens) if bare_first else await supervised(engine, tokens, number)
        second = await supervised(engine, tokens, number) if bare_first else await bare.run(tokens)
        (alone, expected), (ours, made) = (first, second) if bare_first else (second, first)
        if expected[: len(made)] != made:
            raise SystemExit("the two did not sample the same tokens: nothing to compare")
        steps = len(made) - 1
        alone *= steps / (tokens - 1)
        ratios.append(alone / ours)
        order = "AB" if bare_first else "BA"
        print(f"{number:>5} {order:>6} {steps / alone:>11.1f} {steps / ours:>13.1f} {ratios[-1]:>7.3f}")
    print(f"median ratio {statistics.median(ratios):.3f} (goal >= 0.97)")


if __name__ == "__main__":
    asyncio.run(main())
