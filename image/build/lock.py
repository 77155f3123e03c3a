"""image/lock.toml: every downloaded input of the image by name, version and SHA-256. Nothing else enters a build.

version = 1
suite = "trixie"                    # Debian's release that the packages are of
source_date_epoch = 1764374400      # the one time in all outputs, seconds since 1970

[[input]]
kind = "deb"                        # deb, dsc (any file of a Debian source package), wheel, sdist
name = "busybox-static"
version = "1:1.37.0-6"
file = "busybox-static_1.37.0-6_amd64.deb"
size = 1000000                      # bytes
sha256 = "<64 hex>"
groups = ["tools"]                  # what it is for: a build step takes the inputs of its groups

The order in the file is that of (kind, name, version, file), so that a renewed lock has a readable difference.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from image.build.errors import BuildError

LOCK: Final = Path(__file__).parents[1] / "lock.toml"
CACHE: Final = Path(__file__).parents[1] / "cache"
KINDS: Final = ("deb", "dsc", "sdist", "wheel")
_VERSION: Final = 1
_HEX = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+~_%:!-]{0,254}")
_WORD = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,128}")
_KEYS: Final = ("kind", "name", "version", "file", "size", "sha256", "groups")
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One file: `kind` is in KINDS, `size` in bytes, `sha256` 32 bytes, `groups` sorted and not empty."""

    kind: str
    name: str
    version: str
    file: str
    size: int
    sha256: bytes
    groups: tuple[str, ...]

    def cached(self, cache: Path = CACHE) -> Path:
        """Where it is kept: in a folder named by its digest, under its own name, which pip and dpkg insist on."""
        return cache / self.sha256.hex() / self.file


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """`source_date_epoch` in seconds since 1970. Inputs are in the file's order."""

    suite: str
    source_date_epoch: int
    inputs: tuple[Input, ...]

    def group(self, *names: str) -> tuple[Input, ...]:
        """The inputs of any of these groups. Raises BuildError where one has none, as if misspelt."""
        for name in names:
            if not any(name in one.groups for one in self.inputs):
                raise BuildError(f"image/lock.toml has no input of the group {name!r}: run make image-relock")
        return tuple(one for one in self.inputs if set(names) & set(one.groups))

    def find(self, kind: str, name: str) -> Input:
        """The one input of that name. Raises BuildError."""
        found = [one for one in self.inputs if (one.kind, one.name) == (kind, name)]
        if len(found) != 1:
            raise BuildError(f"image/lock.toml has {len(found)} inputs of kind {kind} named {name!r}, not one")
        return found[0]


def digest(inputs: Iterable[Input]) -> bytes:
    """32 bytes that name this set of inputs, in any order: what is made of them alone may be kept under it."""
    lines = sorted(f"{one.kind} {one.file} {one.sha256.hex()}" for one in inputs)
    return hashlib.sha256("\n".join(lines).encode()).digest()


def load(path: Path = LOCK) -> Lock:
    """Read a lock. Raises BuildError."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BuildError(f"{path.name}: {error.strerror}: run make image-relock") from error


def parse(text: str) -> Lock:
    """Raises BuildError naming the entry at fault: an unknown key, a digest that is none, a file twice."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"image/lock.toml is not TOML: {error}") from error
    match table:
        case {
            "version": int(version),
            "suite": str(suite),
            "source_date_epoch": int(epoch),
            "input": list(entries),
        } if len(table) == 4 and version == _VERSION and _WORD.fullmatch(suite) and epoch > 0:
            inputs = tuple(_input(entry, number) for number, entry in enumerate(entries))
        case _:
            raise BuildError(f"image/lock.toml: expected version = {_VERSION}, suite, source_date_epoch and [[input]]")
    for key in ("file", "sha256"):
        values = [getattr(one, key) for one in inputs]
        if len(set(values)) != len(values):
            raise BuildError(f"image/lock.toml: two inputs with one {key}")
    return Lock(suite=suite, source_date_epoch=epoch, inputs=inputs)


