"""What a caller may demand of SEV-SNP: the table [families.sev-snp] of a policy (docs/families/sev-snp.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from client_sdk.errors import PolicyFileError
from client_sdk.tables import check_nothing_left
from client_sdk.tee import pins
from client_sdk.tee.snp import abi

COMPONENTS = ("bootloader", "tee", "snp", "microcode", "fmc")
GUEST_REQUIRABLE = frozenset(
    {"single-socket", "aes256-xts", "rapl-disabled", "ciphertext-hiding", "page-swap-disabled"}
)
GUEST_FORBIDDABLE = frozenset({"smt", "cxl"})
PLATFORM_REQUIRABLE = frozenset(abi.PLATFORM_BITS) - {"smt"}
PLATFORM_FORBIDDABLE = frozenset({"smt", "tio"})

_PIN_SETS = {
    "measurements": 48,
    "family_ids": 16,
    "image_ids": 16,
    "host_data": 32,
    "id_key_digests": 48,
    "author_key_digests": 48,
    "chip_ids": 64,
}
_FLAGS = ("allow_debug", "allow_migration_agent", "allow_vlek", "require_crl")
_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")
_MAX_U32 = (1 << 32) - 1
_MAX_VMPL = 3

Levels = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnpPolicy:
    """Any-of sets (None: not pinned), minima and opt-ins; each is described in docs/families/sev-snp.md.

    `min_tcb` maps product names to minimum levels per component; the key "" stands for every product. `min_abi` and
    `min_firmware` are (major, minor).
    """

    measurements: frozenset[bytes] | None
    family_ids: frozenset[bytes] | None = None
    image_ids: frozenset[bytes] | None = None
    host_data: frozenset[bytes] | None = None
    id_key_digests: frozenset[bytes] | None = None
    author_key_digests: frozenset[bytes] | None = None
    chip_ids: frozenset[bytes] | None = None
    products: frozenset[str] | None = None
    csp_ids: frozenset[str] | None = None
    allow_vmpl: frozenset[int] = frozenset({0})
    allow_debug: bool = False
    allow_migration_agent: bool = False
    allow_vlek: bool = False
    require_crl: bool = False
    min_tcb: Mapping[str, Levels] | None = None
    min_guest_svn: int | None = None
    min_abi: tuple[int, int] | None = None
    min_firmware: tuple[int, int] | None = None
    guest_required: frozenset[str] | None = None
    guest_forbidden: frozenset[str] | None = None
    platform_required: frozenset[str] | None = None
    platform_forbidden: frozenset[str] | None = None

    @property
    def count(self) -> int:
        return 1

    def to_table(self) -> Mapping[str, object]:
        table: dict[str, object] = {}
        for key in _PIN_SETS:
            found = getattr(self, key)
            if found is not None:
                table[key] = pins.hex_list(found)
        for key in ("products", "csp_ids", *_NAME_SETS):
            found = getattr(self, key)
            if found is not None:
                table[key] = sorted(found)
        table["allow_vmpl"] = sorted(self.allow_vmpl)
        table.update({key: getattr(self, key) for key in _FLAGS})
        if self.min_tcb is not None:
            whole = self.min_tcb.get("")
            table["min_tcb"] = dict(whole) if whole is not None else {k: dict(v) for k, v in self.min_tcb.items()}
        if self.min_guest_svn is not None:
            table["min_guest_svn"] = self.min_guest_svn
        for key in ("min_abi", "min_firmware"):
            version = getattr(self, key)
            if version is not None:
                table[key] = f"{version[0]}.{version[1]}"
        return table


_NAME_SETS: Mapping[str, frozenset[str]] = {
    "guest_required": GUEST_REQUIRABLE,
    "guest_forbidden": GUEST_FORBIDDABLE,
    "platform_required": PLATFORM_REQUIRABLE,
    "platform_forbidden": PLATFORM_FORBIDDABLE,
}


def parse_policy(table: dict[str, object], where: str, report_only: bool) -> SnpPolicy:
    """Read the table. `report_only` admits one without measurements. Raises PolicyFileError naming the key."""
    policy = take_policy(table, where)
    check_nothing_left(table, where)
    if policy.measurements is None and not report_only:
        raise PolicyFileError(f"{where}.measurements: at least one launch measurement is needed")
    return policy


def take_policy(table: dict[str, object], where: str) -> SnpPolicy:
    """Take this family's keys out of `table`; others are left. Raises PolicyFileError."""
    fields: dict[str, Any] = {key: pins.take_pins(table, key, size, where) for key, size in _PIN_SETS.items()}
    fields |= {key: _take_known(table, key, where, known) for key, known in _NAME_SETS.items()}
    fields |= {key: pins.take_flag(table, key, where) for key in _FLAGS}
    products = _take_known(table, "products", where, frozenset(abi.PRODUCTS))
    policy = SnpPolicy(
        **fields,
        products=products,
        csp_ids=pins.take_names(table, "csp_ids", where),
        allow_vmpl=pins.take_integers(table, "allow_vmpl", where, low=0, high=_MAX_VMPL) or frozenset({0}),
        min_tcb=_take_min_tcb(table, where, products),
        min_guest_svn=pins.take_integer(table, "min_guest_svn", where, low=0, high=_MAX_U32),
        min_abi=_take_version(table, "min_abi", where),
        min_firmware=_take_version(table, "min_firmware", where),
    )
    if policy.csp_ids is not None and not policy.allow_vlek:
        raise PolicyFileError(f"{where}.csp_ids: only VLEK certificates name a provider; allow_vlek = true admits them")
    return policy


