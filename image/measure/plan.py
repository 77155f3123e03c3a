"""What to measure: a TOML file with a closed schema. Paths are relative to the file's folder.

version = 1
source = "release 1.2.0, built from the locked inputs"   # for people
models = "models.toml"              # what `appliance reference-values` printed: models, configuration, engine

[uki]                               # needed by tpm2 and tdx
file = "uki.efi"

[tpm2]
event_log = "binary_bios_measurements"   # of a boot that you made, under the firmware that you mean to trust
ak_roots = ["<64 hex>"]             # whose attestation keys: these or ak_pins, as in a policy
ak_pins = ["<64 hex>"]

[sev-snp]
firmware = "AMDSEV.fd"
kernel = "vmlinuz"                  # these three together, or none (the firmware alone: refused as a reference)
initrd = "initrd.img"
cmdline = "cmdline"
vcpus = [1, 2]                      # every count with every type is one measurement
vcpu_types = ["EPYC-Milan"]
guest_features = 1                  # SEV_FEATURES of the VMSA
vmm = "qemu"                        # or ec2, gce

[tdx]
firmware = "OVMF.fd"                # computes MRTD; or mrtd = "<96 hex>"
two_pass = false                    # with firmware: the order of the host that launches it, see tdvf.py
event_log = "ccel"                  # RTMR0 from a launch that you made; or rtmr0 = "<96 hex>"
boot_disk = "esp.img"               # optional: its partition table is measured

[nitro]
eif = "appliance.eif"
weights = ["<64 hex>"]              # SHA-256 of the weight files that must be in its ramdisks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from client_sdk.errors import PolicyFileError
from client_sdk.policy.reference_values import ReferenceValues
from client_sdk.tables import check_nothing_left, check_version, parse_toml, read_text, take_table, take_text
from client_sdk.tee import pins
from image.measure.errors import MeasureError
from image.measure.snp import MAX_VCPUS, VMMS, Machine

_MAX_FEATURES = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpm2Plan:
    """`event_log` is a log's file; pins are 32 bytes each, as a policy has them (None: not given)."""

    event_log: Path
    ak_roots: frozenset[bytes] | None
    ak_pins: frozenset[bytes] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnpPlan:
    """`boot` is kernel, initrd and command line, or None: the firmware alone."""

    firmware: Path
    boot: tuple[Path, Path, Path] | None
    machines: tuple[Machine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TdxPlan:
    """Registers as 48 bytes, or what they come from; `boot_disk` None: a disk without a partition table."""

    mrtd: bytes | Path
    rtmr0: bytes | Path
    boot_disk: Path | None
    two_pass: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NitroPlan:
    """`weights` are SHA-256 digests of files, None: not said, so not covered."""

    eif: Path
    weights: frozenset[bytes] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """At least one family."""

    source: str
    models: ReferenceValues
    uki: Path | None
    tpm2: Tpm2Plan | None
    snp: SnpPlan | None
    tdx: TdxPlan | None
    nitro: NitroPlan | None


def load(path: Path) -> Plan:
    """Read a plan. Raises MeasureError naming the key at fault."""
    try:
        return parse(read_text(path), path.parent)
    except PolicyFileError as error:
        raise MeasureError(str(error)) from error


def parse(text: str, folder: Path) -> Plan:
    """Parse the text; paths are taken from `folder`. Raises PolicyFileError or MeasureError."""
    table = parse_toml(text)
    check_version(table)
    uki = _optional(table, "uki")
    tables = {name: _optional(table, name) for name in ("tpm2", "sev-snp", "tdx", "nitro")}
    plan = Plan(
        source=take_text(table, "source"),
        models=ReferenceValues.load(folder / take_text(table, "models")),
        uki=None if uki is None else _path(uki, "file", folder),
        tpm2=_tpm2(tables["tpm2"], folder),
        snp=_snp(tables["sev-snp"], folder),
        tdx=_tdx(tables["tdx"], folder),
        nitro=_nitro(tables["nitro"], folder),
    )
    for where, rest in (("", table), ("uki", uki or {}), *((name, one or {}) for name, one in tables.items())):
        check_nothing_left(rest, where)
    if plan.models.families:
        raise MeasureError("models: the file has launch measurements already; give one that has models alone")
    if not any((plan.tpm2, plan.snp, plan.tdx, plan.nitro)):
        raise MeasureError("no family to measure: give [tpm2], [sev-snp], [tdx] or [nitro]")
    if (plan.tpm2 or plan.tdx) and plan.uki is None:
        raise MeasureError("[tpm2] and [tdx] need [uki]")
    return plan


def _optional(table: dict[str, object], key: str) -> dict[str, object] | None:
    return take_table(table, key) if key in table else None


def _path(table: dict[str, object], key: str, folder: Path) -> Path:
    return folder / take_text(table, key)


def _tpm2(table: dict[str, object] | None, folder: Path) -> Tpm2Plan | None:
    if table is None:
        return None
    return Tpm2Plan(
        event_log=_path(table, "event_log", folder),
        ak_roots=pins.take_pins(table, "ak_roots", 32, "tpm2"),
        ak_pins=pins.take_pins(table, "ak_pins", 32, "tpm2"),
    )


def _snp(table: dict[str, object] | None, folder: Path) -> SnpPlan | None:
    if table is None:
        return None
    given = [key for key in ("kernel", "initrd", "cmdline") if key in table]
    if given and len(given) != 3:
        raise MeasureError("sev-snp: kernel, initrd and cmdline go together")
    boot = None
    if given:
        boot = (_path(table, "kernel", folder), _path(table, "initrd", folder), _path(table, "cmdline", folder))
    return SnpPlan(firmware=_path(table, "firmware", folder), boot=boot, machines=_machines(table))


def _machines(table: dict[str, object]) -> tuple[Machine, ...]:
    vcpus = pins.take_integers(table, "vcpus", "sev-snp", low=1, high=MAX_VCPUS)
    types = pins.take_names(table, "vcpu_types", "sev-snp")
    features = pins.take_integer(table, "guest_features", "sev-snp", low=1, high=_MAX_FEATURES)
    vmm = take_text(table, "vmm") if "vmm" in table else "qemu"
    if vcpus is None or types is None or features is None or vmm not in VMMS:
        raise MeasureError("sev-snp: vcpus, vcpu_types and guest_features are needed; vmm is qemu, ec2 or gce")
    return tuple(
        Machine(vcpus=count, vcpu_type=kind, guest_features=features, vmm=vmm)
        for kind in sorted(types)
        for count in sorted(vcpus)
    )


def _tdx(table: dict[str, object] | None, folder: Path) -> TdxPlan | None:
    if table is None:
        return None
    mrtd = _register(table, "mrtd", "firmware", folder)
    if "two_pass" in table and isinstance(mrtd, bytes):
        raise MeasureError("tdx.two_pass: only a computed MRTD has an order")
    return TdxPlan(
        mrtd=mrtd,
        rtmr0=_register(table, "rtmr0", "event_log", folder),
        boot_disk=_path(table, "boot_disk", folder) if "boot_disk" in table else None,
        two_pass=pins.take_flag(table, "two_pass", "tdx"),
    )


def _register(table: dict[str, object], key: str, source: str, folder: Path) -> bytes | Path:
    """A register, or the file that it comes from: exactly one of them, or nobody could say which one counts."""
    if (key in table) == (source in table):
        raise MeasureError(f"tdx: exactly one of {key} and {source} is needed")
    return _path(table, source, folder) if source in table else pins.parse_hex(table.pop(key), 48, f"tdx.{key}")


def _nitro(table: dict[str, object] | None, folder: Path) -> NitroPlan | None:
    if table is None:
        return None
    return NitroPlan(eif=_path(table, "eif", folder), weights=pins.take_pins(table, "weights", 32, "nitro"))


def families_of(plan: Plan) -> Mapping[str, object]:
    """The families in a plan by their names in a policy, in the order in which they are reported."""
    named = {"tpm2": plan.tpm2, "sev-snp": plan.snp, "tdx": plan.tdx, "nitro": plan.nitro}
    return {name: one for name, one in named.items() if one is not None}
