"""Where to listen and where to connect, as text and as values. No sockets here."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TypeAlias

from appliance.errors import BootError
from client_sdk.wire.vsock import CID_ANY, UNIX_PATH_BYTES, check_unix_path, parse_cid, parse_port

_PORT = re.compile(r"[0-9]{1,5}")
_NAME = re.compile(r"[^\s:]{1,255}")
_STAGING_BYTES = 8
"""A listener's socket is made beside its path, under a process id of up to seven digits and a dot."""

FORMS = "HOST:PORT, vsock:PORT, vsock:CID:PORT, unix:/PATH, vsock+unix:/PATH:PORT, systemd or systemd:NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpAddress:
    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VsockAddress:
    """`cid` is CID_ANY for a listener that takes whatever context ids this machine has."""

    cid: int
    port: int

    def __str__(self) -> str:
        return f"vsock:{self.port}" if self.cid == CID_ANY else f"vsock:{self.cid}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridAddress:
    """`port` of a virtual machine whose vsock is the unix socket `path` here (Firecracker, Cloud Hypervisor)."""

    path: str
    port: int

    @property
    def guest_initiated(self) -> UnixAddress:
        """Where the guest's own connections to `port` of its host arrive."""
        return UnixAddress(path=f"{self.path}_{self.port}")

    def __str__(self) -> str:
        return f"vsock+unix:{self.path}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedSockets:
    """Listening sockets that systemd passed to this process, all of them or those with one name."""

    name: str

    def __str__(self) -> str:
        return f"systemd:{self.name}" if self.name else "systemd"


Address: TypeAlias = TcpAddress | VsockAddress | UnixAddress | HybridAddress | InheritedSockets


def parse_address(text: str) -> Address:
    """Read one address. Raises BootError naming the text, what is wrong with it, and what is expected."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "vsock":
            return _vsock(rest)
        if kind == "unix":
            return UnixAddress(path=check_unix_path(rest, limit_bytes=UNIX_PATH_BYTES - _STAGING_BYTES))
        if kind == "vsock+unix":
            path, _, port = rest.rpartition(":")
            limit_bytes = UNIX_PATH_BYTES - _STAGING_BYTES - len(port) - 1
            return HybridAddress(path=check_unix_path(path, limit_bytes=limit_bytes), port=parse_port(port))
        if kind == "systemd":
            if text != kind and _NAME.fullmatch(rest) is None:
                raise ValueError("the name of a socket of systemd has neither blanks nor colons")
            return InheritedSockets(name=rest)
        return _tcp(text)
    except ValueError as error:
        raise BootError(f"address {text!r}: {error}") from None


def _vsock(text: str) -> VsockAddress:
    cid, separator, port = text.rpartition(":")
    return VsockAddress(cid=parse_cid(cid) if separator else CID_ANY, port=parse_port(port))


def _tcp(text: str) -> TcpAddress:
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT with a port of 0..65535; other forms: {FORMS}")
    return TcpAddress(host=host, port=int(port))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
