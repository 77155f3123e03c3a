"""The way out of an enclave that has no network: an HTTP CONNECT proxy on the host, for named places only.

It joins the enclave with a host and port of its list and moves bytes. TLS ends inside the enclave, which checks the
certificate itself; the host learns which place was asked for, and how much, and nothing else.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

from appliance.config.addresses import TcpAddress, parse_address
from appliance.errors import BootError
from appliance.vsock.connector import connect
from appliance.vsock.forwarder import Reached

HEAD_BYTES: Final = 8192
_END: Final = b"\r\n\r\n"
_REQUEST = re.compile(rb"([A-Z]{1,16}) (\S{1,512}) HTTP/1\.[01]")


class ProxyRefused(OSError):
    """A request that the proxy does not serve; the client was told with an HTTP status."""


class ConnectProxy:
    """`reach` for a Forwarder. `allowed` are the only places; they are compared as they are, nothing is a pattern."""

    def __init__(self, allowed: Iterable[TcpAddress]) -> None:
        self._allowed = {(place.host.lower(), place.port): place for place in allowed}

    async def reach(self, client: socket.socket) -> Reached:
        """Read a CONNECT request, connect, answer 200. Raises OSError; the client then has its answer."""
        loop = asyncio.get_running_loop()
        head, early = await self._read_head(client)
        place = await self._place(client, head)
        try:
            sock = await connect(place)
        except OSError as error:
            await _refuse(client, HTTPStatus.BAD_GATEWAY, error.strerror or str(error))
            raise
        try:
            await loop.sock_sendall(client, b"HTTP/1.1 200 Connection established\r\n\r\n")
        except BaseException:
            sock.close()
            raise
        return Reached(sock=sock, early=early)

    async def _read_head(self, client: socket.socket) -> tuple[bytes, bytes]:
        loop = asyncio.get_running_loop()
        data = b""
        while _END not in data:
            if len(data) > HEAD_BYTES:
                raise await _refuse(client, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "a request head too large")
            piece = await loop.sock_recv(client, HEAD_BYTES)
            if not piece:
                raise ProxyRefused("a client of the proxy hung up in its request head")
            data += piece
        head, _, early = data.partition(_END)
        return head, early

    async def _place(self, client: socket.socket, head: bytes) -> TcpAddress:
        request = _REQUEST.fullmatch(head.partition(b"\r\n")[0])
        if request is None:
            raise await _refuse(client, HTTPStatus.BAD_REQUEST, "a request that is no HTTP/1.1")
        if request[1] != b"CONNECT":
            raise await _refuse(client, HTTPStatus.METHOD_NOT_ALLOWED, "a method other than CONNECT")
        try:
            wanted = parse_address(request[2].decode("ascii"))
        except (BootError, UnicodeDecodeError):
            raise await _refuse(client, HTTPStatus.BAD_REQUEST, "a target that is no HOST:PORT") from None
        place = self._allowed.get((wanted.host.lower(), wanted.port)) if isinstance(wanted, TcpAddress) else None
        if place is None:
            raise await _refuse(client, HTTPStatus.FORBIDDEN, f"{wanted}, which is not on the list")
        return place


async def _refuse(client: socket.socket, status: HTTPStatus, what: str) -> ProxyRefused:
    """Tell the client, and make the error that tells the operator."""
    answer = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    try:
        await asyncio.get_running_loop().sock_sendall(client, answer.encode("ascii"))
    except OSError:
        pass  # it has gone; the operator is told all the same
    return ProxyRefused(f"the proxy refused {what}")
