"""A prompt with a canary through the whole product, and then a search of everything the appliance has written."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from client_sdk import Appliance, ApplianceError, Policy
from tests.e2e.programs import MODEL, Served, make_policy, wait_for

pytestmark = pytest.mark.model
CANARY = "canary-93c1-in-the-coal-mine"


@pytest.fixture(scope="module")
def watched(workspace: Path) -> Iterator[Served]:
    with Served(workspace / "watched", metrics=True) as served:
        yield served


def test_b172_the_canary_is_never_seen(watched: Served, workspace: Path) -> None:
    policy = Policy.load(make_policy(workspace / "watched-policy", environ=watched.environ))
    said: list[bytes] = []
    with Appliance(watched.url, policy=policy) as appliance:
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
        appliance.chat(f"Repeat: {CANARY}", **ask)
        list(appliance.stream(f"Repeat: {CANARY}", **ask))
        refuse(appliance, said)
        crash(watched, appliance)
        leave(watched, appliance)
        metrics = httpx.get(watched.metrics_url, trust_env=False).content
        stop_in_mid_stream(watched, appliance)
    assert len(said) >= 8
    for body in (*said, metrics, watched.log.read_bytes()):
        assert CANARY.encode() not in body
        assert b"Traceback" not in body


def refuse(appliance: Appliance, said: list[bytes]) -> None:
    """What can be wrong, with the canary in its place. (The name of an unknown field is told: it is no prompt.)"""
    message = {"role": "user", "content": CANARY}
    good: dict[str, Any] = {"model": MODEL, "messages": [message]}
    faults: list[Any] = [
        {**good, "model": CANARY},
        {**good, "temperature": CANARY},
        {**good, "messages": [{**message, "role": CANARY}]},
        {**good, "unknown": CANARY},
        {**good, "metadata": {CANARY: [CANARY]}},
        {**good, "messages": CANARY},
        {**good, "messages": [{"role": "user", "content": CANARY * 2000}]},
        {**good, "max_tokens": 10**7},
        CANARY,
    ]
    for fault in faults:
        response = appliance.http.post("/v1/chat/completions", json=fault)
        assert 400 <= response.status_code < 500
        assert response.extensions["verified"]
        said.append(response.content)
    broken = appliance.http.post(
        "/v1/chat/completions", content=f'{{"model": "{CANARY}'.encode(), headers={"content-type": "application/json"}
    )
    said.append(broken.content)
    said.append(appliance.http.get(f"/{CANARY}").content)


def begin(appliance: Appliance) -> Iterator[str]:
    prompt = f"Write a very long story about {CANARY}."
    pieces = iter(appliance.stream(prompt, model=MODEL, max_tokens=3000, seed=5))
    next(pieces)
    return pieces


def crash(watched: Served, appliance: Appliance) -> None:
    pieces = begin(appliance)
    os.kill(watched.workers()[0], signal.SIGKILL)
    with pytest.raises(ApplianceError) as caught:
        list(pieces)
    assert CANARY not in str(caught.value)
    wait_for(lambda: appliance.http.get("/readyz").status_code == 200, limit_s=20, what="ready again")


def leave(watched: Served, appliance: Appliance) -> None:
    pieces: Any = begin(appliance)
    pieces.close()
    wait_for(lambda: watched.gauge("appliance_engine_active_jobs") == 0, limit_s=5, what="generation stops")


def stop_in_mid_stream(watched: Served, appliance: Appliance) -> None:
    pieces = begin(appliance)
    watched.process.send_signal(signal.SIGTERM)
    with pytest.raises(ApplianceError):
        list(pieces)
    assert watched.process.wait(20) == 0
