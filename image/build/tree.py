"""The root file system as a folder: unpacked packages, Python packages, the project's code. No package's script runs.

There is no shell, no ssh and no package manager in it: of all programs that packages bring, Python alone is kept.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final
from zipfile import ZipFile

from image.build.chroot import Chroot
from image.build.errors import BuildError
from image.build.lock import Input
from image.build.run import environment, run
from image.build.wheels import PYTHON
from image.init import service

SITE: Final = PurePosixPath(f"/usr/local/lib/python{PYTHON}/dist-packages")
INTERPRETER: Final = PurePosixPath(f"/usr/bin/python{PYTHON}")
SERVICE_UID: Final = service.UID
_LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"
_MERGED: Final = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_FOLDERS: Final = ("dev", "proc", "run", "sys", "tmp", "srv/models", "etc/appliance", "var/lib")
_RUN: Final = (
    "appliance.cli.main",
    "appliance.boot.boot",
    "appliance.boot.serve",
    "appliance.engine.generation.worker",
    "appliance.attestation.attester",
    "image.init.__main__",
    "tpm2_pytss",
)
PROJECT: Final = ("appliance", "client_sdk", "image/init", "image/__init__.py")
"""Of the project's files, those that are installed in the image."""
# Neither used nor needed as evidence of a licence.
_LEFT_OUT: Final = (
    "usr/bin",
    "usr/sbin",
    "usr/games",
    "usr/share/bash-completion",
    "usr/share/binfmts",
    "usr/share/bug",
    "usr/share/ca-certificates",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/python3",
    "usr/lib/systemd",
    "usr/lib/tmpfiles.d",
    "usr/lib/udev",
    "usr/lib/sysusers.d",
    f"usr/lib/python{PYTHON}/_pyrepl",
    f"usr/lib/python{PYTHON}/ensurepip",
    f"usr/lib/python{PYTHON}/pydoc_data",
    f"usr/lib/python{PYTHON}/test",
    f"usr/lib/python{PYTHON}/unittest",
    f"usr/lib/python{PYTHON}/turtle.py",
    f"usr/lib/python{PYTHON}/lib2to3",
    f"usr/lib/python{PYTHON}/idlelib",
    f"usr/lib/python{PYTHON}/tkinter",
    f"usr/lib/python{PYTHON}/xmlrpc",
    "usr/lib/x86_64-linux-gnu/gconv",
    "var",
)
# Of the standard library: terminals, old databases (their libraries would come along), tests, far eastern codecs.
_NO_MODULES: Final = (
    "_curses*",
    "_dbm",
    "_gdbm",
    "readline",
    "_tkinter",
    "_ctypes_test",
    "_test*",
    "xx*",
    "_xx*",
    "_codecs_*",
)
# Of Python packages: what only clients, builds, tests and terminals need. `_import_all` tells when it is too much.
_LEFT_OUT_OF_SITE: Final = (
    "numpy/fft",
    "numpy/ma",
    "numpy/polynomial",
    "numpy/random",
    "numpy/testing",
    "pydantic/v1",  # FastAPI looks for it and does without
    "llama_cpp/server",
    "llama_cpp/include",
    "bin",
    "include",
    "lib",
    "numpy/f2py",
    "numpy/_pyinstaller",
    "numpy/_core/include",
    "numpy/_core/lib",
    "numpy/typing/tests",
)


