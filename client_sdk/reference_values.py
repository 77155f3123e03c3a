"""Reference values: the digests a builder publishes, from which a caller makes a policy.

A TOML file with a closed schema: `appliance reference-values` prints it, `appliance-client policy init` reads it.

    version = 1
    source = "where these values were computed, for people"
    config = "<64 hex>"        # digest of the configuration, optional
    engine = "<64 hex>"        # digest of the native libraries, optional
    arithmetic = "attested-1"  # what answers are computed in, optional

    [models]
    "NAME" = "<64 hex>"        # model identity by content, one per name

    [families.NAME]            # launch measurements, in the words of a policy's own table
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from client_sdk.errors import PolicyFileError

LIMIT_FILE_BYTES = 1 << 20
DIGEST_BYTES = 32
_HEX = re.compile(r"[0-9a-f]{64}")
_WILDCARDS = frozenset({"any", "*", "all", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceValues:
    """`models` maps names to 32-byte identities; `config` and `engine` are 32-byte digests; `source` is prose.

    `arithmetic` is a name as in receipts. `families` holds tables as a policy has them; they are judged when a policy
    is made of them.
    """

    source: str
    models: Mapping[str, bytes]
    config: bytes | None = None
    engine: bytes | None = None
    arithmetic: str | None = None
    families: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.models:
            raise PolicyFileError("reference values without a model")
        for name, digest in self.models.items():
            check_model_name(name)
            check_digest(digest, f"models.{name}")
        for key, value in (("config", self.config), ("engine", self.engine)):
            if value is not None:
                check_digest(value, key)
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))

    @classmethod
    def load(cls, path: Path) -> ReferenceValues:
        return cls.parse(read_text(path))

    @classmethod
    def parse(cls, text: str) -> ReferenceValues:
        """Parse the TOML text. Raises PolicyFileError naming the key at fault."""
        table = parse_toml(text)
        check_version(table)
        models = take_table(table, "models")
        values = cls(
            source=take_text(table, "source"),
            models={name: parse_digest(value, f"models.{name}") for name, value in models.items()},
            config=parse_digest(table.pop("config"), "config") if "config" in table else None,
            engine=parse_digest(table.pop("engine"), "engine") if "engine" in table else None,
            arithmetic=take_text(table, "arithmetic") if "arithmetic" in table else None,
            families=take_table(table, "families") if "families" in table else {},
        )
        check_nothing_left(table, "")
        return values

    def to_toml(self) -> str:
        lines = ["version = 1", f"source = {toml_text(self.source)}"]
        if self.config is not None:
            lines.append(f'config = "{self.config.hex()}"')
        if self.engine is not None:
            lines.append(f'engine = "{self.engine.hex()}"')
        if self.arithmetic is not None:
            lines.append(f"arithmetic = {toml_text(self.arithmetic)}")
        lines += ["", "[models]"]
        lines += [f'{toml_text(name)} = "{digest.hex()}"' for name, digest in sorted(self.models.items())]
        for name, table in sorted(self.families.items()):
            lines += ["", f"[families.{name}]"]
            lines += [f"{key} = {toml_value(value)}" for key, value in table.items()] if isinstance(table, dict) else []
        return "\n".join(lines) + "\n"


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
