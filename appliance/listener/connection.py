"""What the rest of the appliance sees of a connection: its channel, its limits, its counters."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from dataclasses import dataclass

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from OpenSSL import SSL

_VSOCK = "vsock:"


class NoTlsChannel(RuntimeError):
    """Keying material was asked of a connection that has no TLS, or no longer has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on what one client can hold. Seconds, bytes (request line included), connections.

    `max_per_peer` counts IP addresses (an IPv6 /64 is one peer), `max_per_cid` the machines that connect over vsock,
    which are often one forwarder that stands for every client; unix peers share the total only. `allowed_cids` are the
    machines that may connect over vsock (None: all). `write_stall_s` bounds how long a client may refuse to read an
    answer.
    """

    handshake_s: float = 10.0
    head_s: float = 10.0
    head_bytes: int = 16_384
    body_idle_s: float = 30.0
    max_connections: int = 256
    max_per_peer: int = 64
    max_per_cid: int = 256
    allowed_cids: frozenset[int] | None = None
    keep_alive_s: float = 75.0
    write_stall_s: float = 60.0


@dataclass(slots=True, kw_only=True)
class ConnectionStats:
    """Counters since the start, and `open` as a level. No addresses, no content."""

    accepted: int = 0
    open: int = 0
    refused_total: int = 0
    refused_peer: int = 0
    refused_cid: int = 0
    handshakes: int = 0
    handshake_failures: int = 0
    handshake_timeouts: int = 0
    head_timeouts: int = 0
    body_timeouts: int = 0
    write_stalls: int = 0
    bad_requests: int = 0
    requests: int = 0

    @property
    def refused(self) -> int:
        """Connections refused, for whatever reason."""
        return self.refused_total + self.refused_peer + self.refused_cid


class ConnectionTable:
    """Admission of new connections: in total and per peer."""

    def __init__(self, limits: ConnectionLimits, stats: ConnectionStats) -> None:
        self._limits = limits
        self._stats = stats
        self._per_peer: Counter[str] = Counter()

    def admit(self, key: str | None) -> bool:
        """Count a connection in, or count its refusal and return False. `key` None: no per-peer limit."""
        if self._stats.open >= self._limits.max_connections:
            self._stats.refused_total += 1
            return False
        if key is not None:
            if not self._may_connect(key):
                self._stats.refused_cid += 1
                return False
            if self._per_peer[key] >= self._most_of(key):
                self._stats.refused_peer += 1
                return False
            self._per_peer[key] += 1
        self._stats.open += 1
        self._stats.accepted += 1
        return True

    def _may_connect(self, key: str) -> bool:
        allowed, cid = self._limits.allowed_cids, _cid(key)
        return cid is None or allowed is None or cid in allowed

    def _most_of(self, key: str) -> int:
        return self._limits.max_per_peer if _cid(key) is None else self._limits.max_per_cid

    def release(self, key: str | None) -> None:
        """Count an admitted connection out."""
        self._stats.open -= 1
        if key is not None:
            self._per_peer[key] -= 1
            if self._per_peer[key] <= 0:
                del self._per_peer[key]


def _cid(key: str) -> int | None:
    """The context id that a peer's key names; None for an IP address."""
    return int(key.removeprefix(_VSOCK)) if key.startswith(_VSOCK) else None


def describe_peer(sock: socket.socket) -> tuple[str, str | None]:
    """(peer as text: an IP address, "unix" or "vsock:CID"; the key it is counted under, None where it is not)."""
    if sock.family == socket.AF_UNIX:
        return "unix", None
    try:
        address = sock.getpeername()
    except OSError:
        # Gone already. On vsock it counts as a machine that no list names, so that nobody is let in for being quick.
        return "gone", None if sock.family in (socket.AF_INET, socket.AF_INET6) else f"{_VSOCK}-1"
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return f"{_VSOCK}{address[0]}", f"{_VSOCK}{address[0]}"
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return str(ip), peer_key(str(ip))


def peer_key(peer: str) -> str:
    """Who counts as one: an IPv6 address by its /64, which is what one customer gets; every other peer by itself."""
    try:
        ip = ipaddress.ip_address(peer)
    except ValueError:
        return peer
    return str(ipaddress.ip_network((ip, 64), strict=False)) if isinstance(ip, ipaddress.IPv6Address) else peer


class ChannelState:
    """One connection as attestation sees it. Lives as long as the connection; use it on the event loop only.

    `spki` is the DER SubjectPublicKeyInfo of the leaf presented on this very connection, `suite` the TLS cipher suite;
    both are None on a plain listener. `in_force` is set by the attestation endpoint, `chain_scope` by whoever issues
    receipts per connection; `close_after_response` closes the connection once the answer in progress is out.
    `opened_at` is monotonic seconds.
    """

    __slots__ = ("_tls", "chain_scope", "close_after_response", "in_force", "opened_at", "peer", "spki", "suite")

    def __init__(self, *, tls: SSL.Connection | None, peer: str, opened_at: float) -> None:
        self._tls = tls
        self.peer = peer
        self.opened_at = opened_at
        self.in_force: object | None = None
        self.chain_scope: object | None = None
        self.close_after_response = False
        self.spki: bytes | None = None
        self.suite: str | None = None
        if tls is not None:
            certificate = tls.get_certificate(as_cryptography=True)
            if certificate is None:
                raise NoTlsChannel("the TLS context has no certificate")
            self.spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            self.suite = tls.get_cipher_name()

    def export(self, label: str, length: int, context: bytes) -> bytes:
        """TLS exporter (RFC 8446 section 7.5) of this connection, `length` bytes. Raises NoTlsChannel."""
        if self._tls is None:
            raise NoTlsChannel("this connection has no TLS")
        return self._tls.export_keying_material(label.encode("ascii"), length, context)

    def close(self) -> None:
        """The connection is gone: no more keying material."""
        self._tls = None
