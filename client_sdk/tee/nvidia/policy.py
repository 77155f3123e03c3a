"""What a caller may demand of NVIDIA devices: the table [families.nvidia] (docs/families/nvidia.md has each key)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from client_sdk.checks import CheckLog
from client_sdk.errors import PolicyFileError, Rejection
from client_sdk.tables import check_nothing_left
from client_sdk.tee import pins
from client_sdk.tee.evidence import AuthenticEvidence
from client_sdk.tee.nvidia.abi import DIGEST_BYTES, MODES

KINDS = frozenset({"gpu", "switch"})
ARCHITECTURES = frozenset({"hopper", "blackwell", "ls10"})
DEVICE_ID_BYTES = 32
_MAX_DEVICES = 64

Ocsp = Literal["not-checked", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaPolicy:
    """Demands on each device, and how many there must be. None for a set: not pinned.

    `device_ids` are SHA-256 of the device certificate's public key (32 bytes), `firmware_ids` FWIDs (48 bytes).
    """

    devices: int = 1
    gpus: int = 0
    switches: int = 0
    kinds: frozenset[str] = frozenset({"gpu"})
    require_rim: bool = True
    require_nras: bool = False
    ocsp: Ocsp = "not-checked"
    architectures: frozenset[str] | None = None
    driver_versions: frozenset[str] | None = None
    vbios_versions: frozenset[str] | None = None
    modes: frozenset[str] | None = None
    protected_pcie: bool | None = None
    device_ids: frozenset[bytes] | None = None
    firmware_ids: frozenset[bytes] | None = None

    @property
    def count(self) -> int:
        """How many devices there must be, of all kinds together."""
        return max(self.devices, self.gpus + self.switches)

    def check_devices(self, log: CheckLog, devices: Sequence[AuthenticEvidence]) -> None:
        """As many GPUs and as many switches as demanded, each counted by itself. Raises PolicyError through `log`.

        Where switches are demanded, every switch that a GPU says its links lead to is among those with evidence.
        """
        facts = [dict(device.facts) for device in devices]
        kinds = [fact["kind"] for fact in facts]
        for kind, wanted in (("gpu", self.gpus), ("switch", self.switches)):
            present = kinds.count(kind)
            message = f"{present} of {wanted} have evidence"
            log.require(present >= wanted, f"number of nvidia {kind}s", Rejection.DEVICE_NOT_ALLOWED, message)
        if self.switches:
            attested = _switch_ids(facts, "switch")
            log.require(
                _switch_ids(facts, "gpu") <= attested,
                "switches of the GPUs",
                Rejection.DEVICE_NOT_ALLOWED,
                "a GPU's links lead to a switch without evidence",
            )

    def to_table(self) -> dict[str, object]:
        table: dict[str, object] = {
            "count": self.devices,
            "gpus": self.gpus,
            "switches": self.switches,
            "kinds": sorted(self.kinds),
            "require_rim": self.require_rim,
            "require_nras": self.require_nras,
            "ocsp": self.ocsp,
        }
        for key in ("architectures", "driver_versions", "vbios_versions", "modes"):
            names = getattr(self, key)
            if names is not None:
                table[key] = sorted(names)
        if self.protected_pcie is not None:
            table["protected_pcie"] = self.protected_pcie
        for key in ("device_ids", "firmware_ids"):
            values = getattr(self, key)
            if values is not None:
                table[key] = pins.hex_list(values)
        return table


def parse_policy(table: dict[str, object], where: str, report_only: bool) -> NvidiaPolicy:
    """Read the table. Without `report_only` something has to judge the measurements: manifests or the service.

    Raises PolicyFileError naming the key at fault.
    """
    devices, gpus, switches = _take_counts(table, where)
    kinds = _take_known(table, "kinds", where, KINDS)
    if kinds is None:
        kinds = KINDS if report_only else frozenset({"gpu", "switch"} if switches else {"gpu"})
    if (gpus and "gpu" not in kinds) or (switches and "switch" not in kinds):
        raise PolicyFileError(f"{where}.kinds: leaves out a kind of which devices are demanded")
    require_rim = pins.take_flag(table, "require_rim", where) if "require_rim" in table else not report_only
    require_nras = pins.take_flag(table, "require_nras", where)
    if not (require_rim or require_nras or report_only):
        raise PolicyFileError(f"{where}.require_rim: with require_nras false too, nothing would judge measurements")
    protected = pins.take_flag(table, "protected_pcie", where) if "protected_pcie" in table else None
    policy = NvidiaPolicy(
        devices=devices,
        gpus=gpus,
        switches=switches,
        kinds=kinds,
        require_rim=require_rim,
        require_nras=require_nras,
        ocsp=_take_ocsp(table, where),
        architectures=_take_known(table, "architectures", where, ARCHITECTURES),
        driver_versions=pins.take_names(table, "driver_versions", where),
        vbios_versions=_upper(pins.take_names(table, "vbios_versions", where)),
        modes=_take_known(table, "modes", where, frozenset(MODES.values())),
        protected_pcie=protected,
        device_ids=pins.take_pins(table, "device_ids", DEVICE_ID_BYTES, where),
        firmware_ids=pins.take_pins(table, "firmware_ids", DIGEST_BYTES, where),
    )
    check_nothing_left(table, where)
    return policy


def _switch_ids(facts: Sequence[Mapping[str, str]], kind: str) -> frozenset[str]:
    return frozenset(name for fact in facts if fact["kind"] == kind for name in fact.get("switch ids", "").split())


def _take_counts(table: dict[str, object], where: str) -> tuple[int, int, int]:
    devices = pins.take_integer(table, "count", where, low=1, high=_MAX_DEVICES)
    gpus = pins.take_integer(table, "gpus", where, low=0, high=_MAX_DEVICES)
    switches = pins.take_integer(table, "switches", where, low=0, high=_MAX_DEVICES)
    if (gpus or 0) + (switches or 0) > _MAX_DEVICES:
        raise PolicyFileError(f"{where}.switches: together with gpus more than {_MAX_DEVICES} devices")
    return devices or 1, gpus or 0, switches or 0


def _upper(names: frozenset[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(name.upper() for name in names)


def _take_ocsp(table: dict[str, object], where: str) -> Ocsp:
    value = table.pop("ocsp", "not-checked")
    if value == "required":
        return "required"
    if value == "not-checked":
        return "not-checked"
    raise PolicyFileError(f'{where}.ocsp: "required" or "not-checked"')


def _take_known(table: dict[str, object], key: str, where: str, known: frozenset[str]) -> frozenset[str] | None:
    names = pins.take_names(table, key, where)
    if names is not None and not names <= known:
        raise PolicyFileError(f"{where}.{key}: known are {', '.join(sorted(known))}")
    return names
