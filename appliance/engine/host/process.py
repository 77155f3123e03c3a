"""One worker process: start it, load the model in it, talk to it, end it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import appliance
from appliance.engine.batch import Exactness
from appliance.engine.host.channel import LIMIT_BYTES, ChannelError, ChannelProtocol, Message, connect
from appliance.engine.host.deaths import Build, WorkerDied, describe_death, faulted
from appliance.engine.host.messages import optional, take, unpack_chat_format, unpack_exactness
from appliance.engine.settings import Threads
from appliance.engine.types import ChatFormat
from appliance.errors import BootError

_DYING_S = 5.0
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # On a failed assertion ggml would start a debugger and print a backtrace of a process full of prompts.
    "GGML_NO_BACKTRACE": "1",
    # Of GNU OpenMP: so many times a thread that waits for others looks, before it gives its core to them. With the
    # default of 300,000 a step of 5 ms took up to 3 s beside a busy neighbour; with this 27 ms, and as fast alone.
    "GOMP_SPINCOUNT": "1000",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """What a worker is started with; `message` is its first message."""

    python: str
    model_fd: int
    draft_fd: int | None = None
    message: Message
    timeout_s: float
    module: str = "appliance.engine.generation.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What a worker says of itself once the model is loaded."""

    version: str
    libraries: tuple[tuple[str, bytes], ...]
    arithmetic: str
    kernels: str | None
    vocabulary_size: int
    exactness: Exactness
    steps: int
    """Rows of the longest step."""
    chat: ChatFormat
    threads: Threads = field(compare=False)
    cut: tuple[str, ...] = field(compare=False)
    """Measurements of the start that came to no end within their limits."""


