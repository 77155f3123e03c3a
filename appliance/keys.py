"""API keys: 256 random bits shown once, kept as their SHA-256, compared in constant time.

The key file is JSON with a closed schema, mode 0600, replaced by one rename under a lock. A running appliance
notices the change, so a revoked key stops working at its next request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from appliance.durable import exclusive_lock, make_private_directory, replace_file
from appliance.errors import BootError, Forbidden, Unauthorized, Unavailable

SCOPES: Final = frozenset({"inference", "metrics", "receipts"})
_LIMIT_BYTES: Final = 4 * 1024 * 1024
_ENTRY_KEYS: Final = 7  # id, sha256, label, scopes, created, expires, revoked: the pattern below names each
_ID = re.compile(r"key_[0-9a-f]{12}")
_HEX = re.compile(r"[0-9a-f]{64}")
_BEARER = re.compile(r"bearer +(ai-[A-Za-z0-9_-]{43})", re.IGNORECASE)
_LABEL_LIMIT: Final = 128

RandomBytes = Callable[[int], bytes]
"""n -> n bytes from the system's generator."""


class KeyFileError(BootError):
    """The key file is missing, damaged, or open to others; the message says what to do next."""


class UnknownKey(KeyFileError):
    """No key of that id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """What is kept of one key. `sha256` is over the key's ASCII text; times are Unix seconds, None meaning never."""

    key_id: str
    sha256: bytes
    label: str
    scopes: frozenset[str]
    created: int
    expires: int | None
    revoked: int | None

    def is_live(self, now: float) -> bool:
        """Whether the key is neither revoked nor expired at `now`; it has expired in the second `expires` itself."""
        return self.revoked is None and (self.expires is None or now < self.expires)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a request comes from, as far as keys tell."""

    key_id: str
    scopes: frozenset[str]


def new_key(
    *, label: str, scopes: frozenset[str], now: int, expires: int | None, random_bytes: RandomBytes
) -> tuple[str, KeyEntry]:
    """A new key's text, to be shown once, and the entry to keep. Raises ValueError on a bad label, scope or expiry."""
    if not scopes or not scopes <= SCOPES:
        raise ValueError(f"scopes are one or more of {', '.join(sorted(SCOPES))}")
    if len(label) > _LABEL_LIMIT or not label.isprintable():
        raise ValueError(f"a label is at most {_LABEL_LIMIT} printable characters")
    if expires is not None and expires <= now:
        raise ValueError("the key would have expired already")
    text = "ai-" + base64.urlsafe_b64encode(random_bytes(32)).rstrip(b"=").decode()
    # The id is drawn on its own: it goes to logs and must say nothing about the key.
    entry = KeyEntry(
        key_id=f"key_{random_bytes(6).hex()}",
        sha256=hashlib.sha256(text.encode()).digest(),
        label=label,
        scopes=scopes,
        created=now,
        expires=expires,
        revoked=None,
    )
    return text, entry


