"""What every worker process is, whatever it computes: hardened, between an inbox and an outbox, one step at a time."""

from __future__ import annotations

import ctypes
import os
import queue
import resource
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from appliance.engine.batch import Exactness
from appliance.engine.host.channel import BlockingChannel, ChannelError, Message
from appliance.engine.host.messages import pack_exactness, take
from appliance.engine.settings import Threads

OUTBOX_LIMIT = 4096
STATS_INTERVAL_S = 0.2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


class Steps(Protocol):
    """A scheduler, as far as the loop needs to know it."""

    @property
    def idle(self) -> bool: ...

    def step(self) -> None: ...

    def cancel(self, job_id: bytes) -> None: ...

    def stats(self) -> Mapping[str, int]: ...


class Interruptible(Protocol):
    """A runtime whose evaluation another thread may cut short."""

    def interrupt(self) -> None: ...

    def clear_interrupt(self) -> None: ...


S = TypeVar("S", bound=Steps)


def harden(keep: set[int]) -> None:
    """No core dumps, no ptrace by peers, death with the parent, no descriptor but stdio and `keep`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_PDEATHSIG, signal.SIGKILL)):
        if prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
    for name in os.listdir("/proc/self/fd"):
        if (fd := int(name)) > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass  # the listing's own descriptor


class Inbox:
    """Messages from the supervisor, read by a thread of their own, so that a cancel reaches a running prefill."""

    def __init__(self, channel: BlockingChannel, interrupt: Callable[[], None], *, on_cancel: bool) -> None:
        self._channel = channel
        self._interrupt = interrupt
        # An interrupted step costs everyone in it; short ones are better waited for.
        self._kinds = ("cancel", "stop") if on_cancel else ("stop",)
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.get = self._queue.get
        self.get_nowait = self._queue.get_nowait

    def start(self) -> None:
        threading.Thread(target=self._run, name="inbox", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except (ChannelError, OSError):
                message = None
            if message is None:
                # Nobody is left to answer to; the main thread may be deep in native code.
                os._exit(0)
            self._queue.put(message)  # before the interrupt: whoever is interrupted finds the reason
            if message.get("t") in self._kinds:
                self._interrupt()


class Outbox:
    """Messages to the supervisor, sent by a thread of their own.

    A socket's send tells the kernel that its caller is about to sleep, so the reader is woken on its core. Here
    the caller is about to compute the next token: the serving process would take its core away for every token.
    """

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Mapping[str, object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: Mapping[str, object]) -> None:
        """Queue one message; waits while a supervisor that does not read has left too many."""
        while self._queue.qsize() >= OUTBOX_LIMIT:
            time.sleep(0.001)
        self._queue.put(message)

    def close(self) -> None:
        """Return when everything queued has been sent."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._channel.send(message)
            except (ChannelError, OSError):
                # Nobody is left to answer to, or a message that can never be sent: a new worker starts clean.
                os._exit(1)


class WorkerLoop(ABC, Generic[S]):
    """Takes messages, makes steps, sends what they made. A worker adds what it loads and what it is given to do."""

    def __init__(self, channel: BlockingChannel) -> None:
        self.channel = channel
        self.outbox = Outbox(channel)
        self._stats_at = 0.0
        self._reported = -1.0

    @abstractmethod
    def submit(self, scheduler: S, message: Message) -> bool:
        """Take a job. False where the message is none."""

    @abstractmethod
    def flush(self) -> None:
        """Hand the events of a step to the outbox."""

    def settle(self, scheduler: S) -> None:
        """What may wait until the events of a step are on their way."""

    def serve(self, scheduler: S, runtime: Interruptible, *, on_cancel: bool) -> None:
        """Until told to stop. `on_cancel`: a cancelled job interrupts the step it is in. Raises what a step raises."""
        from appliance.engine.llama_cpp.runtime import Aborted

        inbox = Inbox(self.channel, runtime.interrupt, on_cancel=on_cancel)
        inbox.start()
        self.outbox.start()
        while True:
            if scheduler.idle and not self._handle(scheduler, inbox.get()):
                return
            # Cleared before the inbox is emptied: an interrupt that comes later finds its message still in there.
            runtime.clear_interrupt()
            while True:
                try:
                    message = inbox.get_nowait()
                except queue.Empty:
                    break
                if not self._handle(scheduler, message):
                    return
            try:
                scheduler.step()
            except Aborted:
                pass  # whoever interrupted it has left a message
            self._report_stats(scheduler)
            self.flush()
            self.settle(scheduler)

    def report_progress(self, fraction: float) -> None:
        """Tell how much is loaded, in steps that are worth a message."""
        if fraction - self._reported >= 0.02 or fraction >= 1.0:
            self._reported = fraction
            self.channel.send({"t": "progress", "fraction": min(1.0, max(0.0, float(fraction)))})

    def report_loaded(self, threads: Threads, exactness: Exactness, found: Mapping[str, object]) -> None:
        """The last word of a start: what this worker is. `found` is the rest of what the kind of worker found out."""
        from appliance.engine.llama_cpp import libraries

        self.channel.send(
            {
                "t": "loaded",
                "version": libraries.version(),
                "libraries": [[name, digest] for name, digest in libraries.digests()],
                "arithmetic": libraries.arithmetic(),
                "kernels": libraries.variant(),
                "threads": threads.count,
                "threads_reason": threads.reason,
                "exactness": pack_exactness(exactness),
                **found,
            }
        )

    def report_build(self, name: str) -> dict[str, object]:
        """Choose the kernels and tell what computes, before anything is computed: it may be the worker's last word.

        What the proof of the build switched off, for the execution facts.
        Raises RuntimeError where the variant `name` is none of this build and processor.
        """
        from appliance.engine.llama_cpp import libraries

        build = libraries.choose(name)
        stated = {"kernels": build.kernels, "variants": list(build.variants)}
        self.channel.send({"t": "computes", "library": build.library, "version": build.version, **stated})
        return libraries.passed_over()

    def _handle(self, scheduler: S, message: Message) -> bool:
        """False for the message to stop. Raises ChannelError for one of no known kind."""
        kind = message.get("t")
        if self.submit(scheduler, message):
            self.flush()
        elif kind == "cancel":
            scheduler.cancel(take(message, "id", bytes))
            self._report_stats(scheduler)
        elif kind == "ping":
            self.outbox.put({"t": "pong"})
        elif kind == "stop":
            return False
        else:
            raise ChannelError("unknown kind of message")
        return True

    def _report_stats(self, scheduler: S) -> None:
        """Every now and then, and when nothing is left to do."""
        now = time.monotonic()
        if scheduler.idle or now - self._stats_at >= STATS_INTERVAL_S:
            self._stats_at = now
            self.outbox.put({"t": "stats", "stats": scheduler.stats()})
