"""OCI image layout archives: a tar of blobs named by their digests, an index and a manifest.

OCI Image Format Specification 1.0: image-layout.md, manifest.md, config.md, layer.md. One platform, linux/amd64.
Everything in it follows from layers, configuration and one time, so that equal inputs give an equal archive.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from image.build.errors import BuildError
from image.build.lock import sha256_file
from image.tree import Entry, file, folder, ordered, text, write_tar

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """`diff_id` is SHA-256 of the tar, `digest` of `path`, 32 bytes each; `kind` its media type; `made_by` is text."""

    path: Path
    kind: str
    diff_id: bytes
    digest: bytes
    size: int
    made_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a container of the image runs, in the words of the specification's `config`."""

    name: str
    user: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    environment: tuple[str, ...]
    ports: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)


def describe_layer(tar: Path, compressed: Path | None, made_by: str) -> Layer:
    """A layer from its tar and the same compressed by gzip; None: it stays as it is. Raises OSError."""
    path = compressed or tar
    return Layer(
        path=path,
        kind=LAYER_TYPE if compressed is None else f"{LAYER_TYPE}+gzip",
        diff_id=sha256_file(tar),
        digest=sha256_file(path),
        size=path.stat().st_size,
        made_by=made_by,
    )


def configuration(settings: Settings, layers: Sequence[Layer], epoch: int) -> bytes:
    """The image's configuration as JSON with sorted keys; `epoch` in seconds since 1970 is its only time."""
    created = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": created,
            "config": {
                "User": settings.user,
                "Entrypoint": list(settings.entrypoint),
                "Cmd": list(settings.command),
                "Env": list(settings.environment),
                "ExposedPorts": {port: {} for port in settings.ports},
                "Labels": dict(settings.labels),
                "StopSignal": "SIGTERM",
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.diff_id.hex()}" for layer in layers]},
            "history": [{"created": created, "created_by": layer.made_by} for layer in layers],
        }
    )


def write(settings: Settings, layers: Sequence[Layer], out: BinaryIO, *, epoch: int) -> bytes:
    """Write the archive; the manifest's SHA-256, 32 bytes, which names the image in any registry. Raises BuildError."""
    if not layers:
        raise BuildError("a container image without layers")
    config = configuration(settings, layers, epoch)
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _descriptor(CONFIG_TYPE, hashlib.sha256(config).digest(), len(config)),
            "layers": [_descriptor(layer.kind, layer.digest, layer.size) for layer in layers],
            "annotations": dict(settings.labels),
        }
    )
    digest = hashlib.sha256(manifest).digest()
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [
            {
                **_descriptor(MANIFEST_TYPE, digest, len(manifest)),
                "platform": {"architecture": "amd64", "os": "linux"},
                "annotations": {"org.opencontainers.image.ref.name": settings.name},
            }
        ],
    }
    entries = [
        folder("blobs"),
        folder("blobs/sha256"),
        text("oci-layout", _json({"imageLayoutVersion": "1.0.0"})),
        text("index.json", _json(index)),
        *(text(_blob(hashlib.sha256(one).digest()), one) for one in (config, manifest)),
        *(_layer_entry(layer) for layer in layers),
    ]
    write_tar(ordered(entries), out, epoch=epoch)
    return digest


def read_manifest(path: Path) -> Mapping[str, object]:
    """The manifest of an archive, found through its index and checked by digest. Raises BuildError."""
    try:
        with tarfile.open(path, "r:") as archive:
            index = json.loads(_member(archive, "index.json"))
            name = index["manifests"][0]["digest"].removeprefix("sha256:")
            data = _member(archive, f"blobs/sha256/{name}")
    except (tarfile.TarError, KeyError, IndexError, ValueError) as error:
        raise BuildError(f"{path.name} is no OCI image layout: {error}") from error
    if hashlib.sha256(data).hexdigest() != name:
        raise BuildError(f"{path.name}: the manifest is not the one that the index names")
    manifest: Mapping[str, object] = json.loads(data)
    return manifest


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    reader = archive.extractfile(name)
    if reader is None:
        raise KeyError(name)
    return reader.read()


def _layer_entry(layer: Layer) -> Entry:
    return file(_blob(layer.digest), layer.path, 0o644)


def _blob(digest: bytes) -> str:
    return f"blobs/sha256/{digest.hex()}"


def _descriptor(kind: str, digest: bytes, size: int) -> dict[str, object]:
    return {"mediaType": kind, "digest": f"sha256:{digest.hex()}", "size": size}


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
