"""The worker process of an embedding model: `python -m appliance.engine.embedding.worker SOCKET_FD MODEL_FD`.

Like `appliance.engine.generation.worker` in everything but what it computes.
"""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from appliance.engine.batch import Exactness
from appliance.engine.embedding.jobs import (
    EmbeddingEvent,
    InputsReady,
    Vector,
    pack_inputs_ready,
    pack_vector,
    unpack_job,
)
from appliance.engine.host.channel import BlockingChannel, Message
from appliance.engine.host.loop import WorkerLoop, harden
from appliance.engine.host.messages import cut_facts, cut_short, known_exactness, pack_event, take
from appliance.engine.settings import Threads, choose_threads, thread_candidates
from appliance.errors import ApplianceError

if TYPE_CHECKING:
    from appliance.engine.embedding.scheduler import EmbeddingScheduler
    from appliance.engine.llama_cpp.allowance import Allowance
    from appliance.engine.llama_cpp.embedding import EmbeddingRuntime

FLUSH_BYTES = 4 << 20
SEQUENCES = 64


class EmbeddingWorker(WorkerLoop["EmbeddingScheduler"]):
    """Load, then serve until told to stop."""

    def __init__(self, channel: BlockingChannel, model_fd: int) -> None:
        super().__init__(channel)
        self._model_fd = model_fd
        self._batch: list[dict[str, object]] = []
        self._batch_bytes = 0

    def run(self) -> None:
        """Raises ChannelError on a supervisor that does not keep to the protocol."""
        first = self.channel.receive()
        if first is None:
            return
        # Heavy and native: only after hardening, and reported to the supervisor where it is not installed.
        try:
            from appliance.engine.llama_cpp.allowance import Allowance
            from appliance.engine.llama_cpp.embedding import EmbeddingOptions, EmbeddingRuntime
            from appliance.engine.llama_cpp.runtime import RuntimeFailure

            switched_off = self.report_build(take(first, "kernels", str))
        except (ImportError, OSError, RuntimeError) as error:
            self.channel.send({"t": "failed", "message": f"llama.cpp cannot be loaded: {error}"})
            return
        rows = take(first, "n_batch", int)
        options = EmbeddingOptions(
            fd=self._model_fd,
            context_length=take(first, "context_length", int),
            rows=rows,
            # llama.cpp lays out its largest evaluation for equal shares, and ends the process where they leave a rest.
            inputs=math.gcd(SEQUENCES, rows),
            pooling=take(first, "pooling", str),
            threads=take(first, "threads", int) or 1,
        )
        try:
            runtime = EmbeddingRuntime(options, progress=self.report_progress)
            allowance = Allowance(take(first, "selftest_limit_s", float))
            threads = _choose_threads(runtime, allowance, first)
            packs = _packs(runtime, allowance, first)
        except RuntimeFailure as error:
            self.channel.send({"t": "failed", "message": str(error)})
            return
        cut = cut_short(first, allowance.cut)
        first = {**first, "facts": switched_off | take(first, "facts", dict) | cut_facts(cut)}
        scheduler = self._scheduler(runtime, options.inputs if packs else 1, threads, first)
        # Vectors come of one shape or of many inputs together: the other shapes do not occur.
        exactness = Exactness(batch=packs, verify=True, chunk=True, rollback=True)
        found = {"vocabulary": runtime.vocabulary_size, "steps": rows, "cut": cut}
        self.report_loaded(threads, exactness, found)
        failure: str | None = None
        try:
            self.serve(scheduler, runtime, on_cancel=True)
        except RuntimeFailure as error:
            failure = str(error)
        self.outbox.close()
        if failure is not None:
            self.channel.send({"t": "failed", "message": failure})

    def _scheduler(
        self, runtime: EmbeddingRuntime, together: int, threads: Threads, first: Mapping[str, object]
    ) -> EmbeddingScheduler:
        from appliance.engine.embedding.scheduler import EmbeddingLimits, EmbeddingScheduler

        facts = {
            **take(first, "facts", dict),
            "batching": "packed" if together > 1 else "single",
            "exact": True,
            "threads": threads.count,
        }
        limits = EmbeddingLimits(
            context_length=take(first, "context_length", int),
            rows=runtime.options.n_batch,
            together=together,
            pooling=take(first, "pooling", str),
            facts=facts,
        )
        return EmbeddingScheduler(runtime, limits, self._emit)

    def submit(self, scheduler: EmbeddingScheduler, message: Message) -> bool:
        if message.get("t") != "embed":
            return False
        scheduler.submit(unpack_job(message))
        return True

    def _emit(self, job_id: bytes, event: EmbeddingEvent | ApplianceError) -> None:
        if isinstance(event, Vector):
            self._batch.append(pack_vector(job_id, event))
            self._batch_bytes += len(event.numbers)
        elif isinstance(event, InputsReady):
            self.flush()  # whatever it is, it may fill a message by itself
            self._batch.append(pack_inputs_ready(job_id, event))
            self._batch_bytes = FLUSH_BYTES
        else:
            self._batch.append(pack_event(job_id, event))
        if self._batch_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._batch:
            self.outbox.put({"t": "events", "events": self._batch})
            self._batch, self._batch_bytes = [], 0


def _choose_threads(runtime: EmbeddingRuntime, allowance: Allowance, first: Mapping[str, object]) -> Threads:
    from appliance.engine.llama_cpp.embedding import measure_speed

    count, cores = take(first, "threads", int), take(first, "cores", int)
    if count:
        return Threads(count=count, reason=take(first, "threads_reason", str))

    def measure() -> Threads:
        candidates = thread_candidates(cores)
        return choose_threads({each: measure_speed(runtime, each, allowance) for each in candidates}, cores)

    careful = Threads(count=1, reason="auto: one, as the measurement came to no end within its limit")
    threads = allowance.measured("threads", measure, careful, runtimes=(runtime,), share=0.5)
    runtime.use_threads(threads.count)
    return threads


def _packs(runtime: EmbeddingRuntime, allowance: Allowance, first: Mapping[str, object]) -> bool:
    from appliance.engine.llama_cpp.embedding import measure_packing

    known = known_exactness(first)
    if known is not None:
        return known.batch
    measure = partial(measure_packing, runtime, allowance)
    return allowance.measured("packing", measure, False, runtimes=(runtime,), share=1.0)


def main(arguments: list[str]) -> int:
    """Composition root of the worker. Exit status 0: told to stop, or the supervisor is gone."""
    socket_fd, model_fd = (int(argument) for argument in arguments)
    harden({socket_fd, model_fd})
    channel = BlockingChannel(socket.socket(fileno=socket_fd))
    EmbeddingWorker(channel, model_fd).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
