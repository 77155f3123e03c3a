"""What a caller may demand of Nitro documents: the table `[families.nitro]` of a policy (docs/families/nitro.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from client_sdk.errors import PolicyFileError
from client_sdk.tables import check_nothing_left
from client_sdk.tee import pins
from client_sdk.tee.nitro.abi import PCR_BYTES

DEFAULT_MAX_DOCUMENT_AGE_S = 10_800  # as long as the certificates of documents live
_MAX_DOCUMENT_AGE_S = 86_400
_ENCLAVE_REGISTERS = frozenset(range(16))
_ENCLAVE_REQUIRED = frozenset({0, 1, 2})
_NITROTPM_REGISTERS = frozenset(range(24))
_NITROTPM_REQUIRED = frozenset({4})

PcrSet = Mapping[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class NitroPolicy:
    """Acceptable register sets (any of them), instances, and ages in seconds. Empty sets: not pinned.

    `enclave` sets judge documents of enclaves, `nitrotpm` sets those of NitroTPM; a kind without sets is refused unless
    `report_only`.
    """

    count: ClassVar[int] = 1

    enclave: tuple[PcrSet, ...] = ()
    nitrotpm: tuple[PcrSet, ...] = ()
    module_ids: frozenset[str] | None = None
    max_document_age_s: int = DEFAULT_MAX_DOCUMENT_AGE_S
    allow_debug: bool = False
    report_only: bool = False

    def to_table(self) -> Mapping[str, object]:
        table: dict[str, object] = {}
        if self.enclave:
            table["measurements"] = [_set_table(one) for one in self.enclave]
        if self.nitrotpm:
            table["nitrotpm_measurements"] = [_set_table(one) for one in self.nitrotpm]
        if self.module_ids is not None:
            table["module_ids"] = sorted(self.module_ids)
        table["max_document_age_s"] = self.max_document_age_s
        table["allow_debug"] = self.allow_debug
        return table


def parse_policy(table: dict[str, object], where: str, report_only: bool) -> NitroPolicy:
    """Read `[families.nitro]`. Raises PolicyFileError naming the key at fault."""
    enclave = _take_sets(table, "measurements", where, known=_ENCLAVE_REGISTERS, required=_ENCLAVE_REQUIRED)
    nitrotpm = _take_sets(table, "nitrotpm_measurements", where, known=_NITROTPM_REGISTERS, required=_NITROTPM_REQUIRED)
    if not enclave and not nitrotpm and not report_only:
        raise PolicyFileError(f"{where}: measurements (or nitrotpm_measurements) are needed, or anything would pass")
    age = pins.take_integer(table, "max_document_age_s", where, low=1, high=_MAX_DOCUMENT_AGE_S)
    policy = NitroPolicy(
        enclave=enclave,
        nitrotpm=nitrotpm,
        module_ids=pins.take_names(table, "module_ids", where),
        max_document_age_s=DEFAULT_MAX_DOCUMENT_AGE_S if age is None else age,
        allow_debug=pins.take_flag(table, "allow_debug", where),
        report_only=report_only,
    )
    check_nothing_left(table, where)
    return policy


def _take_sets(
    table: dict[str, object], key: str, where: str, *, known: frozenset[int], required: frozenset[int]
) -> tuple[PcrSet, ...]:
    entries = pins.take_list(table, key, where)
    found = {_parse_set(entry, f"{where}.{key}", known, required) for entry in entries or ()}
    return tuple(MappingProxyType(dict(one)) for one in sorted(found))


def _parse_set(
    entry: object, where: str, known: frozenset[int], required: frozenset[int]
) -> tuple[tuple[int, bytes], ...]:
    if type(entry) is not dict:
        raise PolicyFileError(f"{where}: each entry is a table of registers")
    names = {f"pcr{register}": register for register in known}
    unknown = sorted(set(entry) - set(names))
    if unknown:
        raise PolicyFileError(f"{where}.{unknown[0]}: no such register")
    one = {names[name]: pins.parse_hex(value, PCR_BYTES, f"{where}.{name}") for name, value in entry.items()}
    missing = sorted(required - set(one))
    if missing:
        raise PolicyFileError(f"{where}: every set needs pcr{missing[0]}")
    return tuple(sorted(one.items()))


def _set_table(one: PcrSet) -> dict[str, str]:
    return {f"pcr{register}": value.hex() for register, value in sorted(one.items())}
