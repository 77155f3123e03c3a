"""Container images: the layout that the specification asks for, the same bytes from the same inputs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from image import tree
from image.build.errors import BuildError
from image.oci import layout

EPOCH = 1_764_374_400
SETTINGS = layout.Settings(
    name="appliance:1",
    user="1000:1000",
    entrypoint=("/usr/bin/python3.13", "-m", "appliance"),
    command=("serve",),
    environment=("PATH=/usr/bin",),
    ports=("8443/tcp",),
    labels={"org.opencontainers.image.version": "1"},
)


def make_layer(folder: Path, content: bytes = b"hello\n") -> layout.Layer:
    tar, compressed = folder / "layer.tar", folder / "layer.tar.gz"
    with tar.open("wb") as out:
        tree.write_tar(tree.ordered([tree.folder("etc"), tree.text("etc/motd", content)]), out, epoch=EPOCH)
    compressed.write_bytes(gzip.compress(tar.read_bytes(), mtime=0))
    return layout.describe_layer(tar, compressed, "root file system")


def make_archive(folder: Path) -> bytes:
    out = io.BytesIO()
    layout.write(SETTINGS, [make_layer(folder)], out, epoch=EPOCH)
    return out.getvalue()


def test_layout_holds_what_the_specification_asks_for(tmp_path: Path) -> None:
    out = io.BytesIO()
    digest = layout.write(SETTINGS, [make_layer(tmp_path)], out, epoch=EPOCH)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as archive:
        contents = {m.name: reader.read() for m in archive if (reader := archive.extractfile(m))}
    assert json.loads(contents["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    for name, data in contents.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"
    (listed,) = json.loads(contents["index.json"])["manifests"]
    assert listed["digest"] == f"sha256:{digest.hex()}"
    assert listed["annotations"] == {"org.opencontainers.image.ref.name": "appliance:1"}
    manifest = json.loads(contents[f"blobs/sha256/{digest.hex()}"])
    assert len(contents[f"blobs/sha256/{digest.hex()}"]) == listed["size"]
    config = json.loads(contents["blobs/sha256/" + manifest["config"]["digest"].removeprefix("sha256:")])
    assert config["config"]["User"] == "1000:1000"
    assert config["config"]["Entrypoint"] == ["/usr/bin/python3.13", "-m", "appliance"]
    assert config["created"] == "2025-11-29T00:00:00Z"
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
    compressed = contents["blobs/sha256/" + layer["digest"].removeprefix("sha256:")]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(gzip.decompress(compressed)).hexdigest()}"]
    assert len(config["history"]) == len(manifest["layers"])


def test_equal_inputs_give_an_equal_archive_and_another_byte_another_image(tmp_path: Path) -> None:
    for name in ("a", "bb", "c"):
        (tmp_path / name).mkdir()
    assert make_archive(tmp_path / "a") == make_archive(tmp_path / "bb")
    layer = make_layer(tmp_path / "c", b"hellO\n")
    first = layout.write(SETTINGS, [layer], io.BytesIO(), epoch=EPOCH)
    second = layout.write(SETTINGS, [make_layer(tmp_path / "a")], io.BytesIO(), epoch=EPOCH)
    assert first != second


def test_manifest_is_read_back_and_a_changed_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    data = make_archive(tmp_path)
    path.write_bytes(data)
    assert layout.read_manifest(path)["schemaVersion"] == 2
    path.write_bytes(data.replace(b'"schemaVersion":2}', b'"schemaVersion":3}').replace(b'"size":', b'"sizE":'))
    with pytest.raises(BuildError):
        layout.read_manifest(path)
    path.write_bytes(b"no tar")
    with pytest.raises(BuildError, match="no OCI image layout"):
        layout.read_manifest(path)


def test_an_image_without_layers_is_refused() -> None:
    with pytest.raises(BuildError):
        layout.write(SETTINGS, [], io.BytesIO(), epoch=EPOCH)


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")
def test_skopeo_reads_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(make_archive(tmp_path))
    done = subprocess.run(
        ["skopeo", "inspect", "--config", f"oci-archive:{path}:appliance:1"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["config"]["User"] == "1000:1000"
