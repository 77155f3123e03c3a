"""vsock in words: numbers, reserved addresses, and the two lines of hybrid vsock.

Numbers are those of vsock(7). Hybrid vsock is the host's end in Firecracker (docs/vsock.md there, "Host-Initiated
Connections") and Cloud Hypervisor: a unix socket on which one line chooses the guest's port.
"""

from __future__ import annotations

import re
from typing import Final

CID_ANY: Final = 0xFFFF_FFFF
CID_LOCAL: Final = 1
CID_HOST: Final = 2
PORT_MAX: Final = 0xFFFF_FFFE
"""4294967295 is VMADDR_PORT_ANY; 0 is left out because it does not mean "any free port", as people expect."""

UNIX_PATH_BYTES: Final = 107
"""unix(7): `sun_path` is 108 bytes, the terminating NUL included."""

_REPLY_BYTES: Final = 32
_NUMBER = re.compile(r"[0-9]{1,10}")
_REPLY = re.compile(rb"OK [0-9]{1,10}\n")
_NAMED: Final = {"local": CID_LOCAL, "host": CID_HOST}


class HybridRefused(ConnectionError):
    """The other end of a hybrid vsock did not connect us. The message says what it did instead."""


def parse_port(text: str) -> int:
    """A vsock port, 1..4294967294, in plain decimal digits. Raises ValueError saying what is wrong."""
    if _NUMBER.fullmatch(text) is None or not 1 <= int(text) <= PORT_MAX:
        raise ValueError(f"{_shown(text)} is no vsock port: expected a number of 1..{PORT_MAX}")
    return int(text)


def parse_cid(text: str) -> int:
    """The context id of a machine: a number, "local" (1) or "host" (2). Raises ValueError saying what is wrong."""
    if text in _NAMED:
        return _NAMED[text]
    if _NUMBER.fullmatch(text) is None or int(text) > CID_ANY:
        raise ValueError(f"{_shown(text)} is no vsock CID: expected a number of 1..{CID_ANY - 1}")
    if int(text) in (0, CID_ANY):
        meaning = "the hypervisor itself" if int(text) == 0 else "any machine"
        raise ValueError(f"vsock CID {text} is reserved ({meaning}): expected the number of one machine")
    return int(text)


def check_unix_path(path: str, *, limit_bytes: int = UNIX_PATH_BYTES) -> str:
    """`path` if a unix socket can have it: absolute, short enough, no NUL. Raises ValueError saying what is wrong."""
    if not path.startswith("/") or path.endswith("/"):
        raise ValueError(f"{_shown(path)} is no absolute path of a socket")
    if not path.isprintable():
        raise ValueError("the path of a socket holds characters that cannot be printed")
    if (size := len(path.encode())) > limit_bytes:
        raise ValueError(f"the path of the socket has {size} bytes; {limit_bytes} is the most")
    return path


def connect_line(port: int) -> bytes:
    """What the host sends first on a hybrid vsock."""
    return b"CONNECT %d\n" % port


class HybridReply:
    """Reads the line that answers `connect_line`, a byte at a time: what follows it belongs to the guest."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._line = bytearray()

    def feed(self, byte: bytes) -> bool:
        """Take one byte (b"" is the end); True when the guest is connected. Raises HybridRefused."""
        if not byte:
            raise HybridRefused(
                f"the vsock of this virtual machine hung up: nothing listens on port {self._port} in the guest"
            )
        self._line += byte
        if byte != b"\n" and len(self._line) < _REPLY_BYTES:
            return False
        if _REPLY.fullmatch(self._line) is None:
            raise HybridRefused("what answers on this socket does not speak hybrid vsock: expected `OK <port>`")
        return True


def _shown(text: str) -> str:
    """`text` short enough for a message."""
    return repr(text if len(text) <= 64 else f"{text[:61]}...")