class WorkerProcess:
    """A running worker and the channel to it. `spawn` makes one; `kill` must be awaited in the end."""

    def __init__(self, process: subprocess.Popen[bytes], start: WorkerStart) -> None:
        self._process = process
        self._start = start
        self._closed = asyncio.Event()
        self._loaded: asyncio.Future[WorkerIdentity] = asyncio.get_running_loop().create_future()
        self._progress: Callable[[float], None] | None = None
        self._on_message: Callable[[Message], None] | None = None
        self._channel: ChannelProtocol | None = None
        self._failure: str | None = None
        self._build: Build | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def closed(self) -> bool:
        """True once the channel has ended: the worker is dead or about to be."""
        return self._closed.is_set()

    async def describe_end(self) -> str:
        """Why the worker ended, as far as it is known. Free of content."""
        if self._failure is not None:
            return self._failure
        status = await self._status()
        if status is None:
            return "channel closed"
        return describe_death(-status, self._build) if status < 0 else f"exit status {status}"

    async def _status(self) -> int | None:
        """The exit status: a process that has closed its channel takes a moment to become one that has ended."""
        if not self.closed:
            return self._process.poll()
        try:
            return await asyncio.to_thread(self._process.wait, _DYING_S)
        except subprocess.TimeoutExpired:
            return None

    @classmethod
    async def spawn(cls, start: WorkerStart) -> WorkerProcess:
        """Start the process with a bare environment and its descriptors. Raises BootError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            kept = [theirs.fileno(), start.model_fd, *([] if start.draft_fd is None else [start.draft_fd])]
            try:
                process = subprocess.Popen(
                    [start.python, "-s", "-m", start.module, *map(str, kept)],
                    pass_fds=kept,
                    stdin=subprocess.DEVNULL,
                    # Native code and tracebacks print what they please: nothing of it may end in a log.
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_ENVIRONMENT,
                    cwd=Path(appliance.__file__).resolve().parent.parent,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise BootError(f"cannot start the engine's worker {start.python}: {error.strerror}") from error
        worker = cls(process, start)
        try:
            ours.setblocking(False)
            worker._channel = await connect(ours, worker._receive, worker._end)
        except BaseException:
            ours.close()
            process.kill()
            process.wait()
            raise
        return worker

    async def load(self, progress: Callable[[float], None], on_message: Callable[[Message], None]) -> WorkerIdentity:
        """Have the model loaded; later messages go to `on_message`. Raises BootError."""
        self._progress = progress
        self._on_message = on_message
        self.send(self._start.message)
        try:
            async with asyncio.timeout(self._start.timeout_s):
                return await self._loaded
        except TimeoutError:
            raise BootError(f"the engine did not load the model within {self._start.timeout_s:.0f} s") from None

    def send(self, message: Message, *, limit_bytes: int = LIMIT_BYTES) -> None:
        """Raises ChannelError for a message that is too large; a closed channel swallows it."""
        if self._channel is not None:
            self._channel.send(message, limit_bytes=limit_bytes)

    async def wait_closed(self, timeout_s: float) -> None:
        """Return when the channel has ended, or after `timeout_s`."""
        try:
            await asyncio.wait_for(self._closed.wait(), timeout_s)
        except TimeoutError:
            pass

    async def kill(self) -> None:
        """End the process, whatever state it is in, and reap it. May be repeated after a cancellation."""
        if self._channel is not None:
            self._channel.abort()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        await self._closed.wait()
        if self._ending is not None:
            await self._ending

    def _receive(self, message: Message) -> None:
        """Raises ChannelError, which ends the channel: a worker that talks nonsense is as good as dead."""
        kind = message.get("t")
        if kind == "loaded":
            identity = _identity(message)
            if not self._loaded.done():
                self._loaded.set_result(identity)
        elif kind == "failed":
            self._failure = take(message, "message", str)
            self._refuse(self._failure)
        elif kind == "computes":
            self._build = _build(message)
        elif kind == "progress" and self._progress is not None:
            self._progress(take(message, "fraction", float))
        elif self._on_message is not None:
            self._on_message(message)

    def _end(self) -> None:
        self._closed.set()
        if not self._loaded.done():
            self._ending = asyncio.get_running_loop().create_task(self._refuse_dead())

    async def _refuse_dead(self) -> None:
        status = await self._status()
        if status is None or status >= 0:
            end = "its channel closed" if status is None else f"it ended with exit status {status}"
            self._refuse(f"{end} before it had loaded the model")
            return
        message = "the engine's worker failed before it had loaded and proved the model: "
        self._refuse_with(
            WorkerDied(message + describe_death(-status, self._build), faulted=faulted(-status), build=self._build)
        )

    def _refuse(self, reason: str) -> None:
        self._refuse_with(BootError(f"the engine's worker failed: {reason}"))

    def _refuse_with(self, error: BootError) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(error)
            # Marks the exception as seen: nobody awaits it when the start itself was cancelled.
            self._loaded.exception()


def _identity(message: Message) -> WorkerIdentity:
    libraries: list[tuple[str, bytes]] = []
    for pair in take(message, "libraries", list):
        if not (isinstance(pair, list) and len(pair) == 2):
            raise ChannelError("message field libraries is not a list of pairs")
        name, digest = pair
        if not (isinstance(name, str) and isinstance(digest, bytes)):
            raise ChannelError("message field libraries is not a list of pairs")
        libraries.append((name, digest))
    return WorkerIdentity(
        version=take(message, "version", str),
        libraries=tuple(libraries),
        arithmetic=take(message, "arithmetic", str),
        kernels=optional(message, "kernels", str),
        vocabulary_size=take(message, "vocabulary", int),
        steps=take(message, "steps", int),
        exactness=unpack_exactness(take(message, "exactness", list)),
        chat=unpack_chat_format(take(message, "chat", dict)) if "chat" in message else ChatFormat(),
        threads=Threads(count=take(message, "threads", int), reason=take(message, "threads_reason", str)),
        cut=tuple(str(name) for name in take(message, "cut", list)),
    )


def _build(message: Message) -> Build:
    return Build(
        library=take(message, "library", str),
        version=take(message, "version", str),
        kernels=optional(message, "kernels", str),
        variants=tuple(str(name) for name in take(message, "variants", list)),
    )
