"""Listening sockets of every kind: TCP, vsock, unix, and those that systemd made.

Binding and listening are two steps, so that nobody can connect before everything is proven.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from appliance.config.addresses import (
    Address,
    HybridAddress,
    InheritedSockets,
    TcpAddress,
    UnixAddress,
    VsockAddress,
    is_loopback,
    parse_address,
)
from appliance.errors import BootError
from client_sdk.wire.vsock import CID_ANY

FIRST_INHERITED_FD: Final = 3  # sd_listen_fds(3)
_GET_LOCAL_CID: Final = 0x7B9  # IOCTL_VM_SOCKETS_GET_LOCAL_CID, linux/vm_sockets.h
_SOCKET_MODE: Final = 0o600
_NO_VSOCK = "this machine has no vsock; load the kernel module vsock and the transport of its hypervisor"
_PROBE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixPlace:
    """A unix socket's file. It is made beside its `path` and moved there once the socket listens, so that an address
    in use is never taken from its owner and nobody meets a socket that does not answer yet. `inode` is (device, inode).
    """

    path: str
    staging: str
    inode: tuple[int, int]

    def publish(self) -> None:
        """Raises OSError, EADDRINUSE where somebody listens there."""
        _refuse_used(self.path)
        os.rename(self.staging, self.path)

    def remove(self) -> None:
        """Leave no file behind, and touch nobody else's."""
        for name in (self.staging, self.path):
            with contextlib.suppress(OSError):
                if _inode(name) == self.inode:
                    os.unlink(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSocket:
    """A socket bound to `address` as it was configured; `listen` opens it, `close` takes it away again."""

    sock: socket.socket
    address: Address
    place: UnixPlace | None = None

    @property
    def url(self) -> str:
        """What a client on the other side is given."""
        name = self.sock.getsockname()
        if self.sock.family == socket.AF_UNIX:
            return f"unix://{self.place.path if self.place else name}"
        if self.sock.family in (socket.AF_INET, socket.AF_INET6):
            return f"https://{TcpAddress(host=name[0], port=name[1])}"
        cid = local_cid() if name[0] == CID_ANY else name[0]
        return f"vsock://{'CID' if cid is None else cid}:{name[1]}"

    @property
    def reachable_by_others(self) -> bool:
        """Whether other machines' programs can connect, without a host or a file system between them and it."""
        inet = self.sock.family in (socket.AF_INET, socket.AF_INET6)
        return inet and not is_loopback(self.sock.getsockname()[0])

    def listen(self, backlog: int) -> None:
        """Start to listen. Two processes may bind one address while neither listens: the later one learns it here,
        as a BootError."""
        try:
            self.sock.listen(backlog)
            if self.place is not None:
                self.place.publish()
        except OSError as error:
            raise _cannot_listen(self.address, error) from error

    def close(self) -> None:
        """Close it, also where a server has closed the socket already. A unix socket leaves no file behind."""
        if self.place is not None:
            self.place.remove()
        self.sock.close()


def bind_all(entries: Sequence[str], inherited: Sequence[Inherited] = ()) -> list[BoundSocket]:
    """A socket for each address, and for each that systemd passed. Raises BootError naming the entry; then none is
    left open."""
    addresses = [parse_address(entry) for entry in entries]  # all of them, before the first socket exists
    bound: list[BoundSocket] = []
    try:
        for address in addresses:
            if isinstance(address, InheritedSockets):
                bound += _take(address, inherited)
            else:
                bound.append(bind(address))
    except BootError:
        for one in bound:
            one.close()
        raise
    return bound


def bind(address: Address) -> BoundSocket:
    """Raises BootError naming the address, the reason, and what to look at."""
    binders: Mapping[type, Callable[..., BoundSocket]] = {
        TcpAddress: _bind_tcp,
        VsockAddress: _bind_vsock,
        UnixAddress: _bind_unix,
        HybridAddress: lambda hybrid: _bind_unix(hybrid.guest_initiated),
    }
    try:
        return binders[type(address)](address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that IDNA refuses
        raise _cannot_listen(address, error) from error


def _bind_tcp(address: TcpAddress) -> BoundSocket:
    sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    with _closed_on_error(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
    return BoundSocket(sock=sock, address=address)


def _bind_vsock(address: VsockAddress) -> BoundSocket:
    sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    with _closed_on_error(sock):
        sock.bind((address.cid, address.port))
    return BoundSocket(sock=sock, address=address)


def _bind_unix(address: UnixAddress) -> BoundSocket:
    _refuse_used(address.path)
    staging = f"{address.path}.{os.getpid()}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _closed_on_error(sock):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staging)  # of an earlier process that had this id
        sock.bind(staging)
        os.chmod(staging, _SOCKET_MODE)
        place = UnixPlace(path=address.path, staging=staging, inode=_inode(staging))
    return BoundSocket(sock=sock, address=address, place=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """One socket of systemd's socket activation (sd_listen_fds(3)); `name` is its FileDescriptorName."""

    sock: socket.socket
    name: str


def inherited_sockets(environ: Mapping[str, str], pid: int) -> list[Inherited]:
    """The sockets that systemd passed to the process `pid`, out of its environment. Raises BootError for what is no
    listening stream socket."""
    if environ.get("LISTEN_PID") != str(pid):
        return []
    count = environ.get("LISTEN_FDS", "")
    if not count.isascii() or not count.isdigit() or int(count) > 1024:
        raise BootError(f"LISTEN_FDS is {count!r}, not a number of sockets")
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    fds = range(FIRST_INHERITED_FD, FIRST_INHERITED_FD + int(count))
    padded = [*names, *["unknown"] * len(fds)]
    return [Inherited(sock=_adopt(fd), name=name or "unknown") for fd, name in zip(fds, padded, strict=False)]


def local_cid() -> int | None:
    """This machine's own context id; None where there is no vsock device to ask (vsock(7))."""
    try:
        with open("/dev/vsock", "rb") as device:
            answer = fcntl.ioctl(device, _GET_LOCAL_CID, bytes(4))
    except OSError:
        return None
    cid: int = struct.unpack("=I", answer)[0]
    return None if cid == CID_ANY else cid


def _take(address: InheritedSockets, inherited: Sequence[Inherited]) -> list[BoundSocket]:
    taken = [one.sock for one in inherited if not address.name or one.name == address.name]
    if not taken:
        raise BootError(f"cannot listen on {address}: systemd passed no such socket to this process")
    return [BoundSocket(sock=sock, address=address) for sock in taken]


def _adopt(fd: int) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise BootError(f"systemd passed descriptor {fd}, which is no socket: {error.strerror}") from error
    if sock.type != socket.SOCK_STREAM or not listening:
        raise BootError(f"systemd passed descriptor {fd}, which is no listening stream socket: use ListenStream=")
    return sock


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket) -> Generator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


def _refuse_used(path: str) -> None:
    """Raises OSError EADDRINUSE where somebody listens, or where something lies that is no socket."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EADDRINUSE, "something that is no socket lies there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return  # left by a process that has ended
        except BlockingIOError:
            pass  # its backlog is full: somebody listens
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _inode(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _cannot_listen(address: Address, error: OSError | UnicodeError) -> BootError:
    reason = (isinstance(error, OSError) and error.strerror) or "this is no address of this machine"
    if isinstance(address, VsockAddress) and isinstance(error, OSError):
        if error.errno in (errno.EAFNOSUPPORT, errno.ENODEV):
            reason = f"{reason}: {_NO_VSOCK}"
        elif error.errno == errno.EADDRNOTAVAIL:
            own = local_cid()
            reason += ": this machine has no vsock CID" if own is None else f": the CID of this machine is {own}"
        elif error.errno == errno.EACCES:
            reason += ": ports up to 1023 need CAP_NET_BIND_SERVICE"
    return BootError(f"cannot listen on {address}: {reason}")
