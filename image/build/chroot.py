"""The tools chroot: a Debian of its own, made of locked packages, in which everything is compiled and packed.

It is kept under the digest of its inputs. Work happens in it at fixed paths, because paths get into what compilers make.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image.build.errors import BuildError
from image.build.lock import Input, digest
from image.build.run import environment, run

_RECIPE = b"2"  # counts up when this module makes another chroot of the same packages
_MOUNTS = (("proc", "proc"), ("dev", "/dev"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chroot:
    """A directory tree to run programs in; `environ` is theirs. Root is needed."""

    root: Path
    environ: Mapping[str, str]

    def run(self, command: Sequence[str], *, stdin: bytes = b"", extra: Mapping[str, str] | None = None) -> bytes:
        """Run inside, as root, from /. Raises BuildError with the end of what was printed."""
        with self._mounted():
            arguments = ["nice", "-n", "10", "chroot", self.root, *command]
            return run(arguments, environ={**self.environ, **(extra or {})}, stdin=stdin)

    @contextlib.contextmanager
    def bound(self, folder: Path, at: str) -> Iterator[None]:
        """`folder` of the machine lies at `at` inside, meanwhile."""
        with _mount(folder.resolve(), self.root / at.lstrip("/"), ["--bind"]):
            yield

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_mount("proc", self.root / "proc", ["-t", "proc"]))
            stack.enter_context(_mount("/dev", self.root / "dev", ["--bind"]))
            yield


@contextlib.contextmanager
def _mount(source: str | Path, target: Path, options: Sequence[str]) -> Iterator[None]:
    environ = environment(0)
    target.mkdir(parents=True, exist_ok=True)
    run(["mount", *options, source, target], environ=environ)
    try:
        yield
    finally:
        run(["umount", "-l", target], environ=environ)


def prepare(inputs: Sequence[Input], *, tools: Path, source_date_epoch: int) -> Chroot:
    """The chroot of these packages: made now, or kept from before. Raises BuildError."""
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
        arguments += ["--aptopt=APT::Install-Recommends false", "--aptopt=Acquire::Languages none"]
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
