"""A root file system of locked packages, and programs run in it: one path, no network, nothing of this machine's.

Packages are only unpacked; none of their scripts runs. What those would have made is made here: the links of the merged
/usr, the linker's cache, and the names that alternatives give.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image.build.errors import BuildError
from image.build.lock import Input
from image.build.run import run

_MERGED = ("bin", "lib", "lib64", "sbin")
_DEVICES = ("full", "null", "random", "urandom", "zero")
_PRIVATE = ("unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child")
# Arguments: the root, then the command. The mounts end with the process: they are in its own namespace.
_ENTER = """
set -eu
root=$1; shift
mount -t proc proc "$root/proc"
for device in %s; do : >"$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
mkdir -p "$root/dev/shm"; mount -t tmpfs -o size=64m shm "$root/dev/shm"
exec chroot "$root" "$@"
""" % " ".join(_DEVICES)  # noqa: UP031 - braces and dollars belong to the shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """`root` is the file system, `environ` what programs in it and outside of it get."""

    root: Path
    environ: Mapping[str, str]

    def unpack(self, debs: Sequence[Input], cache: Path, links: Mapping[str, str]) -> None:
        """Make the root anew from cached packages; `links` maps paths in it to targets. Raises BuildError."""
        shutil.rmtree(self.root, ignore_errors=True)
        for name in _MERGED:
            (self.root / "usr" / name).mkdir(parents=True)
            (self.root / name).symlink_to(f"usr/{name}")
        for deb in debs:
            archive = run(["dpkg-deb", "--fsys-tarfile", deb.cached(cache)], environ=self.environ)
            run(
                ["tar", "--extract", "--keep-directory-symlink", "--directory", self.root],
                environ=self.environ,
                stdin=archive,
            )
        for name, target in links.items():
            (self.root / name).symlink_to(target)
        for name in ("build", "dev", "proc", "tmp"):
            (self.root / name).mkdir(exist_ok=True)
        run(["chroot", self.root, "/sbin/ldconfig"], environ=self.environ)

    def run(self, command: Sequence[str]) -> bytes:
        """Run a command inside. Raises BuildError, also where this process may not make namespaces."""
        try:
            return run([*_PRIVATE, "sh", "-c", _ENTER, "sh", self.root, *command], environ=self.environ)
        except BuildError as error:
            if "unshare failed: " in str(error) or "Operation not permitted" in str(error):
                raise BuildError(f"a sandbox needs root and the right to mount: {error}") from error
            raise
