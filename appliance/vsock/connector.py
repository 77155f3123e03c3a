"""Connections to every kind of address, as non-blocking sockets on asyncio."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from appliance.config.addresses import Address, HybridAddress, TcpAddress, UnixAddress, VsockAddress
from appliance.vsock.hybrid import choose_port


async def connect(address: Address) -> socket.socket:
    """A connected socket. Raises OSError with a message that names the address; time limits are the caller's.

    A vsock without a listener answers with a reset where TCP says refused.
    """
    try:
        if isinstance(address, TcpAddress):
            return await _connect_tcp(address)
        if isinstance(address, VsockAddress):
            return await _connect(socket.AF_VSOCK, (address.cid, address.port))
        if isinstance(address, UnixAddress):
            return await _connect(socket.AF_UNIX, address.path)
        if isinstance(address, HybridAddress):
            return await _connect_hybrid(address)
    except OSError as error:
        raise OSError(error.errno, f"cannot connect to {address}: {error.strerror or error}") from error
    raise ValueError(f"{address} is no address to connect to")


def without_delay(sock: socket.socket) -> None:
    """Small records leave at once, and a TCP peer that is gone is noticed."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _connect_tcp(address: TcpAddress) -> socket.socket:
    """The first of the host's addresses that answers. Raises the last OSError."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"no address for {address.host}")
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a host name that IDNA refuses
        raise failure from error
    for family, _, _, _, name in found:
        try:
            sock = await _connect(family, name)
        except OSError as error:
            failure = error
        else:
            without_delay(sock)
            return sock
    raise failure


async def _connect_hybrid(address: HybridAddress) -> socket.socket:
    sock = await _connect(socket.AF_UNIX, address.path)
    try:
        await choose_port(sock, address.port)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect(family: int, name: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, name)
    except BaseException:
        sock.close()
        raise
    return sock
