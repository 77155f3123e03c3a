"""Debian packages through apt with a configuration of its own: the machine's mirror, another release.

The machine may run any release of Debian. Its mirror is read from its apt configuration; packages are checked by apt
against the signed index, and then against the lock.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from image.build.errors import BuildError
from image.build.run import run

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHITECTURE = "amd64"
_URI = re.compile(r"^'([^']+)' (\S+) (\d+) (?:SHA256:([0-9a-f]{64}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package as the index has it; `file` is its name in the lock, without characters that need quoting."""

    name: str
    version: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Apt:
    """apt with state in `folder`. `environ` is what its programs get (a proxy may be in it)."""

    folder: Path
    environ: Mapping[str, str]

    def update(self, suite: str) -> None:
        """Fetch the signed indexes of `suite`, its updates and its security updates. Raises BuildError."""
        for part in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").write_text("", encoding="utf-8")
        if not KEYRING.is_file():
            raise BuildError(f"{KEYRING} is missing: apt-get install debian-archive-keyring")
        (self.folder / "sources.list").write_text("\n".join(self._sources(suite)) + "\n", encoding="utf-8")
        self._apt("apt-get", "update", "-qq", "-o", "APT::Update::Error-Mode=any")

    def closure(self, names: Sequence[str]) -> tuple[Package, ...]:
        """These packages and all they depend on, for a system where nothing is installed yet. Raises BuildError."""
        text = self._apt("apt-get", "install", "--print-uris", "-qq", "-y", *names)
        return self._printed(text)

    def alone(self, names: Sequence[str]) -> tuple[Package, ...]:
        """Just these packages, in the newest version. Raises BuildError."""
        folder = self.folder / "cache/archives/partial"
        return self._printed(self._apt("apt-get", "download", "--print-uris", "-qq", *names, cwd=folder))

    def depends(self, name: str) -> tuple[str, ...]:
        """What the package directly depends on, by name."""
        text = self._apt("apt-cache", "depends", "--no-recommends", "--no-suggests", "--no-enhances", name)
        return tuple(line.split(":", 1)[1].strip() for line in text.splitlines() if line.strip().startswith("Depends:"))

    def download(self, wanted: Iterable[tuple[str, str, str]], to: Path) -> Mapping[str, Path]:
        """Fetch (name, version, file) into `to`; the result maps `file` to what was fetched. Absent: not to be had."""
        to.mkdir(parents=True, exist_ok=True)
        wanted = list(wanted)
        known = self._known(name for name, _, _ in wanted)
        available = [one for one in wanted if one[:2] in known]
        if available:
            arguments = [f"{name}={version}" for name, version, _ in available]
            self._apt("apt-get", "download", "-qq", *arguments, cwd=to)
        found: dict[str, Path] = {}
        for path in sorted(to.glob("*.deb")):
            plain = path.with_name(plain_name(path.name))
            if plain != path:
                path.rename(plain)
            found[plain.name] = plain
        return {file: found[file] for _, _, file in wanted if file in found}

    def source(self, name: str, to: Path) -> tuple[str, tuple[Path, ...]]:
        """Version and files (.dsc and what it names) of a source package, fetched into `to`. Raises BuildError."""
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir(parents=True)
        self._apt("apt-get", "source", "--download-only", "-qq", name, cwd=to)
        files = tuple(sorted(to.iterdir()))
        (dsc,) = [path for path in files if path.suffix == ".dsc"]
        found = re.search(r"^Version: (\S+)$", dsc.read_text(encoding="utf-8"), re.MULTILINE)
        if found is None:
            raise BuildError(f"{dsc.name} tells no version")
        return found[1], files

    def _known(self, names: Iterable[str]) -> frozenset[tuple[str, str]]:
        """Which (name, version) the indexes have, of packages with these names."""
        text = self._apt("apt-cache", "madison", *names)
        rows = (line.split("|") for line in text.splitlines() if line.count("|") == 2)
        return frozenset((name.strip(), version.strip()) for name, version, _ in rows)

    def _printed(self, text: str) -> tuple[Package, ...]:
        packages = []
        for line in text.splitlines():
            found = _URI.match(line)
            if found is None:
                continue
            name, version, architecture = unquote(found[2]).removesuffix(".deb").split("_")
            file = f"{name}_{plain_name(version)}_{architecture}.deb"
            packages.append(Package(name=name, version=version, file=file))
        if not packages:
            raise BuildError("apt named no package to fetch")
        return tuple(sorted(packages, key=lambda one: one.name))

    def _apt(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        settings = {
            "Dir::State": self.folder / "state",
            "Dir::State::status": self.folder / "status",
            "Dir::Cache": self.folder / "cache",
            "Dir::Etc::sourcelist": self.folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": self.folder / "etc/preferences.d",
            "APT::Architecture": ARCHITECTURE,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "Debug::NoLocking": "true",
        }
        options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
        return run([program, *options, *arguments], environ=self.environ, cwd=cwd).decode()

    def _sources(self, suite: str) -> list[str]:
        """The machine's own mirrors of Debian, for another release."""
        text = run(
            ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(COMPONENT)|$(CODENAME)|$(REPO_URI)"],
            environ=self.environ,
        ).decode()
        mirrors: dict[bool, str] = {}
        for line in text.splitlines():
            origin, component, codename, uri = line.split("|", 3)
            if (origin, component) == ("Debian", "main"):
                mirrors.setdefault("security" in codename, uri)
        if False not in mirrors:
            raise BuildError("this machine's apt configuration names no mirror of Debian's main: run apt-get update")
        options = f"[signed-by={KEYRING}]"
        lines = [f"{options} {mirrors[False]} {suite} main", f"{options} {mirrors[False]} {suite}-updates main"]
        if True in mirrors:
            lines.append(f"{options} {mirrors[True]} {suite}-security main")
        return [f"{kind} {line}" for line in lines for kind in ("deb", "deb-src")]


def plain_name(name: str) -> str:
    """A package's file name with its epoch spelt in letters that need no quoting anywhere."""
    return unquote(name).replace(":", "%3a")
