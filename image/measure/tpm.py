"""Registers of a TPM after the image booted: predicted from the unified kernel image, or taken from a firmware's log.

TCG PC Client Platform Firmware Profile 1.06, section 3.3.4; systemd's TPM2_PCR_MEASUREMENTS. SHA-256 bank.

| register | here |
|---|---|
| 0, 2, 3, 6, 7 | the firmware's: taken from a log of a boot under the firmware to be trusted |
| 4, 9, 11 | predicted: image and kernel; command line and initrd; sections of the image |
| 12, 13 | required zero: what the stub measures of extra command lines, add-ons, credentials and system extensions |
| 1, 5, 8, 10, 14, 15 | not pinned: boot order and partition tables of the machine, other boot loaders, IMA |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from image.measure import eventlog, uki
from image.measure.errors import MeasureError
from image.measure.uki import Event, Uki

ALGORITHM = "sha256"
FIRMWARE = (0, 2, 3, 6, 7)
PREDICTED = (4, 9, 11)
ZERO = (12, 13)
_SEPARATED = range(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registers:
    """`values` maps registers to 32 bytes; `events` are those behind the predicted ones, in order."""

    values: Mapping[int, bytes]
    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))


def boot_events(image: Uki) -> tuple[Event, ...]:
    """Events in the predicted registers, for an image that the firmware starts as its first boot option."""
    return (
        uki.action(uki.PCR_APPLICATIONS, uki.ACTION_BOOT, ALGORITHM),
        uki.action(uki.PCR_APPLICATIONS, uki.SEPARATOR, ALGORITHM),
        uki.image_event(image, ALGORITHM),
        *uki.inner_events(image, ALGORITHM),
    )


def predict(image: Uki) -> Registers:
    """Registers 4, 9, 11 predicted, 12 and 13 zero. Raises MeasureError."""
    events = boot_events(image)
    values = {
        register: eventlog.fold(ALGORITHM, (event.digest for event in events if event.register == register))
        for register in PREDICTED
    }
    return Registers(values=values | {register: bytes(32) for register in ZERO}, events=events)


def firmware_values(log: eventlog.Log) -> Mapping[int, bytes]:
    """Registers 0, 2, 3, 6, 7 from a log of a whole boot. Raises MeasureError.

    A log without the separators, or with several, is of no completed boot, or of one that began twice.
    """
    if log.algorithm != ALGORITHM:
        raise MeasureError(f"the registers of a TPM are taken from the {ALGORITHM} bank")
    for register in _SEPARATED:
        separators = [e for e in log.events if e.register == register and e.kind == eventlog.EV_SEPARATOR]
        if len(separators) != 1:
            raise MeasureError(f"register {register} has {len(separators)} separators: no log of one whole boot")
    values = log.replay()
    return {register: values[register] for register in FIRMWARE}


def differences(log: eventlog.Log, predicted: Registers) -> tuple[str, ...]:
    """For a log of a boot of this very image: in words, where it departs from the prediction. Empty: equal."""
    values = log.replay()
    return tuple(
        f"register {register}: predicted {value.hex()}, the log replays to {values[register].hex()}"
        for register, value in sorted(predicted.values.items())
        if values[register] != value
    )
