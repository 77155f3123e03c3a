"""The tools chroot: a Debian of its own, made of locked packages, in which everything is compiled and packed.

It is kept under the digest of its inputs. Work happens in it at fixed paths: paths get into what compilers make.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from image.build.errors import BuildError
from image.build.lock import Input, digest
from image.build.run import environment, run

_RECIPE = b"2"  # counts up when this module makes another chroot of the same packages


# In a mount namespace of its own: whatever ends the build, no mount is left behind.
_SCRIPT = """set -e
root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do mkdir -p "$root$2"; mount --bind "$1" "$root$2"; shift 2; done
shift
exec nice -n 10 chroot "$root" "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chroot:
    """A tree to run programs in; `environ` is theirs, `binds` are folders of the machine by their place inside."""

    root: Path
    environ: Mapping[str, str]
    binds: Mapping[str, Path] = field(default_factory=dict)

    def run(self, command: Sequence[str], *, stdin: bytes = b"", extra: Mapping[str, str] | None = None) -> bytes:
        """Run inside, as root (needed), from /. Raises BuildError with the end of what was printed."""
        binds = [part for inside, folder in self.binds.items() for part in (folder.resolve(), inside)]
        arguments = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _SCRIPT, "chroot", self.root, *binds]
        return run([*arguments, "--", *command], environ={**self.environ, **(extra or {})}, stdin=stdin)

    def bound(self, folder: Path, inside: str) -> Chroot:
        """The same chroot, with `folder` of the machine at `inside`."""
        return replace(self, binds={**self.binds, inside: folder})


def prepare(inputs: Sequence[Input], *, tools: Path, source_date_epoch: int) -> Chroot:
    """The chroot of these packages: made now, or kept from before. Raises BuildError."""
    if os.geteuid() != 0:
        raise BuildError("building takes root: packages are unpacked with their owners, and programs run in a chroot")
    name = digest(inputs).hex()[:16] + "-" + _RECIPE.decode()
    root = tools / name
    environ = environment(source_date_epoch)
    if not (root / ".complete").is_file():
        shutil.rmtree(root, ignore_errors=True)
        tools.mkdir(parents=True, exist_ok=True)
        repository = tools / f"{name}.packages"
        _make_repository(inputs, repository)
        names = ",".join(one.name for one in inputs)
        arguments = ["--mode=root", "--variant=apt", f"--include={names}", "--skip=check/empty"]
        arguments += [
            "--dpkgopt=force-unsafe-io",
            "--aptopt=APT::Install-Recommends false",
            "--aptopt=Acquire::Languages none",
        ]
        source = f"deb [trusted=yes] copy:{repository.resolve()} ./"
        run(["nice", "-n", "10", "mmdebstrap", *arguments, "", root, source], environ=environ)
        shutil.rmtree(repository)
        (root / ".complete").touch()
    return Chroot(root=root, environ=environ)


def _make_repository(inputs: Sequence[Input], folder: Path) -> None:
    """A flat repository with exactly these packages: apt cannot choose another."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stanzas = []
    for one in inputs:
        if one.kind != "deb":
            raise BuildError(f"{one.file} is no package of Debian")
        target = folder / f"{one.sha256.hex()}.deb"
        target.symlink_to(one.cached().resolve())
        control = run(["dpkg-deb", "-f", one.cached()], environ=environment(0)).decode("utf-8").strip()
        stanzas.append(f"{control}\nFilename: ./{target.name}\nSize: {one.size}\nSHA256: {one.sha256.hex()}\n")
    (folder / "Packages").write_text("\n".join(stanzas), encoding="utf-8")
