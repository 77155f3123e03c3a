"""What is asked: four kinds of work in turns, each greedy and with a seed, the same for everybody."""

from __future__ import annotations

from dataclasses import dataclass

_LOG = "The keeper of the lighthouse wrote down the weather, the ships and the birds of every day. "
_RULES = (
    "You answer letters to the keeper of a lighthouse. Be brief, be kind, give numbers where you have them, and never "
    "promise what the sea decides. The lamp is lit at dusk and put out at dawn; visitors come on Sundays. "
)
_SHARED_REPEATS = 6
_COPIED_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`samples` answers of at most `tokens` tokens, asked on `streams` connections at a time."""

    samples: int
    tokens: int
    streams: int


def messages(place: int) -> list[dict[str, str]]:
    """What is asked at one place: open questions, a long system text shared by all, text to copy, lists."""
    match place % 4:
        case 0:
            return [_user(f"Tell me a story about ship number {place} that passed the lighthouse.")]
        case 1:
            rules = {"role": "system", "content": _RULES * _SHARED_REPEATS}
            return [rules, _user(f"Letter {place}: when may I visit, and what shall I bring?")]
        case 2:
            text = _LOG * _COPIED_REPEATS
            return [_user(f"Repeat this text, and change the word birds to boats. Page {place}: {text}")]
        case _:
            return [_user(f"List {place + 3} things that are found on a beach, one on each line.")]


def parameters(place: int, workload: Workload) -> dict[str, object]:
    """What goes with the messages of one place."""
    return {"max_tokens": workload.tokens, "temperature": 0, "seed": place}


def lane(number: int, workload: Workload) -> range:
    """The places that one of the connections asks, in order. Fixed, so that every run fills caches alike."""
    return range(number, workload.samples, workload.streams)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
