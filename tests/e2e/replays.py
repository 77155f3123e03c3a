"""Saved answers and their replays, for tests: many of one server with one engine, as an auditor would go about it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.models.store import ModelStore, default_store_root
from appliance.replay import audit, saved
from appliance.replay.means import Wanted, prepare
from appliance.replay.verdict import CannotReproduce, Outcome, Verdict
from client_sdk import Appliance, Policy
from client_sdk.offline.saved import save_answer
from client_sdk.transport.protocol import VerifiedAnswer

AROUND = audit.Around(monotonic=time.monotonic, random_bytes=os.urandom, progress=lambda _phase, _fraction: None)


@dataclass(frozen=True)
class Asked:
    """One request, whose verified answer lies in `directory`."""

    directory: Path
    status: int
    body: bytes


def store() -> ModelStore:
    return ModelStore(default_store_root(os.environ.get("XDG_DATA_HOME"), os.environ.get("HOME")))


def wanted(model: str, **options: Any) -> Wanted:
    return Wanted(model=model, store=store(), python=sys.executable, **{"cores": 2, **options})


def ask(url: str, policy: Policy, directory: Path, route: str, body: Mapping[str, Any] | bytes) -> Asked:
    """Ask, have the answer verified, and save it."""
    kept: list[VerifiedAnswer] = []
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with Appliance(url, policy=policy, save=kept.append) as appliance:
        response = appliance.http.post(route, content=content, headers={"content-type": "application/json"})
    save_answer(directory, kept[-1], policy_digest=policy.digest)
    return Asked(directory, response.status_code, response.content)


def ask_together(
    url: str, policy: Policy, directory: Path, requests: Mapping[str, tuple[str, Any]], *, at_once: int = 6
) -> dict[str, Asked]:
    """Every request, several at a time, so that their evaluations share batches."""
    with ThreadPoolExecutor(at_once) as pool:
        asked = {
            name: pool.submit(ask, url, policy, directory / name, route, body)
            for name, (route, body) in requests.items()
        }
        return {name: future.result() for name, future in asked.items()}


def replay_together(directories: Mapping[str, Path], given: Wanted) -> dict[str, Verdict]:
    """What `appliance replay` says of each, with one engine for all of them: that of the first."""
    return asyncio.run(_replay_together(directories, given))


async def _replay_together(directories: Mapping[str, Path], given: Wanted) -> dict[str, Verdict]:
    first = saved.load(next(iter(directories.values())))
    prepared = prepare(first, given)
    async with audit.started(prepared, AROUND):
        return {name: await _judge(path, prepared, given) for name, path in directories.items()}


async def _judge(path: Path, prepared: Any, given: Wanted) -> Verdict:
    try:
        answer = saved.load(path)
        audit.check_reproducible(answer.claims)
        return await audit.judge(answer, prepared, given, AROUND, {})
    except CannotReproduce as error:
        return Verdict(outcome=Outcome.CANNOT, reason=error.reason, message=error.message)


def replay_one(directory: Path, given: Wanted) -> Verdict:
    return asyncio.run(audit.replay(directory, given, AROUND))


def tell(verdicts: Iterable[Verdict]) -> str:
    """For the message of an assertion."""
    return "\n".join(str(verdict) for verdict in verdicts)
