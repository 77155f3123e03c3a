"""What a hostile host may do to the image's machine, and how each of it has to be caught."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from image.boottest.machine import Shape
from image.boottest.material import Material, cut_short, with_byte_changed
from image.build import disks

CLIENT: Final = "client"
_EXTRA: Final = "io.systemd.stub.kernel-cmdline-extra="


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`expect` are texts of which one must be on the console before anything listens, or CLIENT: it boots, but a client
    that has the policy refuses its measurement. `by_service`: the service itself stops, not what comes before it.
    """

    name: str
    shape: Shape
    expect: tuple[str, ...]
    by_service: bool = False


Make = Callable[[Material, Shape], Case]


def _root_byte(material: Material, honest: Shape) -> Case:
    blocks = _blocks(material, "root")
    bad = with_byte_changed(material.disks[0], blocks * disks.BLOCK_BYTES // 2, material.work / "bad.img")
    return _case("one byte of the root disk", _with_disk(honest, 0, bad), "stopped: the root disk is corrupt")


def _model_byte(material: Material, honest: Shape) -> Case:
    blocks = _blocks(material, "model")
    bad = with_byte_changed(material.disks[1], blocks * disks.BLOCK_BYTES - 9000, material.work / "bad.img")
    return _case("one byte of the model disk", _with_disk(honest, 1, bad), "stopped: the model disk is corrupt")


def _tree_byte(material: Material, honest: Shape) -> Case:
    blocks = _blocks(material, "model")
    at = (blocks + disks.tree_blocks(blocks)) * disks.BLOCK_BYTES - disks.BLOCK_BYTES // 2
    used = (blocks % 128 or 128) * 32
    at = at if used > disks.BLOCK_BYTES // 2 else at - disks.BLOCK_BYTES // 2
    bad = with_byte_changed(material.disks[1], at, material.work / "bad.img")
    return _case("one byte of the model's hash tree", _with_disk(honest, 1, bad), "stopped: the model disk ")


def _truncated(material: Material, honest: Shape) -> Case:
    bad = cut_short(material.disks[1], 4096, material.work / "bad.img")
    return _case("a truncated model disk", _with_disk(honest, 1, bad), "stopped: the model disk is truncated")


def _no_model(_material: Material, honest: Shape) -> Case:
    shape = replace(honest, disks=(honest.disks[0], honest.disks[2]))
    return _case("no model disk", shape, "stopped: no disk is the model disk")


def _truncated_root(material: Material, honest: Shape) -> Case:
    bad = cut_short(material.disks[0], 4096, material.work / "bad.img")
    return _case("a truncated root disk", _with_disk(honest, 0, bad), "stopped: the root disk is truncated")


def _no_root(_material: Material, honest: Shape) -> Case:
    return _case("no root disk", replace(honest, disks=honest.disks[1:]), "stopped: no disk is the root disk")


def _no_settings(_material: Material, honest: Shape) -> Case:
    return _case(
        "no operator's disk", replace(honest, disks=honest.disks[:2]), "stopped: no disk holds operator settings"
    )


def _other_model(material: Material, honest: Shape) -> Case:
    """The disk as whole and genuine as can be, but not the one that the measured command line names."""
    other = material.work / "bad.img"
    shutil.copyfile(material.disks[1], other)
    with other.open("r+b") as file:
        file.seek(_blocks(material, "model") * disks.BLOCK_BYTES)
        file.write(bytes(disks.BLOCK_BYTES))
    return _case("a hash tree of something else", _with_disk(honest, 1, other), "stopped: the model disk ")


def _wrong_hash(material: Material, honest: Shape) -> Case:
    shape = replace(honest, boot=material.work / "boot-wrong-hash.img")
    return _case("a command line with another hash of the model", shape, "stopped: the model disk ")


def _wrong_root_hash(material: Material, honest: Shape) -> Case:
    shape = replace(honest, boot=material.work / "boot-wrong-root.img")
    return _case("a command line with another hash of the root", shape, "stopped: the root disk is corrupt")


def _other_command_line(material: Material, honest: Shape) -> Case:
    return Case(
        name="another unified kernel image: one word of the command line",
        shape=replace(honest, boot=material.work / "boot-other.img"),
        expect=(CLIENT,),
    )


def _smbios_known(_material: Material, honest: Shape) -> Case:
    name = "SMBIOS type 11 adds an option that init knows: PCR 4 and 11 stay the same"
    return Case(name=name, shape=replace(honest, smbios=f"{_EXTRA}loglevel=5"), expect=(CLIENT,))


def _smbios_unknown(_material: Material, honest: Shape) -> Case:
    shape = replace(honest, smbios=f"{_EXTRA}systemd.debug_shell=1")
    return _case("SMBIOS type 11 adds an unknown option", shape, "stopped: unknown command line option")


def _unknown_setting(material: Material, honest: Shape) -> Case:
    text = (material.work / "settings.toml").read_text(encoding="utf-8")
    text = text.replace("port = 8443", 'port = 8443\nchat_template = "x"')
    bad = material.work / "bad.img"
    bad.write_bytes(text.encode() + bytes(-len(text.encode()) % 512))
    return _case("an unknown operator setting", _with_disk(honest, 2, bad), "stopped: unknown operator setting")


def _little_memory(_material: Material, honest: Shape) -> Case:
    return _case("too little memory", replace(honest, memory_mib=400), "stopped: too little memory")


def _memory_without_cells(material: Material, honest: Shape) -> Case:
    """What the engine will allocate for a model the first process cannot know; the engine looks before it does.

    With the model that the image was built with, also where another is tested: one that needs more than the first
    process asks for. Nothing of it is evaluated.
    """
    disks = (honest.disks[0], material.built / "model.img", *honest.disks[2:])
    shape = replace(honest, boot=material.built / "boot-tpm2.img", disks=disks, memory_mib=704)
    name = "memory for the model, but not for its context"
    return Case(name=name, shape=shape, expect=("stopped: not enough memory",), by_service=True)


def _old_processor(_material: Material, honest: Shape) -> Case:
    return _case("a processor without AVX2", replace(honest, cpu_model="Nehalem"), "stopped: the processor lacks avx")


CASES: Final[Mapping[str, Make]] = {
    "model-byte": _model_byte,
    "root-byte": _root_byte,
    "tree-byte": _tree_byte,
    "other-tree": _other_model,
    "wrong-hash": _wrong_hash,
    "wrong-root-hash": _wrong_root_hash,
    "truncated": _truncated,
    "truncated-root": _truncated_root,
    "no-model": _no_model,
    "no-root": _no_root,
    "no-settings": _no_settings,
    "other-command-line": _other_command_line,
    "smbios-known": _smbios_known,
    "smbios-unknown": _smbios_unknown,
    "unknown-setting": _unknown_setting,
    "little-memory": _little_memory,
    "memory-without-cells": _memory_without_cells,
    "old-processor": _old_processor,
}


def _case(name: str, shape: Shape, *expect: str) -> Case:
    return Case(name=name, shape=shape, expect=expect)


def _with_disk(honest: Shape, number: int, disk: Path) -> Shape:
    return replace(honest, disks=tuple(disk if n == number else one for n, one in enumerate(honest.disks)))


def _blocks(material: Material, name: str) -> int:
    words = (material.image / "cmdline-appliance-tpm2").read_text(encoding="ascii").split()
    return next(int(word.split("=")[1]) for word in words if word.startswith(f"appliance.{name}_blocks="))
