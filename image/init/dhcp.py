"""DHCP (RFC 2131), as little of it as an appliance needs: one lease, its renewal, address and gateway.

The host answers, so nothing in an answer is trusted with more than the network: everything is bounded, what is odd is
passed over as if it had not come.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

CLIENT_PORT: Final = 68
SERVER_PORT: Final = 67
MESSAGE_LIMIT_BYTES: Final = 1500
DISCOVER, OFFER, REQUEST, ACK, NAK = 1, 2, 3, 5, 6
_HEAD = struct.Struct("!BBBBIHH4s4s4s4s16s64s128s")
_COOKIE: Final = b"\x63\x82\x53\x63"
_BOOTREQUEST, _BOOTREPLY, _ETHERNET = 1, 2, 1
_BROADCAST_FLAG: Final = 0x8000
_MASK, _ROUTER, _WANTED, _LEASE, _TYPE, _SERVER, _PARAMETERS, _PAD, _END = 1, 3, 50, 51, 53, 54, 55, 0, 255
_MIN_LEASE_S: Final = 60
_MAX_LEASE_S: Final = 7 * 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`lease_s` is bounded to 60 seconds to 7 days. `gateway` None: none was named."""

    address: ipaddress.IPv4Interface
    gateway: ipaddress.IPv4Address | None
    server: ipaddress.IPv4Address
    lease_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What all messages of one exchange share: `mac` 6 bytes, `xid` drawn at random."""

    mac: bytes
    xid: int


def discover(asking: Asking) -> bytes:
    """DHCPDISCOVER, to be broadcast."""
    return _message(asking, DISCOVER, b"")


def request(asking: Asking, offer: Lease) -> bytes:
    """DHCPREQUEST that takes an offer (section 4.3.2, SELECTING); to be broadcast, which renews a lease as well."""
    options = bytes([_WANTED, 4]) + offer.address.ip.packed + bytes([_SERVER, 4]) + offer.server.packed
    return _message(asking, REQUEST, options)


def _message(asking: Asking, kind: int, options: bytes) -> bytes:
    zero = bytes(4)
    head = _HEAD.pack(
        _BOOTREQUEST, _ETHERNET, 6, 0, asking.xid, 0, _BROADCAST_FLAG, zero, zero, zero, zero, asking.mac, b"", b""
    )
    wanted = bytes([_PARAMETERS, 3, _MASK, _ROUTER, _LEASE])
    return head + _COOKIE + bytes([_TYPE, 1, kind]) + options + wanted + bytes([_END])


def parse(message: bytes, asking: Asking) -> tuple[int, Lease] | None:
    """Kind and content of an answer to `asking`; None for anything else, whatever is wrong with it."""
    if len(message) < _HEAD.size + 4 or len(message) > MESSAGE_LIMIT_BYTES:
        return None
    op, kind, length, _, xid, _, _, _, yours, _, _, hardware, _, _ = _HEAD.unpack_from(message)
    if (op, kind, length, xid, hardware[:6]) != (_BOOTREPLY, _ETHERNET, 6, asking.xid, asking.mac):
        return None
    options = _options(message[_HEAD.size :])
    if options is None or len(options.get(_TYPE, b"")) != 1:
        return None
    lease = _lease(yours, options)
    return None if lease is None else (options[_TYPE][0], lease)


def _options(content: bytes) -> dict[int, bytes] | None:
    if content[:4] != _COOKIE:
        return None
    found: dict[int, bytes] = {}
    at = 4
    while at < len(content) and content[at] != _END:
        if content[at] == _PAD:
            at += 1
            continue
        if at + 2 > len(content) or at + 2 + content[at + 1] > len(content):
            return None
        found.setdefault(content[at], content[at + 2 : at + 2 + content[at + 1]])
        at += 2 + content[at + 1]
    return found


def _lease(yours: bytes, options: dict[int, bytes]) -> Lease | None:
    mask, server, router = options.get(_MASK, b""), options.get(_SERVER, b""), options.get(_ROUTER, b"")
    lease = options.get(_LEASE, b"")
    if len(mask) != 4 or len(server) != 4 or len(router) % 4 or len(lease) != 4:
        return None
    bits = int.from_bytes(mask, "big")
    prefix = bits.bit_count()
    address = ipaddress.IPv4Address(yours)
    if bits != (0xFFFFFFFF << (32 - prefix)) & 0xFFFFFFFF or address.is_multicast or int(address) == 0:
        return None
    return Lease(
        address=ipaddress.IPv4Interface((address, prefix)),
        gateway=ipaddress.IPv4Address(router[:4]) if router else None,
        server=ipaddress.IPv4Address(server),
        lease_s=min(_MAX_LEASE_S, max(_MIN_LEASE_S, int.from_bytes(lease, "big"))),
    )


Exchange = Callable[[bytes, int, Asking], Lease | None]
"""Broadcast a message and wait for an answer of this kind; None when none came in time."""


def obtain(asking: Asking, exchange: Exchange, *, tries: int) -> Lease | None:
    """A lease by DISCOVER, OFFER, REQUEST, ACK; None after so many tries in vain."""
    for _ in range(tries):
        offer = exchange(discover(asking), OFFER, asking)
        if offer is None:
            continue
        lease = exchange(request(asking, offer), ACK, asking)
        if lease is not None:
            return lease
    return None
