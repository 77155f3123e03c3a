"""HTTPS from inside an enclave through the host's CONNECT proxy, for endorsements: TLS ends here, never on the host."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from appliance.config.addresses import Address
from appliance.vsock.connector import connect

_HEAD_BYTES = 16_384
_READ_BYTES = 65_536
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 3


class FetchFailed(OSError):
    """The document could not be had. The message names the host and the reason, never what was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The body of a 200 and its headers, whose names are lower case."""

    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """GET over TLS through `proxy`. `tls` verifies names and certificates: the proxy is not trusted with either.

    A document is at most `limit_bytes`, and comes within `timeout_s` seconds in all.
    """

    proxy: Address
    tls: ssl.SSLContext
    limit_bytes: int = 1 << 20
    timeout_s: float = 30.0

    async def get(self, url: str) -> bytes:
        """The body of `fetch`."""
        return (await self.fetch(url)).body

    async def fetch(self, url: str) -> Document:
        """The answer with status 200. Redirects are followed on the same host and port only. Raises FetchFailed."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._follow(url)
        except TimeoutError as error:
            raise FetchFailed(f"{_place(url)[0]}: no document within {self.timeout_s:g} s") from error

    async def _follow(self, url: str) -> Document:
        place = _place(url)
        for _ in range(1 + _MAX_REDIRECTS):
            if _place(url) != place:
                raise FetchFailed(f"{place[0]}: it redirects to another host, which is not followed")
            response, body = await self._exchange(urlsplit(url))
            if response.status_code == 200:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
                return Document(headers=headers, body=body)
            location = dict(response.headers).get(b"location")
            if response.status_code not in _REDIRECTS or location is None:
                raise FetchFailed(f"{place[0]}: HTTP {response.status_code}")
            url = urljoin(url, location.decode("latin-1"))
        raise FetchFailed(f"{place[0]}: more than {_MAX_REDIRECTS} redirects")

    async def _exchange(self, url: SplitResult) -> tuple[h11.Response, bytes]:
        host, port = _place(url.geturl())
        authority = f"{host}:{port}"
        try:
            async with self._stream(host, authority) as (reader, writer):
                http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
                target = (url.path or "/") + (f"?{url.query}" if url.query else "")
                headers = [("host", url.netloc), ("accept-encoding", "identity"), ("connection", "close")]
                writer.write(http.send(h11.Request(method="GET", target=target, headers=headers)) or b"")
                http.send(h11.EndOfMessage())
                return await self._receive(http, reader, host)
        except h11.ProtocolError as error:
            raise FetchFailed(f"{host}: its answer is not valid HTTP/1.1") from error
        except FetchFailed:
            raise
        except ssl.SSLError as error:
            raise FetchFailed(f"{host}: {error.reason or 'TLS failed'}") from error
        except OSError as error:
            raise FetchFailed(f"{host}: {error.strerror or error}") from error

    async def _receive(
        self, http: h11.Connection, reader: asyncio.StreamReader, host: str
    ) -> tuple[h11.Response, bytes]:
        response: h11.Response | None = None
        body = bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self.limit_bytes:
                    raise FetchFailed(f"{host}: the document has more than {self.limit_bytes} bytes")
            elif isinstance(event, h11.EndOfMessage) and response is not None:
                return response, bytes(body)
            elif isinstance(event, h11.ConnectionClosed):
                raise FetchFailed(f"{host}: it hung up in its answer")

    @asynccontextmanager
    async def _stream(
        self, host: str, authority: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        sock = await connect(self.proxy)
        try:
            await _ask_proxy(sock, authority)
            reader, writer = await asyncio.open_connection(sock=sock, ssl=self.tls, server_hostname=host)
        except BaseException:
            sock.close()
            raise
        try:
            yield reader, writer
        finally:
            writer.transport.abort()  # the answer is complete, or worth nothing


async def _ask_proxy(sock: socket.socket, authority: str) -> None:
    """Raises FetchFailed with the proxy's status. Nothing is read beyond its head: what follows belongs to TLS."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, f"CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n\r\n".encode("ascii"))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = await loop.sock_recv(sock, 1)
        if not byte or len(head) > _HEAD_BYTES:
            raise FetchFailed(f"{authority}: the proxy did not answer as one")
        head += byte
    status = head.split(b" ", 2)[1:2]
    if not head.startswith(b"HTTP/1.1 ") or status != [b"200"]:
        code = status[0][:3].decode("latin-1") if status else "nothing"
        raise FetchFailed(f"{authority}: the proxy answered {code}")


def _place(url: str) -> tuple[str, int]:
    """(host, port) of an https URL. Raises FetchFailed for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port or 443
    except ValueError:
        raise FetchFailed("this is no URL") from None
    if parts.scheme != "https" or not parts.hostname or parts.username is not None:
        raise FetchFailed("only https URLs without credentials are fetched")
    return parts.hostname, port
