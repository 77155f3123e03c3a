"""What a container and an enclave have in common: the service's user, its model store, its configuration file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from image import tree
from image.tree import Entry

USER: Final = 1000
STORE: Final = "models"
PYTHON: Final = "/usr/bin/python3.13"
CONFIGURATION_FOLDER: Final = "etc/appliance"


def configuration(base: Path, model_names: Sequence[str]) -> bytes:
    """The appliance's configuration: the file `base`, then the models that are served. Raises OSError."""
    models = "".join(f'\n[[models]]\nname = "{name}"\n' for name in model_names)
    return (base.read_text(encoding="utf-8") + models).encode()


def store_entries(model: Sequence[Entry]) -> tuple[Entry, ...]:
    """The model store under its folder. Raises BuildError."""
    return tree.ordered([tree.folder(STORE), *(tree.moved(entry, f"{STORE}/{entry.name}") for entry in model)])
