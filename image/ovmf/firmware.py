"""Which firmware is built, how, and by what name a build of it is known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from image.build import lock
from image.build.lock import Input

FOLDER: Final = Path(__file__).parent
SOURCE, TOOLS = "edk2", "edk2-tools"
SOURCE_PACKAGE: Final = "edk2"
# What edk2's makefiles and its grub.sh call, beyond the base system.
TOOL_PACKAGES: Final = (
    "?essential",
    "acpica-tools",
    "apt",
    "dosfstools",
    "g++",
    "gcc",
    "grub-common",
    "grub-efi-amd64-bin",
    "make",
    "mtools",
    "nasm",
    "patch",
    "python3",
    "uuid-dev",
    "xz-utils",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Firmware:
    """`platform` is edk2's description, `folder` where it builds, `defines` the switches that are not its default."""

    file: str
    platform: str
    folder: str
    defines: tuple[str, ...]
    purpose: str


FIRMWARES: Final = (
    Firmware(
        file="AMDSEV.fd",
        platform="OvmfPkg/AmdSev/AmdSevX64.dsc",
        folder="AmdSev",
        defines=("BUILD_SHELL=FALSE",),
        purpose="SEV-SNP: starts the kernel whose digests are in the launch measurement, and no other",
    ),
    Firmware(
        file="INTELTDX.fd",
        platform="OvmfPkg/IntelTdx/IntelTdxX64.dsc",
        folder="IntelTdx",
        defines=("BUILD_SHELL=FALSE",),
        purpose="TDX: measures what it starts into RTMR1 and RTMR2; no shell",
    ),
)


def recipe() -> Mapping[str, bytes]:
    """Our own files that a build is made with, by name."""
    own = [*(FOLDER / name for name in ("build.sh", "grub.cfg", "source.sh")), *sorted(FOLDER.glob("patches/*.patch"))]
    return {str(path.relative_to(FOLDER)): path.read_bytes() for path in own}


def key(firmware: Firmware, inputs: Iterable[Input], own: Mapping[str, bytes], epoch: int) -> str:
    """Hex digits that name one build: inputs, our files, switches and the time in it. Equal key, equal bytes."""
    hasher = hashlib.sha256(lock.digest(inputs))
    for name, content in sorted(own.items()):
        hasher.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    hasher.update(f"{firmware.platform} {' '.join(firmware.defines)} {epoch}\n".encode())
    return hasher.hexdigest()
