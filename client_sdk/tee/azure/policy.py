"""What a caller may demand of Azure's SNP machines: [families.azure-snp-vtpm] (docs/families/sev-snp.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from client_sdk.errors import PolicyFileError
from client_sdk.tables import check_nothing_left
from client_sdk.tee import pins
from client_sdk.tee.snp.policy import SnpPolicy, take_policy
from client_sdk.tee.tpm2.policy import PcrSet, take_pcr_sets

_FLAGS = ("allow_partial_boot", "allow_zero_pcrs", "require_secure_boot", "forbid_console", "require_safe_clock")
_VM_ID = re.compile(r"[0-9A-F]{8}(?:-[0-9A-F]{4}){3}-[0-9A-F]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AzurePolicy:
    """`snp` judges the report, whose measurement covers the paravisor alone; `pcr_sets` what the paravisor booted.

    `vm_ids` are Azure's own names of machines, upper case (None: not pinned).
    """

    count: ClassVar[int] = 1

    snp: SnpPolicy
    pcr_sets: tuple[PcrSet, ...] = ()
    vm_ids: frozenset[str] | None = None
    allow_partial_boot: bool = False
    allow_zero_pcrs: bool = False
    require_secure_boot: bool = False
    forbid_console: bool = False
    require_safe_clock: bool = False

    def to_table(self) -> Mapping[str, object]:
        table = dict(self.snp.to_table())
        if self.pcr_sets:
            table["pcr_sets"] = [{str(r): one[r].hex() for r in sorted(one)} for one in self.pcr_sets]
        if self.vm_ids is not None:
            table["vm_ids"] = sorted(self.vm_ids)
        table.update({name: getattr(self, name) for name in _FLAGS})
        return table


def parse_policy(table: dict[str, object], where: str, report_only: bool) -> AzurePolicy:
    """Read the table. `report_only` admits one without measurement and registers. Raises PolicyFileError."""
    flags = {name: pins.take_flag(table, name, where) for name in _FLAGS}
    policy = AzurePolicy(
        snp=take_policy(table, where),
        pcr_sets=take_pcr_sets(table, where, zero=flags["allow_zero_pcrs"], partial=flags["allow_partial_boot"]),
        vm_ids=_take_vm_ids(table, where),
        **flags,
    )
    check_nothing_left(table, where)
    if policy.snp.measurements is None and not report_only:
        raise PolicyFileError(f"{where}.measurements: at least one measurement of the paravisor is needed")
    if not policy.pcr_sets and not report_only:
        raise PolicyFileError(f"{where}.pcr_sets: without them the paravisor could boot anything")
    return policy


def _take_vm_ids(table: dict[str, object], where: str) -> frozenset[str] | None:
    names = pins.take_names(table, "vm_ids", where)
    if names is None:
        return None
    upper = frozenset(name.strip().upper() for name in names)
    if not all(_VM_ID.fullmatch(name) for name in upper):
        raise PolicyFileError(f"{where}.vm_ids: each is a UUID in text")
    return upper
