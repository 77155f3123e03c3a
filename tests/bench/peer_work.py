"""What the comparison with llama-server asks of both sides, and what a perfect use of the machine would cost.

A piece of work gives one figure or several that one request has in it (a new prompt's time to the first token, and the
speed behind it). Each figure is a speed: more is better. Prompts are new in every sample, from their first words on.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tests.bench.harness import PROMPT
from tests.bench.peer_models import Weights
from tests.bench.streams import SAMPLED, Server, Timing

FORMATS: Final = ("Q4_1", "Q4_K_M", "Q8_0")
"""The columns of the table of targets; other formats are held to those of Q4_K_M."""
_SHORT_TOKENS = 24
_STREAM_TOKENS = 128
_TOGETHER_TOKENS = 96
_MIXED_TOKENS = 48
_MIXED_PROMPTS = tuple(20 + 40 * (each % 6) for each in range(16))
_BEHIND_TOKENS = 48
_LONG_TOKENS = 2000
_CACHED_AT_MOST = 16
_EVALUATED_TOGETHER = 512
_THINGS = (
    "keeper lighthouse weather ships birds letter harbour captain lantern storm morning evening island garden stone "
    "window river market carpenter baker sailor teacher child bridge mountain forest winter summer bread lamp rope "
    "engine clock paper table silver copper green narrow quiet early heavy broken patient careful distant ordinary"
)
_DEEDS = "wrote found carried watched repaired counted painted opened sold measured remembered left followed"

Figures = Mapping[str, float]
Work = Callable[[Server, int], Figures]


class Prompts:
    """Prompts of about so many tokens, alike for both sides, no two of which begin alike."""

    def __init__(self, tokens_per_sentence: float) -> None:
        self._per_sentence = tokens_per_sentence

    @classmethod
    def counted_by(cls, server: Server) -> Prompts:
        """Ask a server how many tokens a sentence has in its model's vocabulary."""
        sentences = 40
        timing = server.stream(" ".join(cls.sentence(random.Random(at)) for at in range(sentences)), 2)
        return cls(timing.prompt_tokens / sentences)

    @staticmethod
    def sentence(chance: random.Random) -> str:
        one, two, three, four = chance.sample(_THINGS.split(), 4)
        day, deed = chance.randrange(10, 100), chance.choice(_DEEDS.split())
        return f"On day {day} the {one} {deed} the {two} near the {three} {four}."

    def new(self, name: str, tokens: int) -> str:
        """The prompt of that name; it ends where a story goes on for long."""
        chance = random.Random(name)
        count = max(1, round((tokens - _SHORT_TOKENS) / self._per_sentence))
        return " ".join([f"{name}:", *(self.sentence(chance) for _ in range(count)), PROMPT])


# -- the work ----------------------------------------------------------------------------------------------------------


