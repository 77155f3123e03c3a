"""The first request on a new connection: TCP, TLS, insecure attestation in full, and the first byte of an answer.

    python tests/bench/bench_first_request.py [--rounds 30]

Every sample is a client of its own, so nothing is pooled and no attestation is continued. For the 1-token completion
the same request on the warm connection is subtracted: what remains is what the connection cost, without the engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from client_sdk import Appliance, Policy
from tests.bench.harness import COMPLETIONS, Figure, ServedAppliance, completion_request, pulled_model, report

ONE_TOKEN = completion_request(1, stream=False)


def models_ms(url: str, policy: Policy) -> float:
    start = time.perf_counter()
    with Appliance(url, policy=policy) as client, client.http.stream("GET", "/v1/models") as response:
        next(response.iter_raw())
        return (time.perf_counter() - start) * 1e3


def completion_ms(client: Appliance) -> float:
    start = time.perf_counter()
    response = client.http.post(COMPLETIONS, json=ONE_TOKEN)
    elapsed = (time.perf_counter() - start) * 1e3
    if not response.extensions["verified"]:
        raise SystemExit(f"no verified answer: {response.status_code}")
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    pulled_model()
    with ServedAppliance() as served:
        policy = Policy.load(served.policy)
        models_ms(served.url, policy)
        listed, first, overhead = [], [], []
        for _ in range(options.rounds):
            listed.append(models_ms(served.url, policy))
            start = time.perf_counter()
            with Appliance(served.url, policy=policy) as client:
                made_ms = (time.perf_counter() - start) * 1e3
                cold = made_ms + completion_ms(client)
                warm = min(completion_ms(client), completion_ms(client))
            first.append(cold)
            overhead.append(cold - warm)
    report(
        "first-request",
        [
            Figure(name="GET /v1/models on a new connection, first byte", samples=listed, unit="ms", target="<= 80"),
            Figure(name="1-token completion, new minus warm connection", samples=overhead, unit="ms", target="<= 80"),
            Figure(name="1-token completion on a new connection, all of it", samples=first, unit="ms"),
        ],
    )


if __name__ == "__main__":
    main()
