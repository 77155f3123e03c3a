"""The image as built, but for its model: another disk, command line and measurement; root, kernel, initrd the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from image.boottest.errors import BootTestError
from image.build import build, uki
from image.build.chroot import Chroot
from image.init import cmdline
from image.init.errors import Stop

_SAME: Final = ("root.img", "vmlinuz", "initrd.img", "appliance.toml", "boot-firmware-log.img")
_NAME: Final = "appliance-tpm2"


def make(built: Path, chroot: Chroot, to: Path, *, store: Path, model: str) -> None:
    """Make in the new folder `to` what a boot with a TPM needs, with the model `model` of `store`.

    Raises BuildError, and BootTestError where `built` is no image.
    """
    to.mkdir(parents=True)
    for name in _SAME:
        (to / name).symlink_to((built / name).resolve())
    disk = build.model_disk(store, model, chroot, to)
    try:
        honest = cmdline.parse((built / f"cmdline-{_NAME}").read_text(encoding="ascii"))
    except (OSError, Stop) as error:
        raise BootTestError(f"no image in {built}: {error}") from error
    options = replace(honest, model_hash=disk.root_hash, model_blocks=disk.blocks)
    for name in ("vmlinuz", "initrd.img"):  # what the chroot sees holds no link that leads out of it
        (to / name).unlink()
        (to / name).hardlink_to((built / name).resolve())
    boot = uki.Boot(folder=to, kernel="vmlinuz", initrd="initrd.img", release="swapped")
    uki.make_disk(chroot, uki.make(chroot, boot, cmdline.render(options), _NAME), to / "boot-tpm2.img")
    inside = replace(_unpacked(built, chroot, to), binds={"/srv/models": to / "model"})
    (to / "models-tpm2.toml").write_bytes(build.reference_values(inside, "tpm2", model))


def _unpacked(built: Path, chroot: Chroot, to: Path) -> Chroot:
    """The image's own root file system, to run its own code in."""
    shell = chroot.bound(built, "/build/disks").bound(to, "/build/unpacked")
    shell.run(["fsck.erofs", "--extract=/build/unpacked/root", "/build/disks/root.img"])
    return replace(chroot, root=to / "root")
