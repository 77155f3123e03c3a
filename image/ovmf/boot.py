"""What the firmware must start in QEMU, and what it must refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from image.trial import Trial

REFUSED: Final = b"No kernel whose digest was measured: nothing is started."
_LINUX: Final = b"Linux version"


def trials(firmware: Path, image: Path) -> tuple[Trial, ...]:
    """What is tried with the firmware in one folder and the image in the other."""
    amd, tdx = firmware / "AMDSEV.fd", firmware / "INTELTDX.fd"
    kernel = ("-kernel", image / "vmlinuz", "-initrd", image / "initrd.img", "-append", "console=ttyS0")
    disk = ("-drive", f"file={image / 'boot-auto.img'},if=none,id=d0,format=raw,readonly=on")
    return (
        Trial(what="nothing to start", firmware=amd, arguments=(), shows=REFUSED, never=_LINUX),
        Trial(
            what="a kernel whose digest was not measured", firmware=amd, arguments=kernel, shows=REFUSED, never=_LINUX
        ),
        Trial(
            what="the boot disk",
            firmware=tdx,
            arguments=(*disk, "-device", "virtio-blk-pci,drive=d0,bootindex=1"),
            shows=b"appliance: initrd after",
        ),
    )
