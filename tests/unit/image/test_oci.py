"""Container images: the layout that the specification asks for, the same bytes from the same inputs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

from image import service, tree
from image.build.errors import BuildError
from image.oci import build, layout

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


def parts() -> build.Parts:
    return build.Parts(
        root=tree.ordered([tree.folder("etc"), tree.folder("etc/appliance"), tree.text("etc/motd", b"hello\n")]),
        model=tree.ordered([tree.folder("blobs"), tree.text("blobs/w.gguf", b"GGUF")]),
        model_names=("small",),
    )


def compress(tar: Path, to: Path) -> None:
    to.write_bytes(gzip.compress(tar.read_bytes(), mtime=0))


@pytest.mark.skipif(
    shutil.which("umoci") is None or shutil.which("skopeo") is None or os.geteuid() != 0,
    reason="needs umoci, skopeo and root",
)
def test_the_image_unpacks_to_root_and_models_and_runs_as_the_unprivileged_user(tmp_path: Path) -> None:
    build.build(parts(), tmp_path / "image.tar", version="1", epoch=EPOCH, compress=compress)
    subprocess.run(
        ["skopeo", "copy", "--quiet", f"oci-archive:{tmp_path}/image.tar", f"oci:{tmp_path}/layout:1"], check=True
    )
    subprocess.run(["umoci", "unpack", "--image", f"{tmp_path}/layout:1", str(tmp_path / "bundle")], check=True)
    root = tmp_path / "bundle/rootfs"
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) == [
        "etc/appliance/container.toml",
        "etc/motd",
        "srv/models/blobs/w.gguf",
    ]
    process = json.loads((tmp_path / "bundle/config.json").read_text())["process"]
    assert (process["user"]["uid"], process["user"]["gid"]) == (service.USER, service.USER)
    assert process["args"][0] == service.PYTHON


def test_two_builds_in_different_folders_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a/image.tar", tmp_path / "bb/image.tar"
    digests = [build.build(parts(), out, version="1", epoch=EPOCH, compress=compress) for out in (first, second)]
    assert digests[0] == digests[1]
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == ["image.tar"]


def test_the_root_is_compressed_and_the_weights_are_not(tmp_path: Path) -> None:
    build.build(parts(), tmp_path / "image.tar", version="1", epoch=EPOCH, compress=compress)
    listed = layout.read_manifest(tmp_path / "image.tar")["layers"]
    assert isinstance(listed, list)
    assert [one["mediaType"].rpartition(".")[2] for one in listed] == ["tar+gzip", "tar"]


def test_configuration_asks_for_keys_and_hardware() -> None:
    settings = tomllib.loads(service.configuration(build.FOLDER / "container.toml", ("small",)).decode())
    assert settings["attestation"] == {"attester": "auto"}
    assert settings["keys"]["file"].startswith("/run/appliance/")
    assert settings["store"]["models_dir"] == "/" + service.STORE
    assert settings["server"]["listen"] == [f"0.0.0.0:{build.PORT}"]


def test_a_root_without_a_place_for_the_configuration_is_refused() -> None:
    with pytest.raises(BuildError, match="/etc/appliance"):
        build.layers(build.Parts(root=(), model=(), model_names=()))
