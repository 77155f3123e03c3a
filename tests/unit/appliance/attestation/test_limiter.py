"""How fast quotes are made, and for whom."""

from __future__ import annotations

import asyncio

import pytest

from appliance.attestation.limiter import QuoteLimiter
from appliance.errors import AttestationUnavailable


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limiter(clock: Clock, *, per_s: float = 1.0, burst: int = 3, max_waiting: int = 8) -> QuoteLimiter:
    return QuoteLimiter(per_s=per_s, burst=burst, max_waiting=max_waiting, monotonic=clock)


async def take(bucket: QuoteLimiter, peer: str = "p") -> None:
    async with bucket.turn(peer):
        pass


async def test_a_burst_then_the_rate_and_the_wait_it_names_is_enough() -> None:
    clock = Clock()
    bucket = limiter(clock, per_s=0.25)
    for _ in range(3):
        await take(bucket)
    for _ in range(2):
        with pytest.raises(AttestationUnavailable) as caught:
            await take(bucket)
        assert (caught.value.status, caught.value.code) == (503, "attestation_overloaded")
    assert caught.value.retry_after_s in {4, 5}
    clock.now += caught.value.retry_after_s
    await take(bucket)
    with pytest.raises(AttestationUnavailable):
        await take(bucket)
    clock.now += 10_000
    for _ in range(3):
        await take(bucket)
    with pytest.raises(AttestationUnavailable):
        await take(bucket)


async def test_one_at_a_time_and_a_quarter_for_each_peer() -> None:
    bucket = limiter(Clock(), burst=100)
    inside, most = 0, 0
    release = asyncio.Event()

    async def hold(peer: str) -> None:
        nonlocal inside, most
        async with bucket.turn(peer):
            inside += 1
            most = max(most, inside)
            await release.wait()
            inside -= 1

    tasks = [asyncio.create_task(hold(peer)) for peer in "aabbccdd"]
    await asyncio.sleep(0)
    for peer in ("a", "e"):  # its own share, then the whole queue
        with pytest.raises(AttestationUnavailable):
            await take(bucket, peer)
    release.set()
    await asyncio.gather(*tasks)
    assert most == 1
    await take(bucket, "a")


async def test_a_refusal_by_the_queue_costs_no_token_and_a_cancelled_one_frees_its_place() -> None:
    bucket = limiter(Clock(), burst=3, max_waiting=4)
    gate = asyncio.Event()

    async def hold() -> None:
        async with bucket.turn("a"):
            await gate.wait()

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    for _ in range(5):
        with pytest.raises(AttestationUnavailable):
            await take(bucket, "a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await take(bucket, "a")
    await take(bucket, "a")