def all_of(server: Server, prompts: Sequence[str], tokens: int) -> tuple[list[Timing], float]:
    """The streams, and the seconds from the first request to the last token. All connections are open before."""
    timings: list[Timing] = []
    with ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in prompts]
        threads = [
            threading.Thread(target=lambda p=prompt, c=connection: timings.append(server.stream(p, tokens, c)))
            for prompt, connection in zip(prompts, connections, strict=True)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - start
    if len(timings) != len(prompts):
        raise SystemExit("a stream failed")
    return timings, elapsed


def one_stream(server: Server, number: int) -> Figures:
    return {"1-stream": server.stream(f"{PROMPT} number {number}", _STREAM_TOKENS).decode}


def one_sampled(server: Server, number: int) -> Figures:
    timing = server.stream(f"{PROMPT} number {number} of", _STREAM_TOKENS, sampling=SAMPLED)
    return {"1-stream-sampled": timing.decode}


def several(count: int) -> Work:
    def work(server: Server, number: int) -> Figures:
        prompts = [f"{PROMPT} {number} and {each}" for each in range(count)]
        timings, elapsed = all_of(server, prompts, _TOGETHER_TOKENS)
        return {f"{count}-streams": sum(timing.tokens for timing in timings) / elapsed}

    return work


def mixed(prompts: Prompts) -> Work:
    def work(server: Server, number: int) -> Figures:
        asked = [prompts.new(f"{number} {each}", tokens) for each, tokens in enumerate(_MIXED_PROMPTS)]
        timings, elapsed = all_of(server, asked, _MIXED_TOKENS)
        return {"16-streams-mixed": sum(timing.tokens for timing in timings) / elapsed}

    return work


def new_prompt(prompts: Prompts, tokens: int, *, again: bool = False) -> Work:
    """A prompt never seen before, and the speed behind it; with `again` also a second one that begins like it.

    The appliance reuses within one identity, which without keys is one connection; the peer closes after each stream.
    """

    def work(server: Server, number: int) -> Figures:
        prompt = prompts.new(f"{tokens} {number}", tokens)
        with ExitStack() as stack:
            connection = stack.enter_context(server.connect()) if server.tls else None
            cold = server.stream(prompt, _BEHIND_TOKENS, connection)
            assert_new(cold)
            figures = {f"new-{tokens}": 1 / cold.first_s}
            if tokens >= 1000:
                figures[f"behind-{tokens}"] = cold.decode
            if again:
                second = server.stream(f"{prompt} a second time,", 4, connection)
                figures["shared-prefix"] = 1 / second.first_s
        return figures

    return work


def assert_new(timing: Timing) -> None:
    """Raises SystemExit for a prompt that was in the server's cache."""
    if timing.cached > _CACHED_AT_MOST:
        raise SystemExit(f"a new prompt was not new: {timing.cached} of {timing.prompt_tokens} tokens were kept")


def four_long(prompts: Prompts) -> Work:
    def work(server: Server, number: int) -> Figures:
        asked = [prompts.new(f"four {number} {each}", 1000) for each in range(4)]
        timings, elapsed = all_of(server, asked, 4)
        for timing in timings:
            assert_new(timing)
        return {"4-long-prompts": 1 / elapsed}

    return work


def during_prefill(prompts: Prompts) -> Work:
    """The inverse of the 95th percentile of the time to the first token, while a long prompt is evaluated.

    Short requests follow one another; those count that began before the long one had its first token.
    """

    def work(server: Server, number: int) -> Figures:
        long = threading.Thread(target=server.stream, args=(prompts.new(f"long {number}", _LONG_TOKENS), 1))
        waits: list[float] = []
        with ExitStack() as stack:
            # Opened before, so that the way there is not what is measured.
            ready = [stack.enter_context(server.connect())]
            long.start()
            time.sleep(0.05)
            while long.is_alive():
                connection = ready.pop() if ready else stack.enter_context(server.connect())
                waits.append(server.stream(f"Short {number} {len(waits)}: {PROMPT}", 1, connection).first_s)
        long.join()
        if not waits:
            raise SystemExit("the long prompt was done before a short one could be sent")
        slowest = statistics.quantiles(waits, n=20, method="inclusive")[-1] if len(waits) > 1 else waits[0]
        return {"during-prefill": 1 / slowest}

    return work


# -- what is asked for -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one unit of a measure takes at least: 8-bit integer operations, and bytes of weights, keys and values."""

    operations: float
    read: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """`targets` by the columns of FORMATS; `cost` of a unit where the measure is one of throughput."""

    unit: str
    targets: tuple[float, float, float]
    cost: Callable[[Weights], Cost] | None = None

    def target(self, form: str) -> float:
        return self.targets[FORMATS.index(form if form in FORMATS else "Q4_K_M")]


def _token(streams: int, context: int, prompt_tokens: float = 0.0) -> Callable[[Weights], Cost]:
    """Of a token of one of `streams`, each `context` tokens long, and of its share of what was asked."""
    return lambda weights: Cost(
        operations=2 * (weights.layer_products * (1 + prompt_tokens) + weights.output_products),
        read=weights.bytes_read / streams + weights.cache_bytes(context),
    )


def _prompt(tokens: int, count: int = 1) -> Callable[[Weights], Cost]:
    """Of `count` prompts. Keys and values are read once for each batch: what is read of them is left out."""
    return lambda weights: Cost(
        operations=2 * count * (weights.layer_products * tokens + weights.output_products),
        read=count * weights.bytes_read * -(-tokens // _EVALUATED_TOGETHER),
    )


_TOKENS, _FIRST = "tokens/s", "1/s to first token"
_AS_BEFORE = (1.00, 1.00, 1.00)
MEASURES: Final[Mapping[str, Measure]] = MappingProxyType({
    "1-stream": Measure(unit=_TOKENS, targets=(1.10, 1.00, 1.05), cost=_token(1, 80)),
    "1-stream-sampled": Measure(unit=_TOKENS, targets=(1.10, 1.00, 1.05), cost=_token(1, 80)),
    "4-streams": Measure(unit=_TOKENS, targets=(1.5, 1.3, 1.5), cost=_token(4, 64)),
    "8-streams": Measure(unit=_TOKENS, targets=(1.8, 1.5, 1.8), cost=_token(8, 64)),
    "16-streams-mixed": Measure(
        unit=_TOKENS, targets=(1.5, 1.3, 1.5), cost=_token(16, 150, sum(_MIXED_PROMPTS) / 16 / _MIXED_TOKENS)
    ),
    "behind-1000": Measure(unit=_TOKENS, targets=(1.5, 1.5, 1.5), cost=_token(1, 1024)),
    "behind-3000": Measure(unit=_TOKENS, targets=(1.5, 1.5, 1.5), cost=_token(1, 3024)),
    "new-500": Measure(unit=_FIRST, targets=(1.2, 1.1, 1.2), cost=_prompt(500)),
    "new-1000": Measure(unit=_FIRST, targets=(1.2, 1.1, 1.2), cost=_prompt(1000)),
    "new-3000": Measure(unit=_FIRST, targets=(1.2, 1.1, 1.2), cost=_prompt(3000)),
    "4-long-prompts": Measure(unit="1/s until all answered", targets=(1.2, 1.1, 1.2), cost=_prompt(1000, 4)),
    "shared-prefix": Measure(unit=_FIRST, targets=_AS_BEFORE),
    "during-prefill": Measure(unit=f"{_FIRST}, p95", targets=_AS_BEFORE),
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`measures` that `work` gives. One that takes ten seconds and more is `long`: it is repeated less often."""

    measures: tuple[str, ...]
    work: Work
    long: bool = False


def pieces(prompts: Prompts) -> tuple[Piece, ...]:
    return (
        Piece(measures=("1-stream",), work=one_stream),
        Piece(measures=("1-stream-sampled",), work=one_sampled),
        Piece(measures=("4-streams",), work=several(4)),
        Piece(measures=("8-streams",), work=several(8)),
        Piece(measures=("16-streams-mixed",), work=mixed(prompts)),
        Piece(measures=("new-500",), work=new_prompt(prompts, 500)),
        Piece(measures=("new-1000", "behind-1000", "shared-prefix"), work=new_prompt(prompts, 1000, again=True)),
        Piece(measures=("new-3000", "behind-3000"), work=new_prompt(prompts, 3000), long=True),
        Piece(measures=("4-long-prompts",), work=four_long(prompts), long=True),
        Piece(measures=("during-prefill",), work=during_prefill(prompts)),
    )
