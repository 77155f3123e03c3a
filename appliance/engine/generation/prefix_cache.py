"""Evaluated prompts kept for reuse: exact token prefixes, within one scope only, bounded three ways.

An entry is a copy of what the context held, outside of the context: it takes no cells and slows no other sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_TOKENS = 16
"""Prefixes shorter than this are evaluated again: it is as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """`entries` 0 turns reuse off. `ttl_s` counts from the last use."""

    entries: int = 64
    limit_bytes: int = 256 << 20
    ttl_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A hit: the first `length` tokens of what `state` holds are those asked for; it holds `size` in all."""

    state: bytes
    length: int
    size: int


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    evictions: int = 0


@dataclass(slots=True, kw_only=True)
class _Entry:
    scope: bytes
    tokens: tuple[int, ...]
    state: bytes
    used_at: float


class PrefixCache:
    """Least recently used entries go first; expired ones at the next call. Scopes never see each other's entries.

    `cuttable`: a state can be cut back, so that an entry holds all of its beginnings too. Else (recurrent models) it
    holds its very tokens and nothing shorter.
    """

    def __init__(self, limits: CacheLimits, clock: Callable[[], float], *, cuttable: bool = True) -> None:
        self._limits = limits
        self._clock = clock
        self._cuttable = cuttable
        self._order: OrderedDict[int, _Entry] = OrderedDict()
        self._scopes: dict[bytes, set[int]] = {}
        self._next_id = 0
        self.counters = CacheCounters()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def enabled(self) -> bool:
        return self._limits.entries > 0

    @property
    def room_bytes(self) -> int:
        """How many bytes may come to those there are."""
        return self._limits.limit_bytes - self.size_bytes if self.enabled else 0

    def find(self, scope: bytes, tokens: Sequence[int], *, room: int) -> Prefix | None:
        """The longest prefix of `tokens` held for `scope`, at least one token short of all of it.

        Only entries of at most `room` tokens, and if they cannot be cut only such as match to their very end. Counts
        hit or miss.
        """
        self._expire()
        found: tuple[int, int] | None = None
        for identifier in self._scopes.get(scope, ()):
            entry = self._order[identifier]
            length = min(_common(entry.tokens, tokens), len(tokens) - 1)
            usable = len(entry.tokens) <= room and (self._cuttable or length == len(entry.tokens))
            if usable and length >= MIN_TOKENS and (found is None or length > found[0]):
                found = (length, identifier)
        if found is None:
            self.counters.misses += 1
            return None
        entry = self._order[found[1]]
        entry.used_at = self._clock()
        self._order.move_to_end(found[1])
        self.counters.hits += 1
        self.counters.reused_tokens += found[0]
        return Prefix(state=entry.state, length=found[0], size=len(entry.tokens))

    def wants(self, scope: bytes, tokens: Sequence[int]) -> bool:
        """True unless this very prefix is too short or there already."""
        if not scope or not self.enabled or len(tokens) < MIN_TOKENS:
            return False
        held = (self._order[identifier].tokens for identifier in self._scopes.get(scope, ()))
        return not any(self._covers(other, tokens) for other in held)

    def put(self, scope: bytes, tokens: Sequence[int], state: bytes) -> None:
        """Keep a state; entries of the scope that it covers are superseded. One larger than the bound is not kept."""
        self._expire()
        if not self.enabled or len(state) > self._limits.limit_bytes:
            return
        kept = tuple(tokens)
        for identifier in list(self._scopes.get(scope, ())):
            if self._covers(kept, self._order[identifier].tokens):
                self._drop(identifier)
        self._next_id += 1
        self._order[self._next_id] = _Entry(scope=scope, tokens=kept, state=state, used_at=self._clock())
        self._scopes.setdefault(scope, set()).add(self._next_id)
        self.size_bytes += len(state)
        while len(self._order) > self._limits.entries or self.size_bytes > self._limits.limit_bytes:
            self._evict(next(iter(self._order)))

    def _covers(self, entry: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether an entry holds all of these tokens, in a way that they could be had from it."""
        long_enough = len(entry) >= len(tokens) if self._cuttable else len(entry) == len(tokens)
        return long_enough and _common(entry, tokens) == len(tokens)

    def _expire(self) -> None:
        border = self._clock() - self._limits.ttl_s
        for identifier in [key for key, entry in self._order.items() if entry.used_at <= border]:
            self._evict(identifier)

    def _evict(self, identifier: int) -> None:
        self.counters.evictions += 1
        self._drop(identifier)

    def _drop(self, identifier: int) -> None:
        entry = self._order.pop(identifier)
        self.size_bytes -= len(entry.state)
        mates = self._scopes[entry.scope]
        mates.discard(identifier)
        if not mates:
            del self._scopes[entry.scope]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix; blocks first, so that a long match costs few steps of Python."""
    size = min(len(first), len(second))
    low = 0
    left, right = tuple(first[:size]), tuple(second[:size])
    if left == right:
        return size
    while size - low > 1:
        middle = (low + size) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            size = middle
    return low
