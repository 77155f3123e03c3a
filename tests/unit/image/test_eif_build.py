"""Enclave images from the image's parts: what stands in which ramdisk, what the registers cover, what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import lzma
import tomllib
from pathlib import Path

import pytest

from image import service, tree
from image.build.errors import BuildError
from image.eif import build, init, kernel
from image.init.errors import Stop
from image.measure import cpio, eif

EPOCH = 1_764_374_400
WEIGHTS = b"GGUF" + bytes(999)


def parts(model: bytes = WEIGHTS) -> build.Parts:
    return build.Parts(
        kernel=b"kernel" * 99,
        kernel_version="6.12",
        modules=(("vsock.ko", b"one"), ("nsm.ko", b"two")),
        root=tree.ordered(
            [tree.folder("etc"), tree.folder("etc/appliance"), tree.folder("usr"), tree.text("usr/python", b"\x7fELF")]
        ),
        model=tree.ordered([tree.folder("blobs"), tree.text("blobs/w.gguf", model)]),
        model_names=("small",),
    )


def assemble(of: build.Parts) -> eif.Eif:
    return build.assemble(of, version="1", epoch=EPOCH)


def test_each_ramdisk_has_its_part() -> None:
    boot, root, model = (cpio.file_digests(ramdisk) for ramdisk in assemble(parts()).ramdisks)
    assert set(boot) == {"init", "enclave/modules/00-vsock.ko", "enclave/modules/01-nsm.ko"}
    assert boot["init"] == hashlib.sha256(Path(init.__file__).read_bytes()).digest()
    assert set(root) == {"usr/python", "etc/appliance/enclave.toml"}
    assert model == {"srv/models/blobs/w.gguf": hashlib.sha256(WEIGHTS).digest()}
    assert build.weight_digests(assemble(parts())) == model


def test_no_ramdisk_replaces_a_file_of_another() -> None:
    names = [name for ramdisk in assemble(parts()).ramdisks for name in cpio.file_digests(ramdisk)]
    assert len(set(names)) == len(names)


def test_equal_parts_give_equal_bytes_and_weights_move_pcr2_alone_of_the_boot() -> None:
    first, second = assemble(parts()), assemble(parts(b"GGUF" + bytes(998) + b"\x01"))
    assert eif.write(first) == eif.write(assemble(parts()))
    (zero, one, two), (other_zero, other_one, other_two) = first.pcrs(), second.pcrs()
    assert (zero != other_zero, one == other_one, two != other_two) == (True, True, True)


def test_configuration_is_of_an_enclave_and_names_its_models() -> None:
    settings = tomllib.loads(service.configuration(build.FOLDER / "enclave.toml", ("small", "large")).decode())
    assert settings["server"]["listen"] == ["vsock:5000"]
    assert settings["attestation"] == {"attester": "nitro"}
    assert settings["store"]["models_dir"] == "/" + service.STORE
    assert [model["name"] for model in settings["models"]] == ["small", "large"]
    assert settings["vsock"] == {"allowed_cids": ["3"]}
    assert init.command()[-1] == "/" + build.CONFIGURATION


@pytest.mark.parametrize("name", ["init", "enclave"])
def test_a_root_that_would_replace_what_boots_is_refused(name: str) -> None:
    root = tree.ordered([*parts().root, tree.text(name, b"#!/bin/sh")])
    with pytest.raises(BuildError, match="would replace"):
        assemble(dataclasses.replace(parts(), root=root))


def test_the_first_process_knows_every_word_of_its_command_line_and_what_a_hypervisor_adds() -> None:
    init.check_command_line(build.CMDLINE + " virtio_mmio.device=4K@0xd0000000:5")


@pytest.mark.parametrize("word", ["init=/bin/sh", "lockdown=none", "systemd.debug-shell", "console=tty0"])
def test_an_unknown_word_stops_the_boot(word: str) -> None:
    with pytest.raises(Stop, match="unknown command line option"):
        init.check_command_line(f"{build.CMDLINE} {word}")


def test_without_a_parent_the_enclave_stops() -> None:
    with pytest.raises(Stop, match="no parent instance"):
        init.send_heartbeat()


def test_a_kernel_from_elsewhere_brings_its_modules_in_the_order_given(tmp_path: Path) -> None:
    for name, content in (("bzImage", b"kernel"), ("b.ko", b"b"), ("a.ko.xz", lzma.compress(b"a"))):
        (tmp_path / name).write_bytes(content)
    found = kernel.given(tmp_path / "bzImage", [tmp_path / "b.ko", tmp_path / "a.ko.xz"], "6.12-enclave")
    assert (found.image, found.release) == (b"kernel", "6.12-enclave")
    assert found.modules == (("b.ko", b"b"), ("a.ko", b"a"))
