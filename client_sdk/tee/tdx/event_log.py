"""Measured-boot logs of a trust domain: parse, hold digests against content, replay to RTMR0..3.

Two formats. "dstack": a JSON list of {imr, event_type, digest, event, event_payload}; the digest of its runtime events
is SHA-384(le32(event_type) ":" event ":" payload). "ccel": the binary crypto-agile log of the TCG PC Client Platform
Firmware Profile (section 10.2), in which measurement register n stands for RTMR n-1 (UEFI 2.10, section 38.4.1).
A log is only as true as its replay, and an event's content only where its digest follows from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee import json_text
from client_sdk.tee.evidence import EventLog
from client_sdk.wire.errors import WireError

CODE = "MALFORMED_ENDORSEMENT"
KINDS = ("dstack", "ccel")
LIMIT_LOG_BYTES = 1 << 20
_MAX_EVENTS = 4096
DIGEST_BYTES = 48
REGISTERS = 4

RUNTIME_REGISTER = 3

EV_NO_ACTION, EV_SEPARATOR, EV_IPL = 0x03, 0x04, 0x0D
EV_EFI_VARIABLE_DRIVER_CONFIG, EV_EFI_VARIABLE_BOOT, EV_EFI_GPT_EVENT = 0x80000001, 0x80000002, 0x80000006
EV_EFI_ACTION, EV_EFI_VARIABLE_AUTHORITY = 0x80000007, 0x800000E0
DSTACK_RUNTIME_EVENT = 0x08000001
_HASHED_WHOLE = frozenset({EV_EFI_VARIABLE_DRIVER_CONFIG, EV_EFI_GPT_EVENT})
_HASHED_VARIABLE = frozenset({EV_EFI_VARIABLE_BOOT, EV_EFI_VARIABLE_AUTHORITY})
_GRUB_TEXTS = (b"grub_cmd: ", b"kernel_cmdline: ", b"module_cmdline: ")

_ALG_SHA384 = 0x000C
_SPEC_ID = b"Spec ID Event03\x00"
_END_OF_LOG = bytes((0xFF,)) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One measurement: into RTMR `register` (0..3), `digest` 48 bytes. `name` is "" but for dstack's runtime events."""

    register: int
    kind: int
    digest: bytes
    content: bytes
    name: str = ""

    @property
    def is_runtime(self) -> bool:
        return self.kind == DSTACK_RUNTIME_EVENT

    def payload_as(self, name: str) -> bytes | None:
        """The payload if this is a runtime event of that name, however the log cuts what was measured in two.

        Name and payload are hashed as "name:payload", so that a log could call an event (name, "a:b") one of
        ("name:a", "b") without changing its digest.
        """
        measured, wanted = self.name.encode() + b":" + self.content, name.encode() + b":"
        return measured[len(wanted) :] if self.is_runtime and measured.startswith(wanted) else None


def parse(log: EventLog) -> tuple[Event, ...]:
    """All events that extend a register, in order. Raises WireError MALFORMED_ENDORSEMENT."""
    if len(log.content) > LIMIT_LOG_BYTES:
        raise WireError(CODE, f"an event log larger than {LIMIT_LOG_BYTES} bytes")
    events = _parse_dstack(log.content) if log.kind == "dstack" else _parse_ccel(log.content)
    if not events:
        raise WireError(CODE, "the event log is empty")
    return events


def replay(events: Iterable[Event]) -> tuple[bytes, ...]:
    """The four RTMRs after extending zeros with every digest in order."""
    registers = [bytes(DIGEST_BYTES)] * REGISTERS
    for event in events:
        registers[event.register] = hashlib.sha384(registers[event.register] + event.digest).digest()
    return tuple(registers)


def check(events: tuple[Event, ...], rtmrs: tuple[bytes, ...]) -> None:
    """Digests follow from content where the format says how, and replay to `rtmrs`. Raises AuthenticityError."""
    for number, event in enumerate(events):
        possible = _digests_of_content(event)
        if possible and event.digest not in possible:
            raise AuthenticityError(
                Rejection.EVENT_LOG_MISMATCH,
                f"the digest of event {number} is not that of its content",
                expected=possible[0].hex(),
                actual=event.digest.hex(),
            )
    for number, (replayed, signed) in enumerate(zip(replay(events), rtmrs, strict=True)):
        if replayed != signed:
            raise AuthenticityError(
                Rejection.EVENT_LOG_MISMATCH,
                f"the event log does not replay to RTMR{number}",
                expected=signed.hex(),
                actual=replayed.hex(),
            )


