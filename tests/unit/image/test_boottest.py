"""The boot test's own parts: what it changes on disks, what it takes for caught."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from image.boottest import __main__ as boottest
from image.boottest import cases, material
from image.boottest.errors import BootTestError, EmulatorCrash
from image.boottest.machine import Machine, Shape
from image.boottest.material import Material
from image.build import disks
from image.init import cmdline, settings

MODEL_BLOCKS = 300


@pytest.fixture
def held(tmp_path: Path) -> Material:
    """A build's folder with small disks and its command line."""
    image, work = tmp_path / "image", tmp_path / "work"
    image.mkdir()
    work.mkdir()
    for name, blocks in (("root", 200), ("model", MODEL_BLOCKS)):
        (image / f"{name}.img").write_bytes(bytes((blocks + disks.tree_blocks(blocks)) * disks.BLOCK_BYTES))
    options = cmdline.Options(
        attester="tpm2", root_hash="ab" * 32, root_blocks=200, model_hash="cd" * 32, model_blocks=MODEL_BLOCKS
    )
    (image / "cmdline-appliance-tpm2").write_text(cmdline.render(options))
    made = Material(built=image, image=image, work=work, store=tmp_path, model="small", environ={})
    material.write_settings(work, bytes(range(38)), 1_764_374_400)
    return made


def changed(before: Path, after: Path) -> list[int]:
    one, two = before.read_bytes(), after.read_bytes()
    assert len(one) == len(two)
    return [at for at, (x, y) in enumerate(zip(one, two, strict=True)) if x != y]


def test_each_case_does_something_else_and_says_how_it_is_caught(held: Material) -> None:
    honest = Shape(boot=held.image / "boot-tpm2.img", disks=held.disks)
    made = [make(held, honest) for make in cases.CASES.values()]
    assert all(case.shape != honest and case.expect for case in made)
    assert len({case.name for case in made}) == len(made)
    assert sum(case.expect == (cases.CLIENT,) for case in made) == 2


def test_the_byte_of_the_hash_tree_is_a_used_one_of_its_leaves(held: Material) -> None:
    honest = Shape(boot=held.image / "boot-tpm2.img", disks=held.disks)
    case = cases.CASES["tree-byte"](held, honest)
    (at,) = changed(held.disks[1], case.shape.disks[1])
    leaves = (MODEL_BLOCKS + 1) * disks.BLOCK_BYTES  # behind the data and the root block of the tree
    assert leaves <= at < leaves + MODEL_BLOCKS * 32


def test_one_byte_of_the_data_is_one_bit_inside_it(held: Material) -> None:
    honest = Shape(boot=held.image / "boot-tpm2.img", disks=held.disks)
    for number, name, blocks in ((0, "root-byte", 200), (1, "model-byte", MODEL_BLOCKS)):
        case = cases.CASES[name](held, honest)
        (at,) = changed(held.disks[number], case.shape.disks[number])
        assert 0 <= at < blocks * disks.BLOCK_BYTES
        assert case.shape.disks[number].read_bytes()[at] == 1


def test_with_another_model_only_the_case_of_memory_boots_the_image_s_own(held: Material, tmp_path: Path) -> None:
    """A small model needs no more than the first process asks for: what the engine refuses takes the real one."""
    swapped = replace(held, image=tmp_path / "swapped")
    assert (swapped.is_swapped, held.is_swapped) == (True, False)
    shutil.copytree(held.image, swapped.image)
    honest = Shape(boot=swapped.image / "boot-tpm2.img", disks=swapped.disks)
    for name, make in cases.CASES.items():
        shape = make(swapped, honest).shape
        own = [path for path in (shape.boot, *shape.disks) if path.is_relative_to(swapped.built)]
        assert bool(own) is (name == "memory-without-cells")
    case = cases.CASES["memory-without-cells"](swapped, honest)
    assert case.shape.boot == swapped.built / "boot-tpm2.img"
    assert case.shape.disks[1] == swapped.built / "model.img"


def test_the_operator_s_disk_of_the_test_is_one_that_init_takes(held: Material) -> None:
    found = settings.parse(held.disks[2].read_bytes())
    assert (found.port, len(found.api_keys)) == (8443, 1)


def test_a_crash_of_the_emulated_kernel_is_no_verdict_but_one_after_the_image_began_is(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    running = Machine(process=process, folder=tmp_path, port=1)
    (tmp_path / "console").write_text("Kernel panic - not syncing: Fatal exception in interrupt\n")
    with pytest.raises(EmulatorCrash):
        running.wait_for("ready", 1.0)
    (tmp_path / "console").write_text("appliance: initrd after 2 s\nKernel panic - not syncing: dm-verity\n")
    running.check_started()
    with pytest.raises(BootTestError, match="the machine ended"):
        running.wait_for("ready", 1.0)
    tries: list[int] = []

    def action() -> str:
        tries.append(1)
        raise EmulatorCrash("crashed")

    with pytest.raises(EmulatorCrash):
        boottest.again(action, tmp_path / "folder")
    assert len(tries) == 3
