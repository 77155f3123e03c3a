"""Decode throughput of one verified stream against a bare `llama_decode` loop, and what a token costs the API process.

    python tests/bench/bench_serving.py [--tokens 160] [--rounds 6]

The appliance, the bare loop and the client are processes of their own, alive together, and take turns: bare, SDK, raw,
raw, SDK, bare. So drift of a shared machine cancels out. A stream is timed from its first token to its verified end,
receipt included; the raw client reads the same bytes over TLS without looking at them, which tells the server's cost
from the client's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from client_sdk import Appliance
from tests.bench.harness import (
    COMPLETIONS,
    BareLoop,
    Figure,
    Neighbours,
    RawClient,
    ServedAppliance,
    completion_request,
    cpu_s,
    pulled_model,
    report,
)

# As the appliance runs this model with the default configuration.
CONTEXT = 4096
N_BATCH = 512
# A round during which others used more than this is measured again, whatever it gave.
QUIET_CORES = 0.15
MOST_DISTURBED = 3


def verified_stream(client: Appliance, tokens: int) -> tuple[float, int]:
    """(seconds from the first released token to the verified end, tokens by the receipt)"""
    start = 0.0
    with client.http.stream("POST", COMPLETIONS, json=completion_request(tokens)) as response:
        for chunk in response.iter_raw():
            if chunk and not start:
                start = time.perf_counter()
        elapsed = time.perf_counter() - start
        output = response.extensions["verified_receipt"].claims.output
    return elapsed, output[0].count


def raw_stream(client: RawClient, tokens: int) -> float:
    start = 0.0
    for data in client.post(completion_request(tokens)):
        if not start and b"data: " in data:
            start = time.perf_counter()
    return time.perf_counter() - start


class Runs:
    """Everything that takes turns."""

    def __init__(self, served: ServedAppliance, bare: BareLoop, client: Appliance, raw: RawClient) -> None:
        self.served = served
        self.bare = bare
        self.client = client
        self.raw = raw
        self.api_cpu_s: list[float] = []

    def run(self, who: str, tokens: int) -> float:
        """Seconds for one step of decoding."""
        before = cpu_s(self.served.api_pid)
        if who == "bare":
            return self.bare.run(tokens)[0] / (tokens - 1)
        if who == "raw":
            return raw_stream(self.raw, tokens) / (tokens - 1)
        elapsed, count = verified_stream(self.client, tokens)
        if count != tokens:
            raise SystemExit(f"the model ended after {count} tokens: ask for fewer")
        self.api_cpu_s.append((cpu_s(self.served.api_pid) - before) / tokens)
        return elapsed / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) - 1),
        help="compute threads of both; by default all cores but one, which is for the API process",
    )
    options = parser.parse_args()
    threads: int = options.threads
    os.environ["APPLIANCE_ENGINE_THREADS"] = str(threads)
    model = pulled_model()
    with ServedAppliance() as served, Appliance(served.url, policy=served.policy) as client:
        bare = BareLoop(model, threads=threads, context=CONTEXT, n_batch=N_BATCH)
        raw = RawClient(served.port)
        try:
            measure(Runs(served, bare, client, raw), options.tokens, options.rounds, threads)
        finally:
            raw.close()
            bare.close()


def measure(runs: Runs, tokens: int, rounds: int, threads: int) -> None:
    for who in ("bare", "sdk", "raw"):
        runs.run(who, tokens)
    runs.api_cpu_s.clear()
    seconds: dict[str, list[float]] = {"bare": [], "sdk": [], "raw": []}
    ratios: dict[str, list[float]] = {"sdk": [], "raw": []}
    others: list[float] = []
    disturbed = 0
    neighbours = Neighbours((runs.served.api_pid, runs.served.worker_pid, runs.bare.pid))
    while len(others) < rounds:
        turn: dict[str, list[float]] = {"bare": [], "sdk": [], "raw": []}
        neighbours.cores()
        for who in ("bare", "sdk", "raw", "raw", "sdk", "bare"):
            turn[who].append(runs.run(who, tokens))
        busy = neighbours.cores()
        if busy > QUIET_CORES and disturbed < MOST_DISTURBED * rounds:
            disturbed += 1
            continue
        others.append(busy)
        for who, taken in turn.items():
            seconds[who] += taken
        for who in ratios:
            ratios[who].append(sum(turn["bare"]) / sum(turn[who]))
    report(
        "serving",
        [
            Figure(name="verified stream / bare loop", samples=ratios["sdk"], unit="ratio", target=">= 0.95"),
            Figure(name="unverified raw TLS stream / bare loop", samples=ratios["raw"], unit="ratio"),
            *(Figure(name=f"{w}", samples=[1 / s for s in seconds[w]], unit="tokens/s") for w in seconds),
            Figure(name="CPU of the API process", samples=[s * 1e6 for s in runs.api_cpu_s], unit="us/token"),
            Figure(name="busy with something else", samples=others, unit="cores"),
        ],
        threads=threads,
        tokens=tokens,
        disturbed_rounds=disturbed,
    )


if __name__ == "__main__":
    main()
