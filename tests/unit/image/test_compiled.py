"""What is compiled for the image: what names it, and that the project's own products are in the engine's library."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from image.build import build, compiled, lock, tree
from image.build.errors import BuildError

PROJECT = Path(__file__).parents[3]
_NAMES = sorted(path.name for path in (PROJECT / "native/llama_cpp").iterdir())
NATIVE = {name: (PROJECT / "native/llama_cpp" / name).read_bytes() for name in _NAMES}
EXPORTED = b"\x7fELF\x00ggml_cpu_init\x00attested_arithmetic\x00attested_products\x00"


def a_wheel(path: Path, **libraries: bytes) -> Path:
    with ZipFile(path, "w") as archive:
        archive.writestr("llama_cpp/__init__.py", b"")
        for name, content in libraries.items():
            archive.writestr(f"llama_cpp/lib/{name.replace('_so', '.so').replace('_cpu', '-cpu')}", content)
    return path


def test_another_byte_of_any_input_is_compiled_anew() -> None:
    held = lock.load()
    tools, inputs = held.group("tools"), held.group("build")
    names = [compiled.folder_name(tools, inputs, NATIVE), compiled.folder_name(tools[1:], inputs, NATIVE)]
    names.append(compiled.folder_name(tools, inputs[1:], NATIVE))
    for name, content in NATIVE.items():
        names.append(compiled.folder_name(tools, inputs, NATIVE | {name: content + b"\n"}))
    # Bytes that move from one file to the other are another input, too.
    swapped = dict(zip(NATIVE, reversed(list(NATIVE.values())), strict=True))
    names.append(compiled.folder_name(tools, inputs, swapped))
    assert len(set(names)) == len(names)
    assert compiled.folder_name(tools, inputs, dict(reversed(NATIVE.items()))) == names[0]


def test_cmake_is_told_where_the_chroot_has_the_file() -> None:
    assert "-DCMAKE_PROJECT_ggml_INCLUDE=/build/native/attested.cmake" in compiled.LLAMA_FLAGS
    # The files next to it are found by its folder, and are compiled from there.
    assert b'ATTESTED_DIR "${CMAKE_CURRENT_LIST_DIR}"' in NATIVE["attested.cmake"]


def a_job(project: Path, commit: str = "HEAD") -> build.Job:
    return build.Job(
        project=project,
        commit=commit,
        out=project,
        tools=project,
        store=project,
        model="m",
        environ={},
        say=print,
    )


def test_b178_what_lies_in_the_working_tree_is_not_in_the_image(tmp_path: Path) -> None:
    """B178: configuration and initrd of a commit are that commit's, whatever was edited since."""
    (tmp_path / "image/build").mkdir(parents=True)
    script = tmp_path / "image/build/init.sh"
    script.write_bytes(b"committed\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "image"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    script.write_bytes(b"edited\n")
    assert build.own_file(a_job(tmp_path), "init.sh") == b"committed\n"
    for name in ("init.sh", "firmware_log.sh", "appliance.toml"):
        assert build.own_file(a_job(PROJECT), name)


def test_what_is_linked_in_is_what_is_committed() -> None:
    job = a_job(PROJECT)
    found = build.native(job)
    assert {"attested.cmake", "variants.cpp", "variants.h"} < set(found)
    for name, content in found.items():
        path = f"native/llama_cpp/{name}"
        assert content == tree.committed(PROJECT, "HEAD", [path])[path]
    with pytest.raises(BuildError, match="did not match any files"):
        tree.committed(PROJECT, "HEAD", ["native/llama_cpp/absent.cpp"])
    with pytest.raises(BuildError):
        build.native(dataclasses.replace(job, commit="0" * 40))


def test_a_library_without_the_products_is_refused_in_any_of_its_copies(tmp_path: Path) -> None:
    compiled.check_kernels([a_wheel(tmp_path / "good.whl", libggml_cpu_so=EXPORTED), a_wheel(tmp_path / "other.whl")])
    bad = a_wheel(tmp_path / "bad.whl", libggml_cpu_so=EXPORTED, libggml_cpu_so_0=b"\x7fELF\x00ggml_cpu_init\x00")
    with pytest.raises(BuildError, match=r"not in llama_cpp/lib/libggml-cpu\.so"):
        compiled.check_kernels([bad])
    # A longer name is another symbol.
    longer = a_wheel(tmp_path / "longer.whl", libggml_cpu_so=b"\x00attested_arithmetic_of\x00")
    with pytest.raises(BuildError, match=r"not in llama_cpp/lib/libggml-cpu\.so"):
        compiled.check_kernels([longer])


def test_wheels_without_the_library_and_files_that_are_no_wheels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"not in libggml-cpu\.so"):
        compiled.check_kernels([a_wheel(tmp_path / "none.whl")])
    (tmp_path / "cut.whl").write_bytes(os.urandom(64))
    with pytest.raises(BuildError, match="cannot be read"):
        compiled.check_kernels([tmp_path / "cut.whl"])
