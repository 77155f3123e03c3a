"""The engine as the service sees it: a worker process, watched, restarted, and never trusted to answer.

The API process never loads llama.cpp. The model's bytes live in one sealed memfd for the whole life of this process;
every worker, the first and each one after a crash, loads that very descriptor.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import cast

from appliance.engine.base import Progress
from appliance.engine.embedding.jobs import EmbeddingEvent
from appliance.engine.embedding.pooling import resolve_pooling
from appliance.engine.generation.draft import DraftWeights, read_draft
from appliance.engine.host.channel import SUBMIT_LIMIT_BYTES, ChannelError, Message
from appliance.engine.host.deaths import KernelChoice, WorkerDied
from appliance.engine.host.messages import pack_exactness, pack_job, take, unpack_event
from appliance.engine.host.process import WorkerIdentity, WorkerProcess, WorkerStart
from appliance.engine.settings import EngineSettings, check_lengths, most_threads, resolve_cells
from appliance.engine.types import EngineEvent, EngineInfo, Finished, GenerationJob, LoadedModel
from appliance.engine.weights.gguf import ModelFacts, read_facts
from appliance.engine.weights.memory import Need, ReadText, available_bytes, check_fits, need, read_text, scratch_bytes
from appliance.engine.weights.sealed import SealedModel, seal_model
from appliance.engine.weights.tensor_types import LLAMA_CPP, read_tensor_types, uncovered
from appliance.errors import ApplianceError, BadRequest, BootError, EngineFailed, TooLarge, Unavailable

_LOG = logging.getLogger(__name__)
_Event = EngineEvent | EmbeddingEvent
_JobQueue = asyncio.Queue[_Event | ApplianceError]


class SupervisedEngine:
    """`base.Engine` over a worker process. Belongs to the event loop that called `start`."""

    worker_module = "appliance.engine.generation.worker"

    def __init__(self, settings: EngineSettings, *, read: ReadText = read_text) -> None:
        """`read` reads the kernel's files about memory."""
        self._settings = settings
        self._read = read
        self._cores = len(os.sched_getaffinity(0))
        self._sealed: SealedModel | None = None
        self._facts: ModelFacts | None = None
        self._uncovered: tuple[str, ...] = ()
        """Types of the model's tensors that this project's kernels do not cover."""
        self._kernels = KernelChoice(settings.kernels)
        self._draft: SealedModel | None = None
        self._draft_facts: ModelFacts | None = None
        self._identity: WorkerIdentity | None = None
        self._worker: WorkerProcess | None = None
        self._jobs: dict[bytes, _JobQueue] = {}
        self._up = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False
        self._heard_at = 0.0
        self._next_attempt_at = 0.0
        self.restarts = 0
        """Workers started after the first one."""
        self.stats: Mapping[str, int] = {}
        """Levels and counts of the present worker, as it last told them; names as in `Scheduler.stats`."""

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Raises RuntimeError before `start` returned."""
        identity = self._started()
        return EngineInfo(
            name="llama.cpp",
            version=identity.version,
            libraries=identity.libraries,
            threads=identity.threads.count,
            threads_reason=identity.threads.reason,
            exactness=identity.exactness,
            steps=identity.steps,
            arithmetic=LLAMA_CPP if self._uncovered else identity.arithmetic,
            kernels=identity.kernels,
            uncovered=self._uncovered,
            cut=identity.cut,
        )

    @property
    def model(self) -> LoadedModel:
        """Raises RuntimeError before `start` returned."""
        identity = self._started()
        assert self._facts is not None
        return LoadedModel(
            context_length=self._context_length(),
            vocabulary_size=identity.vocabulary_size,
            architecture=self._facts.architecture,
            has_chat_template=self._facts.chat_template is not None,
            tokenizer_digest=self._facts.tokenizer_digest,
            chat_template_digest=self._facts.chat_template_digest,
            weights=((self._settings.size_bytes, self._settings.sha256),),
            chat=identity.chat,
        )

    @property
    def ready(self) -> bool:
        return self._up.is_set() and not self._stopping

    @property
    def threads(self) -> int:
        """Compute threads, 0 before `start` returned."""
        return 0 if self._identity is None else self._identity.threads.count

    def exact(self, shape: str) -> bool:
        """The self-test's verdict on "batch", "verify" or "chunk"; False before `start` returned."""
        return self._identity is not None and self._identity.exactness.facts()[f"exact-{shape}"] is True

    @property
    def worker_pid(self) -> int | None:
        """Process id of the present worker, None while there is none."""
        return None if self._worker is None else self._worker.pid

    @property
    def active(self) -> int:
        """Jobs under evaluation."""
        return min(len(self._jobs), self._settings.slots)

    @property
    def queued(self) -> int:
        """Jobs handed to the engine that wait for their turn."""
        return len(self._jobs) - self.active

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self, progress: Progress) -> None:
        """Seal and check the models, parse their metadata, start the first worker. Raises BootError."""
        settings, draft = self._settings, self._settings.draft
        model = DraftWeights(paths=settings.model_paths, sha256=settings.sha256, size_bytes=settings.size_bytes)
        try:
            self._sealed = await self._seal(model, "model", progress)
            self._facts = await asyncio.to_thread(read_facts, self._sealed.fd, chat_template=settings.chat_template)
            self._uncovered = uncovered(await asyncio.to_thread(read_tensor_types, self._sealed.fd))
            self._check_purpose(self._facts)
            self._check_lengths(self._facts)
            if draft is not None:
                self._draft = await self._seal(draft, "draft model", progress)
                self._draft_facts = await asyncio.to_thread(read_draft, self._sealed.fd, self._draft.fd)
            self._check_memory(self._facts)
            await self._launch_first(lambda fraction: progress("load", fraction))
        except BaseException:
            await self._discard_worker()
            self._close_models()
            raise
        for line in (*self.info.describe(), f"the chat template: {self.model.chat.describe()}"):
            _LOG.info(line)
        if self.info.cut:
            _LOG.warning(self.info.describe_cut(settings.selftest_limit_s))
        self._watch = asyncio.create_task(self._keep_running(), name="engine-supervisor")

    async def stop(self, grace_s: float) -> None:
        """End every job in flight with Unavailable, ask the worker to leave, kill it after `grace_s`. Idempotent."""
        self._stopping = True
        self._up.clear()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        self._fail_jobs(lambda: Unavailable("shutting_down", "the engine is shutting down", retry_after_s=5))
        if self._worker is not None:
            self._worker.send({"t": "stop"})
            await self._worker.wait_closed(grace_s)
            await self._discard_worker()
        self._close_models()

    async def _seal(self, weights: DraftWeights, what: str, progress: Progress) -> SealedModel:
        """The file in sealed memory, hashed, its progress reported as "hash". Raises BootError."""
        loop = asyncio.get_running_loop()

        def report(fraction: float) -> None:
            loop.call_soon_threadsafe(progress, "hash", fraction)

        check_fits(weights.size_bytes, f"the {what} {weights.paths[0].name}", available_bytes(self._read))
        return await asyncio.to_thread(
            seal_model, weights.paths, sha256=weights.sha256, size_bytes=weights.size_bytes, progress=report
        )

    def _close_models(self) -> None:
        for sealed in (self._sealed, self._draft):
            if sealed is not None:
                sealed.close()
        self._sealed = self._draft = None

    def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        """See `base.Engine.generate`. Closing the generator cancels the job in the worker."""
        return cast(AsyncGenerator[EngineEvent, None], self._events(job.job_id, pack_job(job)))

    async def _events(self, job_id: bytes, submitted: Message) -> AsyncGenerator[_Event, None]:
        await self._wait_up()
        if job_id in self._jobs:
            raise ValueError("job_id is in use")
        queue: _JobQueue = asyncio.Queue()
        self._submit(submitted)
        self._jobs[job_id] = queue
        ended = False
        try:
            while not ended:
                event = await queue.get()
                if isinstance(event, ApplianceError):
                    ended = True
                    raise event
                ended = isinstance(event, Finished)
                yield event
        finally:
            if self._jobs.get(job_id) is queue:
                del self._jobs[job_id]
                if not ended and self._worker is not None:
                    self._worker.send({"t": "cancel", "id": job_id})

    def _read_event(self, message: Message) -> _Event | ApplianceError:
        return unpack_event(message)

    # -- jobs ------------------------------------------------------------------------------------------------------

    async def _wait_up(self) -> None:
        if not self._up.is_set() and not self._stopping and self._watch is not None:
            try:
                await asyncio.wait_for(self._up.wait(), self._settings.restart.wait_s)
            except TimeoutError:
                pass
        if self._stopping:
            raise Unavailable("shutting_down", "the engine is shutting down", retry_after_s=5)
        if not self._up.is_set():
            left = self._next_attempt_at - asyncio.get_running_loop().time()
            raise Unavailable(
                "engine_restarting",
                "the engine is being restarted",
                retry_after_s=max(1, math.ceil(left)) + 1,
            )

    def _submit(self, submitted: Message) -> None:
        assert self._worker is not None
        try:
            self._worker.send(submitted, limit_bytes=SUBMIT_LIMIT_BYTES)
        except ChannelError:
            raise TooLarge("prompt_too_large", "the prompt is larger than the engine accepts") from None
        except UnicodeEncodeError:
            raise BadRequest("invalid_text", "the request contains text that is not valid Unicode") from None

    def _on_message(self, message: Message) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if message.get("t") == "stats":
            self._note_stats(take(message, "stats", dict))
        if message.get("t") != "events":
            return
        for item in take(message, "events", list):
            if not isinstance(item, dict):
                raise ChannelError("an event is not a map")
            queue = self._jobs.get(take(item, "id", bytes))
            if queue is None:
                continue  # cancelled a moment ago
            event = self._read_event(item)
            queue.put_nowait(event)
            if isinstance(event, Finished | ApplianceError):
                # Out of the gauges at once; the generator still drains its own queue.
                del self._jobs[take(item, "id", bytes)]

    def _note_stats(self, stats: Message) -> None:
        if not all(type(value) is int for value in stats.values()):
            raise ChannelError("a count is not an integer")
        self.stats = {name: take(stats, name, int) for name in stats}

    def _fail_jobs(self, error: Callable[[], ApplianceError]) -> None:
        jobs, self._jobs = self._jobs, {}
        for queue in jobs.values():
            queue.put_nowait(error())

    # -- the worker ------------------------------------------------------------------------------------------------

    def _started(self) -> WorkerIdentity:
        if self._identity is None:
            raise RuntimeError("the engine was not started")
        return self._identity

    def _context_length(self) -> int:
        assert self._facts is not None
        return self._settings.context_length or self._facts.training_context_length

    def _check_purpose(self, facts: ModelFacts) -> None:
        if resolve_pooling(self._settings.pooling, facts) is not None:
            raise BootError("the model's metadata ask for vectors: its file has changed since it was looked at")

    def _check_lengths(self, facts: ModelFacts) -> None:
        check_lengths(self._settings, wanted=self._context_length(), trained=facts.training_context_length)
        self._cells()

    def _draft_context(self) -> int:
        """Tokens that the draft's context holds: those of an answer, as far as the draft was trained for."""
        draft = self._draft_facts
        return 0 if draft is None else min(self._context_length(), draft.training_context_length)

    def _check_memory(self, facts: ModelFacts) -> None:
        settings, threads = self._settings, most_threads(self._settings.threads, self._cores)
        wanted = need(
            bytes_per_cell=facts.cell_bytes,
            kv_tokens=self._cells(),
            n_batch=settings.n_batch,
            vocabulary_size=facts.vocabulary_size,
            cache_bytes=settings.cache.limit_bytes if settings.cache.entries else 0,
            threads=threads,
        )
        if (draft := self._draft_facts) is not None:
            held, words = self._draft_context(), draft.vocabulary_size
            scratch = scratch_bytes(n_batch=settings.n_batch, vocabulary_size=words, kv_tokens=held, threads=threads)
            wanted = wanted.beside(cells=draft.cell_bytes * held, scratch=scratch)
        self._check_fits(wanted)

    def _check_fits(self, wanted: Need) -> None:
        check_fits(wanted.total, wanted.describe(), available_bytes(self._read))

    def _cells(self) -> int:
        settings = self._settings
        return resolve_cells(settings.kv_tokens, context_length=self._context_length(), slots=settings.slots)

    def _start_message(self) -> Message:
        assert self._facts is not None
        settings = self._settings
        n_batch = min(settings.n_batch, self._context_length())
        threads, reason = self._known_threads()
        facts: Message = {
            "batching": "continuous",
            "flash-attention": True,
            "n-batch": n_batch,
            "context-length": self._context_length(),
            **self._kernels.facts(),
        }
        if settings.draft is not None:
            facts["draft-model"] = settings.draft.sha256
        return {
            "t": "load",
            "context_length": self._context_length(),
            "kv_tokens": self._cells(),
            "cell_bytes": self._facts.cell_bytes,
            "slots": settings.slots,
            "n_batch": n_batch,
            "threads": threads,
            "threads_reason": reason,
            "cores": self._cores,
            "deterministic": settings.deterministic,
            "speculation": settings.speculation.kind,
            "draft_tokens": settings.speculation.draft_tokens,
            "adaptive": settings.speculation.adaptive,
            "draft_context": self._draft_context(),
            "cache_entries": settings.cache.entries,
            "cache_bytes": settings.cache.limit_bytes,
            "cache_ttl_s": settings.cache.ttl_s,
            "template": self._facts.chat_template,
            "reasoning": list(settings.reasoning) if isinstance(settings.reasoning, tuple) else [],
            "detect_reasoning": settings.reasoning == "auto",
            "template_tools": settings.template_tools,
            "facts": facts,
            **self._start_limits(),
        }

    def _start_limits(self) -> Message:
        """How a worker of any kind measures, and what an earlier one has measured already."""
        return {
            "kernels": self._kernels.name,
            "selftest_limit_s": self._settings.selftest_limit_s,
            "exactness": pack_exactness(None if self._identity is None else self._identity.exactness),
            "steps": 0 if self._identity is None else self._identity.steps,
            "known_cut": [] if self._identity is None else list(self._identity.cut),
        }

    def _known_threads(self) -> tuple[int, str]:
        """(count, reason), 0 where the worker has to measure. What the first found is kept, as receipts say it."""
        if self._settings.threads != "auto":
            return self._settings.threads, f"configured: {self._settings.threads} of {self._cores} usable cores"
        if self._identity is not None:
            return self._identity.threads.count, self._identity.threads.reason
        return 0, ""

    async def _launch_first(self, progress: Callable[[float], None]) -> None:
        """The start that proves library and model. Where a variant of the kernels dies of it the next smaller one is
        tried, once: it computes the same bits, and every receipt names both. Raises BootError."""
        try:
            await self._launch(progress)
        except WorkerDied as died:
            if not self._kernels.pass_over(died):
                raise
            _LOG.warning("%s. Trying the smaller variant %s", died, self._kernels.name)
            await self._discard_worker()
            await self._launch(progress)

    async def _launch(self, progress: Callable[[float], None]) -> None:
        """Start a worker and wait until it has loaded. Raises BootError."""
        assert self._sealed is not None
        start = WorkerStart(
            python=self._settings.worker_python,
            model_fd=self._sealed.fd,
            draft_fd=None if self._draft is None else self._draft.fd,
            message=self._start_message(),
            timeout_s=self._settings.restart.load_timeout_s,
            module=self.worker_module,
        )
        self._worker = await WorkerProcess.spawn(start)
        identity = await self._worker.load(progress, self._on_message)
        if self._identity is not None and identity != self._identity:
            raise BootError("the engine's native libraries changed since the start; restart the appliance")
        self._identity = identity
        self._heard_at = asyncio.get_running_loop().time()
        self._up.set()

    async def _keep_running(self) -> None:
        """Watch the worker and replace it, for ever; the waits grow while workers die young."""
        loop = asyncio.get_running_loop()
        policy = self._settings.restart
        failures = 0
        while True:
            if self._worker is not None and self._up.is_set():
                born = loop.time()
                await self._watch_worker(self._worker)
                failures = 0 if loop.time() - born >= policy.stable_s else failures
            self._up.clear()
            self._fail_jobs(lambda: EngineFailed("engine_failed", "the engine stopped in the middle of this answer"))
            reason = "it never loaded" if self._worker is None else await self._worker.describe_end()
            await self._discard_worker()
            delay = min(policy.max_s, policy.initial_s * 2 ** min(failures, 30))
            self._next_attempt_at = loop.time() + delay
            _LOG.warning("the engine's worker is lost (%s); next start in %.1f s", reason, delay)
            await asyncio.sleep(delay)
            failures += 1
            self.restarts += 1
            try:
                await self._launch(lambda _: None)
            except (BootError, OSError) as error:
                _LOG.error("the engine's worker could not be started again: %s", error)  # `ready` stays false

    async def _watch_worker(self, worker: WorkerProcess) -> None:
        """Return when the worker is gone or wedged: silent for `stall_s` although it was asked."""
        loop = asyncio.get_running_loop()
        stall_s = self._settings.restart.stall_s
        while not worker.closed:
            if loop.time() - self._heard_at >= stall_s:
                _LOG.warning("the engine's worker said nothing for %.1f s", stall_s)
                return
            worker.send({"t": "ping"})
            await worker.wait_closed(stall_s / 4)

    async def _discard_worker(self) -> None:
        if self._worker is not None:
            await self._worker.kill()  # first: a cancellation in here leaves the worker to `stop`
            self._worker = None
