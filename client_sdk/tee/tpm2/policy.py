"""What a caller may demand of TPM quotes: the table `[families.tpm2]` of a policy (docs/families/tpm2.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from client_sdk.errors import PolicyFileError
from client_sdk.tables import check_nothing_left
from client_sdk.tee import pins

PCR_BYTES = 32  # the SHA-256 bank is the only one that policies pin
_PIN_BYTES = 32
_REGISTERS = range(24)
# Firmware, option ROMs, boot loader, secure-boot state; then what the boot loader or the unified kernel image measured.
_FIRMWARE = frozenset({0, 2, 4, 7})
_SYSTEM = frozenset({8, 9, 11})
_MAX_COUNT = (1 << 32) - 1

PcrSet = Mapping[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpm2Policy:
    """`pcr_sets` are acceptable register sets of the SHA-256 bank (any of them; empty: not pinned).

    `ak_pins` are SHA-256 digests of the attestation key's TPMT_PUBLIC, `ak_roots` those of root certificates that its
    certificate may lead to; where both are given, both must hold. Counts are the TPM's own (None: not pinned),
    `firmware_versions` 8 bytes each.
    """

    count: ClassVar[int] = 1

    pcr_sets: tuple[PcrSet, ...] = ()
    ak_pins: frozenset[bytes] | None = None
    ak_roots: frozenset[bytes] | None = None
    reset_counts: frozenset[int] | None = None
    restart_counts: frozenset[int] | None = None
    firmware_versions: frozenset[bytes] | None = None
    require_safe_clock: bool = False
    allow_partial_boot: bool = False
    allow_zero_pcrs: bool = False
    allow_any_certified_key: bool = False

    def to_table(self) -> Mapping[str, object]:
        table: dict[str, object] = {}
        if self.pcr_sets:
            table["pcr_sets"] = [{str(r): one[r].hex() for r in sorted(one)} for one in self.pcr_sets]
        for name in ("ak_pins", "ak_roots", "firmware_versions"):
            found = getattr(self, name)
            if found is not None:
                table[name] = pins.hex_list(found)
        for name in ("reset_counts", "restart_counts"):
            counts = getattr(self, name)
            if counts is not None:
                table[name] = sorted(counts)
        for name in _FLAGS:
            table[name] = getattr(self, name)
        return table


_FLAGS = ("require_safe_clock", "allow_partial_boot", "allow_zero_pcrs", "allow_any_certified_key")


def parse_policy(table: dict[str, object], where: str, report_only: bool) -> Tpm2Policy:
    """Read `[families.tpm2]`. Raises PolicyFileError naming the key at fault."""
    flags = {name: pins.take_flag(table, name, where) for name in _FLAGS}
    policy = Tpm2Policy(
        pcr_sets=take_pcr_sets(table, where, zero=flags["allow_zero_pcrs"], partial=flags["allow_partial_boot"]),
        ak_pins=pins.take_pins(table, "ak_pins", _PIN_BYTES, where),
        ak_roots=pins.take_pins(table, "ak_roots", _PIN_BYTES, where),
        reset_counts=pins.take_integers(table, "reset_counts", where, low=0, high=_MAX_COUNT),
        restart_counts=pins.take_integers(table, "restart_counts", where, low=0, high=_MAX_COUNT),
        firmware_versions=pins.take_pins(table, "firmware_versions", 8, where, zero=True),
        **flags,
    )
    check_nothing_left(table, where)
    if policy.ak_pins is None and policy.ak_roots is None:
        raise PolicyFileError(f"{where}: ak_pins or ak_roots are needed, or anybody's key would do")
    if not policy.pcr_sets and not report_only:
        raise PolicyFileError(f"{where}: pcr_sets are needed, or any boot would pass")
    return policy


def take_pcr_sets(table: dict[str, object], where: str, *, zero: bool, partial: bool) -> tuple[PcrSet, ...]:
    """The `pcr_sets` of a table, empty where the key is absent. Raises PolicyFileError."""
    entries = pins.take_list(table, "pcr_sets", where)
    found = {_parse_set(entry, f"{where}.pcr_sets", zero=zero, partial=partial) for entry in entries or ()}
    return tuple(MappingProxyType(dict(one)) for one in sorted(found))


def _parse_set(entry: object, where: str, *, zero: bool, partial: bool) -> tuple[tuple[int, bytes], ...]:
    if type(entry) is not dict or not entry:
        raise PolicyFileError(f"{where}: each entry is a table of registers")
    names = {str(register): register for register in _REGISTERS}
    unknown = sorted(set(entry) - set(names))
    if unknown:
        raise PolicyFileError(f"{where}.{unknown[0]}: no such register")
    one = {names[n]: pins.parse_hex(value, PCR_BYTES, f"{where}.{n}", zero=zero) for n, value in entry.items()}
    if not partial and not (set(one) >= _FIRMWARE and set(one) & _SYSTEM):
        raise PolicyFileError(
            f"{where}: a set covers the boot: registers 0, 2, 4, 7 and one of 8, 9, 11; "
            "allow_partial_boot = true admits less"
        )
    return tuple(sorted(one.items()))
