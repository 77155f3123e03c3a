"""Unified kernel images by ukify, and the disk that firmware boots them from."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from image.build.chroot import Chroot

_STUB: Final = "/usr/lib/systemd/boot/efi/linuxx64.efi.stub"
_MIB: Final = 1 << 20
_SECTOR_BYTES: Final = 512
_GPT_TABLE = """\
label: gpt
label-id: 6170706C-6961-4E63-8520-626F6F740001
first-lba: 2048

start=2048, size={sectors}, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B, uuid={uuid}, name=ESP
"""
_PARTITION_UUID: Final = "6170706C-6961-4E63-8520-626F6F740002"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What a boot starts from: files in one folder; `release` is the kernel's."""

    folder: Path
    kernel: str
    initrd: str
    release: str


def make(chroot: Chroot, boot: Boot, cmdline: str, name: str) -> Path:
    """The unified kernel image `name`.efi, beside its command line as cmdline-`name`. Raises BuildError."""
    text = boot.folder / f"cmdline-{name}"
    text.write_text(cmdline, encoding="ascii")
    inside = "/build/boot"
    # The default for --os-release= would be the chroot's own file; what is measured with it is not predictable.
    chroot.bound(boot.folder, inside).run(
        [
            "ukify",
            "build",
            f"--linux={inside}/{boot.kernel}",
            f"--initrd={inside}/{boot.initrd}",
            f"--cmdline=@{inside}/{text.name}",
            "--os-release=",
            f"--uname={boot.release}",
            f"--stub={_STUB}",
            f"--output={inside}/{name}.efi",
        ]
    )
    return boot.folder / f"{name}.efi"


def make_disk(chroot: Chroot, image: Path, to: Path) -> None:
    """A GPT disk with one EFI system partition (FAT) that holds the image where firmware looks first."""
    epoch = int(chroot.environ["SOURCE_DATE_EPOCH"])
    sectors = -(-(image.stat().st_size + 4 * _MIB) // _MIB) * _MIB // _SECTOR_BYTES
    with to.open("wb") as file:
        file.truncate(sectors * _SECTOR_BYTES + 2 * _MIB)
    staged = to.with_name(f"{to.name}.efi")
    shutil.copyfile(image, staged)
    os.utime(staged, (epoch, epoch))
    inside = chroot.bound(to.parent, "/build/boot")
    disk = f"/build/boot/{to.name}"
    inside.run(["sfdisk", "--quiet", disk], stdin=_GPT_TABLE.format(sectors=sectors, uuid=_PARTITION_UUID).encode())
    partition = ["-i", f"{disk}@@{2048 * _SECTOR_BYTES}"]
    inside.run(["mformat", *partition, "-T", str(sectors), "-N", "61707001", "-v", "APPLIANCE", "::"])
    inside.run(["mmd", *partition, "::/EFI", "::/EFI/BOOT"])
    inside.run(["mcopy", *partition, "-m", f"/build/boot/{staged.name}", "::/EFI/BOOT/BOOTX64.EFI"])
    staged.unlink()
