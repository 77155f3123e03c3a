"""Python packages through pip, from the index that the machine's pip is configured for, for the image's own Python."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from image.build.errors import BuildError
from image.build.lock import Input
from image.build.run import run

PYTHON = "3.13"
_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")
_SDIST = re.compile(r"(.+)-([^-]+)\.tar\.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pip:
    """`environ` is what pip gets: its configuration may be in it."""

    environ: Mapping[str, str]

    def resolve(self, requirements: Sequence[str], constraints: Path | None, to: Path) -> tuple[Path, ...]:
        """Fetch wheels for the image's Python for these and all they need. Raises BuildError."""
        arguments = [*requirements, *_target()]
        return self._download(arguments if constraints is None else ["-c", str(constraints), *arguments], to)

    def sdists(self, requirements: Sequence[str], to: Path) -> tuple[Path, ...]:
        """Fetch these as source, without what they need. Raises BuildError."""
        return self._download(["--no-deps", "--no-binary", ",".join(_names(requirements)), *requirements], to)

    def fetch(self, wanted: Iterable[Input], to: Path) -> Mapping[str, Path]:
        """Fetch locked files by name, version and digest: pip checks the digest too. Absent: not to be had."""
        for batch in batches(wanted):
            try:
                self._fetch(batch, to)
            except BuildError:
                for one in batch:  # one of them is not to be had: the others are still wanted
                    with contextlib.suppress(BuildError):
                        self._fetch([one], to)
        return {path.name: path for path in sorted(to.iterdir())} if to.is_dir() else {}

    def _fetch(self, batch: Sequence[Input], to: Path) -> None:
        lines = [f"{one.name}=={one.version} --hash=sha256:{one.sha256.hex()}\n" for one in batch]
        kind = ["--no-binary", ",".join(one.name for one in batch)] if batch[0].kind == "sdist" else _target()
        with tempfile.TemporaryDirectory() as folder:
            requirements = Path(folder) / "requirements.txt"
            requirements.write_text("".join(lines), encoding="utf-8")
            self._download(["--no-deps", "--require-hashes", "-r", str(requirements), *kind], to)

    def _download(self, arguments: Sequence[str], to: Path) -> tuple[Path, ...]:
        to.mkdir(parents=True, exist_ok=True)
        # PYTHON* of the build's environment are not for pip: it runs outside of the image.
        run([sys.executable, "-m", "pip", "download", "-q", "-d", to, *arguments], environ=self.environ)
        return tuple(sorted(to.iterdir()))


def batches(wanted: Iterable[Input]) -> list[list[Input]]:
    """Groups for one run of pip each: of one kind, and no name twice, as a build may need another version of it."""
    made: list[list[Input]] = []
    for one in wanted:
        for batch in made:
            if batch[0].kind == one.kind and all(other.name != one.name for other in batch):
                batch.append(one)
                break
        else:
            made.append([one])
    return made


def _names(requirements: Sequence[str]) -> list[str]:
    return [requirement.split("==", 1)[0] for requirement in requirements]


def _target() -> list[str]:
    parts = ["--only-binary", ":all:", "--python-version", PYTHON, "--implementation", "cp"]
    parts += [part for abi in ("cp313", "abi3", "none") for part in ("--abi", abi)]
    return parts + [part for tag in _TAGS for part in ("--platform", f"{tag}_x86_64")]


def name_and_version(path: Path) -> tuple[str, str]:
    """Of a wheel or source archive. Raises BuildError."""
    if path.suffix == ".whl":
        fields = wheel_metadata(path)
        return fields["name"].lower().replace("_", "-"), fields["version"]
    found = _SDIST.fullmatch(path.name)
    if found is None:
        raise BuildError(f"{path.name} is neither a wheel nor a source archive")
    return found[1].lower().replace("_", "-"), found[2]


def wheel_metadata(path: Path) -> Mapping[str, str]:
    """Name, version and licence as a wheel tells them (Core Metadata 2.4); the licence is "" where none is told."""
    with ZipFile(path) as archive:
        (member,) = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        fields = HeaderParser().parsestr(archive.read(member).decode("utf-8", "replace"))
    classifiers = [c.rsplit("::", 1)[-1].strip() for c in fields.get_all("Classifier", []) if c.startswith("License")]
    first_line = (fields.get("License") or "").strip().split("\n", 1)[0]
    licence = fields.get("License-Expression") or first_line or ", ".join(classifiers)
    return {"name": str(fields["Name"]), "version": str(fields["Version"]), "licence": licence}
