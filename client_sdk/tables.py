"""Readers of the caller's TOML files: strict, bounded, every unknown key an error. All raise PolicyFileError."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from client_sdk.errors import PolicyFileError

LIMIT_FILE_BYTES = 1 << 20


DIGEST_BYTES = 32


_HEX = re.compile(r"[0-9a-f]{64}")


_WILDCARDS = frozenset({"any", "*", "all", "none"})


def toml_value(value: object) -> str:
    """One value as TOML: text, integer, boolean, list, inline table."""
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_text(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    return toml_text(str(value))


def parse_digest(value: object, where: str) -> bytes:
    """The one reader of pinned digests: 64 hex digits, whatever case, `sha256:` before them at most.

    Prefixes, other lengths, other algorithms, wildcards and the all-zero digest are errors, never weaker pins.
    """
    if type(value) is not str:
        raise PolicyFileError(f"{where}: a digest is text of 64 hex digits")
    text = value.strip().lower().removeprefix("sha256:")
    if _HEX.fullmatch(text) is None:
        raise PolicyFileError(f"{where}: a digest is exactly 64 hex digits, got {len(text)} characters")
    digest = bytes.fromhex(text)
    check_digest(digest, where)
    return digest


def check_digest(digest: object, where: str) -> None:
    if type(digest) is not bytes or len(digest) != DIGEST_BYTES:
        raise PolicyFileError(f"{where}: a digest is {DIGEST_BYTES} bytes")
    if not any(digest):
        raise PolicyFileError(f"{where}: the all-zero digest pins nothing")


def check_model_name(name: object) -> None:
    if type(name) is not str or not name or not name.isprintable() or name.strip() != name:
        raise PolicyFileError("a model name is printable text without surrounding blanks")
    if name.lower() in _WILDCARDS:
        raise PolicyFileError(f"models.{name}: there is no wildcard, name each model")


def read_text(path: Path) -> str:
    """A caller's own small text file. Raises PolicyFileError."""
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT_FILE_BYTES + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyFileError(f"{path}: {error}") from error
    if len(raw) > LIMIT_FILE_BYTES:
        raise PolicyFileError(f"{path}: larger than {LIMIT_FILE_BYTES} bytes")
    return text


def parse_toml(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyFileError(f"not TOML: {error}") from None


def check_version(table: dict[str, object]) -> None:
    version = table.pop("version", None)
    if type(version) is not int or version != 1:
        raise PolicyFileError("version: must be 1")


def take_table(table: dict[str, object], key: str) -> dict[str, object]:
    value = table.pop(key, None)
    if type(value) is not dict:
        raise PolicyFileError(f"{key}: a table is needed")
    return value


def take_text(table: dict[str, object], key: str) -> str:
    value = table.pop(key, None)
    if type(value) is not str or not value.strip():
        raise PolicyFileError(f"{key}: text is needed")
    return value


def check_nothing_left(table: Mapping[str, object], where: str) -> None:
    if table:
        prefix = f"{where}." if where else ""
        raise PolicyFileError("unknown keys: " + ", ".join(f"{prefix}{key}" for key in sorted(table)))


def toml_text(text: str) -> str:
    """A basic TOML string. JSON's escapes are TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
