"""The recipe of the firmware: what names a build, what apt says of the source, what the patched loader may start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from image.build import lock
from image.build.errors import BuildError
from image.build.lock import Input
from image.ovmf import boot, build, firmware, inputs

PRINTED = """\
'http://mirror.example/e/edk2_2025.02-8%2bdeb13u1.dsc' edk2_2025.02-8+deb13u1.dsc 2656 SHA256:{a}
'http://mirror.example/e/edk2_2025.02.orig.tar.xz' edk2_2025.02.orig.tar.xz 29646336 SHA256:{b}
'http://mirror.example/e/edk2_2025.02-8%2bdeb13u1.debian.tar.xz' edk2_2025.02-8+deb13u1.debian.tar.xz 53652 SHA256:{c}
""".format(a="aa" * 32, b="bb" * 32, c="cc" * 32)


def an_input(digest: int) -> Input:
    return Input(
        kind="deb",
        name="gcc",
        version="14",
        file="gcc_14_amd64.deb",
        size=1,
        sha256=bytes([digest]) * 32,
        groups=(firmware.TOOLS,),
    )


def test_the_source_is_one_upstream_and_one_debian_archive_by_digest() -> None:
    upstream, debian = inputs.parse_source_uris(PRINTED)
    assert (upstream.file, upstream.sha256) == ("edk2_2025.02.orig.tar.xz", b"\xbb" * 32)
    assert (debian.file, debian.sha256) == ("edk2_2025.02-8+deb13u1.debian.tar.xz", b"\xcc" * 32)
    assert upstream.version == debian.version == "2025.02-8+deb13u1"
    assert debian.uri == "http://mirror.example/e/edk2_2025.02-8%2bdeb13u1.debian.tar.xz"


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_another_kind_of_source_package_is_refused(lines: int) -> None:
    with pytest.raises(BuildError):
        inputs.parse_source_uris("".join(PRINTED.splitlines(keepends=True)[:lines]))


def test_a_build_is_named_by_everything_that_enters_it() -> None:
    amd, tdx = firmware.FIRMWARES
    own = firmware.recipe()
    name = firmware.key(amd, [an_input(1)], own, 1)
    assert name == firmware.key(amd, [an_input(1)], dict(sorted(own.items(), reverse=True)), 1)
    others = {
        firmware.key(tdx, [an_input(1)], own, 1),
        firmware.key(amd, [an_input(2)], own, 1),
        firmware.key(amd, [an_input(1)], {**own, "build.sh": b""}, 1),
        firmware.key(amd, [an_input(1)], own, 2),
    }
    assert len(others | {name}) == 5


def test_the_recipe_is_complete() -> None:
    assert {"build.sh", "grub.cfg", "source.sh"} < set(firmware.recipe())
    assert any(name.startswith("patches/") for name in firmware.recipe())


def test_the_loader_in_the_firmware_has_nothing_that_starts_a_system() -> None:
    patch = firmware.recipe()["patches/0001-start-measured-kernels-only.patch"].decode()
    hunk = patch[patch.index("GRUB_MODULES") : patch.index("basedir=")]
    kept = set(re.findall(r"^[ +]\s+(\w+)$", hunk, re.MULTILINE))
    assert kept == {"fat", "configfile", "memdisk", "sleep", "normal", "echo", "halt"}
    config = firmware.recipe()["grub.cfg"].decode()
    assert [line.split()[0] for line in config.splitlines() if not line.startswith("#")] == ["echo", "sleep", "halt"]


def test_no_shell_is_built_into_any_firmware() -> None:
    assert all("BUILD_SHELL=FALSE" in one.defines for one in firmware.FIRMWARES)


def test_a_kernel_without_a_measured_digest_must_not_start(tmp_path: Path) -> None:
    refusals = [trial for trial in boot.trials(tmp_path, tmp_path) if trial.shows == boot.REFUSED]
    assert len(refusals) == 2
    assert {trial.firmware for trial in refusals} == {tmp_path / "AMDSEV.fd"}
    assert all(trial.never == b"Linux version" for trial in refusals)
    assert boot.REFUSED in firmware.recipe()["grub.cfg"]


def test_the_lock_has_the_source_and_every_tool() -> None:
    locked = lock.load()
    upstream, debian = build.archives(locked.group(firmware.SOURCE))
    assert (upstream.kind, debian.kind) == ("dsc", "dsc")
    assert debian.file.startswith(f"edk2_{debian.version.replace(':', '%3a')}")
    tools = {one.name for one in locked.group(firmware.TOOLS)}
    assert {name for name in firmware.TOOL_PACKAGES if not name.startswith("?")} <= tools
    assert {one.kind for one in locked.group(firmware.TOOLS)} == {"deb"}


def test_a_lock_with_another_kind_of_source_is_refused() -> None:
    with pytest.raises(BuildError, match="one upstream and one Debian"):
        build.archives([an_input(1)])


def test_firmware_is_built_again_unless_it_is_the_very_same(tmp_path: Path) -> None:
    (tmp_path / "A.fd").write_bytes(b"firmware")
    assert not build.is_built(tmp_path, "A.fd", "key")
    build.write_manifest(tmp_path, {"A.fd": "key"})
    assert build.is_built(tmp_path, "A.fd", "key")
    assert not build.is_built(tmp_path, "A.fd", "another key")
    (tmp_path / "A.fd").write_bytes(b"Firmware")
    assert not build.is_built(tmp_path, "A.fd", "key")
