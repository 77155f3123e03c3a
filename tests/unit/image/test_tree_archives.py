"""A file system as entries, and the archives written from it: layers of containers, ramdisks of enclaves."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image import tree
from image.build.errors import BuildError
from image.eif import newc
from image.measure import cpio

EPOCH = 1_764_374_400
NEEDS_CPIO = pytest.mark.skipif(shutil.which("cpio") is None, reason="needs cpio")


def small_tree(folder: Path) -> tuple[tree.Entry, ...]:
    weights = folder / "weights.gguf"
    weights.write_bytes(bytes(range(256)) * 999)
    return tree.ordered(
        [
            tree.text("etc/passwd", b"root:x:0:0::/:\n", 0o644),
            tree.folder("etc"),
            tree.folder("models", 0o750, owner=1000),
            tree.file("models/weights.gguf", weights),
            tree.link("bin", "usr/bin"),
            tree.text("empty", b""),
        ]
    )


def tar_of(entries: tuple[tree.Entry, ...]) -> bytes:
    out = io.BytesIO()
    tree.write_tar(entries, out, epoch=EPOCH)
    return out.getvalue()


def cpio_of(entries: tuple[tree.Entry, ...]) -> bytes:
    out = io.BytesIO()
    newc.write(entries, out, epoch=EPOCH)
    return out.getvalue()


def test_tar_holds_each_entry_with_the_given_time_and_nothing_of_the_machine(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(tar_of(small_tree(tmp_path)))) as archive:
        members = archive.getmembers()
        weights = archive.extractfile("models/weights.gguf")
        assert weights is not None
        assert weights.read() == (tmp_path / "weights.gguf").read_bytes()
    assert [m.name for m in members] == ["bin", "empty", "etc", "etc/passwd", "models", "models/weights.gguf"]
    assert {m.mtime for m in members} == {EPOCH}
    assert {(m.uname, m.gname) for m in members} == {("", "")}
    assert [m.uid for m in members] == [0, 0, 0, 0, 1000, 0]
    assert members[0].linkname == "usr/bin"
    assert members[5].mode == 0o444


def test_archives_are_equal_whatever_order_folder_umask_and_times_are(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "bb").mkdir()
    first = small_tree(tmp_path / "a")
    before = os.umask(0o077)
    try:
        second = small_tree(tmp_path / "bb")
    finally:
        os.umask(before)
    os.utime(tmp_path / "bb/weights.gguf", (1, 1))
    assert tar_of(first) == tar_of(tree.ordered(reversed(second)))
    assert cpio_of(first) == cpio_of(tree.ordered(reversed(second)))


def test_a_tar_is_read_back_to_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "root.tar"
    path.write_bytes(tar_of(small_tree(tmp_path)))
    again = tree.read_tar(path)
    assert tar_of(again) == path.read_bytes()
    assert cpio_of(again) == cpio_of(small_tree(tmp_path))


def test_a_ramdisk_has_the_files_that_the_calculator_finds(tmp_path: Path) -> None:
    found = cpio.file_digests(cpio_of(small_tree(tmp_path)))
    assert found == {
        "empty": hashlib.sha256(b"").digest(),
        "etc/passwd": hashlib.sha256(b"root:x:0:0::/:\n").digest(),
        "models/weights.gguf": hashlib.sha256(bytes(range(256)) * 999).digest(),
    }


@NEEDS_CPIO
def test_a_ramdisk_is_what_cpio_reads(tmp_path: Path) -> None:
    console = tree.ordered([tree.folder("dev"), tree.character_device("dev/console", 5, 1)])
    data = cpio_of(tree.ordered([*small_tree(tmp_path), *console]))
    assert len(data) % 512 == 0
    listed = subprocess.run(
        ["cpio", "--list", "--verbose", "--numeric-uid-gid", "--quiet"],
        input=data,
        capture_output=True,
        check=True,
        env={"TZ": "UTC", "LC_ALL": "C", "PATH": os.defpath},
    )
    assert listed.stderr == b""
    lines = [line.split() for line in listed.stdout.decode().splitlines()]
    assert [line[0] for line in lines] == [
        "lrwxrwxrwx",
        "drwxr-xr-x",
        "crw-------",
        "-rw-r--r--",
        "drwxr-xr-x",
        "-rw-r--r--",
        "drwxr-x---",
        "-r--r--r--",
    ]
    assert lines[2][-1] == "dev/console"
    assert lines[7][4] == str(256 * 999)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,9}", fullmatch=True), st.binary(max_size=99), max_size=9))
def test_any_files_survive_a_ramdisk(files: dict[str, bytes]) -> None:
    data = cpio_of(tree.ordered([tree.text(name, content) for name, content in files.items()]))
    assert cpio.file_digests(data) == {name: hashlib.sha256(content).digest() for name, content in files.items()}


def test_a_later_entry_replaces_an_earlier_one() -> None:
    entries = tree.ordered([tree.text("a", b"1"), tree.text("a", b"2")])
    assert [entry.content for entry in entries] == [b"2"]


@pytest.mark.parametrize("name", ["/etc", "../a", "a/../b", "./a", "a//b", ""])
def test_a_name_that_leads_outside_is_refused(name: str) -> None:
    with pytest.raises(BuildError):
        tree.ordered([tree.text(name, b"")])


def test_a_file_without_its_folder_is_refused() -> None:
    with pytest.raises(BuildError, match=r"a is no folder"):
        tree.ordered([tree.text("a", b""), tree.text("a/b", b"")])


def test_hard_links_become_files_and_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as archive:
        first = tarfile.TarInfo("./a")
        first.size = 3
        archive.addfile(first, io.BytesIO(b"abc"))
        second = tarfile.TarInfo("./b")
        second.type, second.linkname = tarfile.LNKTYPE, "./a"
        archive.addfile(second)
    assert [(e.name, b"".join(e.chunks()), stat.S_ISREG(e.mode)) for e in tree.read_tar(path)] == [
        ("a", b"abc", True),
        ("b", b"abc", True),
    ]
    with tarfile.open(path, "w") as archive:
        fifo = tarfile.TarInfo("pipe")
        fifo.type = tarfile.FIFOTYPE
        archive.addfile(fifo)
    with pytest.raises(BuildError, match="pipe"):
        tree.read_tar(path)


def test_a_source_that_became_shorter_is_refused(tmp_path: Path) -> None:
    entries = small_tree(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"x")
    with pytest.raises(BuildError, match="shorter"):
        cpio_of(entries)
    with pytest.raises(BuildError, match="shorter"):
        tar_of(entries)


def test_a_device_is_refused_in_a_layer_and_a_file_of_4_gib_in_a_ramdisk(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="files, folders and links"):
        tar_of((tree.character_device("console", 5, 1),))
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(BuildError, match="4 GiB"):
        cpio_of((tree.file("large", large),))
