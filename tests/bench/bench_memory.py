"""Memory of the appliance's two processes after boot and after 50 requests, and what 2,000 more leave behind.

    python tests/bench/bench_memory.py [--requests 2000]

Proportional set size (proc(5)), so a page that both processes map is counted once. The model's bytes are a sealed memfd
that the worker maps, so they are in the worker's share. Libraries that a process outside maps too count in part only,
which the resident size bounds; growth is that of anonymous memory, which nobody outside changes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from client_sdk import Appliance
from tests.bench.harness import (
    COMPLETIONS,
    PROMPT,
    Figure,
    Memory,
    ServedAppliance,
    completion_request,
    pulled_model,
    report,
)

MIB = 1 << 20
# SmolLM2-135M: 30 layers, 3 key-value heads of 64, keys and values in 16 bits, 16,384 cells shared by all requests.
CONTEXT_BYTES = 30 * 2 * 3 * 64 * 2 * 16384
WARM_UP = 50
KEPT_RECEIPTS = 1024
CONNECTIONS = 300


def ask(client: Appliance, count: int, tokens: int, prompt: str) -> None:
    """Alternately whole and streamed, on one connection."""
    for number in range(count):
        request = completion_request(tokens, stream=number % 2 == 1, prompt=prompt)
        if client.http.post(COMPLETIONS, json=request).status_code != 200:
            raise SystemExit("a request failed")


def connect(served: ServedAppliance, count: int) -> None:
    """New connections, each attested and used once."""
    for _ in range(count):
        with Appliance(served.url, policy=served.policy) as client:
            client.attest()


class Watched:
    """Both processes at a moment."""

    def __init__(self, served: ServedAppliance) -> None:
        self.api = Memory.of(served.api_pid)
        self.worker = Memory.of(served.worker_pid)

    def total_mib(self, *, resident: bool = False) -> float:
        each = (m.resident if resident else m.proportional for m in (self.api, self.worker))
        return sum(each) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    model_bytes = pulled_model().stat().st_size
    # The store of receipts is bounded and fills first: growth is counted once it is full.
    filling = min(KEPT_RECEIPTS, options.requests // 2)
    counted = options.requests - filling
    with ServedAppliance() as served:
        boot = Watched(served)
        with Appliance(served.url, policy=served.policy) as client:
            ask(client, WARM_UP, 32, PROMPT)
            warm = Watched(served)
            ask(client, filling, 1, "Hi")
            full = Watched(served)
            ask(client, counted, 1, "Hi")
        end = Watched(served)
        connect(served, CONNECTIONS)
        connected = Watched(served)
        connect(served, CONNECTIONS)
        reconnected = Watched(served)
    limit = f"<= {(model_bytes + CONTEXT_BYTES) / MIB + 300:.0f} MiB"
    each = {"unit": "bytes/request"}
    report(
        "memory",
        [
            _mib("API process + worker after boot", boot.total_mib(), limit),
            _mib(f"API process + worker after {WARM_UP} requests", warm.total_mib(), limit),
            _mib(f"API process + worker after {options.requests} more", end.total_mib(), limit),
            _mib("the same, resident (upper bound)", end.total_mib(resident=True), limit),
            _mib("API process alone", end.api.proportional / MIB),
            _mib("worker alone, model and context included", end.worker.proportional / MIB),
            Figure(
                name="API process, receipts filling up",
                samples=[(full.api.private - warm.api.private) / filling],
                **each,
            ),
            Figure(name="API process, receipts full", samples=[(end.api.private - full.api.private) / counted], **each),
            Figure(
                name="worker, over both",
                samples=[(end.worker.private - warm.worker.private) / options.requests],
                **each,
            ),
            Figure(
                name="API process, new attested connections",
                samples=[(reconnected.api.private - connected.api.private) / CONNECTIONS],
                unit="bytes/connection",
            ),
        ],
        model_mib=round(model_bytes / MIB, 1),
        context_mib=round(CONTEXT_BYTES / MIB, 1),
        counted_requests=counted,
    )


def _mib(name: str, size: float, target: str = "") -> Figure:
    return Figure(name=name, samples=[size], unit="MiB", target=target)


if __name__ == "__main__":
    main()
