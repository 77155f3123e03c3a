"""The worker process: `python -m appliance.engine.generation.worker SOCKET_FD MODEL_FD [DRAFT_FD]`.

It holds the model and the prompts in flight, and nothing else: no keys, no network, no files. It hardens itself before
it reads anything, and ends when the socket to its supervisor does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from appliance.engine.chat.chat_template import ChatTemplate, Rendering, TemplateTimeout, TemplateTooSlow
from appliance.engine.chat.template_probe import probe
from appliance.engine.generation.draft import DraftModel
from appliance.engine.generation.prefix_cache import CacheLimits, PrefixCache
from appliance.engine.generation.prompt import PromptBuilder, Vocabulary
from appliance.engine.generation.scheduler import Limits, Scheduler
from appliance.engine.generation.speculation import DRAFTERS, Drafter, GuessCosts, Speculation, WidthController
from appliance.engine.host.channel import BlockingChannel, Message
from appliance.engine.host.loop import WorkerLoop, harden
from appliance.engine.host.messages import (
    cut_facts,
    cut_short,
    known_exactness,
    optional,
    pack_chat_format,
    pack_event,
    take,
    unpack_job,
)
from appliance.engine.settings import SMALL_STEP, Threads
from appliance.engine.types import ChatFormat, ChatMessage, EngineEvent, ToolChat
from appliance.engine.weights.memory import JobMemory, available_bytes, read_text
from appliance.errors import ApplianceError, BadRequest

if TYPE_CHECKING:
    from appliance.engine.batch import Exactness
    from appliance.engine.llama_cpp.allowance import Allowance
    from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions

TEMPLATE_LIMIT_S = 2.0
PROBE_LIMIT_S = 5.0
SEQUENCES_AT_MOST = 256  # LLAMA_MAX_SEQ
DEAR_ROW = 0.5  # of an evaluation: from here on guesses cost more than they bring unless nearly all are right
TOO_DEAR = GuessCosts(row=1.0, shape=1.0)  # where nobody knows: a row of guesses as dear as an evaluation of its own
LONG_STEP_ROWS = 128


class TimedTemplate(ChatTemplate):
    """A chat template under a timer: one that never returns costs its own request only."""

    def render(
        self, chat: Sequence[ChatMessage] | ToolChat, *, template_date: str, random_bytes: Callable[[int], bytes]
    ) -> Rendering:
        try:
            with _alarm(TEMPLATE_LIMIT_S):
                return super().render(chat, template_date=template_date, random_bytes=random_bytes)
        except TemplateTimeout:  # between two pieces of template code
            raise BadRequest("chat_template_rejected", "the model's chat template takes too long") from None


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise TemplateTimeout


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Worker(WorkerLoop[Scheduler]):
    """Load, then serve until told to stop."""

    def __init__(self, channel: BlockingChannel, models: Sequence[int], random_bytes: Callable[[int], bytes]) -> None:
        """`models`: descriptors of the model and, where there is one, of its draft."""
        super().__init__(channel)
        self._models = models
        self._random_bytes = random_bytes
        self._batch: list[dict[str, object]] = []
        self._costs = GuessCosts()
        self._steps = 0
        self._draft: DraftModel | None = None

    def run(self) -> None:
        """Raises ChannelError on a supervisor that does not keep to the protocol."""
        first = self.channel.receive()
        if first is None:
            return
        # Heavy and native: only after hardening, and reported to the supervisor where it is not installed.
        try:
            from appliance.engine.llama_cpp.allowance import Allowance
            from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeFailure

            switched_off = self.report_build(take(first, "kernels", str))
        except (ImportError, OSError, RuntimeError) as error:
            self.channel.send({"t": "failed", "message": f"llama.cpp cannot be loaded: {error}"})
            return
        try:
            runtime = LlamaRuntime(self._options(first), progress=self.report_progress)
            allowance = Allowance(take(first, "selftest_limit_s", float))
            threads, exactness = self._measure(runtime, allowance, first)
            if len(self._models) > 1:
                self._load_draft(runtime, threads, allowance, first)
        except RuntimeFailure as error:
            self.channel.send({"t": "failed", "message": str(error)})
            return
        cut = cut_short(first, allowance.cut)
        first = {**first, "facts": switched_off | take(first, "facts", dict)}
        template = TimedTemplate(
            optional(first, "template", str),
            bos_text=runtime.special_text("bos"),
            eos_text=runtime.special_text("eos"),
        )
        chat = _probe(template, first)
        runtime.spell(chat.spellings)
        scheduler = self._scheduler(runtime, exactness, (threads, template, cut), first)
        found = {
            "vocabulary": runtime.vocabulary_size,
            "chat": pack_chat_format(chat),
            "steps": self._steps,
            "cut": cut,
        }
        self.report_loaded(threads, exactness, found)
        failure: str | None = None
        try:
            paced = exactness.batch and exactness.chunk  # then steps are short however many rows they may have
            self.serve(scheduler, runtime, on_cancel=self._steps > LONG_STEP_ROWS and not paced)
        except RuntimeFailure as error:
            failure = str(error)
        self.outbox.close()
        if failure is not None:
            self.channel.send({"t": "failed", "message": failure})

    def _measure(
        self, runtime: LlamaRuntime, allowance: Allowance, first: Mapping[str, object]
    ) -> tuple[Threads, Exactness]:
        """Threads, then what is exact with so many of them, then what guesses cost. Raises RuntimeFailure."""
        from appliance.engine.llama_cpp.measure import measure_threads
        from appliance.engine.llama_cpp.selftest import NOT_EXACT, measure_exactness, measure_guess_costs

        count = take(first, "threads", int)
        threads = Threads(count=count, reason=take(first, "threads_reason", str))
        if not count:
            measure = partial(measure_threads, runtime, take(first, "cores", int), allowance)
            careful = Threads(count=1, reason="auto: one, as the measurement came to no end within its limit")
            threads = allowance.measured("threads", measure, careful, runtimes=(runtime,), share=0.25)
            runtime.use_threads(threads.count)
        exactness = known_exactness(first)
        if exactness is None:
            test = partial(measure_exactness, runtime, allowance)
            exactness = allowance.measured("exactness", test, NOT_EXACT, runtimes=(runtime,), share=0.75)
        self._steps = self._measure_steps(runtime, exactness, allowance, first)
        costs = partial(measure_guess_costs, runtime, allowance)
        self._costs = allowance.measured("speculation", costs, TOO_DEAR, runtimes=(runtime,), share=0.9)
        if not exactness.rollback:
            self._costs = replace(self._costs, replay=self._costs.row)
        return threads, exactness

    @staticmethod
    def _measure_steps(
        runtime: LlamaRuntime, exactness: Exactness, allowance: Allowance, first: Mapping[str, object]
    ) -> int:
        """Rows of the longest step that is as exact as the small ones are; all of them where those are not."""
        from appliance.engine.llama_cpp.selftest import measure_steps

        most, known = runtime.options.n_batch, take(first, "steps", int)
        if known or not (exactness.batch and exactness.chunk):
            return known or most
        proven: list[int] = []
        measure = partial(measure_steps, runtime, allowance, proven)
        allowance.measured("steps", measure, None, runtimes=(runtime,), share=0.85)
        return proven[-1] if proven else min(SMALL_STEP, most)

    def _options(self, first: Mapping[str, object]) -> RuntimeOptions:
        from appliance.engine.llama_cpp.runtime import RuntimeOptions

        return RuntimeOptions(
            fd=self._models[0],
            kv_tokens=take(first, "kv_tokens", int),
            n_batch=take(first, "n_batch", int),
            n_sequences=min(SEQUENCES_AT_MOST, 2 * take(first, "slots", int) + 1),
            threads=take(first, "threads", int) or 1,
        )

    def _load_draft(
        self, runtime: LlamaRuntime, threads: Threads, allowance: Allowance, first: Mapping[str, object]
    ) -> None:
        """Raises RuntimeFailure."""
        from appliance.engine.llama_cpp.runtime import LlamaRuntime, RuntimeOptions
        from appliance.engine.llama_cpp.selftest import measure_draft_cost

        capacity = take(first, "draft_context", int)
        rows = min(runtime.options.n_batch, capacity)
        options = RuntimeOptions(
            fd=self._models[1], kv_tokens=capacity, n_batch=rows, n_sequences=1, threads=threads.count
        )
        draft = LlamaRuntime(options, progress=lambda _: None)
        # A guess costs its own making and a row of the model's evaluation.
        measure, both = partial(measure_draft_cost, runtime, draft, allowance), (runtime, draft)
        cost = allowance.measured("draft", measure, TOO_DEAR.row, runtimes=both, share=1.0)
        self._costs = replace(self._costs, row=self._costs.row + cost)
        self._draft = DraftModel(draft, rows=rows, capacity=capacity)

    def _scheduler(
        self,
        runtime: LlamaRuntime,
        exactness: Exactness,
        resolved: tuple[Threads, ChatTemplate, list[str]],
        first: Mapping[str, object],
    ) -> Scheduler:
        threads, template, cut = resolved
        vocabulary: Vocabulary = runtime
        kind = take(first, "speculation", str)
        if kind == "auto":
            pays = exactness.verify and exactness.rollback and self._costs.row < DEAR_ROW
            kind = "prompt-lookup" if pays else "off"
        limits = Limits(
            context_length=take(first, "context_length", int),
            n_batch=self._steps,
            kv_tokens=runtime.options.kv_tokens,
            slots=take(first, "slots", int),
            sequences=runtime.options.n_sequences,
            exactness=exactness,
            deterministic=take(first, "deterministic", bool),
            speculation=kind,
            facts=take(first, "facts", dict) | {"threads": threads.count, "n-batch": self._steps} | cut_facts(cut),
        )
        return Scheduler(
            runtime,
            PromptBuilder(vocabulary, template, random_bytes=self._random_bytes),
            limits,
            self._emit,
            cache=PrefixCache(_cache_limits(first), time.monotonic, cuttable=exactness.rollback),
            memory=JobMemory(
                bytes_per_cell=take(first, "cell_bytes", int),
                kv_tokens=runtime.options.kv_tokens,
                row_bytes=4 * runtime.vocabulary_size * (1 + take(first, "draft_tokens", int)),
                available=lambda: available_bytes(read_text),
                rollback_bytes=0 if exactness.rollback or kind == "off" else limits.rollback_bytes,
            ),
            speculate=_speculate(first, _drafters(kind, self._draft), self._costs),
            clock_ns=time.perf_counter_ns,
        )

    def submit(self, scheduler: Scheduler, message: Message) -> bool:
        if message.get("t") != "submit":
            return False
        scheduler.submit(unpack_job(message))
        return True

    def settle(self, scheduler: Scheduler) -> None:
        scheduler.settle()

    def _emit(self, job_id: bytes, event: EngineEvent | ApplianceError) -> None:
        self._batch.append(pack_event(job_id, event))

    def flush(self) -> None:
        """One write per step, however many events it made."""
        if self._batch:
            self.outbox.put({"t": "events", "events": self._batch})
            self._batch = []


def _probe(template: ChatTemplate, first: Mapping[str, object]) -> ChatFormat:
    """What the template knows; a template that does not come to an end knows nothing."""
    tags = take(first, "reasoning", list)
    configured = (str(tags[0]), str(tags[1])) if len(tags) == 2 else None
    try:
        with _alarm(PROBE_LIMIT_S):
            return probe(
                template,
                reasoning=configured,
                detect=take(first, "detect_reasoning", bool),
                tools=take(first, "template_tools", bool),
            )
    except (TemplateTimeout, TemplateTooSlow):
        return ChatFormat()


def _cache_limits(first: Mapping[str, object]) -> CacheLimits:
    return CacheLimits(
        entries=take(first, "cache_entries", int),
        limit_bytes=take(first, "cache_bytes", int),
        ttl_s=take(first, "cache_ttl_s", float),
    )


def _drafters(kind: str, draft: DraftModel | None) -> Callable[[], Drafter] | None:
    return draft.drafter if draft is not None else DRAFTERS.get(kind)


def _speculate(
    first: Mapping[str, object], drafter: Callable[[], Drafter] | None, costs: GuessCosts
) -> Callable[[], Speculation | None]:
    """Makes what one job speculates with."""
    if drafter is None:
        return lambda: None
    wide, adaptive = take(first, "draft_tokens", int), take(first, "adaptive", bool)
    return lambda: Speculation(drafter=drafter(), controller=WidthController(wide=wide, adaptive=adaptive, costs=costs))


def main(arguments: list[str]) -> int:
    """Composition root of the worker. Exit status 0: told to stop, or the supervisor is gone."""
    socket_fd, model_fd, *more = (int(argument) for argument in arguments)
    harden({socket_fd, model_fd, *more})
    signal.signal(signal.SIGALRM, _on_alarm)
    channel = BlockingChannel(socket.socket(fileno=socket_fd))
    Worker(channel, (model_fd, *more), os.urandom).run()  # noqa: TID251
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