def _input(entry: object, number: int) -> Input:
    if not isinstance(entry, dict) or set(entry) != set(_KEYS):
        raise BuildError(f"image/lock.toml: input {number}: its keys are not exactly {', '.join(_KEYS)}")
    match entry:
        case {
            "kind": str(kind),
            "name": str(name),
            "version": str(version),
            "file": str(file),
            "size": int(size),
            "sha256": str(sha256),
            "groups": [str(), *_] as groups,
        } if (
            kind in KINDS
            and _PRINTABLE.fullmatch(name)
            and _PRINTABLE.fullmatch(version)
            and _FILE.fullmatch(file)
            and not isinstance(size, bool)
            and size > 0
            and _HEX.fullmatch(sha256)
            and all(isinstance(group, str) and _WORD.fullmatch(group) for group in groups)
        ):
            return Input(
                kind=kind,
                name=name,
                version=version,
                file=file,
                size=size,
                sha256=bytes.fromhex(sha256),
                groups=tuple(sorted(set(groups))),
            )
        case _:
            raise BuildError(f"image/lock.toml: input {number} ({entry.get('name')!r}): a value is not of its form")


def render(lock: Lock) -> str:
    """The file's text; `parse` reads it back to an equal lock. The same inputs give the same text."""
    lines = [
        "# Written by make image-relock. Every input of the image: a build takes these bytes or none.",
        f"version = {_VERSION}",
        f'suite = "{lock.suite}"',
        f"source_date_epoch = {lock.source_date_epoch}",
    ]
    for one in sorted(lock.inputs, key=lambda one: (one.kind, one.name, one.version, one.file)):
        groups = ", ".join(f'"{group}"' for group in one.groups)
        lines += [
            "",
            "[[input]]",
            f'kind = "{one.kind}"',
            f'name = "{one.name}"',
            f'version = "{one.version}"',
            f'file = "{one.file}"',
            f"size = {one.size}",
            f'sha256 = "{one.sha256.hex()}"',
            f"groups = [{groups}]",
        ]
    return "\n".join(lines) + "\n"


def replace_groups(lock: Lock, groups: Sequence[str], inputs: Iterable[Input]) -> Lock:
    """The lock with these groups renewed: `inputs` is all that they have now, other groups keep what they had.

    A file of several groups is one input. Raises BuildError where a file's bytes differ between two groups.
    """
    merged: dict[str, Input] = {}
    kept = (_without(one, groups) for one in lock.inputs)
    for one in (*(one for one in kept if one is not None), *inputs):
        before = merged.get(one.file)
        if before is not None and before.sha256 != one.sha256:
            raise BuildError(f"{one.file} has other bytes for {one.groups} than for {before.groups}: renew them all")
        held = before.groups if before is not None else ()
        merged[one.file] = _with_groups(one, (*held, *one.groups))
    ordered = sorted(merged.values(), key=lambda one: (one.kind, one.name, one.version, one.file))
    return Lock(suite=lock.suite, source_date_epoch=lock.source_date_epoch, inputs=tuple(ordered))


def _without(one: Input, groups: Sequence[str]) -> Input | None:
    left = tuple(group for group in one.groups if group not in groups)
    return _with_groups(one, left) if left else None


def _with_groups(one: Input, groups: Iterable[str]) -> Input:
    return Input(
        kind=one.kind,
        name=one.name,
        version=one.version,
        file=one.file,
        size=one.size,
        sha256=one.sha256,
        groups=tuple(sorted(set(groups))),
    )


def describe(path: Path, *, kind: str, name: str, version: str, groups: Sequence[str]) -> Input:
    """An input from a downloaded file: its size and digest are those of its bytes. Raises OSError."""
    return Input(
        kind=kind,
        name=name,
        version=version,
        file=path.name,
        size=path.stat().st_size,
        sha256=sha256_file(path),
        groups=tuple(sorted(set(groups))),
    )


def sha256_file(path: Path) -> bytes:
    """32 bytes. Raises OSError."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.digest()


def is_cached(one: Input, cache: Path = CACHE) -> bool:
    """Whether the cache has exactly these bytes; a file with others is removed."""
    path = one.cached(cache)
    if not path.is_file():
        return False
    if path.stat().st_size == one.size and sha256_file(path) == one.sha256:
        return True
    path.unlink()
    return False


def keep(path: Path, one: Input, cache: Path = CACHE) -> None:
    """Put a file that was checked into the cache: by a rename, so that a killed run leaves none in part."""
    target = one.cached(cache)
    if is_cached(one, cache):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.part")
    shutil.copyfile(path, partial)
    partial.rename(target)
