"""Bounds on how fast quotes are made: token buckets, for all and for each peer, and a queue bounded in the same way."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from appliance.errors import AttestationUnavailable

RESERVED = 4
"""One part in so many of the burst is out of reach of a peer that has used up its share."""
SHARES = 16
"""A peer's share is one part in so many of the rate and of the burst."""
MAX_PEERS = 4096


@dataclass(slots=True)
class _Bucket:
    """`per_s` tokens a second, `most` at most; full at first."""

    per_s: float
    most: float
    tokens: float
    refilled: float

    def refill(self, now: float) -> None:
        self.tokens = min(self.most, self.tokens + (now - self.refilled) * self.per_s)
        self.refilled = now

    def wait_s(self, wanted: float) -> float:
        return max(0.0, (wanted - self.tokens) / self.per_s)


class QuoteLimiter:
    """`per_s` quotes a second with bursts of `burst`; at most `max_waiting` callers wait, a quarter of them one peer's.

    A peer alone has nearly all of it. The last quarter of the burst, however, goes only to peers that are within their
    own share, so that one that takes all it can get leaves something to whoever comes next. Peers beyond MAX_PEERS are
    forgotten, the longest unseen first: that gives them a new share, while the bounds on all of them together hold.
    `monotonic` is seconds. Excess is 503 with Retry-After; running connections are unaffected.
    """

    def __init__(self, *, per_s: float, burst: int, max_waiting: int, monotonic: Callable[[], float]) -> None:
        most = max(1, burst)
        self._reserve = most // RESERVED
        self._max_waiting = max_waiting
        self._max_per_peer = max(1, max_waiting // 4)
        self._monotonic = monotonic
        self._all = _Bucket(per_s, most, most, monotonic())
        self._peers: OrderedDict[str, _Bucket] = OrderedDict()
        self._waiting: Counter[str] = Counter()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """One quote's turn: entered when the caller may quote, alone. Raises AttestationUnavailable.

        `peer` is whoever shares one share (connection.peer_key).
        """
        if self._waiting.total() >= self._max_waiting or self._waiting[peer] >= self._max_per_peer:
            raise _unavailable(self._all.wait_s(1))
        self._take_token(peer)
        self._waiting[peer] += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting[peer] -= 1
            if not self._waiting[peer]:
                del self._waiting[peer]

    def _take_token(self, peer: str) -> None:
        now, everybody = self._monotonic(), self._all
        own = self._share(peer, now)
        everybody.refill(now)
        own.refill(now)
        if everybody.tokens < 1 + self._reserve:
            if everybody.tokens < 1 or own.tokens < 1:
                by_share = max(own.wait_s(1), everybody.wait_s(1))
                raise _unavailable(min(by_share, everybody.wait_s(1 + self._reserve)))
            own.tokens -= 1
        everybody.tokens -= 1

    def _share(self, peer: str, now: float) -> _Bucket:
        own = self._peers.get(peer)
        if own is None:
            most = max(1.0, self._all.most / SHARES)
            own = self._peers[peer] = _Bucket(self._all.per_s / SHARES, most, most, now)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        return own


def _unavailable(wait_s: float) -> AttestationUnavailable:
    return AttestationUnavailable(
        "attestation_overloaded",
        "Evidence is asked for faster than it can be made.",
        retry_after_s=max(1, round(wait_s + 0.5)),
    )
