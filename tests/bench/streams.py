"""The least client that can time a stream of either server: sockets, HTTP/1.1, server-sent events. Verifies nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import cbor2

from tests.bench.harness import MODEL, cpu_s

_HAS_TEXT = re.compile(rb'"text":"[^"]')
LIMIT_S = 600.0
GREEDY: Mapping[str, float] = MappingProxyType({"temperature": 0, "seed": 0})
# Written out, because the two have other defaults.
SAMPLED: Mapping[str, float] = MappingProxyType(
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 7}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One stream: seconds from its request to its first and last text, its usage, SHA-256 of its text.

    `cached` of the `prompt_tokens` were not evaluated, because the server had kept them.
    """

    first_s: float
    last_s: float
    tokens: int
    prompt_tokens: int
    cached: int
    digest: str

    @property
    def decode(self) -> float:
        """Tokens per second from the first text to the last. Raises SystemExit where there is no second one."""
        if self.tokens < 2 or self.last_s == self.first_s:
            raise SystemExit("a stream ended with its first token: there is no speed to measure")
        return (self.tokens - 1) / (self.last_s - self.first_s)


class Server:
    """Where requests go. With `tls` it is the appliance: each connection is attested before anything is asked on it.

    `pids` are the processes that work for it, `model` the name it is asked by.
    """

    def __init__(self, port: int, *, tls: bool, pids: Sequence[int] = (), model: str = MODEL) -> None:
        self._port = port
        self._model = model
        self.tls = tls
        self._pids = tuple(pids)
        self._context: ssl.SSLContext | None = None
        if tls:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
            self._context.minimum_version = ssl.TLSVersion.TLSv1_3

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return sum(map(cpu_s, self._pids))

    def connect(self) -> socket.socket:
        """A connection that is ready for requests; receipts on it name the attestation that is in force."""
        plain = socket.create_connection(("127.0.0.1", self._port), timeout=LIMIT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            return plain
        connection = self._context.wrap_socket(plain)
        question = cbor2.dumps({"nonce": os.urandom(32)})
        connection.sendall(_post("/.well-known/attestation", "application/cbor", question))
        status, _ = _read_whole(connection)
        if status != 200:
            raise SystemExit(f"the appliance refused to attest: {status}")
        return connection

    def stream(
        self,
        prompt: str,
        tokens: int,
        connection: socket.socket | None = None,
        *,
        sampling: Mapping[str, float] = GREEDY,
    ) -> Timing:
        """Complete a prompt on a connection that is open before the clock starts, a new one by default."""
        if connection is None:
            with self.connect() as connection:
                return self.stream(prompt, tokens, connection, sampling=sampling)
        request = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            **sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        message = _post("/v1/completions", "application/json", json.dumps(request).encode())
        start = time.perf_counter()
        connection.sendall(message)
        return _read_stream(connection, start)


def _post(path: str, media: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _read_whole(connection: socket.socket) -> tuple[int, bytes]:
    """(status, body) of an answer that says its length."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = connection.recv(65_536)
        if not data:
            raise SystemExit("the connection was closed")
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    length = int(found[1]) if found else 0
    while len(body) < length:
        body += connection.recv(65_536)
    return int(head.split()[1]), body


def _read_stream(connection: socket.socket, start: float) -> Timing:
    """Read to the end, noting the time only; what it says is looked at when the clock has stopped."""
    arrived: list[tuple[float, bytes]] = []
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        data = connection.recv(65_536)
        if not data:
            break
        arrived.append((time.perf_counter() - start, data))
        tail = (tail + data)[-16:]
    times = [when for when, data in arrived if _HAS_TEXT.search(data)]
    frames = _frames(b"".join(data for _, data in arrived))
    usage = next((frame["usage"] for frame in reversed(frames) if frame.get("usage")), None)
    if usage is None or not times:
        raise SystemExit(f"a stream ended without text or usage: {tail!r}")
    text = "".join(choice.get("text", "") for frame in frames for choice in frame.get("choices", ()))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Timing(
        first_s=times[0],
        last_s=times[-1],
        tokens=usage["completion_tokens"],
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        digest=digest,
    )


def _frames(received: bytes) -> list[dict[str, Any]]:
    """The JSON of every event of a chunked answer."""
    _, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            break
        body, rest = body + rest[:length], rest[length + 2 :]
    lines = (line.strip() for line in body.split(b"\n"))
    return [json.loads(line[5:]) for line in lines if line.startswith(b"data:") and not line.endswith(b"[DONE]")]
