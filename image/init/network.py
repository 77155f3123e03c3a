"""Interfaces by ioctl (netdevice(7)): up, address, route. There is no program in the image to do it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import time
from pathlib import Path
from typing import Final

from image.init import dhcp
from image.init.errors import Stop

_SIOCSIFFLAGS, _SIOCGIFFLAGS = 0x8914, 0x8913
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCADDRT = 0x8916, 0x891C, 0x890B
_IFF_UP, _RTF_UP, _RTF_GATEWAY = 0x1, 0x1, 0x2
_EEXIST: Final = 17
_ANSWER_S: Final = 2.0
_RETRY_S: Final = 60.0
_ETHERNET: Final = "1"  # ARPHRD_ETHER


def find_interface(sys: Path = Path("/sys/class/net")) -> tuple[str, bytes] | None:
    """Name and hardware address of the first Ethernet interface, None where there is none."""
    for folder in sorted(sys.iterdir()):
        if (folder / "type").read_text(encoding="ascii").strip() == _ETHERNET:
            return folder.name, bytes.fromhex((folder / "address").read_text(encoding="ascii").strip().replace(":", ""))
    return None


def up(name: str) -> None:
    """Set an interface up. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", name.encode(), 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags | _IFF_UP))


def configure(name: str, lease: dhcp.Lease) -> None:
    """Give an interface its address and the machine its route. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, address in ((_SIOCSIFADDR, lease.address.ip), (_SIOCSIFNETMASK, lease.address.netmask)):
            fcntl.ioctl(control, request, struct.pack("16s16s8x", name.encode(), _sockaddr(address)))
        if lease.gateway is None:
            return
        any_address = _sockaddr(ipaddress.IPv4Address(0))
        # struct rtentry: pad, destination, gateway, mask, flags, and fields that stay zero (120 bytes in all).
        route = struct.pack(
            "8x16s16s16sH62x", any_address, _sockaddr(lease.gateway), any_address, _RTF_UP | _RTF_GATEWAY
        )
        try:
            fcntl.ioctl(control, _SIOCADDRT, route)
        except OSError as error:
            if error.errno != _EEXIST:
                raise


def _sockaddr(address: ipaddress.IPv4Address) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, address.packed)


def exchange_on(name: str) -> dhcp.Exchange:
    """Ask over this interface."""

    def exchange(message: bytes, kind: int, asking: dhcp.Asking) -> dhcp.Lease | None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
            sock.bind(("", dhcp.CLIENT_PORT))
            sock.sendto(message, ("255.255.255.255", dhcp.SERVER_PORT))
            deadline = time.monotonic() + _ANSWER_S
            while (left := deadline - time.monotonic()) > 0:
                sock.settimeout(left)
                try:
                    answer = dhcp.parse(sock.recv(dhcp.MESSAGE_LIMIT_BYTES + 1), asking)
                except TimeoutError:
                    return None
                if answer is not None and answer[0] == kind:
                    return answer[1]
        return None

    return exchange


def start(random_bytes: bytes, *, tries: int = 10) -> tuple[str, dhcp.Asking, dhcp.Lease] | None:
    """Loopback and the first interface up, with a lease; None where there is no interface.

    `random_bytes` are 4. Raises Stop where nobody answers, or the kernel refuses.
    """
    try:
        up("lo")
        found = find_interface()
        if found is None:
            return None
        name, mac = found
        up(name)
        asking = dhcp.Asking(mac=mac, xid=int.from_bytes(random_bytes, "big"))
        lease = dhcp.obtain(asking, exchange_on(name), tries=tries)
        if lease is None:
            raise Stop(f"no DHCP server answers on {name}")
        configure(name, lease)
    except OSError as error:
        raise Stop(f"the network cannot be set up: {error.strerror}") from error
    return name, asking, lease


def renew(name: str, asking: dhcp.Asking, lease: dhcp.Lease) -> float:
    """Ask for the same lease again; returns the seconds until the next time. The address is kept, whoever is silent."""
    answer = exchange_on(name)(dhcp.request(asking, lease), dhcp.ACK, asking)
    return _RETRY_S if answer is None else answer.lease_s / 2
