"""What a container and an enclave have in common: the service's user, its model store, its configuration file."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from image import tree
from image.build.errors import BuildError
from image.build.lock import sha256_file
from image.build.run import run
from image.init import service
from image.tree import Entry

USER: Final = service.UID
STORE: Final = "srv/models"
PYTHON: Final = service.PYTHON
CONFIGURATION_FOLDER: Final = "etc/appliance"


def configuration(base: Path, model_names: Sequence[str]) -> bytes:
    """The appliance's configuration: the file `base`, then the models that are served. Raises OSError."""
    models = "".join(f'\n[[models]]\nname = "{name}"\n' for name in model_names)
    return (base.read_text(encoding="utf-8") + models).encode()


def write_models(config: bytes, to: Path, *, store: Path, environ: Mapping[str, str]) -> None:
    """What callers pin of the models and of this configuration, as the appliance computes it: a plan's `models`.

    Raises BuildError.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "config.toml"
        file.write_bytes(config)
        command: list[str | Path] = [sys.executable, "-m", "appliance", "reference-values", "--config", file]
        to.write_bytes(run(command, environ={**environ, "APPLIANCE_STORE_MODELS_DIR": str(store)}))


def default_store(environ: Mapping[str, str]) -> Path:
    """The user's model store, where `appliance models pull` puts models."""
    data = environ.get("XDG_DATA_HOME") or f"{environ.get('HOME', '')}/.local/share"
    return Path(data) / "attested-inference/models"


def read_store(store: Path, model: str) -> tuple[Entry, ...]:
    """A store that has one model of `store`, by names relative to it. Raises BuildError where a byte of it is wrong."""
    manifest = store / "manifests" / f"{model}.json"
    try:
        described = json.loads(manifest.read_text(encoding="utf-8"))
        digests = {".gguf": described["sha256"], ".jinja": described["chat_template_sha256"]}
        blobs = [store / "blobs" / f"{digest}{suffix}" for suffix, digest in digests.items() if digest]
        wrong = [path.name for path in blobs if sha256_file(path).hex() != path.stem]
    except (OSError, ValueError, KeyError) as error:
        raise BuildError(f"the model store {store} has no whole {model}: appliance models pull {model}") from error
    if wrong:
        raise BuildError(f"the model store has other bytes under {wrong[0]}: appliance models verify {model}")
    found = [tree.file(path.relative_to(store).as_posix(), path, 0o644) for path in (manifest, *blobs)]
    return tree.ordered([tree.folder("blobs"), tree.folder("manifests"), *found])


def store_entries(model: Sequence[Entry]) -> tuple[Entry, ...]:
    """The model store under its folder. Raises BuildError."""
    above = [tree.folder(str(path)) for path in PurePosixPath(STORE).parents if path.name]
    return tree.ordered([*above, tree.folder(STORE), *(tree.moved(entry, f"{STORE}/{entry.name}") for entry in model)])
