"""Build the firmware from cached inputs, or find that it is built already."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from image.build import chroot
from image.build.chroot import Chroot
from image.build.errors import BuildError
from image.build.lock import CACHE, Input, Lock
from image.ovmf.firmware import FIRMWARES, SOURCE, TOOLS, key, recipe

CHROOTS = Path("build/image-tools")
_MANIFEST = "firmware.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """`path` is the firmware, `sha256` of its bytes, `key` that of the build (firmware.key)."""

    path: Path
    sha256: bytes
    key: str


def build(lock: Lock, out: Path, *, jobs: int, say: Callable[[str], None], cache: Path = CACHE) -> tuple[Built, ...]:
    """All firmware into `out`; what is there already under the same key, with the same bytes, is not built again.

    Raises BuildError. Inputs must be cached.
    """
    inputs = lock.group(SOURCE, TOOLS)
    keys = {one.file: key(one, inputs, recipe(), lock.source_date_epoch) for one in FIRMWARES}
    wanted = [one for one in FIRMWARES if not is_built(out, one.file, keys[one.file])]
    if wanted:
        out.mkdir(parents=True, exist_ok=True)
        say(f"Preparing the tools ({len(lock.group(TOOLS))} packages)")
        tools = chroot.prepare(lock.group(TOOLS), tools=CHROOTS, source_date_epoch=lock.source_date_epoch)
        with tempfile.TemporaryDirectory(prefix="ovmf-") as scratch:
            inside = tools.bound(Path(scratch), "/build")
            _prepare(inside, Path(scratch), lock, cache)
            for one in wanted:
                say(f"Building {one.file} ({one.purpose})")
                inside.run(["bash", "/build/build.sh", str(jobs), one.platform, *one.defines])
                _take(Path(scratch) / "edk2/Build" / one.folder / "RELEASE_GCC5/FV/OVMF.fd", out / one.file)
        write_manifest(out, keys)
    return tuple(Built(path=out / one.file, sha256=_sha256(out / one.file), key=keys[one.file]) for one in FIRMWARES)


def check(lock: Lock, *, jobs: int, say: Callable[[str], None], cache: Path = CACHE) -> tuple[bytes, ...]:
    """Build everything twice in different folders; SHA-256 of each, in order. Raises BuildError on a difference."""
    found: list[tuple[bytes, ...]] = []
    for number in (1, 2):
        with tempfile.TemporaryDirectory(prefix=f"ovmf-check-{'x' * number}-") as scratch:
            say(f"Build {number} of 2")
            found.append(tuple(one.sha256 for one in build(lock, Path(scratch), jobs=jobs, say=say, cache=cache)))
    different = [one.file for one, *two in zip(FIRMWARES, *found, strict=True) if len(set(two)) != 1]
    if different:
        raise BuildError(f"two builds differ: {', '.join(different)}")
    return found[0]


def _prepare(inside: Chroot, folder: Path, lock: Lock, cache: Path) -> None:
    """Put our files and the source into `folder`, which is /build inside."""
    for name, content in recipe().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    upstream, debian = archives(lock.group(SOURCE))
    for archive in (upstream, debian):
        shutil.copyfile(archive.cached(cache), folder / archive.file)
    inside.run(["bash", "/build/source.sh", f"/build/{upstream.file}", f"/build/{debian.file}"])


def archives(inputs: Sequence[Input]) -> tuple[Input, Input]:
    """Upstream's and Debian's archive. Raises BuildError."""
    upstream = [one for one in inputs if ".orig.tar." in one.file]
    debian = [one for one in inputs if ".debian.tar." in one.file]
    if len(inputs) != 2 or len(upstream) != 1 or len(debian) != 1:
        raise BuildError(f"image/lock.toml: the group {SOURCE!r} is not one upstream and one Debian archive")
    return upstream[0], debian[0]


def _take(made: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(made, partial)
    except OSError as error:
        raise BuildError(f"{target.name} was built, but left no firmware: {error.strerror}") from error
    partial.rename(target)


def is_built(out: Path, file: str, wanted: str) -> bool:
    """Whether `out` has this firmware from this very recipe, unchanged since."""
    try:
        noted = json.loads((out / _MANIFEST).read_text(encoding="utf-8"))[file]
        return bool(noted == {"key": wanted, "sha256": _sha256(out / file).hex()})
    except (OSError, ValueError, KeyError):
        return False


def write_manifest(out: Path, keys: Mapping[str, str]) -> None:
    """Note of which recipe and which bytes the firmware in `out` is: `keys` by file. Raises OSError."""
    noted = {file: {"key": one, "sha256": _sha256(out / file).hex()} for file, one in sorted(keys.items())}
    (out / _MANIFEST).write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
