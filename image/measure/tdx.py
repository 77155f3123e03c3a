"""Registers of a trust domain after the image booted under TDVF (OVMF for TDX).

UEFI 2.10, section 38.4.1: PCR 2 to 6 go to RTMR1, 8 to 15 to RTMR2, in SHA-384. TDVF (edk2,
OvmfPkg/Tcg/TdTcg2Dxe) writes one separator into RTMR1 for all its registers, and two events of leaving boot services.
The stub ignores the host's SMBIOS command line in a trust domain. RTMR0 is the firmware's and its virtual machine's
(memory map, ACPI tables, boot variables): it is given, or taken from the log of a launch. MRTD: see `tdvf`.

Not booted: nothing here ran on TDX hardware. Tests hold the order and the digests of the firmware's own events against
a real log of a trust domain.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from image.measure import eventlog, uki
from image.measure.errors import MeasureError
from image.measure.uki import Event, Uki

ALGORITHM = "sha384"
MR_BYTES = 48
_MR_RTMR0 = 1
_BLOCK = 512
_GPT_HEADER_BYTES = 92
_MAX_ENTRIES, _MAX_ENTRY_BYTES = 1024, 4096
_RTMR1 = range(2, 7)
_RTMR2 = range(8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """48 bytes each. `events` are those behind RTMR1 and RTMR2, in order, by PCR."""

    mrtd: bytes
    rtmr0: bytes
    rtmr1: bytes
    rtmr2: bytes
    events: tuple[Event, ...]


def boot_events(image: Uki, gpt: bytes | None) -> tuple[Event, ...]:
    """Events in RTMR1 and RTMR2. `gpt` is the content of the partition-table event of the disk booted from, if any."""
    table = () if gpt is None else (_gpt_event(gpt),)
    return (
        uki.action(4, uki.ACTION_BOOT, ALGORITHM),
        uki.action(4, uki.SEPARATOR, ALGORITHM),
        *table,
        uki.image_event(image, ALGORITHM),
        *uki.inner_events(image, ALGORITHM),
        uki.action(5, uki.ACTION_EXIT, ALGORITHM),
        uki.action(5, uki.ACTION_EXITED, ALGORITHM),
    )


def predict(image: Uki, *, mrtd: bytes, rtmr0: bytes, gpt: bytes | None) -> Launch:
    """Raises MeasureError where a given value is no register, or all zeros."""
    for name, value in (("mrtd", mrtd), ("rtmr0", rtmr0)):
        if len(value) != MR_BYTES or not any(value):
            raise MeasureError(f"{name}: {MR_BYTES} bytes that are not all zero are needed")
    events = boot_events(image, gpt)
    rtmr1, rtmr2 = (
        eventlog.fold(ALGORITHM, (event.digest for event in events if event.register in registers))
        for registers in (_RTMR1, _RTMR2)
    )
    return Launch(mrtd=mrtd, rtmr0=rtmr0, rtmr1=rtmr1, rtmr2=rtmr2, events=events)


def rtmr0_of(log: eventlog.Log) -> bytes:
    """RTMR0 from the log of a launch under the firmware to be trusted, on the same kind of machine.

    A log of a trust domain numbers its registers from 1 for RTMR0. Raises MeasureError on a log without exactly one
    separator there: it is of no whole boot.
    """
    if log.algorithm != ALGORITHM:
        raise MeasureError(f"the registers of a trust domain are taken from the {ALGORITHM} bank")
    separators = [one for one in log.events if one.register == _MR_RTMR0 and one.kind == eventlog.EV_SEPARATOR]
    if len(separators) != 1:
        raise MeasureError(f"RTMR0 has {len(separators)} separators: no log of one whole boot")
    return log.replay()[_MR_RTMR0]


def gpt_content(disk: bytes) -> bytes | None:
    """UEFI_GPT_DATA of a disk image with 512-byte blocks: header, u64 count, the entries in use. None without a table.

    TCG PC Client Platform Firmware Profile 1.06, section 10.4.4. Raises MeasureError on an impossible table.
    """
    header = disk[_BLOCK : _BLOCK + _GPT_HEADER_BYTES]
    if not header.startswith(b"EFI PART"):
        return None
    if len(header) < _GPT_HEADER_BYTES:
        raise MeasureError("boot disk: a truncated partition table")
    first_block, count, size = struct.unpack_from("<QII", header, 72)
    start, end = first_block * _BLOCK, first_block * _BLOCK + count * size
    if not 0 < count <= _MAX_ENTRIES or not 128 <= size <= _MAX_ENTRY_BYTES or end > len(disk):
        raise MeasureError("boot disk: a partition table with impossible sizes")
    entries = [disk[at : at + size] for at in range(start, end, size)]
    used = [entry for entry in entries if any(entry[:16])]
    return header + struct.pack("<Q", len(used)) + b"".join(used)


def _gpt_event(content: bytes) -> Event:
    return Event(register=5, what="partition table of the boot disk", digest=hashlib.sha384(content).digest())
