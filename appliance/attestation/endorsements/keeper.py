"""Endorsements that the host did not hand over: fetched beside the evidence, kept in memory, never in its way.

Whatever brings them is not trusted, and cannot be: the verifier holds every endorsement against its own roots. All that
is at stake here is that evidence goes out in time, with or without them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from appliance.attestation.attester import Attester, Binding, Collected
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.errors import WireError

_LOG = logging.getLogger(__name__)

Items = tuple[EvidenceItem, ...]


class UnfitEndorsement(ValueError):
    """What came is not what was asked for. The message says how, and names no machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Endorsements of some evidence. Evidence with one `key` has the same ones.

    `fetch` raises OSError, WireError or UnfitEndorsement. After `fresh_s` seconds what it gave is fetched anew while it
    goes on being used, until `usable_s`.
    """

    key: bytes
    fetch: Callable[[], Awaitable[Items]]
    fresh_s: float = math.inf
    usable_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds. One try takes `try_s` at most. Evidence waits for the first one alone, at most `wait_s`.

    Between tries there are `pause_s`, then twice as many each time, up to `longest_pause_s`.
    """

    wait_s: float = 10.0
    try_s: float = 25.0
    pause_s: float = 2.0
    longest_pause_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    items: Items
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One thread that tries until it has found. `tried`: the first try has ended."""

    since: float
    tried: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


class EndorsementKeeper:
    """Fetched endorsements of the `limit` kinds of evidence asked for last. `monotonic` is seconds since any moment.

    A machine has one kind of evidence, and another after an update of its firmware.
    """

    def __init__(self, *, monotonic: Callable[[], float], patience: Patience | None = None, limit: int = 4) -> None:
        self._monotonic = monotonic
        self._patience = patience or Patience()
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._searches: OrderedDict[bytes, _Search] = OrderedDict()
        self._closed = False

    def find(self, wanted: Wanted) -> Items:
        """What there is now, or once the first try has ended; nothing where that failed or takes too long."""
        with self._lock:
            kept = self._usable(wanted)
            age_s = math.inf if kept is None else self._monotonic() - kept.since
            search = self._searches.get(wanted.key)
            if search is None and age_s >= wanted.fresh_s and not self._closed:
                search = self._begin(wanted)
        if kept is not None or search is None:
            return () if kept is None else kept.items
        search.tried.wait(max(0.0, search.since + self._patience.wait_s - self._monotonic()))
        with self._lock:
            found = self._usable(wanted)
        return () if found is None else found.items

    def close(self) -> None:
        """Search no more. What is kept stays."""
        with self._lock:
            self._closed = True
            for search in self._searches.values():
                search.stop.set()

    def _usable(self, wanted: Wanted) -> _Kept | None:
        kept = self._kept.get(wanted.key)
        if kept is None or self._monotonic() - kept.since >= wanted.usable_s:
            return None
        self._kept.move_to_end(wanted.key)
        return kept

    def _begin(self, wanted: Wanted) -> _Search:
        while len(self._searches) >= self._limit:
            self._searches.popitem(last=False)[1].stop.set()
        search = self._searches[wanted.key] = _Search(since=self._monotonic())
        threading.Thread(target=self._run, args=(wanted, search), name="endorsements", daemon=True).start()
        return search

    def _run(self, wanted: Wanted, search: _Search) -> None:
        pause_s, told = self._patience.pause_s, ""
        try:
            while not search.stop.is_set():
                told = self._attempt(wanted, search, told)
                search.tried.set()
                search.stop.wait(pause_s)
                pause_s = min(2 * pause_s, self._patience.longest_pause_s)
        finally:
            search.tried.set()
            with self._lock:
                if self._searches.get(wanted.key) is search:
                    del self._searches[wanted.key]

    def _attempt(self, wanted: Wanted, search: _Search, told: str) -> str:
        """One try, the last where it succeeds. Returns why not, which is logged unless it is what was `told`."""
        try:
            items = asyncio.run(self._try(wanted))
        except (OSError, WireError, UnfitEndorsement) as error:
            if (reason := _one_line(error)) != told:
                _LOG.warning("evidence goes out without the vendor's endorsements, which cannot be had: %s", reason)
            return reason
        self._keep(wanted.key, items)
        search.stop.set()
        _LOG.info("the vendor's endorsements of this machine's evidence were fetched")
        return ""

    async def _try(self, wanted: Wanted) -> Items:
        try:
            async with asyncio.timeout(self._patience.try_s):
                return await wanted.fetch()
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"not within {self._patience.try_s:g} s") from error

    def _keep(self, key: bytes, items: Items) -> None:
        with self._lock:
            self._kept[key] = _Kept(items=items, since=self._monotonic())
            self._kept.move_to_end(key)
            while len(self._kept) > self._limit:
                self._kept.popitem(last=False)


class EndorsedAttester:
    """`inner`, whose evidence gets the endorsements that it lacks. `lacks` tells which, None where it needs none."""

    def __init__(self, inner: Attester, lacks: Callable[[Collected], Wanted | None], keeper: EndorsementKeeper) -> None:
        self._inner = inner
        self._lacks = lacks
        self._keeper = keeper

    @property
    def family(self) -> str:
        return self._inner.family

    @property
    def mode(self) -> str:
        return self._inner.mode

    def collect(self, binding: Binding) -> Collected:
        collected = self._inner.collect(binding)
        wanted = self._lacks(collected)
        if wanted is None:
            return collected
        return replace(collected, endorsements=(*collected.endorsements, *self._keeper.find(wanted)))

    def close(self) -> None:
        self._keeper.close()


def _one_line(error: Exception) -> str:
    """The relay may have had a hand in the text."""
    text = error.detail if isinstance(error, WireError) else str(error)
    return "".join(character if character.isprintable() else "?" for character in text)[:200]
