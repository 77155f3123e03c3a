"""The model store: one rename or nothing, whatever kills, fills or races it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.models.errors import (
    DigestMismatch,
    InvalidModelName,
    ModelError,
    ModelNameTaken,
    ModelNotInstalled,
    PickleRefused,
    SourceUnreadable,
    StoreDamaged,
    StoreFull,
    UnsupportedFormat,
)
from appliance.models.manifest import ModelFacts
from appliance.models.store import ModelStore, default_store_root

GGUF = b"GGUF\x03\x00\x00\x00" + bytes(range(256)) * 12_000  # three chunks and a bit
STEPS = ("staged", "chunk", "copied", "blob", "committed")

CHILD = """
import hashlib, os, resource, signal, sys
from pathlib import Path
from appliance.models.errors import ModelError
from appliance.models.manifest import ModelFacts
from appliance.models.store import ModelStore

root, source, action, step, limit = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
store = ModelStore(root, on_step=lambda s: os.kill(os.getpid(), signal.SIGKILL) if s == step else None)
digest = hashlib.sha256(source.read_bytes()).digest()
try:
    if action == "remove":
        store.remove("m")
    else:
        store.add(source, ModelFacts(name="m", sha256=digest, size=None, licence="MIT", source="test"))
except ModelError as error:
    print(type(error).__name__)
    sys.exit(3)
