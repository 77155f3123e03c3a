"""Have the locked inputs at hand: from the cache by digest, else from mirror and index. Nothing unlocked comes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from image.build.debs import Apt
from image.build.errors import BuildError
from image.build.lock import CACHE, Input, Lock, is_cached, keep, sha256_file
from image.build.wheels import Pip


def fetch(
    lock: Lock, inputs: Sequence[Input], *, environ: Mapping[str, str], say: Callable[[str], None], cache: Path = CACHE
) -> None:
    """Make sure that each input is in the cache with its very bytes. Raises BuildError naming all that are missing."""
    absent = [one for one in inputs if not is_cached(one, cache)]
    if not absent:
        return
    say(f"Fetching {len(absent)} of {len(inputs)} locked inputs ({sum(one.size for one in absent) >> 20} MiB)")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "files"
        found: dict[str, Path] = {}
        debs = [one for one in absent if one.kind == "deb"]
        if debs:
            apt = Apt(folder=Path(scratch) / "apt", environ=environ)
            apt.update(lock.suite)
            found.update(apt.download([(one.name, one.version, one.file) for one in debs], folder))
        packages = [one for one in absent if one.kind in ("wheel", "sdist")]
        found.update(Pip(environ=environ).fetch(packages, folder))
        for one in absent:
            path = found.get(one.file)
            if path is not None and sha256_file(path) == one.sha256:
                keep(path, one, cache)
    missing = [one for one in absent if not is_cached(one, cache)]
    if missing:
        names = "\n".join(f"  {one.kind} {one.name} {one.version} sha256:{one.sha256.hex()}" for one in missing)
        raise BuildError(
            f"{len(missing)} locked inputs are neither in image/cache/ nor to be had from the mirror:\n{names}\n"
            "Put the files there, from whoever built this lock before, or renew it with make image-relock: "
            "that makes another image with another measurement"
        )
