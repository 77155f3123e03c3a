"""What guessing ahead brings: one engine without and one with it, in turns, on the same requests. No test.

    python tests/bench/bench_speculation.py [--model GGUF] [--kind prompt-lookup] [--draft GGUF] [--threads 1]

Two kinds of work: a text that is copied with small corrections, and one that goes on freely. The ratio of times tells
what a caller sees; that of the worker's CPU time is shown beside it, because it is the same on a busy machine. The
answers must be the same, or the benchmark ends with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from appliance.engine.generation.draft import DraftWeights
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import EngineSettings, SpeculationSettings
from appliance.engine.types import Delta, Finished, GenerationJob, SamplingParams
from tests.bench.harness import Figure, cpu_s, pulled_model, report

_FIRST = "The harbour was quiet in the morning, and the boats lay in a row along the old stone wall."
_SECOND = (
    "In the year 1871 the keeper of the lighthouse wrote a letter to the council of the town. He asked for new glass, "
    "for two barrels of oil, and for a boat with a sail. The council met on a Tuesday, read the letter aloud, "
    "and sent the glass and the oil at once. The boat came only in the spring, painted white and blue, his name on "
    "its side."
)
WORK = {
    "copying": f"Text: {_FIRST}\nCorrected text: {_FIRST}\n\nText: {_SECOND}\nCorrected text:",
    "free": "Once upon a time, in a village by the sea, there lived",
}
CONTEXT = 1024


def settings(model: Path, options: argparse.Namespace, speculation: SpeculationSettings) -> EngineSettings:
    draft = options.draft if speculation.kind == "draft-model" else None
    content = model.read_bytes()
    return EngineSettings(
        model_paths=(model,),
        sha256=hashlib.sha256(content).digest(),
        size_bytes=len(content),
        worker_python=sys.executable,
        context_length=CONTEXT,
        threads=options.threads,
        speculation=speculation,
        draft=None if draft is None else weights(draft),
    )


def weights(path: Path) -> DraftWeights:
    content = path.read_bytes()
    return DraftWeights(paths=(path,), sha256=hashlib.sha256(content).digest(), size_bytes=len(content))


class Run:
    """One answer: seconds from its first token to its last, the worker's CPU seconds meanwhile, tokens and facts."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.tokens = b""
        self.facts: dict[str, object] = {}


async def ask(engine: SupervisedEngine, prompt: str, tokens: int, number: int) -> Run:
    sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=tokens)
    job_id = number.to_bytes(16, "big")
    run, started, cpu = Run(), 0.0, 0.0
    assert engine.worker_pid is not None
    async for event in engine.generate(
        GenerationJob(job_id=job_id, prompt=prompt, sampling=sampling, template_date="2026-01-01")
    ):
        if isinstance(event, Delta):
            if not run.tokens:
                started, cpu = time.perf_counter(), cpu_s(engine.worker_pid)
            run.tokens += event.token_ids
        elif isinstance(event, Finished):
            run.facts = dict(event.execution)
    run.wall, run.cpu = time.perf_counter() - started, cpu_s(engine.worker_pid) - cpu
    return run


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--kind", default="prompt-lookup")
    parser.add_argument("--widths", choices=("adaptive", "fixed"), default="adaptive")
    parser.add_argument("--draft-tokens", type=int, default=SpeculationSettings().draft_tokens)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = options.model or pulled_model()
    guessing = SpeculationSettings(
        kind=options.kind, draft_tokens=options.draft_tokens, adaptive=options.widths == "adaptive"
    )
    plain = SupervisedEngine(settings(model, options, SpeculationSettings(kind="off")))
    ahead = SupervisedEngine(settings(model, options, guessing))
    for engine in (plain, ahead):
        await engine.start(lambda phase, fraction: None)
    try:
        await measure(plain, ahead, options)
    finally:
        for engine in (plain, ahead):
            await engine.stop(5.0)


async def measure(plain: SupervisedEngine, ahead: SupervisedEngine, options: argparse.Namespace) -> None:
    figures: list[Figure] = []
    number = 0
    for name, prompt in WORK.items():
        wall: list[float] = []
        cpu: list[float] = []
        per_pass: list[float] = []
        for turn in range(options.rounds + 1):
            order = (plain, ahead) if turn % 2 else (ahead, plain)
            runs = {}
            for engine in order:
                number += 1
                runs[engine] = await ask(engine, prompt, options.tokens, number)
            if runs[plain].tokens != runs[ahead].tokens:
                raise SystemExit("the answers differ: guessing must change no token")
            if turn:  # the first one warms up
                wall.append(runs[plain].wall / runs[ahead].wall)
                cpu.append(runs[plain].cpu / runs[ahead].cpu)
                passes = runs[ahead].facts["target-passes"]
                assert isinstance(passes, int)
                per_pass.append(len(runs[ahead].tokens) / 4 / passes)
        target = ">= 1.5" if name == "copying" and options.kind == "prompt-lookup" else ""
        figures += [
            Figure(name=f"{name}: decode, with / without", samples=wall, unit="ratio", target=target),
            Figure(name=f"{name}: CPU for each token, without / with", samples=cpu, unit="ratio"),
            Figure(name=f"{name}: tokens for each evaluation", samples=per_pass, unit="tokens"),
        ]
        facts = runs[ahead].facts
        drafted, accepted = facts.get("drafted-tokens", 0), facts.get("accepted-tokens", 0)
        print(f"{name}: {drafted} guessed, {accepted} right; CPU ratio {statistics.median(cpu):.3f}", flush=True)
    report(
        "speculation",
        figures,
        kind=options.kind,
        widths=options.widths,
        draft_tokens=options.draft_tokens,
        threads=options.threads,
        tokens=options.tokens,
    )


if __name__ == "__main__":
    asyncio.run(main())
