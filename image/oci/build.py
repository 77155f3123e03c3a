"""Put the container image together: two layers, the image's own root file system and the model store.

The same bytes as in the image, without kernel and first process: a container runs where somebody else boots.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from image import service, tree
from image.build.errors import BuildError
from image.oci import layout
from image.tree import Entry

FOLDER: Final = Path(__file__).parent
CONFIGURATION: Final = f"{service.CONFIGURATION_FOLDER}/container.toml"
PORT: Final = 8443
_ROOT: Final = 0  # of the layers; weights hardly get smaller
# tar in, gzip out. The program that compresses is a locked one: another would make other bytes of the same layer.
Compress = Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`root` is the root file system, `model` the store's files relative to it, `model_names` what is served."""

    root: Sequence[Entry]
    model: Sequence[Entry]
    model_names: Sequence[str]


def settings(version: str, model_names: Sequence[str]) -> layout.Settings:
    """How a container of the image runs: no root, no shell, the operator's files under /run/appliance."""
    return layout.Settings(
        name=f"attested-inference:{version}",
        user=f"{service.USER}:{service.USER}",
        entrypoint=(service.PYTHON, "-I", "-m", "appliance"),
        command=("serve", "--config", f"/{CONFIGURATION}"),
        environment=("PATH=/usr/bin", "LC_ALL=C.UTF-8", "HOME=/run/appliance"),
        ports=(f"{PORT}/tcp",),
        labels={
            "org.opencontainers.image.title": "attested-inference",
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.licenses": "Apache-2.0",
            "org.opencontainers.image.description": (
                "The appliance without the machine that is measured: evidence covers what boots, not a container"
            ),
            "attested-inference.models": " ".join(model_names),
        },
    )


def layers(parts: Parts) -> tuple[tuple[str, tuple[Entry, ...]], ...]:
    """What made each layer, in words, and its entries. Raises BuildError where the root has no place for them."""
    if not any(entry.name == service.CONFIGURATION_FOLDER for entry in parts.root):
        raise BuildError(f"the root file system has no /{service.CONFIGURATION_FOLDER}")
    own = service.configuration(FOLDER / "container.toml", parts.model_names)
    root = tree.ordered([*parts.root, tree.text(CONFIGURATION, own, 0o444)])
    return ("root file system from locked packages", root), ("model store", service.store_entries(parts.model))


def build(parts: Parts, out: Path, *, version: str, epoch: int, compress: Compress) -> bytes:
    """Write the archive to `out`; the manifest's SHA-256. Raises BuildError, OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        made = []
        for number, (made_by, entries) in enumerate(layers(parts)):
            tar, compressed = Path(scratch) / f"{number}.tar", Path(scratch) / f"{number}.tar.gz"
            with tar.open("wb") as file:
                tree.write_tar(entries, file, epoch=epoch)
            if number == _ROOT:
                compress(tar, compressed)
            made.append(layout.describe_layer(tar, compressed if number == _ROOT else None, made_by))
        partial = Path(scratch) / out.name
        with partial.open("wb") as file:
            digest = layout.write(settings(version, parts.model_names), made, file, epoch=epoch)
        partial.rename(out)
    return digest