class KeyRing:
    """The keys in force. `load` follows its file; a ring made of entries (tests, embedding) never changes."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._entries = tuple(entries)
        self._path: Path | None = None
        self._version: tuple[int, int, int] | None = None

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """The keys of the file `path`. Raises KeyFileError, also where others may read or write the file."""
        entries, version = _read(path)
        ring = cls(entries)
        ring._path, ring._version = path, version
        return ring

    @property
    def entries(self) -> tuple[KeyEntry, ...]:
        return self._entries

    def has_live_key(self, now: float) -> bool:
        """Whether anybody could authenticate at `now`; a listener open to the network must not start otherwise."""
        return any(entry.is_live(now) for entry in self._entries)

    def authenticate(self, header_value: str | None, scope: str, now: float) -> Identity:
        """The identity behind an Authorization header (`Bearer ai-...`) that may use `scope` at `now` (Unix seconds).

        Raises Unauthorized, with one code for every cause (unknown, expired, revoked, missing, malformed); Forbidden
        when the key lacks the scope; Unavailable when the key file can no longer be read (closed, not open).
        """
        self._refresh()
        match = _BEARER.fullmatch(header_value) if header_value is not None else None
        digest = hashlib.sha256(match[1].encode() if match else b"").digest()
        found: KeyEntry | None = None
        for entry in self._entries:  # all of them, always: the time tells nothing about which one matched
            if hmac.compare_digest(entry.sha256, digest):
                found = entry
        if found is None or not found.is_live(now):
            raise Unauthorized("invalid_api_key", "A valid API key is needed: `Authorization: Bearer ai-...`.")
        if scope not in found.scopes:
            raise Forbidden("insufficient_scope", f"This API key does not have the scope {scope!r}.")
        return Identity(key_id=found.key_id, scopes=found.scopes)

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            if _version_of(self._path.stat()) != self._version:
                self._entries, self._version = _read(self._path)
        except (OSError, KeyFileError) as error:
            raise Unavailable("keys_unavailable", "The API keys cannot be read now.", retry_after_s=5) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """The key file as its tool sees it."""

    path: Path

    def entries(self) -> tuple[KeyEntry, ...]:
        """All keys, the revoked and expired too; none where there is no file yet. Raises KeyFileError."""
        return _read(self.path)[0] if self.path.exists() else ()

    def add(self, entry: KeyEntry) -> None:
        """Keep `entry`, durably. Raises KeyFileError; then nothing changed."""
        self._change(lambda entries: (*entries, entry))

    def revoke(self, key_id: str, now: int) -> KeyEntry:
        """End the key for good (once: a second time changes nothing). Raises UnknownKey, KeyFileError."""

        def change(entries: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
            if all(entry.key_id != key_id for entry in entries):
                raise UnknownKey(f"no key has the id {key_id!r}. `appliance keys list` shows all ids.")
            return tuple(replace(e, revoked=now) if e.key_id == key_id and e.revoked is None else e for e in entries)

        return next(entry for entry in self._change(change) if entry.key_id == key_id)

    def _change(self, change: Callable[[tuple[KeyEntry, ...]], tuple[KeyEntry, ...]]) -> tuple[KeyEntry, ...]:
        try:
            make_private_directory(self.path.parent)
            with exclusive_lock(self.path.with_name(self.path.name + ".lock")):
                entries = change(self.entries())
                replace_file(self.path, _encode(entries))
        except OSError as error:
            raise KeyFileError(f"cannot write the key file {self.path}: {error.strerror}") from error
        return entries


def _version_of(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> tuple[tuple[KeyEntry, ...], tuple[int, int, int]]:
    try:
        with path.open("rb") as stream:
            found = os.fstat(stream.fileno())
            data = stream.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise KeyFileError(
            f"cannot read the key file {path}: {error.strerror}. `appliance keys new` makes one."
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        raise KeyFileError(f"the key file {path} is open to other users: chmod 600 it")
    if len(data) > _LIMIT_BYTES:
        raise KeyFileError(f"the key file {path} has over {_LIMIT_BYTES} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise KeyFileError(f"the key file {path} is not JSON") from error
    match document:
        case {"version": 1, "keys": list(items)} if len(document) == 2:
            entries = tuple(_parse_entry(item, path) for item in items)
        case _:
            raise KeyFileError(f"the key file {path} is not a key file of version 1")
    if len({entry.key_id for entry in entries}) != len(entries):
        raise KeyFileError(f"the key file {path} has one id twice")
    return entries, _version_of(found)


def _parse_entry(item: object, path: Path) -> KeyEntry:
    match item:
        case {
            "id": str(key_id),
            "sha256": str(sha256),
            "label": str(label),
            "scopes": list(scopes),
            "created": int(created),
            "expires": int() | None as expires,
            "revoked": int() | None as revoked,
        } if (
            isinstance(item, dict)
            and len(item) == _ENTRY_KEYS
            and _ID.fullmatch(key_id)
            and _HEX.fullmatch(sha256)
            and scopes
            and all(isinstance(scope, str) and scope in SCOPES for scope in scopes)
            and not any(isinstance(time, bool) for time in (created, expires, revoked))
        ):
            return KeyEntry(
                key_id=key_id,
                sha256=bytes.fromhex(sha256),
                label=label,
                scopes=frozenset(scopes),
                created=created,
                expires=expires,
                revoked=revoked,
            )
        case _:
            raise KeyFileError(f"the key file {path} has an entry with a missing, unknown or bad value")


def _encode(entries: tuple[KeyEntry, ...]) -> bytes:
    keys = [
        {
            "id": entry.key_id,
            "sha256": entry.sha256.hex(),
            "label": entry.label,
            "scopes": sorted(entry.scopes),
            "created": entry.created,
            "expires": entry.expires,
            "revoked": entry.revoked,
        }
        for entry in entries
    ]
    return json.dumps({"version": 1, "keys": keys}, indent=2, ensure_ascii=False).encode() + b"\n"
