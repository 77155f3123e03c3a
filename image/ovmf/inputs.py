"""The locked inputs of the firmware: edk2's source as Debian has it, and the tools that build it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image.build import fetch
from image.build.debs import Apt, plain_name
from image.build.errors import BuildError
from image.build.lock import CACHE, Input, Lock, describe, is_cached, keep
from image.ovmf.firmware import SOURCE, SOURCE_PACKAGE, TOOL_PACKAGES, TOOLS

_APT_HELPER = "/usr/lib/apt/apt-helper"
_SOURCE_URI = re.compile(r"^'([^']+)' (\S+_(\S+?)\.(?:orig|debian)\.tar\.\w+) \d+ SHA256:([0-9a-f]{64})", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One archive of a source package, as the signed index has it."""

    uri: str
    file: str
    version: str
    sha256: bytes


class SourceApt(Apt):
    """apt for source packages. It takes their archives alone: the index has the digests that a .dsc would repeat."""

    __slots__ = ()

    def archives(self, package: str) -> tuple[SourceFile, ...]:
        """The newest version's upstream and Debian archive, in this order. Raises BuildError."""
        return parse_source_uris(self._apt("apt-get", "source", "--print-uris", "-qq", package))

    def take(self, archive: SourceFile, to: Path) -> Path:
        """Fetch one; apt checks its digest. Raises BuildError."""
        path = to / archive.file
        self._apt(_APT_HELPER, "download-file", archive.uri, str(path), f"SHA256:{archive.sha256.hex()}")
        return path


def parse_source_uris(text: str) -> tuple[SourceFile, ...]:
    """What `apt-get source --print-uris` prints. Raises BuildError where it is not one upstream and one Debian archive.

    Both have the version of Debian's package: which upstream archive it takes is part of it.
    """
    found = [(uri, plain_name(file), bytes.fromhex(digest)) for uri, file, _, digest in _SOURCE_URI.findall(text)]
    kinds = [re.search(r"\.(orig|debian)\.tar\.", file) for _, file, _ in found]
    if sorted(kind[1] for kind in kinds if kind) != ["debian", "orig"]:
        raise BuildError("apt names no source package of one upstream and one Debian archive")
    version = next(file.split("_")[1].split(".debian.")[0] for _, file, _ in found if ".debian." in file)
    files = [SourceFile(uri=uri, file=file, version=version, sha256=digest) for uri, file, digest in found]
    return tuple(sorted(files, key=lambda one: ".debian." in one.file))


def renew(suite: str, *, environ: Mapping[str, str], cache: Path = CACHE) -> tuple[Input, ...]:
    """What the firmware's groups are now; the files are in the cache. Raises BuildError."""
    with tempfile.TemporaryDirectory() as scratch:
        apt = SourceApt(folder=Path(scratch) / "apt", environ=environ)
        apt.update(suite)
        inputs = []
        for archive in apt.archives(SOURCE_PACKAGE):
            path = apt.take(archive, Path(scratch))
            one = describe(path, kind="dsc", name=SOURCE_PACKAGE, version=archive.version, groups=(SOURCE,))
            inputs.append((path, one))
        packages = apt.closure(TOOL_PACKAGES)
        found = apt.download([(one.name, one.version, one.file) for one in packages], Path(scratch) / "debs")
        for package in packages:
            if package.file not in found:
                raise BuildError(f"the mirror's index has it, but it cannot be fetched: {package.file}")
            path = found[package.file]
            inputs.append(
                (path, describe(path, kind="deb", name=package.name, version=package.version, groups=(TOOLS,)))
            )
        for path, one in inputs:
            keep(path, one, cache)
    return tuple(one for _, one in inputs)


def have(lock: Lock, *, environ: Mapping[str, str], say: Callable[[str], None], cache: Path = CACHE) -> None:
    """Make sure that all inputs of the firmware are in the cache. Raises BuildError naming what is not to be had."""
    absent = [one for one in lock.group(SOURCE) if not is_cached(one, cache)]
    if absent:
        say(f"Fetching the source of {SOURCE_PACKAGE} ({sum(one.size for one in absent) >> 20} MiB)")
        _fetch_source(lock, absent, environ, cache)
    fetch.fetch(lock, lock.group(TOOLS), environ=environ, say=say, cache=cache)


def _fetch_source(lock: Lock, absent: Sequence[Input], environ: Mapping[str, str], cache: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        apt = SourceApt(folder=Path(scratch) / "apt", environ=environ)
        apt.update(lock.suite)
        offered = {one.sha256: one for one in apt.archives(SOURCE_PACKAGE)}
        for one in absent:
            if one.sha256 not in offered:
                raise BuildError(
                    f"{one.file} (sha256:{one.sha256.hex()}) is neither in image/cache/ nor on the mirror any more: "
                    "put it there, or renew the lock with make image-relock, which makes other firmware"
                )
            keep(apt.take(offered[one.sha256], Path(scratch)), one, cache)
