"""Fetch endorsements: the one module besides the transport that uses the network, and the cache on disk in front of it.

Nothing fetched is believed: it is verified like any endorsement given. What this module must not do is worse: hammer a
vendor, hang, fill memory, or turn "unreachable" into a yes.
"""

from __future__ import annotations

import hashlib
import json
import os
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from client_sdk.errors import UndecidedError

LIMIT_ANSWER_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0
TOTAL_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 3
MAX_WAIT_S = 10.0
_FIRST_WAIT_S = 1.0
_BUSY = frozenset({429, 502, 503, 504})
_MAX_ENTRIES = 1024
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer with status 200. Header names are lower case."""

    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One address to ask, and how long its answer may be used again (seconds). `ends` tells its own end, Unix seconds.

    `keep` are the headers that belong to the answer.
    """

    url: str
    ttl_s: float
    keep: tuple[str, ...] = ()
    ends: Callable[[bytes], float | None] = lambda body: None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """What the cache knows of one address. Times in Unix seconds."""

    url: str
    sha256: str
    size: int
    fetched: float
    expires: float


class Cache:
    """Answers on disk: contents named by their SHA-256, one small index file for each address, all for the owner only.

    A damaged entry is as good as none. Several processes may use one directory: files appear whole or not at all.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, url: str, now: float) -> Answer | None:
        """The answer kept for `url` unless it has expired."""
        found = self._read(self._index(url))
        if found is None or found[0].url != url or not found[0].fetched <= now < found[0].expires:
            return None
        entry, headers = found
        try:
            body = (self._directory / entry.sha256).read_bytes()
        except OSError:
            return None
        return Answer(headers=headers, body=body) if hashlib.sha256(body).hexdigest() == entry.sha256 else None

    def store(self, url: str, answer: Answer, *, now: float, expires: float) -> None:
        """Keep an answer. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = hashlib.sha256(answer.body).hexdigest()
        index = {
            "version": _VERSION,
            "url": url,
            "sha256": name,
            "size": len(answer.body),
            "fetched": now,
            "expires": expires,
            "headers": dict(answer.headers),
        }
        self._write(self._directory / name, answer.body)
        self._write(self._index(url), json.dumps(index).encode())
        self._prune()

    def entries(self) -> tuple[CacheEntry, ...]:
        """All that is kept, expired or not, by address."""
        found = [self._read(path) for path in self._directory.glob("*.json")] if self._directory.is_dir() else []
        return tuple(sorted((pair[0] for pair in found if pair is not None), key=lambda entry: entry.url))

    def _index(self, url: str) -> Path:
        return self._directory / f"{hashlib.sha256(url.encode()).hexdigest()}.json"

    def _read(self, path: Path) -> tuple[CacheEntry, Mapping[str, str]] | None:
        try:
            raw = json.loads(path.read_bytes())
            entry = CacheEntry(
                url=str(raw["url"]),
                sha256=bytes.fromhex(raw["sha256"]).hex(),
                size=int(raw["size"]),
                fetched=float(raw["fetched"]),
                expires=float(raw["expires"]),
            )
            headers = {str(name): str(value) for name, value in raw["headers"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return (entry, headers) if raw.get("version") == _VERSION and len(entry.sha256) == 64 else None

    def _write(self, path: Path, data: bytes) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def _prune(self) -> None:
        """Forget the oldest addresses beyond the limit, and contents that no address names."""
        paths = sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in paths[_MAX_ENTRIES:]:
            path.unlink(missing_ok=True)
        if len(paths) > _MAX_ENTRIES:
            named = {entry.sha256 for entry in self.entries()}
            for path in self._directory.iterdir():
                if len(path.name) == 64 and path.name not in named:
                    path.unlink(missing_ok=True)


class Fetcher:
    """Asks each address once at a time, however many ask for it. `client` is closed by its owner.

    `now` is Unix seconds, `monotonic` and `sleep` seconds. `cache` None: nothing is kept.
    """

    def __init__(
        self,
        client: httpx.Client,
        *,
        cache: Cache | None,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._client = client
        self._cache = cache
        self._now = now
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self._flights: dict[str, tuple[threading.Lock, int]] = {}

    def get(self, want: Want) -> Answer:
        """The answer from the cache or the network.

        Raises UndecidedError: ENDORSEMENTS_MISSING where the service has none, ENDORSEMENTS_UNREACHABLE otherwise.
        """
        with self._alone(want.url):
            kept = None if self._cache is None else self._cache.load(want.url, self._now())
            if kept is not None:
                return kept
            answer = self._fetch(want)
            self._keep(want, answer)
        return answer

    @contextmanager
    def _alone(self, url: str) -> Iterator[None]:
        with self._lock:
            lock, waiting = self._flights.get(url, (threading.Lock(), 0))
            self._flights[url] = (lock, waiting + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, waiting = self._flights.pop(url)
                if waiting > 1:
                    self._flights[url] = (lock, waiting - 1)

    def _fetch(self, want: Want) -> Answer:
        if not want.url.startswith("https://"):
            raise _unreachable(want.url, "endorsements are fetched over https alone")
        deadline, wait_s = self._monotonic() + TOTAL_TIMEOUT_S, _FIRST_WAIT_S
        for attempt in range(1, MAX_ATTEMPTS + 1):
            answer = self._ask(want, deadline)
            if isinstance(answer, Answer):
                return answer
            pause_s = wait_s if answer.retry_after_s is None else answer.retry_after_s
            if attempt == MAX_ATTEMPTS or pause_s > MAX_WAIT_S or self._monotonic() + pause_s > deadline:
                raise answer
            self._sleep(pause_s)
            wait_s *= 2
        raise AssertionError("the last attempt returns or raises")

    def _ask(self, want: Want, deadline: float) -> Answer | UndecidedError:
        """The answer, or the error of one that may be tried again. Raises UndecidedError for any other."""
        try:
            with self._client.stream("GET", want.url, follow_redirects=False) as response:
                if response.status_code in _BUSY:
                    again = _seconds(response.headers.get("retry-after"))
                    return _unreachable(want.url, f"answered {response.status_code}", retry_after_s=again)
                if response.status_code in (404, 410):
                    raise UndecidedError("ENDORSEMENTS_MISSING", f"{_shown(want.url)} has no such endorsement")
                if response.status_code != 200:
                    raise _unreachable(want.url, f"answered {response.status_code}")
                body = self._read(want, response, deadline)
                headers = {name: response.headers[name] for name in want.keep if name in response.headers}
                return Answer(headers=headers, body=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _unreachable(want.url, type(error).__name__) from None

    def _read(self, want: Want, response: httpx.Response, deadline: float) -> bytes:
        body = bytearray()
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > LIMIT_ANSWER_BYTES:
                raise _unreachable(want.url, f"the answer is larger than {LIMIT_ANSWER_BYTES} bytes")
            if self._monotonic() > deadline:
                raise _unreachable(want.url, f"no whole answer within {TOTAL_TIMEOUT_S:.0f} s")
        return bytes(body)

    def _keep(self, want: Want, answer: Answer) -> None:
        if self._cache is None:
            return
        now = self._now()
        end = want.ends(answer.body)
        expires = now + want.ttl_s if end is None else min(now + want.ttl_s, end)
        try:
            self._cache.store(want.url, answer, now=now, expires=expires)
        except OSError as error:
            raise UndecidedError("ENDORSEMENTS_CACHE", f"cannot write the cache: {error.strerror}") from None


def default_client() -> httpx.Client:
    """A client that verifies TLS with the system's roots; proxies and the like are not taken from the environment."""
    return httpx.Client(
        verify=ssl.create_default_context(),
        timeout=CONNECT_TIMEOUT_S,
        follow_redirects=False,
        trust_env=False,
        headers={"accept-encoding": "identity", "user-agent": "attested-inference"},
    )


def default_cache_directory(environment: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/attested-inference/endorsements, or the same under ~/.cache."""
    base = environment.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path(environment.get("HOME", "/nonexistent")) / ".cache"
    return root / "attested-inference" / "endorsements"


def _seconds(value: str | None) -> float | None:
    """Retry-After in its delta form; None for anything else."""
    return float(value) if value is not None and value.isascii() and value.isdigit() and len(value) < 10 else None


def _shown(url: str) -> str:
    """The address without its query: chip ids are nobody's business in logs."""
    return url.split("?", 1)[0][:120]


def _unreachable(url: str, what: str, *, retry_after_s: float | None = None) -> UndecidedError:
    return UndecidedError("ENDORSEMENTS_UNREACHABLE", f"{_shown(url)}: {what}", retry_after_s=retry_after_s)
