"""The kernel of an enclave and the modules that its first process loads, from the image's own kernel package."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from image.build import initrd
from image.build.chroot import Chroot
from image.build.lock import Input

# With what modules.dep says they need: the bus on which an enclave has its devices, vsock, the Nitro Secure Module.
MODULES: Final = ("virtio_mmio", "vsock", "vmw_vsock_virtio_transport", "nsm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """`modules` in the order in which they load, uncompressed; their signatures are in them."""

    release: str
    image: bytes
    modules: Sequence[tuple[str, bytes]]


def take(deb: Input, chroot: Chroot, scratch: Path) -> Kernel:
    """Unpack the package in `scratch`; depmod runs in the tools chroot. Raises BuildError."""
    release = initrd.unpack_kernel(deb, scratch)
    chroot.bound(scratch, "/build/kernel").run(["depmod", "-b", "/build/kernel/usr", release])
    folder = scratch / "usr/lib/modules" / release
    dependencies = (folder / "modules.dep").read_text(encoding="utf-8")
    builtin = (folder / "modules.builtin").read_text(encoding="utf-8")
    order = initrd.load_order(dependencies, MODULES, builtin)
    return Kernel(
        release=release,
        image=(scratch / "boot" / f"vmlinuz-{release}").read_bytes(),
        modules=tuple((f"{initrd.module_name(path)}.ko", _content(folder / path)) for path in order),
    )


def given(image: Path, modules: Sequence[Path], release: str) -> Kernel:
    """A kernel from elsewhere, and its modules in the order in which they load. Raises OSError."""
    return Kernel(
        release=release,
        image=image.read_bytes(),
        modules=tuple((path.name.removesuffix(".xz"), _content(path)) for path in modules),
    )


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content
