"""Measured-boot logs in the crypto-agile format: parse one bank, hold digests against content, replay.

TCG PC Client Platform Firmware Profile 1.06, section 10 (log), 3.3.4 (registers). Linux gives the log of a TPM as
/sys/kernel/security/tpm0/binary_bios_measurements. A log is as good as where it comes from: take it from a boot that
you made yourself, under the firmware that you mean to trust.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from image.measure.errors import MeasureError

LIMIT_LOG_BYTES = 4 << 20
_MAX_EVENTS = 8192
_MAX_DIGESTS = 16
REGISTERS = 24

ALGORITHMS: Mapping[str, int] = {"sha256": 0x000B, "sha384": 0x000C}

EV_NO_ACTION, EV_SEPARATOR = 0x03, 0x04
EV_EFI_VARIABLE_DRIVER_CONFIG, EV_EFI_GPT_EVENT, EV_EFI_ACTION = 0x80000001, 0x80000006, 0x80000007
_HASHED_WHOLE = frozenset({EV_SEPARATOR, EV_EFI_VARIABLE_DRIVER_CONFIG, EV_EFI_GPT_EVENT, EV_EFI_ACTION})

_SPEC_ID = b"Spec ID Event03\x00"
_STARTUP_LOCALITY = b"StartupLocality\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One measurement into `register` (a PCR, 0..23), with the digest of the bank asked for."""

    register: int
    kind: int
    digest: bytes
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """`locality` is what the TPM was started from: the last byte of PCR 0 before any event."""

    algorithm: str
    events: tuple[Event, ...]
    locality: int = 0

    def replay(self) -> Mapping[int, bytes]:
        """All 24 registers. Those that firmware does not touch are zero (17 to 22 are not ours and never read here)."""
        size = hashlib.new(self.algorithm).digest_size
        values = dict.fromkeys(range(REGISTERS), bytes(size))
        values[0] = bytes(size - 1) + bytes((self.locality,))
        for event in self.events:
            values[event.register] = extend(self.algorithm, values[event.register], event.digest)
        return values


def extend(algorithm: str, value: bytes, digest: bytes) -> bytes:
    """One extension of a register."""
    return hashlib.new(algorithm, value + digest).digest()


def fold(algorithm: str, digests: Iterable[bytes]) -> bytes:
    """A register that began at zero, after all digests in order."""
    value = bytes(hashlib.new(algorithm).digest_size)
    for digest in digests:
        value = extend(algorithm, value, digest)
    return value


class _Reader:
    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise MeasureError("the event log is truncated")
        taken, self.at = self.data[self.at : end], end
        return taken

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    @property
    def is_at_end(self) -> bool:
        """The end, or the unused rest of a table that firmware reserved."""
        rest = memoryview(self.data)[self.at :]
        return not any(rest) or (len(rest) >= 4 and all(byte == 0xFF for byte in rest))


def parse(content: bytes, algorithm: str) -> Log:
    """Parse a log for one bank ("sha256" or "sha384"). Raises MeasureError.

    Digests that must follow from the content are recomputed: a log whose parts disagree is no reference.
    """
    if len(content) > LIMIT_LOG_BYTES:
        raise MeasureError(f"an event log larger than {LIMIT_LOG_BYTES} bytes")
    reader = _Reader(content)
    sizes = _spec_id(reader, algorithm)
    events: list[Event] = []
    locality = 0
    while not reader.is_at_end:
        event = _event(reader, sizes, ALGORITHMS[algorithm])
        if event.kind == EV_NO_ACTION:
            if event.content.startswith(_STARTUP_LOCALITY) and len(event.content) == len(_STARTUP_LOCALITY) + 1:
                locality = event.content[-1]
            continue
        _check_content(event, algorithm, len(events))
        events.append(event)
        if len(events) > _MAX_EVENTS:
            raise MeasureError(f"an event log of more than {_MAX_EVENTS} events")
    if not events:
        raise MeasureError("the event log is empty")
    return Log(algorithm=algorithm, events=tuple(events), locality=locality)


def _event(reader: _Reader, sizes: Mapping[int, int], wanted: int) -> Event:
    register, kind, count = reader.integer(4), reader.integer(4), reader.integer(4)
    if count > len(sizes):
        raise MeasureError(f"an event has {count} digests, the log declares {len(sizes)} banks")
    digests: dict[int, bytes] = {}
    for _ in range(count):
        bank = reader.integer(2)
        if bank not in sizes or bank in digests:
            raise MeasureError(f"an event has a digest of bank {bank:#x} twice, or of no declared bank")
        digests[bank] = reader.take(sizes[bank])
    content = reader.take(reader.integer(4))
    if kind == EV_NO_ACTION:
        return Event(register=0, kind=kind, digest=b"", content=content)
    if register >= REGISTERS or wanted not in digests:
        raise MeasureError("an event is for no register, or has no digest in the bank asked for")
    return Event(register=register, kind=kind, digest=digests[wanted], content=content)


def _check_content(event: Event, algorithm: str, number: int) -> None:
    if event.kind not in _HASHED_WHOLE or not event.content:
        return
    if event.kind == EV_SEPARATOR and event.content != bytes(4):
        raise MeasureError(f"event {number}: the firmware reports an error (separator {event.content.hex()})")
    # Some firmware logs an action with a NUL that it did not hash.
    texts = {event.content, event.content.rstrip(b"\x00")} if event.kind == EV_EFI_ACTION else {event.content}
    if event.digest not in {hashlib.new(algorithm, text).digest() for text in texts}:
        raise MeasureError(f"event {number}: the digest is not that of its content")


def _spec_id(reader: _Reader, algorithm: str) -> dict[int, int]:
    """Digest sizes by bank, from the TCG_EfiSpecIDEvent that starts the log (in the old SHA-1 layout)."""
    if algorithm not in ALGORITHMS:
        raise MeasureError(f"no bank {algorithm!r} here: {', '.join(ALGORITHMS)}")
    _register, kind, _digest = reader.integer(4), reader.integer(4), reader.take(20)
    header = _Reader(reader.take(reader.integer(4)))
    if kind != EV_NO_ACTION or header.take(len(_SPEC_ID)) != _SPEC_ID:
        raise MeasureError("no crypto-agile event log (it does not begin with its specification id)")
    header.take(8)  # platform class, version, errata, size of UINTN
    count = header.integer(4)
    if count > _MAX_DIGESTS:
        raise MeasureError(f"the event log declares {count} banks")
    sizes = {header.integer(2): header.integer(2) for _ in range(count)}
    if sizes.get(ALGORITHMS[algorithm]) != hashlib.new(algorithm).digest_size:
        raise MeasureError(f"the event log has no {algorithm} bank")
    return sizes
