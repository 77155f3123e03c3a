"""Parts of the build that are functions of their input: archives, load orders, disks' sizes, comparisons."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest

from image.build import check, disks, initrd, lock, sbom, settings_disk, tree, wheels
from image.build.errors import BuildError
from image.init import settings
from image.measure import cpio

DEP = "kernel/a/dm-verity.ko.xz: kernel/a/dm-bufio.ko.xz kernel/b/dm-mod.ko.xz\n"
DEP += "kernel/a/dm-bufio.ko.xz: kernel/b/dm-mod.ko.xz\n"
DEP += "kernel/b/dm-mod.ko.xz:\nkernel/c/evdev.ko.xz:\n"


def test_what_a_module_needs_is_loaded_before_it() -> None:
    order = initrd.load_order(DEP, ["dm_verity", "evdev"], "")
    names = [initrd.module_name(path) for path in order]
    assert names == ["dm_mod", "dm_bufio", "dm_verity", "evdev"]


def test_a_module_that_is_built_in_is_not_looked_for_and_an_unknown_one_is_an_error() -> None:
    assert initrd.load_order(DEP, ["virtio_pci"], "kernel/drivers/virtio/virtio-pci.ko\n") == ()
    with pytest.raises(BuildError, match="no module virtio_pci"):
        initrd.load_order(DEP, ["virtio_pci"], "")


def test_the_archive_is_what_the_calculator_reads_and_the_same_from_any_order() -> None:
    files = {"init": (0o755, b"#!x\n"), "lib/a/b": (0o644, b"12345")}
    archive = initrd.archive(files)
    digests = {name: hashlib.sha256(content).digest() for name, (_, content) in files.items()}
    assert dict(cpio.file_digests(archive)) == digests
    assert archive == initrd.archive(dict(reversed(files.items())))
    assert len(archive) % 512 == 0
    assert archive.index(b"lib\x00") < archive.index(b"lib/a\x00") < archive.index(b"lib/a/b\x00")


def test_the_list_of_contents_is_valid_spdx_and_says_what_packages_declare() -> None:
    held = lock.Lock(suite="trixie", source_date_epoch=1_764_374_400, inputs=())
    parts = [
        sbom.Component(kind="deb", name="libc6", version="2.41-12", sha256=bytes(32), licence="GPL-2+, LGPL-2.1+"),
        sbom.Component(kind="python", name="cbor2", version="6.3.0", sha256=b"\x01" * 32, licence="MIT"),
        sbom.Component(kind="python", name="x_y", version="1", sha256=b"\x02" * 32, licence=""),
    ]
    texts = [sbom.spdx_text(held, parts) for _ in range(2)]
    assert texts[0] == texts[1]
    packages = {one["name"]: one for one in json.loads(texts[0])["packages"]}
    assert packages["cbor2"]["licenseDeclared"] == "MIT"
    assert packages["libc6"]["licenseDeclared"] == "NOASSERTION"
    assert packages["libc6"]["licenseComments"] == "declared as: GPL-2+, LGPL-2.1+"
    assert packages["x_y"]["checksums"] == [{"algorithm": "SHA256", "checksumValue": "02" * 32}]


def test_the_list_of_contents_has_the_project_s_own_code_and_the_model() -> None:
    pyproject = b'[project]\nname = "own"\nversion = "0.1.0"\nlicense = "Apache-2.0"\n'
    files = {"native/gemm.cpp": b"2", "appliance/a.py": b"1"}
    own = sbom.project(pyproject, files)
    listed = "".join(f"{hashlib.sha256(files[path]).hexdigest()}  {path}\n" for path in sorted(files))
    assert own.sha256 == hashlib.sha256(listed.encode()).digest()
    assert own == sbom.project(pyproject, dict(reversed(files.items())))
    manifest = {"name": "m", "sha256": "ab" * 32, "licence": "Gemma terms", "source": "wheel==1:m.gguf"}
    held = lock.Lock(suite="trixie", source_date_epoch=1_764_374_400, inputs=())
    packages = {one["name"]: one for one in json.loads(sbom.spdx_text(held, [own, sbom.model(manifest)]))["packages"]}
    assert packages["own"]["licenseDeclared"] == "Apache-2.0"
    assert packages["own"]["comment"].endswith("appliance, native")
    assert packages["m"]["checksums"][0]["checksumValue"] == "ab" * 32
    assert packages["m"]["licenseComments"] == "declared as: Gemma terms"
    with pytest.raises(BuildError, match="no project"):
        sbom.project(b"[project]\n", files)


@pytest.mark.parametrize(("blocks", "tree_blocks"), [(1, 1), (128, 1), (129, 3), (16384, 129), (16385, 132)])
def test_the_size_of_a_hash_tree(blocks: int, tree_blocks: int) -> None:
    assert disks.tree_blocks(blocks) == tree_blocks


def test_b178_a_packed_tree_has_nothing_of_the_machine_in_it(tmp_path: Path) -> None:
    """B178: another folder, other times, another umask: the same bytes."""
    archives = []
    for number, (umask, mtime) in enumerate(((0o022, 1), (0o077, 2_000_000_000))):
        before = os.umask(umask)
        try:
            root = tmp_path / ("x" * (number + 1)) / "root"
            (root / "usr/lib").mkdir(parents=True)
            names = ["usr/lib/b", "usr/lib/a"]
            for name in names if number else reversed(names):
                (root / name).write_bytes(name.encode())
            (root / "lib").symlink_to("usr/lib")
            (root / "usr/lib/a").chmod(0o700)
            os.utime(root / "usr/lib/a", (mtime, mtime))
        finally:
            os.umask(before)
        archive = tmp_path / f"{number}.tar"
        tree.pack(root, archive, mtime=1_764_374_400)
        archives.append(archive.read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "0.tar") as tar:
        found = {entry.name: (entry.mode, entry.uid, entry.mtime) for entry in tar}
    assert found["usr/lib/a"] == (0o755, 0, 1_764_374_400)
    assert found["usr/lib/b"] == (0o644, 0, 1_764_374_400)


def test_two_builds_are_compared_file_by_file(tmp_path: Path) -> None:
    for folder, content in (("a", b"1"), ("b", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same").write_bytes(b"x")
        (tmp_path / folder / "other").write_bytes(content)
    (tmp_path / "a/only").write_bytes(b"")
    assert check.compare(tmp_path / "a", tmp_path / "b") == ["only", "other"]


def test_settings_become_a_disk_of_whole_sectors_that_init_reads(tmp_path: Path) -> None:
    text = settings.FIRST_LINE.decode() + (
        'port = 9443\n[[api_keys]]\nid = "key_0123456789ab"\nsha256 = "' + "0" * 64 + '"\n'
        'label = "x"\nscopes = ["inference"]\ncreated = 1\n'
    )
    (tmp_path / "s.toml").write_text(text)
    settings_disk.write(tmp_path / "s.toml", tmp_path / "disk")
    disk = (tmp_path / "disk").read_bytes()
    assert len(disk) % 512 == 0
    assert settings.parse(disk).port == 9443


def test_settings_that_would_stop_a_boot_are_refused_before_there_is_a_disk(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(settings.FIRST_LINE.decode() + 'policy = "x"\n')
    with pytest.raises(BuildError, match="unknown operator setting 'policy'"):
        settings_disk.write(tmp_path / "s.toml", tmp_path / "disk")
    assert not (tmp_path / "disk").exists()


def test_pip_is_run_for_many_files_at_a_time_but_never_for_two_versions_of_one() -> None:
    one = lock.Input(kind="wheel", name="a", version="1", file="a", size=1, sha256=bytes(32), groups=("g",))
    newer, other = dataclasses.replace(one, version="2"), dataclasses.replace(one, name="b")
    source = dataclasses.replace(one, name="c", kind="sdist")
    assert wheels.batches([one, newer, source, other]) == [[one, other], [newer], [source]]


def test_names_of_source_archives() -> None:
    assert wheels.name_and_version(Path("llama_cpp_python-0.3.36.tar.gz")) == ("llama-cpp-python", "0.3.36")
    with pytest.raises(BuildError):
        wheels.name_and_version(Path("x.zip"))
