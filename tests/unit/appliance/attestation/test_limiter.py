"""How fast quotes are made, and for whom."""

from __future__ import annotations

import asyncio

import pytest

from appliance.attestation.limiter import MAX_PEERS, SHARES, QuoteLimiter
from appliance.errors import AttestationUnavailable
from appliance.listener.connection import peer_key


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


async def taken(bucket: QuoteLimiter, peer: str, most: int = 1000) -> int:
    """How many quotes this peer gets in a row."""
    for number in range(most):
        try:
            await take(bucket, peer)
        except AttestationUnavailable:
            return number
    return most


async def test_one_peer_alone_has_the_rate_but_not_the_last_of_the_burst() -> None:
    clock = Clock()
    bucket = limiter(clock, per_s=1.0, burst=64)
    assert await taken(bucket, "greedy") == 48 + 4  # all above the reserve of 16, then its share
    greedy = 0
    for _ in range(1000):
        clock.now += 1.0
        greedy += await taken(bucket, "greedy")
    assert greedy >= 980, "nobody else is there: the rate is all its own"
    assert await taken(bucket, "somebody") == 4


async def test_a_peer_that_takes_all_it_gets_leaves_everybody_else_their_share() -> None:
    clock = Clock()
    bucket = limiter(clock, per_s=1.0, burst=64)
    await taken(bucket, "greedy")
    refused = 0
    for number in range(2000):
        clock.now += 0.5
        await taken(bucket, "greedy")
        second, half = divmod(number, 2)
        if half == 0 and second % SHARES:  # fifteen others, each once in sixteen seconds: its share
            refused += await taken(bucket, f"client {second % SHARES}", most=1) == 0
    assert refused == 0


async def test_refusals_name_a_wait_that_is_enough_for_a_peer_beyond_its_share() -> None:
    clock = Clock()
    bucket = limiter(clock, per_s=0.5, burst=64)
    await taken(bucket, "greedy")
    for _ in range(20):
        with pytest.raises(AttestationUnavailable) as caught:
            await take(bucket, "greedy")
        assert caught.value.retry_after_s is not None
        clock.now += caught.value.retry_after_s
        assert await taken(bucket, "greedy") >= 1
        await taken(bucket, "greedy")


async def test_all_peers_together_never_get_more_than_the_rate_and_the_burst() -> None:
    """However many addresses somebody has, and whether or not they are remembered."""
    clock = Clock()
    bucket = limiter(clock, per_s=2.0, burst=32)
    made = 0
    for number in range(3 * MAX_PEERS):
        made += await taken(bucket, f"address {number}", most=1)
        clock.now += 0.01
    assert made <= 32 + 2.0 * clock.now
    assert len(bucket._peers) == MAX_PEERS


@pytest.mark.parametrize(
    ("peer", "key"),
    [
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("192.0.2.7", "192.0.2.7"),
        ("vsock:3", "vsock:3"),
        ("unix", "unix"),
        ("gone", "gone"),
    ],
)
def test_who_counts_as_one_peer(peer: str, key: str) -> None:
    assert peer_key(peer) == key
