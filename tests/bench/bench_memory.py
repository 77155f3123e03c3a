"""Memory of the appliance's two processes: after boot, after 50 requests, and what 2,000 short ones leave behind.

    python tests/bench/bench_memory.py [--requests 2000]

Proportional set size (proc(5)), so a page that both processes map is counted once. The model's bytes are a sealed memfd
that the worker maps, so they are in the worker's share. Reading the figure takes CAP_SYS_PTRACE, because both processes
are not dumpable.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from client_sdk import Appliance
from tests.bench.harness import (
    COMPLETIONS,
    Figure,
    ServedAppliance,
    completion_request,
    proportional_bytes,
    pulled_model,
    report,
)

MIB = 1 << 20
# SmolLM2-135M: 30 layers, 3 key-value heads of 64, keys and values in 16 bits, 4096 tokens of context.
CONTEXT_BYTES = 30 * 2 * 3 * 64 * 2 * 4096
WARM_UP = 50
KEPT_RECEIPTS = 1024


def ask(client: Appliance, count: int, tokens: int) -> None:
    """Alternately whole and streamed, each on the same connection."""
    for number in range(count):
        request = completion_request(tokens, stream=number % 2 == 1)
        if client.http.post(COMPLETIONS, json=request).status_code != 200:
            raise SystemExit("a request failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    model_bytes = pulled_model().stat().st_size
    with ServedAppliance() as served:

        def sizes() -> tuple[int, int]:
            return proportional_bytes(served.api_pid), proportional_bytes(served.worker_pid)

        boot = sizes()
        with Appliance(served.url, policy=served.policy) as client:
            ask(client, WARM_UP, 32)
            warm = sizes()
            # The store of receipts is bounded and fills first: growth is counted once it is full.
            filling = min(KEPT_RECEIPTS, options.requests // 2)
            ask(client, filling, 2)
            full = sizes()
            ask(client, options.requests - filling, 2)
        end = sizes()
    limit = (model_bytes + CONTEXT_BYTES + 300 * MIB) / MIB
    counted = options.requests - filling
    report(
        "memory",
        [
            _total("API process + worker after boot", boot, f"<= {limit:.0f} MiB"),
            _total(f"API process + worker after {WARM_UP} requests", warm, f"<= {limit:.0f} MiB"),
            _total(f"API process + worker after {options.requests} more", end, f"<= {limit:.0f} MiB"),
            Figure(name=f"API process after {WARM_UP} requests", samples=[warm[0] / MIB], unit="MiB"),
            Figure(name=f"worker after {WARM_UP} requests", samples=[warm[1] / MIB], unit="MiB"),
            Figure(name="growth of the API process", samples=[(end[0] - full[0]) / counted], unit="bytes/request"),
            Figure(name="growth of the worker", samples=[(end[1] - full[1]) / counted], unit="bytes/request"),
            Figure(name="filling the receipt store", samples=[(full[0] - warm[0]) / filling], unit="bytes/receipt"),
        ],
        model_mib=round(model_bytes / MIB, 1),
        context_mib=round(CONTEXT_BYTES / MIB, 1),
        counted_requests=counted,
    )


def _total(name: str, sizes: tuple[int, int], target: str) -> Figure:
    return Figure(name=name, samples=[sum(sizes) / MIB], unit="MiB", target=target)


if __name__ == "__main__":
    main()
