"""The lock: the one in the tree, its form, what a build takes from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from image.build import contents, fetch, lock
from image.build.errors import BuildError
from image.build.lock import Input, Lock


def an_input(**changes: object) -> Input:
    one = Input(
        kind="deb",
        name="busybox",
        version="1:1.0-1",
        file="busybox_1%3a1.0-1_amd64.deb",
        size=3,
        sha256=lock.hashlib.sha256(b"abc").digest(),
        groups=("tools",),
    )
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def a_lock(*inputs: Input) -> Lock:
    return Lock(suite="trixie", source_date_epoch=1_764_374_400, inputs=inputs)


def test_the_locked_inputs_are_well_formed_and_each_has_its_digest() -> None:
    held = lock.load()
    assert lock.render(held) == lock.LOCK.read_text(encoding="utf-8"), "not as make image-relock writes it"
    assert held.suite == contents.SUITE
    assert all(len(one.sha256) == 32 and one.size > 0 and one.groups for one in held.inputs)
    assert len({one.sha256 for one in held.inputs}) == len(held.inputs)


def test_the_lock_has_all_that_the_recipe_names() -> None:
    held = lock.load()
    names = {(one.kind, one.name.lower().replace("_", "-")) for one in held.inputs}
    wanted = {("deb", name) for name in (*contents.ROOT, *contents.TOOLS) if not name.startswith("?")}
    wanted |= {("wheel", name) for name in (*contents.WHEELS, *contents.BUILD_WHEELS)}
    wanted |= {("sdist", name) for name in contents.SDISTS}
    assert wanted - names == set()


def test_python_packages_in_the_image_have_the_versions_that_the_project_is_tested_with() -> None:
    lines = (Path(__file__).parents[3] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line and line[0] != "#")
    held = lock.load()
    found = {one.name: one.version for one in held.inputs if "wheels" in one.groups or one.kind == "sdist"}
    assert {name: version for name, version in found.items() if pinned.get(name) != version} == {}


def test_nothing_in_the_root_is_a_shell_or_a_package_manager() -> None:
    root = {one.name for one in lock.load().group("root")}
    assert root.isdisjoint({"apt", "bash", "busybox-static", "dash", "debconf", "dpkg", "openssh-server", "openssl"})


def test_reads_back_what_it_writes() -> None:
    held = a_lock(an_input(), an_input(name="zstd", file="zstd.whl", kind="wheel", sha256=bytes(32)))
    assert lock.parse(lock.render(held)) == held


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('kind = "deb"', 'kind = "rpm"'),
        ("size = 3", "size = 0"),
        ("size = 3", "size = true"),
        ("sha256 = ", 'extra = "x"\nsha256 = '),
        ('file = "busybox', 'file = "../busybox'),
        ('groups = ["tools"]', "groups = []"),
        ("version = 1\n", "version = 2\n"),
        ('suite = "trixie"', 'suite = "../x"'),
    ],
)
def test_refuses_what_is_not_of_its_form(old: str, new: str) -> None:
    text = lock.render(a_lock(an_input()))
    assert old in text
    with pytest.raises(BuildError):
        lock.parse(text.replace(old, new, 1))


def test_refuses_a_file_twice() -> None:
    with pytest.raises(BuildError, match="two inputs with one file"):
        lock.parse(lock.render(a_lock(an_input(), an_input(sha256=bytes(32)))))


def test_a_group_without_inputs_is_an_error_and_not_an_empty_build() -> None:
    with pytest.raises(BuildError, match="no input of the group 'roots'"):
        a_lock(an_input()).group("roots")


def test_renewing_a_group_leaves_the_others() -> None:
    shared = an_input(groups=("ovmf", "tools"))
    held = a_lock(shared, an_input(name="gone", file="gone.deb", sha256=bytes(32)))
    new = an_input(name="new", file="new.deb", sha256=b"\x01" * 32)
    after = lock.replace_groups(held, ["tools"], [new])
    assert {(one.name, one.groups) for one in after.inputs} == {("busybox", ("ovmf",)), ("new", ("tools",))}
    again = lock.replace_groups(after, ["tools"], [an_input()])
    assert [(one.name, one.groups) for one in again.inputs] == [("busybox", ("ovmf", "tools"))]


def test_one_file_cannot_have_two_contents() -> None:
    with pytest.raises(BuildError, match="renew them all"):
        lock.replace_groups(a_lock(an_input(groups=("ovmf",))), ["tools"], [an_input(sha256=bytes(32))])


def test_the_digest_of_a_set_is_of_its_bytes_not_of_its_order() -> None:
    one, two = an_input(), an_input(name="b", file="b.deb", sha256=b"\x01" * 32)
    assert lock.digest([one, two]) == lock.digest([two, one])
    assert lock.digest([one]) != lock.digest([dataclasses.replace(one, sha256=b"\x02" * 32)])


def test_a_file_of_other_bytes_does_not_stay_in_the_cache(tmp_path: Path) -> None:
    one = an_input()
    one.cached(tmp_path).parent.mkdir()
    one.cached(tmp_path).write_bytes(b"abd")
    assert not lock.is_cached(one, tmp_path)
    assert not one.cached(tmp_path).exists()
    source = tmp_path / "abc"
    source.write_bytes(b"abc")
    lock.keep(source, one, tmp_path)
    assert lock.is_cached(one, tmp_path)


def test_with_everything_at_hand_nothing_is_fetched(tmp_path: Path) -> None:
    source, said = tmp_path / "abc", []
    source.write_bytes(b"abc")
    lock.keep(source, an_input(), tmp_path)
    fetch.fetch(a_lock(an_input()), [an_input()], environ={}, say=said.append, cache=tmp_path)
    assert said == []