"""


def facts(data: bytes = GGUF, name: str = "m", size: int | None = None) -> ModelFacts:
    return ModelFacts(name=name, sha256=hashlib.sha256(data).digest(), size=size, licence="MIT", source="test")


def child(root: Path, source: Path, action: str = "add", step: str = "", limit: int = 0) -> list[str]:
    return [sys.executable, "-c", CHILD, str(root), str(source), action, step, str(limit)]


def leftovers(root: Path) -> list[str]:
    """Every file of the store that no manifest accounts for."""
    known = {"lock"} | {f"manifests/{name}.json" for name in ModelStore(root).names()}
    for name in ModelStore(root).names():
        model = ModelStore(root).get(name)
        known |= {str(p.relative_to(root)) for p in (*model.paths, model.chat_template) if p}
    return sorted(p for path in root.rglob("*") if path.is_file() and (p := str(path.relative_to(root))) not in known)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "weights.gguf"
    path.write_bytes(GGUF)
    return path


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "data" / "models")


def test_added_model_is_found_verified_and_private(store: ModelStore, source: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    added = store.add(source, facts(), progress=lambda *report: seen.append(report))
    assert store.names() == ("m",)
    assert store.get("m") == added == store.verify("m")
    assert added.paths[0].read_bytes() == GGUF
    assert (added.size, added.licence, added.source) == (len(GGUF), "MIT", "test")
    assert seen[-1] == ("hash", len(GGUF), len(GGUF))
    for path in [store.root, *store.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert source.read_bytes() == GGUF
    assert leftovers(store.root) == []


def test_adding_twice_is_no_error_and_other_bytes_need_another_name(store: ModelStore, source: Path) -> None:
    store.add(source, facts())
    store.add(source, facts())
    source.write_bytes(GGUF + b"x")
    with pytest.raises(ModelNameTaken, match="'m'"):
        store.add(source, facts(GGUF + b"x"))
    assert store.verify("m").size == len(GGUF)
    assert leftovers(store.root) == []


def test_two_names_share_the_bytes_until_the_last_goes(store: ModelStore, source: Path) -> None:
    first = store.add(source, facts(name="a"))
    second = store.add(source, facts(name="b"))
    assert first.paths == second.paths
    store.remove("a")
    store.verify("b")
    store.remove("b")
    assert store.names() == ()
    assert leftovers(store.root) == []


def test_own_chat_template_is_kept_by_its_digest(store: ModelStore, source: Path) -> None:
    template = b"{{ messages }}"
    model = store.add(source, facts(), chat_template=template)
    assert model.chat_template is not None
    assert model.chat_template.read_bytes() == template
    assert model.chat_template_sha256 == hashlib.sha256(template).digest()
    with pytest.raises(ModelNameTaken):
        store.add(source, facts(), chat_template=b"other")
    model.chat_template.write_bytes(b"changed")
    with pytest.raises(DigestMismatch):
        store.verify("m")


@pytest.mark.parametrize(
    ("data", "promised", "error"),
    [
        pytest.param(GGUF[:-1], GGUF, DigestMismatch, id="truncated"),
        pytest.param(b"GGUF\x09" + GGUF[5:], GGUF, DigestMismatch, id="B165-header-flipped-fails-at-the-hash"),
        pytest.param(b"", b"", UnsupportedFormat, id="empty"),
        pytest.param(b"GGUF\x03\x00", b"GGUF\x03\x00", UnsupportedFormat, id="half-a-header"),
        pytest.param(b"GGML" + GGUF[4:], b"GGML" + GGUF[4:], UnsupportedFormat, id="not-gguf"),
        pytest.param(b"GGUF\x01\x00\x00\x00", b"GGUF\x01\x00\x00\x00", UnsupportedFormat, id="old-version"),
        pytest.param(b"GGUF\x00\x00\x00\x03", b"GGUF\x00\x00\x00\x03", UnsupportedFormat, id="big-endian"),
        pytest.param(b"\x80\x04\x95evil....", b"\x80\x04\x95evil....", PickleRefused, id="B164-pickle"),
        pytest.param(b"PK\x03\x04evil....", b"PK\x03\x04evil....", PickleRefused, id="B164-torch-zip"),
        pytest.param(b"PK\x03\x04evil....", GGUF, DigestMismatch, id="hash-before-any-look"),
    ],
)
def test_wrong_bytes_leave_nothing(
    store: ModelStore, tmp_path: Path, data: bytes, promised: bytes, error: type[ModelError]
) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(data)
    with pytest.raises(error) as caught:
        store.add(path, facts(promised))
    assert type(caught.value) is error
    assert store.names() == ()
    assert leftovers(store.root) == []


@pytest.mark.parametrize("name", ["model.bin", "model.PT", "pytorch_model.ckpt", "x.pkl", "x.pth"])
def test_b164_pickle_names_are_refused_before_the_file_is_opened(store: ModelStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(PickleRefused):
        store.add(tmp_path / name, facts())
    assert not store.root.exists()


def test_unreadable_sources_are_named(store: ModelStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("missing", "fifo", "."):
        with pytest.raises(SourceUnreadable):
            store.add(tmp_path / name, facts())
    assert not store.root.exists()


def test_error_in_mid_read_leaves_nothing(store: ModelStore) -> None:
    def failing() -> Iterator[bytes]:
        yield GGUF[: 1 << 20]
        raise SourceUnreadable("the disk went away")

    with pytest.raises(SourceUnreadable):
        store.install(failing(), facts(), expect=len(GGUF))
    assert leftovers(store.root) == []


@pytest.mark.parametrize("name", ["", "../m", "a/b", ".hidden", "a b", "a" * 129, "a\n", "é"])
def test_names_outside_the_grammar_are_refused(store: ModelStore, source: Path, name: str) -> None:
    for attempt in (lambda: store.add(source, facts(name=name)), lambda: store.get(name), lambda: store.remove(name)):
        with pytest.raises(InvalidModelName):
            attempt()


def test_unknown_model_names_those_there_are(store: ModelStore, source: Path) -> None:
    for attempt in (store.get, store.remove, store.verify):
        with pytest.raises(ModelNotInstalled, match="installed: none"):
            attempt("nope")
    store.add(source, facts())
    with pytest.raises(ModelNotInstalled, match="installed: m"):
        store.get("nope")


def test_b166_changed_cut_and_replaced_files_are_noticed(store: ModelStore, source: Path) -> None:
    blob = store.add(source, facts()).paths[0]
    blob.write_bytes(GGUF[:-1] + b"!")
    store.get("m")
    with pytest.raises(DigestMismatch):
        store.verify("m")
    blob.write_bytes(GGUF[:-1])
    with pytest.raises(StoreDamaged):
        store.get("m")
    blob.unlink()
    blob.symlink_to(source)
    with pytest.raises(StoreDamaged):
        store.get("m")
    store.add(source, facts())  # mends it
    store.verify("m")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: {**d, "extra": 1},
        lambda d: {k: v for k, v in d.items() if k != "licence"},
        lambda d: {**d, "version": 2},
        lambda d: {**d, "size": True},
        lambda d: {**d, "size": -1},
        lambda d: {**d, "name": "other"},
        lambda d: {**d, "sha256": d["sha256"][:40]},
        lambda d: {**d, "format": "safetensors"},
        lambda d: [d],
    ],
)
def test_damaged_manifest_is_refused_and_no_bytes_are_lost(store: ModelStore, source: Path, change) -> None:
    kept = store.add(source, facts(name="kept"))
    store.add(source, facts())
    manifest = store.root / "manifests" / "m.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    with pytest.raises(StoreDamaged):
        store.get("m")
    with pytest.raises(StoreDamaged):
        store.add(source, facts())
    assert store.verify("kept") == kept
    store.remove("m")
    assert store.names() == ("kept",)
    store.verify("kept")


@pytest.mark.parametrize("step", STEPS)
def test_kill_while_adding_leaves_the_old_or_the_new_state(store: ModelStore, source: Path, step: str) -> None:
    done = subprocess.run(child(store.root, source, step=step), check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.names() == (("m",) if step == "committed" else ())
    if step == "committed":
        store.verify("m")
    store.add(source, facts())  # sweeps what the dead process left
    store.verify("m")
    assert leftovers(store.root) == []
    assert list((store.root / "staging").iterdir()) == []


def test_kill_while_removing_leaves_no_half_model(store: ModelStore, source: Path) -> None:
    store.add(source, facts())
    done = subprocess.run(child(store.root, source, action="remove", step="unlinked"), check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.names() == ()
    store.add(source, facts())
    store.remove("m")
    assert leftovers(store.root) == []


def test_racing_processes_give_one_result(store: ModelStore, source: Path) -> None:
    racers = [subprocess.Popen(child(store.root, source)) for _ in range(4)]
    assert [racer.wait() for racer in racers] == [0] * 4
    store.verify("m")
    assert leftovers(store.root) == []


def test_racing_with_other_bytes_has_one_winner(store: ModelStore, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(GGUF + b"other")
    racers = [subprocess.Popen(child(store.root, p), stdout=subprocess.PIPE, text=True) for p in (source, other) * 2]
    outcomes = [(racer.communicate()[0].strip(), racer.returncode) for racer in racers]
    assert {outcomes[0], outcomes[1]} == {("", 0), ("ModelNameTaken", 3)}
    assert outcomes[:2] == outcomes[2:]
    store.verify("m")
    assert leftovers(store.root) == []


def test_live_staging_survives_the_sweep_of_others(store: ModelStore, source: Path) -> None:
    with store.staging() as area:
        (area / "half").write_bytes(b"half")
        store.add(source, facts())
        assert (area / "half").read_bytes() == b"half"
    assert leftovers(store.root) == []


def test_full_disk_is_named_and_leaves_the_store_as_it_was(store: ModelStore, source: Path) -> None:
    done = subprocess.run(
        child(store.root, source, limit=1 << 20), stdout=subprocess.PIPE, text=True, check=False
    )  # the kernel refuses the second chunk
    assert (done.returncode, done.stdout.strip()) == (3, "StoreFull")
    assert store.names() == ()
    assert leftovers(store.root) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_at_any_step_is_store_full(tmp_path: Path, source: Path, number: int) -> None:
    for step in STEPS[:-1]:
        root = tmp_path / step

        def fail(at: str, step: str = step) -> None:
            if at == step:
                raise OSError(number, os.strerror(number))

        with pytest.raises(StoreFull):
            ModelStore(root, on_step=fail).add(source, facts())
        ModelStore(root).add(source, facts())
        assert leftovers(root) == []


def test_model_larger_than_the_disk_is_refused_before_copying(store: ModelStore) -> None:
    with pytest.raises(StoreFull, match="left"):
        store.install(iter([GGUF]), facts(), expect=1 << 60)
    assert leftovers(store.root) == []


def test_store_that_others_can_write_is_refused(store: ModelStore, source: Path) -> None:
    store.add(source, facts())
    store.root.chmod(0o777)
    with pytest.raises(StoreDamaged, match="chmod"):
        store.remove("m")
    store.root.chmod(0o700)
    shutil.rmtree(store.root)


def test_default_root() -> None:
    assert default_store_root("/data", "/users/u") == Path("/data/attested-inference/models")
    for unset in (None, "", "relative"):
        assert default_store_root(unset, "/users/u") == Path("/users/u/.local/share/attested-inference/models")
    with pytest.raises(ModelError, match="XDG_DATA_HOME"):
        default_store_root(None, None)
