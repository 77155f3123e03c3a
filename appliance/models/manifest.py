"""What the store knows of one installed model, as a small JSON document with a closed schema."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from appliance.models.digests import parse_sha256
from appliance.models.errors import InvalidDigest, InvalidModelName, StoreDamaged

LIMIT_BYTES: Final = 64 * 1024
_VERSION: Final = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEYS: Final = frozenset({"version", "name", "sha256", "size", "format", "licence", "source", "chat_template_sha256"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is promised of a model before its bytes arrive. `size` in bytes, None where only the digest is known."""

    name: str
    sha256: bytes
    size: int | None
    licence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """A committed model. `paths` are its weight files, `size` in bytes, `sha256` what they were checked against."""

    name: str
    paths: tuple[Path, ...]
    sha256: bytes
    size: int
    licence: str
    source: str
    chat_template: Path | None
    chat_template_sha256: bytes | None


def check_name(name: str) -> str:
    """`name`, 1 to 128 letters, digits, '.', '_' and '-' the first a letter or digit; or InvalidModelName."""
    if not _NAME.fullmatch(name):
        raise InvalidModelName(f"not a model name: {name[:140]!r}. Use letters, digits, '.', '_' and '-', at most 128.")
    return name


def encode_manifest(facts: ModelFacts, *, size: int, chat_template_sha256: bytes | None) -> bytes:
    """The manifest of `facts` as UTF-8 JSON; `size` is the number of bytes that were hashed."""
    document = {
        "version": _VERSION,
        "name": facts.name,
        "sha256": facts.sha256.hex(),
        "size": size,
        "format": "gguf",
        "licence": facts.licence,
        "source": facts.source,
        "chat_template_sha256": chat_template_sha256.hex() if chat_template_sha256 else None,
    }
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def parse_manifest(data: bytes, *, name: str, blobs: Path) -> InstalledModel:
    """The model that the manifest `data` of `name` describes, its files under `blobs`. Raises StoreDamaged."""
    where = f"the manifest of model {name!r} is damaged"
    if len(data) > LIMIT_BYTES:
        raise StoreDamaged(f"{where}: over {LIMIT_BYTES} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"{where}: not JSON. Remove the model and install it again.") from error
    if not isinstance(document, dict) or document.keys() != _KEYS:
        raise StoreDamaged(f"{where}: its keys are not exactly {', '.join(sorted(_KEYS))}")
    match document:
        case {
            "version": 1,
            "name": str(stored_name),
            "sha256": str(sha256),
            "size": int(size),
            "format": "gguf",
            "licence": str(licence),
            "source": str(source),
            "chat_template_sha256": str() | None as template_sha256,
        } if stored_name == name and size > 0 and not isinstance(size, bool):
            pass
        case _:
            raise StoreDamaged(f"{where}: a value has the wrong type, another name, or another version")
    try:
        digest = parse_sha256(sha256)
        template = parse_sha256(template_sha256) if template_sha256 is not None else None
    except InvalidDigest as error:
        raise StoreDamaged(f"{where}: {error}") from error
    return InstalledModel(
        name=name,
        paths=(weights_path(blobs, digest),),
        sha256=digest,
        size=size,
        licence=licence,
        source=source,
        chat_template=template_path(blobs, template) if template else None,
        chat_template_sha256=template,
    )


def weights_path(blobs: Path, sha256: bytes) -> Path:
    """Where weights of that digest lie."""
    return blobs / f"{sha256.hex()}.gguf"


def template_path(blobs: Path, sha256: bytes) -> Path:
    """Where a chat template of that digest lies."""
    return blobs / f"{sha256.hex()}.jinja"
