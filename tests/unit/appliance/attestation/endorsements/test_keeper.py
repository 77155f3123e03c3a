"""EndorsementKeeper: fetched once, used while it may be, renewed behind evidence's back, bounded, and closed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from appliance.attestation.endorsements.keeper import EndorsementKeeper, Items, Patience, UnfitEndorsement, Wanted
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.errors import WireError


class Source:
    """Gives its count of askings as the endorsement; `failure` is raised instead."""

    def __init__(self) -> None:
        self.asked = 0
        self.failure: Exception | None = None
        self.gate: threading.Event | None = None

    async def fetch(self) -> Items:
        self.asked += 1
        while self.gate is not None and not self.gate.is_set():
            await asyncio.sleep(0.005)
        if self.failure is not None:
            raise self.failure
        return (EvidenceItem(kind="certificates", content=bytes([self.asked])),)

    def wanted(self, key: bytes = b"chip", *, fresh_s: float = 100.0, usable_s: float = 300.0) -> Wanted:
        return Wanted(key=key, fetch=self.fetch, fresh_s=fresh_s, usable_s=usable_s)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def shown(items: Items) -> list[int]:
    return [item.content[0] for item in items]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_is_old_is_used_while_it_is_renewed() -> None:
    clock, source = Clock(), Source()
    keeper = EndorsementKeeper(monotonic=clock)
    assert [shown(keeper.find(source.wanted())) for _ in range(3)] == [[1], [1], [1]]
    clock.now += 101
    source.gate = threading.Event()
    assert shown(keeper.find(source.wanted())) == [1], "it does not wait for the new one"
    source.gate.set()
    until(lambda: shown(keeper.find(source.wanted())) == [2])
    assert source.asked == 2


def test_what_is_too_old_is_not_used() -> None:
    clock, source = Clock(), Source()
    keeper = EndorsementKeeper(monotonic=clock, patience=Patience(pause_s=60.0))
    assert shown(keeper.find(source.wanted())) == [1]
    source.failure = ConnectionRefusedError("refused")
    clock.now += 299
    assert shown(keeper.find(source.wanted())) == [1]
    clock.now += 2
    assert keeper.find(source.wanted()) == ()
    keeper.close()


def test_no_more_kinds_are_kept_than_a_machine_could_have() -> None:
    sources = [Source() for _ in range(6)]
    keeper = EndorsementKeeper(monotonic=time.monotonic, limit=2)
    for number, source in enumerate(sources):
        assert shown(keeper.find(source.wanted(bytes([number])))) == [1]
    assert shown(keeper.find(sources[5].wanted(b"\x05"))) == [1]
    assert shown(keeper.find(sources[0].wanted(b"\x00"))) == [2], "forgotten, and asked for anew"


def test_no_more_searches_go_on_than_kinds_are_kept() -> None:
    source = Source()
    source.failure = ConnectionRefusedError("refused")
    keeper = EndorsementKeeper(monotonic=time.monotonic, patience=Patience(pause_s=60.0), limit=2)
    before = threading.active_count()
    for number in range(6):
        assert keeper.find(source.wanted(bytes([number]))) == ()
    until(lambda: threading.active_count() == before + 2)
    keeper.close()
    until(lambda: threading.active_count() == before)
    assert source.asked == 6


def test_after_the_end_nobody_is_asked() -> None:
    source = Source()
    keeper = EndorsementKeeper(monotonic=time.monotonic)
    assert shown(keeper.find(source.wanted())) == [1]
    keeper.close()
    assert shown(keeper.find(source.wanted())) == [1]
    assert keeper.find(source.wanted(b"other")) == ()
    assert source.asked == 1


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (TimeoutError(), "not within 25 s"),
        (OSError("localhost: HTTP 404"), "localhost: HTTP 404"),
        (UnfitEndorsement("not this chip's"), "not this chip's"),
        (WireError("MALFORMED_EVIDENCE", "reserved"), "reserved"),
        (OSError("a\nb\x1b[2J" + "c" * 500), "a?b?[2J" + "c" * 193),
    ],
)
def test_a_failure_is_one_line(failure: Exception, words: str, caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    source.failure = failure
    keeper = EndorsementKeeper(monotonic=time.monotonic, patience=Patience(pause_s=60.0))
    assert keeper.find(source.wanted()) == ()
    keeper.close()
    (record,) = caplog.records
    assert record.getMessage().endswith(f"cannot be had: {words}")
