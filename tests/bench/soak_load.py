"""The mixed load of `soak.py`: what one caller does, one thing after another, and how each of them may end."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from client_sdk import ApplianceError, AsyncAppliance
from client_sdk.client.client import CHAT_ROUTE
from tests.e2e.programs import MODEL

SENTENCE = "The keeper of the lighthouse wrote down the weather, the ships and the birds of every day. "
LONG_SENTENCES = 30
RECONNECT_AFTER = 25
# Of twenty things in a row one is a client that goes away and one is a bad request: 5 % each.
CYCLE, DISCONNECT_AT, BAD_AT = 20, 7, 15
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "tall": {"type": "boolean"}},
    "required": ["name", "tall"],
    "additionalProperties": False,
}
Act = Callable[[AsyncAppliance], Awaitable[str]]
SECRET = "the-marker-that-no-log-may-hold"


@dataclass(slots=True, kw_only=True)
class Tally:
    """How often each kind of thing ended in which way. `wrong` has what may never happen."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def total(self) -> int:
        return sum(self.ends.values())

    def of(self, kind: str) -> int:
        return sum(count for (name, _), count in self.ends.items() if name == kind)


class Caller:
    """One caller. `number` and the seed say what it does; the order of answers of others does not."""

    def __init__(self, url: str, policy: Path, number: int, seed: int, tally: Tally) -> None:
        self._url = url
        self._policy = policy
        self._draw = random.Random(seed * 1000 + number)
        self._tally = tally
        self._port = int(url.rpartition(":")[2])
        self._good: Sequence[tuple[str, Act]] = (
            ("whole", self._whole),
            ("stream", self._stream),
            ("two choices", self._two),
            ("json schema", self._schema),
            ("long prompt", self._long),
            ("cancelled", self._cancelled),
            ("timeout", self._timeout),
            ("sampled", self._sampled),
        )

    async def run(self, until: float, things: int) -> None:
        """Until `until` on the loop's clock, and `things` at least; what has begun by then is finished."""
        loop = asyncio.get_running_loop()
        first = self._draw.randrange(CYCLE)
        done = 0
        while done < things or loop.time() < until:
            async with AsyncAppliance(self._url, policy=self._policy) as client:
                for _ in range(RECONNECT_AFTER):
                    await self._once(client, (first + done) % CYCLE)
                    done += 1
                    if done >= things and loop.time() >= until:
                        break

    async def _once(self, client: AsyncAppliance, place: int) -> None:
        special: dict[int, tuple[str, Act]] = {
            DISCONNECT_AT: ("disconnect", self._disconnect),
            BAD_AT: ("bad request", self._bad),
        }
        kind, act = special.get(place) or self._draw.choice(self._good)
        try:
            end = await act(client)
        except ApplianceError as error:
            end = f"refused {error.status} {error.code}"
            if (kind, error.status) not in {("timeout", 408)}:
                self._tally.wrong.append(f"{kind}: {end}")
        self._tally.ends[kind, end] += 1

    def _question(self) -> str:
        return f"{SECRET} {self._draw.randrange(10**9)}: tell me about ships."

    async def _whole(self, client: AsyncAppliance) -> str:
        answer = await client.chat(self._question(), model=MODEL, max_tokens=self._draw.randrange(1, 24), temperature=0)
        self._tally.tokens += _tokens(answer.receipt)
        return "verified"

    async def _sampled(self, client: AsyncAppliance) -> str:
        answer = await client.chat(
            self._question(), model=MODEL, max_tokens=16, temperature=1.2, top_p=0.9, frequency_penalty=0.5, stop=["."]
        )
        self._tally.tokens += _tokens(answer.receipt)
        return "verified"

    async def _stream(self, client: AsyncAppliance) -> str:
        stream = client.stream(self._question(), model=MODEL, max_tokens=self._draw.randrange(2, 40), temperature=0)
        async for _ in stream:
            pass
        self._tally.tokens += _tokens(stream.receipt)
        return "verified"

    async def _two(self, client: AsyncAppliance) -> str:
        answer = await client.chat(self._question(), model=MODEL, n=2, max_tokens=12, temperature=1.0)
        self._tally.tokens += _tokens(answer.receipt)
        return "verified" if len(answer.texts) == 2 else "one choice"

    async def _schema(self, client: AsyncAppliance) -> str:
        wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
        answer = await client.chat(self._question(), model=MODEL, response_format=wanted, max_tokens=40, temperature=0)
        self._tally.tokens += _tokens(answer.receipt)
        return "verified"

    async def _long(self, client: AsyncAppliance) -> str:
        text = f"{self._draw.randrange(10**9)} " + SENTENCE * LONG_SENTENCES
        stream = client.stream(text, model=MODEL, max_tokens=8, temperature=0)
        async for _ in stream:
            pass
        self._tally.tokens += _tokens(stream.receipt)
        return "verified"

    async def _cancelled(self, client: AsyncAppliance) -> str:
        """The caller has read enough: the stream is closed in the middle."""
        stream = client.stream(self._question(), model=MODEL, max_tokens=400, temperature=1.0)
        pieces = stream.__aiter__()
        async for _ in pieces:
            break
        await pieces.aclose()  # type: ignore[attr-defined]
        return "cancelled"

    async def _timeout(self, client: AsyncAppliance) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": self._question()}], "max_tokens": 300}
        limit = {"x-request-timeout": f"{self._draw.uniform(0.01, 0.4):.3f}"}
        response = await client.http.post(CHAT_ROUTE, json=body, headers=limit)
        if not response.extensions["verified"] or response.status_code not in (200, 408):
            self._tally.wrong.append(f"timeout: {response.status_code}")
        return f"verified {response.status_code}"

    # -- clients that go away: no good-bye, at different moments ---------------------------------------------------

    async def _disconnect(self, _client: AsyncAppliance) -> str:
        moment = self._draw.choice(("in the handshake", "in the head", "in the body", "while waiting", "in the answer"))
        context = _unverified()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=None if moment == "in the handshake" else context
        )
        try:
            await self._leave(moment, reader, writer)
        finally:
            writer.transport.abort()
        return moment

    async def _leave(self, moment: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": self._question()}],
                "max_tokens": 400,
                "stream": True,
            }
        ).encode()
        head = f"POST {CHAT_ROUTE} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
        length = f"content-length: {len(body)}\r\n\r\n".encode()
        sent = {
            "in the handshake": b"\x16\x03\x01\x02\x00\x01\x00",
            "in the head": head,
            "in the body": head + length + body[: len(body) // 2],
        }.get(moment, head + length + body)
        writer.write(sent)
        await writer.drain()
        if moment == "in the answer":
            await reader.readuntil(b"data: ")
        await asyncio.sleep(self._draw.uniform(0.0, 0.2))

    # -- bad requests ----------------------------------------------------------------------------------------------

    async def _bad(self, client: AsyncAppliance) -> str:
        good: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": self._question()}]}
        kind, body, headers, expected = self._draw.choice(
            (
                ("no json", b'{"model": ', {}, 400),
                ("unknown field", {**good, "no_such_field": 1}, {}, 400),
                ("wrong type", {**good, "temperature": "hot"}, {}, 400),
                ("unknown model", {**good, "model": "no-such-model"}, {}, 404),
                ("no messages", {**good, "messages": []}, {}, 400),
                ("schema keyword", {**good, "response_format": _unsupported_schema()}, {}, 400),
                ("too long", {**good, "messages": [{"role": "user", "content": "ship " * 9000}]}, {}, 400),
                ("bad timeout", good, {"x-request-timeout": "soon"}, 400),
                ("media type", good, {"content-type": "text/plain"}, 415),
            )
        )
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.http.post(
            CHAT_ROUTE, content=content, headers={"content-type": "application/json", **headers}
        )
        if response.status_code != expected or not response.extensions["verified"] or _says(response, SECRET):
            self._tally.wrong.append(f"bad request, {kind}: {response.status_code}")
        return f"{kind} {response.status_code}"


def _says(response: httpx.Response, text: str) -> bool:
    return text.encode() in response.content


def _tokens(receipt: Any) -> int:
    return sum(output.count for output in receipt.claims.output)


def _unsupported_schema() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=x)"}}, "required": ["a"]}
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
