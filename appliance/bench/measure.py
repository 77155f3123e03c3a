"""Runs: an appliance is started, asked through the verifying SDK over RA-TLS, and stopped.

This module plays both sides, as the demo does. Nothing of it is loaded by `appliance serve`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from appliance.bench.asking import Taken, ask
from appliance.bench.intent import Intent, stated
from appliance.bench.runs import Arm, Order, Run
from appliance.bench.same_model import check_same_weights
from appliance.bench.served import ServedConfig
from appliance.bench.suite import Suite
from appliance.bench.workload import Workload, lane
from appliance.config.settings import Config
from appliance.errors import BootError
from client_sdk import AsyncAppliance, SdkError
from client_sdk.receipts.verify import VerifiedReceipt

Progress = Callable[[str], None]
_WARM_UP_TOKENS = 8
_WARM_UP = "Say hello."


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared. One configuration alone is measured `rounds` times; two in both orders, `rounds` times each.

    With a `suite` its questions are asked, one at each place of the workload. `pythons`: the interpreter whose
    installation serves a configuration, where that is not this one. `intent`: see `decision.Rules`.
    """

    configs: Mapping[Arm, Config]
    workload: Workload
    rounds: int
    environ: Mapping[str, str]
    suite: Suite | None = None
    pythons: Mapping[Arm, Path] = field(default_factory=dict)
    intent: Intent | None = None

    def turns(self) -> Iterator[tuple[Order, int, Arm]]:
        """Every run, in the order in which they are made."""
        orders = tuple(Order) if Arm.CANDIDATE in self.configs else (Order.BASELINE_FIRST,)
        for number in range(self.rounds):
            for order in orders:
                arms = list(Arm) if order is Order.BASELINE_FIRST else list(reversed(Arm))
                yield from ((order, number, arm) for arm in arms if arm in self.configs)


def measure(plan: Plan, progress: Progress) -> list[Run]:
    """All runs of a plan. Raises BootError where one cannot be made: a measurement with holes decides nothing.

    Raises DifferentModel as soon as the receipts of two runs name different weights, and NothingStated where they say
    nothing of the difference that was intended.
    """
    runs: list[Run] = []
    turns = list(plan.turns())
    for done, (order, number, arm) in enumerate(turns):
        progress(f"run {done + 1} of {len(turns)}: {arm.value}, round {number + 1}, {order.value}")
        with ServedConfig(plan.configs[arm], plan.environ, plan.pythons.get(arm)) as served:
            model = plan.configs[arm].models[0].name
            try:
                elapsed_s, taken = asyncio.run(_ask_all(served, model, plan))
            except SdkError as error:
                raise BootError(f"an answer failed ({type(error).__name__}): {error}") from error
            runs.append(
                Run(
                    arm=arm,
                    order=order,
                    round=number,
                    wall_s=elapsed_s,
                    samples=tuple(sample for sample, _ in taken),
                    memory=served.memory(),
                    identity=_identity(taken[0][1]),
                    weights=_weights(taken[0][1]),
                    replayed=served.replayed_tokens(),
                )
            )
        check_same_weights(runs)
        if plan.intent is not None and {run.arm for run in runs} == set(Arm):
            stated(runs, plan.intent)
    return runs


async def _ask_all(served: ServedConfig, model: str, plan: Plan) -> tuple[float, Sequence[Taken]]:
    """(seconds for all of it, the samples in the order of their places). Connections are attested before."""
    workload = plan.workload
    clients = [AsyncAppliance(served.url, policy=served.policy) for _ in range(min(workload.streams, workload.samples))]
    taken: dict[int, Taken] = {}

    async def ask_lane(number: int) -> None:
        for place in lane(number, workload):
            taken[place] = await ask(clients[number], model, place, workload, plan.suite)

    try:
        for client in clients:
            await client.chat(_WARM_UP, model=model, max_tokens=_WARM_UP_TOKENS, temperature=0, seed=0)
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(len(clients)):
                group.create_task(ask_lane(number))
        elapsed = time.perf_counter() - start
    except* SdkError as failed:
        raise failed.exceptions[0] from None
    finally:
        for client in clients:
            await client.aclose()
    return elapsed, [taken[place] for place in sorted(taken)]


def _weights(receipt: VerifiedReceipt) -> tuple[tuple[int, bytes], ...]:
    assert receipt.claims.model is not None
    return receipt.claims.model.weights


def _identity(receipt: VerifiedReceipt) -> dict[str, object]:
    """Where a run took place, from a receipt that was verified: digests in hex."""
    claims = receipt.claims
    assert claims.model is not None
    assert claims.execution is not None
    facts = claims.execution
    return {
        "config": claims.config.hex(),
        "device": {"kind": claims.device.kind, "digest": claims.device.digest.hex()},
        "engine": {**claims.engine.to_map(), "digest": claims.engine.digest.hex()},
        "model": {"name": claims.model.name, "identity": claims.model.identity.hex(), "format": claims.model.format},
        "execution": {
            name: facts[name]
            for name in ("threads", "batching", "speculation", "exact-batch", "exact-verify", "exact-chunk")
            if name in facts
        },
    }
