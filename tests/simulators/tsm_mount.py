"""The process that mounts what tests/simulators/tsm.py answers for: python tsm_mount.py FOLDER SOCKET-NUMBER.

libfuse belongs to a process of its own: it changes how signals are taken and leaves the directory it was started in.
Every operation goes through the socket as one line of JSON, and so does its answer: a value, or the number of an error.
"""

from __future__ import annotations

import base64
import ctypes.util
import errno
import json
import os
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
if not {"FUSE_LIBRARY_PATH", "FUSE_LIBRARY_NAME"} & os.environ.keys() and ctypes.util.find_library("fuse3"):
    os.environ["FUSE_LIBRARY_NAME"] = "fuse3"  # the newer one where both are; mfusepy takes the older

import mfusepy  # noqa: E402 - reads the environment, and loads libfuse


class Forwarded(mfusepy.Operations):  # type: ignore[misc]
    """Asks the other end of the socket."""

    use_ns = True

    def __init__(self, channel: socket.socket) -> None:
        self._stream = channel.makefile("rwb")

    def _ask(self, operation: str, *arguments: Any) -> Any:
        self._stream.write(json.dumps([operation, *arguments]).encode() + b"\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise mfusepy.FuseOSError(errno.EIO)
        answer = json.loads(line)
        if "errno" in answer:
            raise mfusepy.FuseOSError(answer["errno"])
        return answer["value"]

    def getattr(self, path: str, fh: int | None = None) -> Any:
        return self._ask("getattr", path)

    def readdir(self, path: str, fh: int) -> Any:
        return [".", "..", *self._ask("readdir", path)]

    def mkdir(self, path: str, mode: int) -> Any:
        return self._ask("mkdir", path)

    def rmdir(self, path: str) -> Any:
        return self._ask("rmdir", path)

    def unlink(self, path: str) -> Any:
        raise mfusepy.FuseOSError(errno.EPERM)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        return 0

    def open(self, path: str, flags: int) -> Any:
        return self._ask("open", path, flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return base64.b64decode(self._ask("read", path, size, offset, fh))

    def write(self, path: str, data: bytes, offset: int, fh: int) -> Any:
        return self._ask("write", path, base64.b64encode(data).decode(), offset, fh)

    def release(self, path: str, fh: int) -> Any:
        return self._ask("release", path, fh)


def main() -> None:
    folder, number = sys.argv[1], int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # libfuse unmounts then
    channel = socket.socket(fileno=number)
    mfusepy.FUSE(Forwarded(channel), folder, foreground=True, nothreads=True, direct_io=True)


if __name__ == "__main__":
    main()