_ARITHMETIC: Final = "attested-1"
_SOURCES: Final = frozenset({".c", ".h", ".pxd", ".pyi", ".pyx"})
_NUMPY_TESTS = re.compile(r"/numpy/_core/_(simd|\w+_tests)\.[^/]+\.so$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What goes in: packages, wheels, the project's folder, and files by their path in the root."""

    debs: Sequence[Input]
    wheels: Sequence[Path]
    project: Path
    commit: str
    files: dict[str, bytes]


def make(parts: Parts, tree: Path, chroot: Chroot) -> None:
    """Make the tree in a new folder. Raises BuildError, also where a library that something needs is not in it."""
    tree.mkdir(parents=True)
    for merged, target in _MERGED.items():
        (tree / target).mkdir(parents=True)
        (tree / merged).symlink_to(target)
    for one in parts.debs:
        # Through tar, which follows the merged folders' links; dpkg-deb would replace them.
        archive = run(["dpkg-deb", "--fsys-tarfile", one.cached()], environ=environment(0))
        run(
            ["tar", "-x", "-C", tree, "--keep-directory-symlink", "--no-same-owner"],
            environ=environment(0),
            stdin=archive,
        )
    _certificates(tree)
    _trim(tree)
    site = tree / SITE.relative_to("/")
    site.mkdir(parents=True)
    for wheel in sorted(parts.wheels, key=lambda path: path.name):
        _unzip(wheel, site)
    for name in _LEFT_OUT_OF_SITE:
        shutil.rmtree(site / name, ignore_errors=True)
    for tests in sorted(site.rglob("tests")):
        shutil.rmtree(tests, ignore_errors=True)
    for path in sorted(site.rglob("*")):
        if path.suffix in _SOURCES or _NUMPY_TESTS.search(str(path)):
            path.unlink()
    _copy_project(parts, site)
    for folder in _FOLDERS:
        (tree / folder).mkdir(parents=True, exist_ok=True)
    for name, content in sorted(parts.files.items()):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    _finish(tree, chroot)
    check(tree, chroot)
    _import_all(tree, chroot)


def _import_all(tree: Path, chroot: Chroot) -> None:
    """Start the image's own Python in the tree and import what runs. Raises BuildError naming what is missing."""
    code = f"import importlib\nfor name in {_RUN!r}: importlib.import_module(name)"
    inside = replace(chroot, root=tree, binds={})
    inside.run([str(INTERPRETER), "-I", "-B", "-c", code])
    # The engine's library as it is after stripping, and whether it has this project's arithmetic.
    library = f"ctypes.CDLL('{SITE}/llama_cpp/lib/libggml-cpu.so')"
    code = f"import ctypes; f = {library}.attested_arithmetic; f.restype = ctypes.c_char_p; print(f().decode())"
    arithmetic = inside.run([str(INTERPRETER), "-I", "-B", "-c", code]).decode().strip()
    if arithmetic != _ARITHMETIC:
        raise BuildError(f"the engine's library computes {arithmetic!r}, not {_ARITHMETIC!r}")


def _trim(tree: Path) -> None:
    kept = tree / INTERPRETER.relative_to("/")
    content = kept.read_bytes()
    for name in _LEFT_OUT:
        target = tree / name
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
    for module in _NO_MODULES:
        for path in sorted((tree / f"usr/lib/python{PYTHON}/lib-dynload").glob(f"{module}.*.so")):
            path.unlink()
    kept.parent.mkdir()
    (tree / "usr/sbin").mkdir()
    kept.write_bytes(content)
    kept.chmod(0o755)
    for folder in sorted((tree / "usr/share/doc").iterdir()):
        for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []:
            if path.name != "copyright":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _certificates(tree: Path) -> None:
    """What update-ca-certificates would write, had it a shell."""
    paths = sorted((tree / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = b"".join(path.read_bytes().rstrip(b"\n") + b"\n" for path in paths)
    (tree / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
    (tree / "etc/ssl/certs/ca-certificates.crt").write_bytes(bundle)


def _unzip(wheel: Path, site: Path) -> None:
    """What pip does with a wheel, less scripts: programs have no place here (PEP 427)."""
    with ZipFile(wheel) as archive:
        for member in archive.infolist():
            parts = PurePosixPath(member.filename).parts
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue
                parts = parts[2:]
            # RECORD has digests of files that are left out, one of which names a temporary folder of its build.
            if member.is_dir() or not parts or ".." in parts or parts[-1] == "RECORD":
                continue
            target = site.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
            if re.search(r"\.so(\.\d+)*$", target.name):
                target.chmod(0o755)


def _copy_project(parts: Parts, site: Path) -> None:
    """The project's code as it is committed: what lies around in a working tree has no place in an image."""
    for name, content in committed(parts.project, parts.commit, PROJECT).items():
        target = site / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def committed(project: Path, commit: str, paths: Sequence[str]) -> dict[str, bytes]:
    """The files at or below these paths, as they are in a commit. Raises BuildError where it has none of a path."""
    options = ["-c", "safe.directory=*", "-c", "core.autocrlf=false"]
    command: list[str | Path] = ["git", "-C", project, *options, "archive", "--format=tar", commit]
    found = {}
    with tarfile.open(fileobj=io.BytesIO(run([*command, *paths], environ=environment(0)))) as tar:
        for member in tar:
            if member.isfile():
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


def _finish(tree: Path, chroot: Chroot) -> None:
    """Links instead of copies of libraries, the loader's cache, byte code."""
    libraries = tree / SITE.relative_to("/") / "llama_cpp/lib"
    for path in sorted(libraries.glob("*.so.*.*")):
        for shorter in sorted(libraries.glob(path.name.split(".so", 1)[0] + ".so*")):
            if shorter != path and not shorter.is_symlink() and path.name.startswith(shorter.name + "."):
                shorter.unlink()
                shorter.symlink_to(path.name)
    inside = chroot.bound(tree, "/build/tree")
    inside.run(["ldconfig", "-X", "-r", "/build/tree"])
    shutil.rmtree(tree / "var/cache", ignore_errors=True)
    stripped = [str(p.relative_to(tree)) for p in sorted(libraries.glob("*.so*")) if not p.is_symlink()]
    inside.run(["strip", "--strip-unneeded", *(f"/build/tree/{name}" for name in stripped)])
    # Hashes, not times; and unchecked, as verity has checked the files already.
    command = [str(INTERPRETER), "-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash"]
    command += ["-s", "/build/tree", "-p", "/"]
    inside.run([*command, f"/build/tree/usr/lib/python{PYTHON}", f"/build/tree{SITE}"])


def check(tree: Path, chroot: Chroot) -> None:
    """Raises BuildError where there is a program but Python, a set-id bit, or a library that needs an absent one."""
    present, objects = set(), []
    for path in sorted(tree.rglob("*")):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISLNK(found.st_mode):
            continue
        if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
            raise BuildError(f"{path.relative_to(tree)} has a set-id bit")
        if path.parent.name in ("bin", "sbin") and path.name != INTERPRETER.name:
            raise BuildError(f"{path.relative_to(tree)} is a program that nothing in the image needs")
        present.add(path.name)
        if stat.S_ISREG(found.st_mode) and _is_elf(path):
            objects.append(str(path.relative_to(tree)))
    inside = chroot.bound(tree, "/build/tree")
    text = inside.run(["readelf", "-d", *(f"/build/tree/{name}" for name in objects)]).decode("utf-8", "replace")
    needed = set(re.findall(r"\(NEEDED\)\s+Shared library: \[([^\]]+)\]", text))
    if needed - present:
        raise BuildError(f"libraries are missing in the root file system: {', '.join(sorted(needed - present))}")


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def pack(tree: Path, archive: Path, *, mtime: int) -> None:
    """The tree as a tar with nothing of this machine in it: sorted, owned by root, modes 755 and 644, one time."""
    paths = sorted(tree.rglob("*"), key=lambda path: path.relative_to(tree).parts)
    with archive.open("wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            entry = tarfile.TarInfo(str(path.relative_to(tree)))
            entry.mtime = mtime
            if path.is_symlink():
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
                tar.addfile(entry)
            elif path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            else:
                entry.size = path.stat().st_size
                entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
                with path.open("rb") as content:
                    tar.addfile(entry, content)


def etc(config: bytes, version: str) -> dict[str, bytes]:
    """Files of ours in the root, by path."""
    service = f"appliance:x:{SERVICE_UID}:{SERVICE_UID}:appliance:/run/appliance:/nonexistent"
    users = f"root:x:0:0:root:/:/nonexistent\n{service}\n"
    return {
        "etc/passwd": users.encode(),
        "etc/group": f"root:x:0:\nappliance:x:{SERVICE_UID}:\n".encode(),
        "etc/hosts": b"127.0.0.1 localhost\n::1 localhost\n",
        "etc/os-release": f'ID=attested-inference\nNAME="Attested inference"\nVERSION_ID={version}\n'.encode(),
        "etc/appliance/appliance.toml": config,
    }
