"""A file system as a list of entries: what archives of the image, and of containers and enclaves, are written from.

Owners, modes and contents are those of the entries; times are one given time, inode numbers are places in the list.
Nothing of the machine's own files (owner, umask, order in the folder) gets in.
"""

from __future__ import annotations

import dataclasses
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from image.build.errors import BuildError

_CHUNK_BYTES = 1 << 20
_MODES = {tarfile.DIRTYPE: stat.S_IFDIR, tarfile.SYMTYPE: stat.S_IFLNK, tarfile.REGTYPE: stat.S_IFREG}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name, relative and without dots. `mode` with the kind of file (stat.S_IF*).

    A regular file has `size` bytes from `offset` of `source`, or `content`; a link its target as `content`; a character
    device its numbers as `device`.
    """

    name: str
    mode: int
    uid: int = 0
    gid: int = 0
    content: bytes = b""
    source: Path | None = None
    offset: int = 0
    size: int = 0
    device: tuple[int, int] = (0, 0)

    def chunks(self) -> Iterator[bytes]:
        """The content in pieces, `length` bytes in all. Raises BuildError on a file that has become shorter."""
        if self.source is None:
            yield self.content
            return
        with self.source.open("rb") as file:
            file.seek(self.offset)
            left = self.size
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise BuildError(f"{self.source.name}: shorter than it was")
                left -= len(chunk)
                yield chunk

    @property
    def length(self) -> int:
        """Bytes of content."""
        return len(self.content) if self.source is None else self.size


def folder(name: str, permissions: int = 0o755, owner: int = 0) -> Entry:
    return Entry(name=name, mode=stat.S_IFDIR | permissions, uid=owner, gid=owner)


def text(name: str, content: bytes, permissions: int = 0o644) -> Entry:
    return Entry(name=name, mode=stat.S_IFREG | permissions, content=content)


def link(name: str, target: str) -> Entry:
    return Entry(name=name, mode=stat.S_IFLNK | 0o777, content=target.encode())


def character_device(name: str, major: int, minor: int, permissions: int = 0o600) -> Entry:
    return Entry(name=name, mode=stat.S_IFCHR | permissions, device=(major, minor))


def file(name: str, source: Path, permissions: int = 0o444) -> Entry:
    """A file of this machine: its content alone. Raises OSError."""
    return Entry(name=name, mode=stat.S_IFREG | permissions, source=source, size=source.stat().st_size)


def moved(entry: Entry, name: str) -> Entry:
    """The same under another name."""
    return dataclasses.replace(entry, name=name)


def read_folder(path: Path, *, owner: int = 0) -> tuple[Entry, ...]:
    """The files and folders below a folder of this machine: contents are theirs, owners and modes are given.

    Raises BuildError on links and other kinds, OSError.
    """
    found = []
    for below in sorted(path.rglob("*")):
        name = below.relative_to(path).as_posix()
        if below.is_symlink() or not (below.is_dir() or below.is_file()):
            raise BuildError(f"{name} is neither file nor folder")
        one = folder(name) if below.is_dir() else file(name, below)
        found.append(dataclasses.replace(one, uid=owner, gid=owner))
    return ordered(found)


def read_tar(path: Path) -> tuple[Entry, ...]:
    """The entries of an uncompressed tar archive; contents stay in the file. Raises BuildError on other kinds.

    Hard links become files of their own: both archives made from these have no other way to tell them.
    """
    found: dict[str, Entry] = {}
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            name = _plain(member.name)
            if name is None:
                continue
            if member.islnk():
                target = found.get(_plain(member.linkname) or "")
                if target is None:
                    raise BuildError(f"{path.name}: {name} is a hard link to what does not come before it")
                found[name] = moved(target, name)
                continue
            if member.type not in _MODES:
                raise BuildError(f"{path.name}: {name} is neither file, folder nor link")
            found[name] = Entry(
                name=name,
                mode=_MODES[member.type] | member.mode & 0o7777,
                uid=member.uid,
                gid=member.gid,
                content=member.linkname.encode() if member.issym() else b"",
                source=path if member.isreg() else None,
                offset=member.offset_data if member.isreg() else 0,
                size=member.size if member.isreg() else 0,
            )
    return ordered(found.values())


def ordered(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """By name, so that a folder comes before what is in it. A later entry of a name replaces an earlier one.

    Raises BuildError where an entry's folder is missing, or is none: unpackers differ on what they would do then.
    """
    by_name = {entry.name: entry for entry in entries}
    for name in by_name:
        parent = str(PurePosixPath(name).parent)
        if _plain(name) != name:
            raise BuildError(f"{name!r} is no relative name without dots")
        if parent != "." and (parent not in by_name or not stat.S_ISDIR(by_name[parent].mode)):
            raise BuildError(f"{name}: {parent} is no folder of the archive")
    return tuple(by_name[name] for name in sorted(by_name, key=lambda name: name.split("/")))


def write_tar(entries: Sequence[Entry], out: BinaryIO, *, epoch: int) -> None:
    """POSIX (pax) tar, headers only where ustar has no room. Raises BuildError."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            archive.addfile(_member(entry, epoch), _Reader(entry) if stat.S_ISREG(entry.mode) else None)


def _member(entry: Entry, epoch: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(entry.name)
    member.mode, member.uid, member.gid, member.mtime = stat.S_IMODE(entry.mode), entry.uid, entry.gid, epoch
    match stat.S_IFMT(entry.mode):
        case stat.S_IFDIR:
            member.type = tarfile.DIRTYPE
        case stat.S_IFLNK:
            member.type, member.linkname = tarfile.SYMTYPE, entry.content.decode()
        case stat.S_IFREG:
            member.size = entry.length
        case _:
            raise BuildError(f"{entry.name}: a layer of a container holds files, folders and links")
    return member


class _Reader:
    """What tarfile reads a member's content from."""

    def __init__(self, entry: Entry) -> None:
        self._chunks, self._rest = entry.chunks(), b""

    def read(self, size: int = -1, /) -> bytes:
        while size < 0 or len(self._rest) < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._rest += chunk
        end = len(self._rest) if size < 0 else size
        taken, self._rest = self._rest[:end], self._rest[end:]
        return taken


def _plain(name: str) -> str | None:
    """The name without ./ before and / behind; None for the top folder. Raises BuildError where it leads outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise BuildError(f"{name!r} leads outside of the archive")
    return "/".join(parts) or None
