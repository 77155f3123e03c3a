"""Bounds on how fast quotes are made: a token bucket, a bounded queue, and a share of it for each peer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from appliance.errors import AttestationUnavailable


class QuoteLimiter:
    """`per_s` quotes a second with bursts of `burst`; at most `max_waiting` callers wait, a quarter of them one peer's.

    `monotonic` is seconds. Excess is 503 with Retry-After; running connections are unaffected.
    """

    def __init__(self, *, per_s: float, burst: int, max_waiting: int, monotonic: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = float(max(1, burst))
        self._max_waiting = max_waiting
        self._max_per_peer = max(1, max_waiting // 4)
        self._monotonic = monotonic
        self._tokens = self._burst
        self._refilled = monotonic()
        self._waiting: Counter[str] = Counter()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """One quote's turn: entered when the caller may quote, alone. Raises AttestationUnavailable."""
        if self._waiting.total() >= self._max_waiting or self._waiting[peer] >= self._max_per_peer:
            raise self._unavailable()
        self._take_token()
        self._waiting[peer] += 1
        try:
            async with self._turn:
                yield
        finally:
            self._waiting[peer] -= 1
            if not self._waiting[peer]:
                del self._waiting[peer]

    def _take_token(self) -> None:
        now = self._monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._refilled) * self._per_s)
        self._refilled = now
        if self._tokens < 1:
            raise self._unavailable()
        self._tokens -= 1

    def _unavailable(self) -> AttestationUnavailable:
        wait_s = max(1, round((1 - self._tokens) / self._per_s + 0.5))
        return AttestationUnavailable(
            "attestation_overloaded", "Evidence is asked for faster than it can be made.", retry_after_s=wait_s
        )
