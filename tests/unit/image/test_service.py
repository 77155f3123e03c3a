"""The model store that goes into containers and enclaves: one model of it, checked byte for byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from image import service
from image.build.errors import BuildError


def make_store(folder: Path, *, template: bytes | None) -> Path:
    weights = b"GGUF" + bytes(99)
    named = {"sha256": hashlib.sha256(weights).hexdigest(), "chat_template_sha256": None}
    for part in ("blobs", "manifests", "staging"):
        (folder / part).mkdir(parents=True)
    (folder / "blobs" / f"{named['sha256']}.gguf").write_bytes(weights)
    (folder / "blobs/other.gguf").write_bytes(b"of another model")
    if template is not None:
        named["chat_template_sha256"] = hashlib.sha256(template).hexdigest()
        (folder / "blobs" / f"{named['chat_template_sha256']}.jinja").write_bytes(template)
    (folder / "manifests/small.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


@pytest.mark.parametrize("template", [None, b"{{ messages }}"])
def test_one_model_is_taken_and_nothing_else(tmp_path: Path, template: bytes | None) -> None:
    store = make_store(tmp_path / "store", template=template)
    files = [entry.name for entry in service.read_store(store, "small") if entry.source is not None]
    assert files[-1] == "manifests/small.json"
    assert sorted(Path(name).suffix for name in files[:-1]) == [".gguf"] + ([".jinja"] if template else [])
    names = [entry.name for entry in service.store_entries(service.read_store(store, "small"))]
    assert names[:3] == ["srv", "srv/models", "srv/models/blobs"]


def test_a_changed_byte_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", template=None)
    (weights,) = [path for path in (store / "blobs").iterdir() if path.name != "other.gguf"]
    weights.write_bytes(b"GGUF" + bytes(98) + b"\x01")
    with pytest.raises(BuildError, match="other bytes"):
        service.read_store(store, "small")


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_a_model_that_is_not_there_or_not_whole_is_refused(tmp_path: Path, content: str | None) -> None:
    store = make_store(tmp_path / "store", template=None)
    if content is not None:
        (store / "manifests/other.json").write_text(content, encoding="utf-8")
    with pytest.raises(BuildError, match="no whole other"):
        service.read_store(store, "other")


def test_the_default_store_is_the_users() -> None:
    assert service.default_store({"XDG_DATA_HOME": "/d", "HOME": "/h"}) == Path("/d/attested-inference/models")
    assert service.default_store({"HOME": "/h"}) == Path("/h/.local/share/attested-inference/models")
