"""Whose evaluated prompts may be reused for whom: those of one API key, or of one connection where there are no keys.

And of one route and one `prompt_cache_key` only; every model keeps its own. The time of a first token tells whether a
prompt was reused, so that a scope never spans two tenants (B139).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from weakref import WeakKeyDictionary

from appliance.receipts.issuer import ChainScope

_SECRET_BYTES = 32


class CacheScopes:
    """Scopes of this boot. `random_bytes` draws their secret, and the identity of each connection."""

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._random_bytes = random_bytes
        self._secret = random_bytes(_SECRET_BYTES)
        self._connections: WeakKeyDictionary[ChainScope, bytes] = WeakKeyDictionary()

    def scope(self, identity: ChainScope, route: str, cache_key: str) -> bytes:
        """32 bytes that tell none of it. `cache_key` is the request's `prompt_cache_key`: it divides scopes further."""
        if identity.store_key is not None:
            who = b"key " + identity.store_key.encode()
        elif identity in self._connections:
            who = self._connections[identity]
        else:
            who = self._connections[identity] = b"connection " + self._random_bytes(_SECRET_BYTES).hex().encode()
        made = self._secret
        for part in (who, route.encode(), cache_key.encode()):
            made = hmac.digest(made, part, "sha256")
        return made
