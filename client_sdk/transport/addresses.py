"""Ways to an appliance that are not TCP: vsock, hybrid vsock (Firecracker, Cloud Hypervisor), unix sockets.

vsock://CID:PORT                 from a host to its virtual machine, or the other way round
vsock+unix:///run/vm.sock:PORT   from the host through the unix socket of Firecracker or Cloud Hypervisor
unix:///run/appliance.sock       on one machine

A connector makes one connected socket. Attestation runs over it as over any other: the binder is TLS' own exporter.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

import httpx

from client_sdk.wire.vsock import HybridReply, check_unix_path, connect_line, parse_cid, parse_port

_VSOCK = re.compile(r"vsock://([^/:?#]*):([^/:?#]*)/?")
_PATH = re.compile(r"(vsock\+unix|unix)://(/[^?#]*)")
_FORMS = "https://host:port, vsock://CID:port, vsock+unix:///path:port or unix:///path"


class Connector(Protocol):
    """Makes connected sockets. Both ways raise OSError with a message that says what to look at."""

    def connect(self, timeout_s: float | None) -> socket.socket:
        """A blocking socket, within `timeout_s` seconds in all. Raises TimeoutError, OSError."""

    async def aconnect(self) -> socket.socket:
        """A non-blocking socket. Raises OSError; time limits are the caller's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketConnector:
    """A plain connect: `family` and `address` as `socket` takes them, `where` for messages."""

    family: int
    address: Any
    where: str

    def connect(self, timeout_s: float | None) -> socket.socket:
        with _explained(self.where), _kept(_new_socket(self.family)) as sock:
            sock.settimeout(timeout_s)
            sock.connect(self.address)
            return sock

    async def aconnect(self) -> socket.socket:
        with _explained(self.where), _kept(_new_socket(self.family)) as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, self.address)
            return sock


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConnector:
    """The unix socket of a virtual machine, and the guest's `port` behind it."""

    path: str
    port: int

    @property
    def _socket(self) -> SocketConnector:
        return SocketConnector(family=socket.AF_UNIX, address=self.path, where=f"the vsock at {self.path}")

    def connect(self, timeout_s: float | None) -> socket.socket:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        reply = HybridReply(self.port)
        with _kept(self._socket.connect(timeout_s)) as sock, _hung_up(reply):
            sock.sendall(connect_line(self.port))
            while not reply.feed(_receive_byte(sock, deadline)):
                pass
            return sock

    async def aconnect(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        reply = HybridReply(self.port)
        with _kept(await self._socket.aconnect()) as sock, _hung_up(reply):
            await loop.sock_sendall(sock, connect_line(self.port))
            while not reply.feed(await loop.sock_recv(sock, 1)):
                pass
            return sock


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplianceAddress:
    """Where an appliance is: the origin that HTTP uses, and how to get there (None: TCP, as the origin says).

    The origins of the other ways are names under `.invalid` (RFC 6761): nothing ever looks them up.
    """

    origin: httpx.URL
    connector: Connector | None


def parse_appliance_address(url: str) -> ApplianceAddress:
    """Read the address of an appliance. Raises ValueError for anything that is none."""
    if found := _VSOCK.fullmatch(url):
        cid, port = parse_cid(found[1]), parse_port(found[2])
        connector = SocketConnector(
            family=getattr(socket, "AF_VSOCK", -1), address=(cid, port), where=f"vsock {cid}:{port}"
        )
        return _off_the_network(f"{cid}-{port}.vsock", connector)
    if found := _PATH.fullmatch(url):
        return _unix(found[2], hybrid=found[1] != "unix")
    if url.startswith(("vsock", "unix")):
        raise ValueError(f"the address of an appliance is {_FORMS}")
    return ApplianceAddress(origin=_https(url), connector=None)


def _unix(path: str, *, hybrid: bool) -> ApplianceAddress:
    if not hybrid:
        path = check_unix_path(unquote(path))
        connector = SocketConnector(family=socket.AF_UNIX, address=path, where=f"the unix socket {path}")
        return _off_the_network("unix", connector)
    path, separator, number = path.rpartition(":")
    if not separator:
        raise ValueError("the address of an appliance behind hybrid vsock is vsock+unix:///path:port")
    port = parse_port(number)
    return _off_the_network(f"{port}.hybrid-vsock", HybridConnector(path=check_unix_path(unquote(path)), port=port))


def _off_the_network(name: str, connector: Connector) -> ApplianceAddress:
    return ApplianceAddress(origin=httpx.URL(f"https://{name}.invalid/"), connector=connector)


def _https(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise ValueError(f"the address of an appliance is {_FORMS}") from None
    if parsed.scheme != "https" or not parsed.host:
        raise ValueError(f"the address of an appliance is {_FORMS}")
    if parsed.raw_path not in (b"", b"/") or parsed.userinfo or parsed.fragment:
        raise ValueError("the address of an appliance is an origin: no path, query, fragment or credentials")
    return parsed.copy_with(raw_path=b"/")


def _new_socket(family: int) -> socket.socket:
    if family < 0:
        raise OSError("this system has no vsock")
    return socket.socket(family, socket.SOCK_STREAM)


def _receive_byte(sock: socket.socket, deadline: float | None) -> bytes:
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the vsock of the virtual machine was too slow to answer")
        sock.settimeout(left)
    return sock.recv(1)


@contextmanager
def _kept(sock: socket.socket) -> Generator[socket.socket]:
    """`sock`, closed if what happens inside fails."""
    try:
        yield sock
    except BaseException:
        sock.close()
        raise


@contextmanager
def _hung_up(reply: HybridReply) -> Generator[None]:
    """A reset is the same refusal as an end: which of them comes depends on what was still unread."""
    try:
        yield
    except (ConnectionResetError, BrokenPipeError):
        reply.feed(b"")


@contextmanager
def _explained(where: str) -> Generator[None]:
    """Say where a connection failed. A vsock without a listener answers with a reset where TCP says refused."""
    try:
        yield
    except TimeoutError:
        raise TimeoutError(f"{where} did not answer in time") from None
    except (ConnectionRefusedError, ConnectionResetError) as error:
        raise ConnectionRefusedError(error.errno, f"nothing listens at {where}") from error
    except OSError as error:
        raise OSError(error.errno, f"cannot connect to {where}: {error.strerror or error}") from error