def _digests_of_content(event: Event) -> tuple[bytes, ...]:
    """The digests that this content may have; none where the log does not carry what was measured."""
    content = event.content
    hashed: tuple[bytes, ...]
    if event.is_runtime:
        hashed = (event.kind.to_bytes(4, "little") + b":" + event.name.encode() + b":" + content,)
    elif not content:
        hashed = ()
    elif event.kind in _HASHED_WHOLE or (event.kind == EV_SEPARATOR and content == bytes(4)):
        hashed = (content,)
    elif event.kind == EV_EFI_ACTION:
        hashed = (content, content.rstrip(b"\x00"))
    elif event.kind in _HASHED_VARIABLE:
        hashed = (content, _variable_data(content))
    elif event.kind == EV_IPL and content.startswith(_GRUB_TEXTS):
        hashed = (content.rstrip(b"\x00").partition(b": ")[2],)
    else:
        hashed = ()
    return tuple(hashlib.sha384(data).digest() for data in hashed)


def _variable_data(content: bytes) -> bytes:
    """VariableData of a UEFI_VARIABLE_DATA (GUID 16, u64 name length in characters, u64 data length, name, data)."""
    name_characters = int.from_bytes(content[16:24], "little")
    return content[32 + 2 * name_characters :]


def _parse_dstack(content: bytes) -> tuple[Event, ...]:
    entries = json_text.read(json_text.decode(content, CODE, "event log"), CODE, "event log")
    if type(entries) is not list or len(entries) > _MAX_EVENTS:
        raise WireError(CODE, f"the event log is no list of at most {_MAX_EVENTS} events")
    return tuple(_dstack_event(entry) for entry in entries)


def _dstack_event(entry: object) -> Event:
    if type(entry) is not dict:
        raise WireError(CODE, "an event is not a JSON object")
    register, kind, name = entry.get("imr"), entry.get("event_type"), entry.get("event", "")
    if type(register) is not int or not 0 <= register < REGISTERS:
        raise WireError(CODE, "an event is for no RTMR")
    if type(kind) is not int or not 0 <= kind < 1 << 32 or type(name) is not str:
        raise WireError(CODE, "an event has a malformed type or name")
    try:
        digest, payload = bytes.fromhex(entry.get("digest", "")), bytes.fromhex(entry.get("event_payload", ""))
        name.encode()
    except (TypeError, ValueError):
        raise WireError(CODE, "an event has a malformed digest, name or payload") from None
    if len(digest) != DIGEST_BYTES:
        raise WireError(CODE, f"a digest has {len(digest)} bytes instead of {DIGEST_BYTES}")
    return Event(register=register, kind=kind, digest=digest, content=payload, name=name)


class _Reader:
    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise WireError(CODE, "the event log is truncated")
        taken, self.at = self.data[self.at : end], end
        return taken

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    @property
    def is_at_end(self) -> bool:
        """No event follows: the end, or the fill of the table that the firmware reserved."""
        head = self.data[self.at : self.at + 4]
        if head == bytes(4):
            return not any(memoryview(self.data)[self.at :])
        return not head or head == _END_OF_LOG


def _parse_ccel(content: bytes) -> tuple[Event, ...]:
    reader = _Reader(content)
    sizes = _spec_id(reader)
    events: list[Event] = []
    seen = 0
    while not reader.is_at_end:
        seen += 1
        register, kind, count = reader.integer(4), reader.integer(4), reader.integer(4)
        if seen > _MAX_EVENTS or count > len(sizes):
            raise WireError(CODE, f"more than {_MAX_EVENTS} events, or one with {count} digests")
        digests: dict[int, bytes] = {}
        for _ in range(count):
            algorithm = reader.integer(2)
            if algorithm not in sizes:
                raise WireError(CODE, f"a digest of unknown algorithm {algorithm:#x}")
            digests[algorithm] = reader.take(sizes[algorithm])
        data = reader.take(reader.integer(4))
        if kind == EV_NO_ACTION:
            continue
        if not 1 <= register <= REGISTERS or _ALG_SHA384 not in digests:
            raise WireError(CODE, "an event is for no RTMR or has no SHA-384 digest")
        events.append(Event(register=register - 1, kind=kind, digest=digests[_ALG_SHA384], content=data))
    return tuple(events)


def _spec_id(reader: _Reader) -> dict[int, int]:
    """Digest sizes by algorithm, from the TCG_EfiSpecIDEvent that starts the log (in the old SHA-1 layout)."""
    _register, kind, _digest = reader.integer(4), reader.integer(4), reader.take(20)
    header = _Reader(reader.take(reader.integer(4)))
    if kind != EV_NO_ACTION or header.take(len(_SPEC_ID)) != _SPEC_ID:
        raise WireError(CODE, "the event log does not begin with its specification id")
    header.take(8)  # platform class, version, errata, size of UINTN
    count = header.integer(4)
    sizes = {header.integer(2): header.integer(2) for _ in range(min(count, 16))}
    if sizes.get(_ALG_SHA384) != DIGEST_BYTES:
        raise WireError(CODE, "the event log has no SHA-384 digests")
    return sizes
