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

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from client_sdk.errors import PolicyFileError
from client_sdk.tables import (
    check_digest,
    check_model_name,
    check_nothing_left,
    check_version,
    parse_digest,
    parse_toml,
    read_text,
    take_table,
    take_text,
    toml_text,
    toml_value,
)


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
