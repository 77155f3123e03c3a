"""The initrd: busybox, dmsetup and kernel modules, as a cpio archive with nothing of this machine in it."""

from __future__ import annotations

import lzma
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from image.build.chroot import Chroot
from image.build.errors import BuildError
from image.build.lock import Input
from image.build.run import environment, run

# By what they are for; with all that modules.dep says they need. Those for hardware that is absent fail to load.
MODULES: Final = (
    "virtio_pci",
    "virtio_blk",
    "virtio_scsi",
    "sd_mod",
    "nvme",
    "dm_mod",
    "dm_verity",
    "erofs",
    "virtio_net",
    "af_packet",
    "vsock",
    "vmw_vsock_virtio_transport",
    "tsm",
    "sev_guest",
    "tdx_guest",
    "nsm",
    "button",
    "evdev",
)
PROGRAMS: Final = ("usr/sbin/dmsetup", "usr/bin/busybox")
_LDD = re.compile(r"(/\S+\.so\S*) \(0x")


def archive(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """A cpio archive ("newc") of regular files by path, with their modes; folders come before what is in them.

    Owner, time and inode numbers are the archive's own: the same files give the same bytes.
    """
    entries: dict[str, tuple[int, bytes]] = {}
    for path in sorted(files):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            entries.setdefault("/".join(parts[:depth]), (stat.S_IFDIR | 0o755, b""))
        mode, content = files[path]
        entries[path] = (stat.S_IFREG | mode, content)
    written = [_entry(number, path, *entry) for number, (path, entry) in enumerate(sorted(entries.items()), start=1)]
    whole = b"".join((*written, _entry(0, "TRAILER!!!", 0, b"")))
    return whole + bytes(-len(whole) % 512)


def _entry(inode: int, path: str, mode: int, content: bytes) -> bytes:
    links = 2 if stat.S_ISDIR(mode) else 1
    name = path.encode() + b"\x00"
    fields = (inode, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)


def load_order(dependencies: str, names: Sequence[str], builtin: str) -> tuple[str, ...]:
    """Paths of modules in an order that loads, from the text of modules.dep. Raises BuildError on an unknown name.

    Each line is "path: needed ...", what is needed first standing last (modules.dep(5)).
    """
    paths: dict[str, tuple[str, list[str]]] = {}
    for line in dependencies.splitlines():
        module, _, after = line.partition(":")
        paths[module_name(module)] = (module, after.split())
    inside = {module_name(line) for line in builtin.split()}
    ordered: dict[str, None] = {}
    for name in names:
        if name in inside:
            continue
        if name not in paths:
            raise BuildError(f"the kernel has no module {name}")
        path, needed = paths[name]
        ordered.update(dict.fromkeys((*reversed(needed), path)))
    return tuple(ordered)


def module_name(path: str) -> str:
    return path.rsplit("/", 1)[-1].split(".ko", 1)[0].replace("-", "_")


def unpack_kernel(deb: Input, to: Path) -> str:
    """Unpack the kernel's package; returns its release, such as 6.12.1+deb13-cloud-amd64. Raises BuildError."""
    to.mkdir(parents=True, exist_ok=True)
    run(["dpkg-deb", "-x", deb.cached(), to], environ=environment(0))
    releases = sorted(path.name for path in (to / "usr/lib/modules").iterdir())
    if len(releases) != 1:
        raise BuildError(f"the kernel's package has modules of {len(releases)} releases")
    return releases[0]


def make(chroot: Chroot, kernel: Path, release: str, script: bytes) -> bytes:
    """The archive, not compressed. `script` is its /init. Raises BuildError."""
    files: dict[str, tuple[int, bytes]] = {"init": (0o755, script)}
    modules = kernel / "usr/lib/modules" / release
    chroot.bound(kernel, "/build/kernel").run(["depmod", "-b", "/build/kernel/usr", release])
    dependencies = (modules / "modules.dep").read_text(encoding="utf-8")
    builtin = (modules / "modules.builtin").read_text(encoding="utf-8")
    order = load_order(dependencies, MODULES, builtin)
    for path in order:
        files[f"modules/{module_name(path)}.ko"] = (0o644, _module(modules / path))
    files["modules/order"] = (0o644, "".join(f"{module_name(path)}\n" for path in order).encode())
    for program in PROGRAMS:
        files[f"bin/{Path(program).name}"] = (0o755, (chroot.root / program).read_bytes())
    for path in _libraries(chroot, "/usr/sbin/dmsetup"):
        files[path.lstrip("/")] = (0o755, (chroot.root / path.lstrip("/")).resolve().read_bytes())
    return archive(files)


def _libraries(chroot: Chroot, program: str) -> Iterable[str]:
    return sorted(set(_LDD.findall(chroot.run(["ldd", program]).decode())))


def _module(path: Path) -> bytes:
    """A module without compression: whoever loads it need not know how it was packed; its signature stays."""
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content