def _take_known(table: dict[str, object], key: str, where: str, known: frozenset[str]) -> frozenset[str] | None:
    names = pins.take_names(table, key, where)
    if names is not None and not names <= known:
        raise PolicyFileError(f"{where}.{key}: known are {', '.join(sorted(known))}")
    return names


def _take_version(table: dict[str, object], key: str, where: str) -> tuple[int, int] | None:
    if key not in table:
        return None
    value = table.pop(key)
    match = _VERSION.fullmatch(value) if type(value) is str else None
    if match is None or max(int(match[1]), int(match[2])) > 255:
        raise PolicyFileError(f'{where}.{key}: text "MAJOR.MINOR" is needed, each 0 to 255')
    return int(match[1]), int(match[2])


def _take_min_tcb(table: dict[str, object], where: str, products: frozenset[str] | None) -> Mapping[str, Levels] | None:
    """One table of components for all products, or one per product by name."""
    if "min_tcb" not in table:
        return None
    value = table.pop("min_tcb")
    if type(value) is not dict or not value:
        raise PolicyFileError(f"{where}.min_tcb: a table of components, or of products with such tables, is needed")
    if not set(value) & set(abi.PRODUCTS):
        return {"": _levels(value, f"{where}.min_tcb", with_fmc=products == frozenset({abi.TURIN}))}
    if not set(value) <= set(abi.PRODUCTS):
        raise PolicyFileError(f"{where}.min_tcb: products are {', '.join(abi.PRODUCTS)}; do not mix in components")
    return {
        name: _levels(levels, f"{where}.min_tcb.{name}", with_fmc=name == abi.TURIN)
        for name, levels in sorted(value.items())
    }


def _levels(value: object, where: str, *, with_fmc: bool) -> Levels:
    if type(value) is not dict or not value:
        raise PolicyFileError(f"{where}: a table of at least one component is needed")
    rest = dict(value)
    levels = {key: pins.take_integer(rest, key, where, low=0, high=255) for key in COMPONENTS}
    check_nothing_left(rest, where)
    if levels["fmc"] is not None and not with_fmc:
        raise PolicyFileError(f"{where}.fmc: only Turin has an FMC level; give levels by product")
    return {key: level for key, level in levels.items() if level is not None}
