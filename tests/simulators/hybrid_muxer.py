"""The host's end of Firecracker's and Cloud Hypervisor's vsock, without a virtual machine behind it.

`ports` maps a guest's port to the unix socket that stands for the listener in the guest. The guest's own connections go
to `PATH_PORT` of the host, which `guest_connects` makes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from pathlib import Path


class HybridMuxer:
    """`reply` replaces the honest answer to CONNECT; b"" hangs up, None never answers."""

    def __init__(self, path: Path, ports: Mapping[int, Path], *, reply: bytes | str | None = "honest") -> None:
        self.path = path
        self._ports = ports
        self._reply = reply
        self.asked: list[bytes] = []
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._spawn(self._accept)

    def __enter__(self) -> HybridMuxer:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in (self._listener, *self._open):
            sock.close()
        self.path.unlink()

    def guest_connects(self, port: int) -> socket.socket:
        """The guest connects to `port` of its host (CID 2). ConnectionRefusedError where the host does not listen."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        try:
            sock.connect(f"{self.path}_{port}")
        except FileNotFoundError as error:
            sock.close()
            raise ConnectionRefusedError from error
        return sock

    def _spawn(self, target, *arguments) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                host, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(host)
            self._spawn(self._serve, host)

    def _serve(self, host: socket.socket) -> None:
        line = b""
        with contextlib.suppress(OSError):
            while not line.endswith(b"\n"):
                byte = host.recv(1)
                if not byte:
                    return
                line += byte
            self.asked.append(line)
            if self._reply is None:
                return  # and leave it open
            if isinstance(self._reply, bytes):
                host.sendall(self._reply)
                host.close()
                return
            self._join(host, line)

    def _join(self, host: socket.socket, line: bytes) -> None:
        word, _, port = line.decode().rstrip("\n").partition(" ")
        path = self._ports.get(int(port)) if word == "CONNECT" else None
        if path is None:
            host.close()  # as Firecracker does where nothing listens
            return
        guest = socket.socket(socket.AF_UNIX)
        self._open.append(guest)
        guest.connect(str(path))
        host.sendall(f"OK {1 << 30}\n".encode())
        self._spawn(_pump, host, guest)
        self._spawn(_pump, guest, host)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
