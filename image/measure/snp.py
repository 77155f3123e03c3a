"""SEV-SNP launch measurements, by the kept tool sev-snp-measure (IBM, Apache-2.0).

SNP boots kernel, initrd and command line directly, not the unified kernel image: firmware with a kernel-hashes page
(edk2's AmdSev package) is measured with their digests in it and refuses others. Firmware without that page starts
whatever the host hands it, so its measurement says nothing about the image and is never called a reference for it.

Not booted: nothing here ran on SNP hardware; the arithmetic is the tool's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image.measure.errors import MeasureError

MEASUREMENT_BYTES = 48
MAX_VCPUS = 512
VMMS = {"qemu": "QEMU", "ec2": "ec2", "gce": "gce"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What the firmware starts; `cmdline` exactly as the virtual machine monitor passes it."""

    kernel: Path
    initrd: Path
    cmdline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`vcpu_type` in QEMU's words, `guest_features` the SEV_FEATURES of the VMSA, `vmm` one of VMMS."""

    vcpus: int
    vcpu_type: str
    guest_features: int
    vmm: str = "qemu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`measurement` is 48 bytes. `covers_boot`: kernel, initrd and command line are in it."""

    machine: Machine
    measurement: bytes
    covers_boot: bool


def has_kernel_hashes(firmware: Path) -> bool:
    """Whether the firmware holds what it starts to measured digests. Raises MeasureError."""
    tool = _tool()
    try:
        ovmf = tool.ovmf.OVMF(str(firmware))
        found = ovmf.has_metadata_section(tool.ovmf.SectionType.SNP_KERNEL_HASHES)
        return bool(found and ovmf.is_sev_hashes_table_supported())
    except (OSError, RuntimeError, ValueError, IndexError) as error:
        raise MeasureError(f"SEV-SNP firmware: {error}") from error


def predict(firmware: Path, boot: Boot | None, machines: Iterable[Machine]) -> tuple[Launch, ...]:
    """One launch for each machine. `boot` None: the firmware alone, which covers nothing of the image.

    Raises MeasureError, also where `boot` is given and the firmware would not hold the host to it.
    """
    if boot is not None and not has_kernel_hashes(firmware):
        raise MeasureError(
            "SEV-SNP firmware without a kernel-hashes page: its measurement does not cover kernel, command line or "
            "weights, and any kernel would launch under it. Build OVMF from edk2's OvmfPkg/AmdSev/AmdSevX64.dsc"
        )
    return tuple(_launch(firmware, boot, machine) for machine in machines)


def _launch(firmware: Path, boot: Boot | None, machine: Machine) -> Launch:
    tool = _tool()
    signature = tool.vcpu_types.CPU_SIGS.get(machine.vcpu_type)
    if signature is None:
        raise MeasureError(f"SEV-SNP: no vCPU type {machine.vcpu_type!r}; known: {', '.join(tool.vcpu_types.CPU_SIGS)}")
    if not 1 <= machine.vcpus <= MAX_VCPUS or machine.vmm not in VMMS or not machine.guest_features & 1:
        raise MeasureError("SEV-SNP: 1 to 512 vCPUs, a known monitor, and guest features with bit 0 (SNP active)")
    try:
        measurement = tool.guest.snp_calc_launch_digest(
            machine.vcpus,
            signature,
            str(firmware),
            str(boot.kernel) if boot else "",
            str(boot.initrd) if boot else "",
            boot.cmdline if boot else "",
            machine.guest_features,
            "",
            tool.vmm_types.VMMType[VMMS[machine.vmm]],
        )
    except (OSError, RuntimeError, ValueError, IndexError, AssertionError) as error:
        raise MeasureError(f"SEV-SNP: {error}") from error
    if type(measurement) is not bytes or len(measurement) != MEASUREMENT_BYTES:
        raise MeasureError("SEV-SNP: sev-snp-measure gave no 48-byte measurement")
    return Launch(machine=machine, measurement=measurement, covers_boot=boot is not None)


def _tool() -> Any:
    """The tool's modules: the extra `image` has it, and only this family needs it."""
    try:
        import sevsnpmeasure
        import sevsnpmeasure.guest
        import sevsnpmeasure.ovmf
        import sevsnpmeasure.vcpu_types
        import sevsnpmeasure.vmm_types
    except ImportError as error:
        raise MeasureError("SEV-SNP needs the package sev-snp-measure: install the extra `image`") from error
    return sevsnpmeasure
