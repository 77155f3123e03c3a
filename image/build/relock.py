"""Renew image/lock.toml: resolve what contents.py names, fetch it, write down what came."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from image.build import contents
from image.build.debs import Apt, Package
from image.build.errors import BuildError
from image.build.lock import Input, Lock, describe, is_cached, keep, replace_groups
from image.build.wheels import Pip, name_and_version

GROUPS = ("build", "kernel", "root", "tools", "wheels")
_KERNEL = re.compile(r"linux-image-6\.12\.[0-9]+\+deb13-cloud-amd64")


def relock(before: Lock, *, project: Path, environ: Mapping[str, str]) -> Lock:
    """The lock with the image's own groups renewed; other groups stay. What was fetched is in the cache.

    Raises BuildError.
    """
    with tempfile.TemporaryDirectory() as scratch:
        apt = Apt(folder=Path(scratch) / "apt", environ=environ)
        apt.update(before.suite)
        inputs = _debs(apt, before, Path(scratch) / "debs")
        pip = Pip(environ=environ)
        constraints = project / "constraints.txt"
        pins = _pins(constraints)
        runtime = pip.resolve(contents.WHEELS, constraints, Path(scratch) / "wheels")
        build = pip.resolve(contents.BUILD_WHEELS, None, Path(scratch) / "build")
        sources = pip.sdists([f"{name}=={pins[name]}" for name in contents.SDISTS], Path(scratch) / "sdists")
        for paths, kind, group in (
            (runtime, "wheel", "wheels"),
            (build, "wheel", "build"),
            (sources, "sdist", "build"),
        ):
            inputs += [_keep(path, kind, *name_and_version(path), (group,)) for path in paths]
    return replace_groups(before, GROUPS, inputs)


def _debs(apt: Apt, before: Lock, folder: Path) -> list[Input]:
    kernels = [name for name in apt.depends(contents.KERNEL_OF) if _KERNEL.fullmatch(name)]
    if len(kernels) != 1:
        raise BuildError(f"{contents.KERNEL_OF} depends on {len(kernels)} kernels of the expected name")
    wanted: dict[Package, set[str]] = {}
    for group, packages in (
        ("tools", apt.closure(contents.TOOLS)),
        ("root", apt.alone(contents.ROOT)),
        ("kernel", apt.alone(kernels)),
    ):
        for package in packages:
            wanted.setdefault(package, set()).add(group)
    # A file of the same name and version that apt checked before needs no second download.
    found = {one.file: one.cached() for one in before.inputs if one.kind == "deb" and is_cached(one)}
    found |= apt.download([(o.name, o.version, o.file) for o in wanted if o.file not in found], folder)
    missing = sorted(one.file for one in wanted if one.file not in found)
    if missing:
        raise BuildError(f"the mirror's index has it, but it cannot be fetched: {', '.join(missing)}")
    return [_keep(found[p.file], "deb", p.name, p.version, tuple(groups)) for p, groups in wanted.items()]


def _keep(path: Path, kind: str, name: str, version: str, groups: tuple[str, ...]) -> Input:
    one = describe(path, kind=kind, name=name, version=version, groups=groups)
    keep(path, one)
    return one


def _pins(constraints: Path) -> dict[str, str]:
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip().lower().replace("_", "-"): version.strip() for name, version in pairs}
