"""The nouns between HTTP and the service: a parsed call, the JSON of a route, and the way back to one client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from appliance.engine.types import ChatMessage
from appliance.receipts.issuer import ChainScope


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One parsed request. None stands for "not given"; defaults are applied by the service."""

    model: str
    prompt: tuple[ChatMessage, ...] | str
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    max_tokens: int | None
    max_tokens_field: str
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every body and frame of one answer begins with. `identifier` is the receipt id in hex."""

    identifier: str
    created: int
    model: str
    include_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


class Dialect(Protocol):
    """The JSON of one route: how a request is read and an answer is written. Bytes in, bytes out, no state."""

    def parse(self, body: bytes) -> Call: ...
    def whole(self, heading: Heading, text: str, finish: str, usage: Usage) -> bytes: ...
    def opening(self, heading: Heading) -> tuple[bytes, ...]: ...
    def delta(self, heading: Heading, text: str) -> bytes: ...
    def closing(self, heading: Heading, finish: str, usage: Usage) -> tuple[bytes, ...]: ...


class Exchange(Protocol):
    """One HTTP request and the way back to its client. `received` grows while the body is read."""

    method: str
    route: str
    nonce: bytes | None
    attestation: bytes | None
    channel: bytes | None
    scope: ChainScope
    received: bytes
    complete: bool

    @property
    def gone(self) -> asyncio.Future[None]: ...
    async def read_body(self) -> bytes: ...
    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None: ...
    async def send_head(self, headers: Mapping[str, str]) -> None: ...
    async def send_part(self, data: bytes) -> None: ...
    async def send_end(self, *, close: bool) -> None: ...
