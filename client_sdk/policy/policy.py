"""The caller's policy: what is accepted. Loaded by the SDK alone; nothing a server says can relax it.

    version = 1
    unsafe_accept_insecure = true          # admits the insecure family, relaxes nothing else
    configs = ["<64 hex>"]                 # optional: digests of acceptable configurations

    [models]                               # at least one name, each with one or more identities
    "NAME" = ["<64 hex>", "<64 hex>"]

    [receipt]                              # optional
    required_claims = ["gpu", "execution.batching"]
    devices = ["cpu"]                      # kinds of device an answer may come from
    arithmetic = ["attested-1"]            # arithmetics an answer may have been computed in
    require_gap_free_chain = false

    [families.NAME]                        # what evidence of each family must show: docs/attestation.md
    ...

    [limits]                               # optional, seconds
    max_channel_age_s = 3600
    max_continued_s = 600                  # 0: hardware evidence on every connection
    max_clock_skew_s = 300

The schema is closed, and a pin that is blank, short, all-zero or that nothing here could enforce is an error when the
policy is made, not a weaker check later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from client_sdk.errors import PolicyFileError
from client_sdk.policy.reference_values import ReferenceValues
from client_sdk.tables import (
    check_digest,
    check_model_name,
    check_nothing_left,
    check_version,
    parse_digest,
    parse_toml,
    read_text,
    take_table,
    toml_text,
    toml_value,
)
from client_sdk.tee.evidence import FamilyPolicy
from client_sdk.tee.families import FAMILIES
from client_sdk.wire import cbor, digests

FAMILY_INSECURE = "insecure"

REQUIRABLE_CLAIMS = frozenset(
    {"model", "chat-template", "prompt", "decoding", "output", "embedding", "execution", "stream", "checkpoint", "gpu"}
)
_EXECUTION_FACT = re.compile(r"execution\.[a-z0-9][a-z0-9_.-]{0,63}")
_LIMITS = ("max_channel_age_s", "max_continued_s", "max_clock_skew_s")
_MAX_LIMIT_S = 86_400


@dataclass(frozen=True, slots=True)
class UnsafeAcceptInsecure:
    """Admits evidence without hardware. Anybody can make such evidence: it proves nothing about the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the caller accepts. Raises PolicyFileError when it could not refuse anything.

    `models` maps each name to its acceptable 32-byte identities, `configs` holds acceptable configuration digests,
    `devices` acceptable device kinds and `arithmetic` acceptable arithmetics in receipts (None for any of them: not
    pinned). Limits are in seconds.
    """

    models: Mapping[str, frozenset[bytes]]
    families: Mapping[str, FamilyPolicy] = field(default_factory=dict)
    insecure: UnsafeAcceptInsecure | None = None
    configs: frozenset[bytes] | None = None
    required_claims: frozenset[str] = field(default=frozenset())
    devices: frozenset[str] | None = None
    arithmetic: frozenset[str] | None = None
    require_gap_free_chain: bool = False
    max_channel_age_s: int = 3600
    max_continued_s: int = 600
    max_clock_skew_s: int = 300

    def __post_init__(self) -> None:
        self._check_families()
        _check_models(self.models)
        object.__setattr__(self, "models", MappingProxyType({k: frozenset(v) for k, v in self.models.items()}))
        if self.configs is not None:
            _check_pins(self.configs, "configs")
        for claim in self.required_claims:
            if claim not in REQUIRABLE_CLAIMS and _EXECUTION_FACT.fullmatch(claim) is None:
                raise PolicyFileError(f"receipt.required_claims: no receipt has a claim {claim!r}")
        _check_names(self.devices, "receipt.devices", "kind of device")
        _check_names(self.arithmetic, "receipt.arithmetic", "arithmetic")
        if type(self.require_gap_free_chain) is not bool:
            raise PolicyFileError("receipt.require_gap_free_chain: true or false")
        for name in _LIMITS:
            _check_limit(name, getattr(self, name))

    def _check_families(self) -> None:
        if self.insecure is not None and type(self.insecure) is not UnsafeAcceptInsecure:
            raise PolicyFileError("insecure: only UnsafeAcceptInsecure() admits the insecure family")
        if not isinstance(self.families, Mapping):
            raise PolicyFileError("families: a table of what each family must show")
        for name in self.families:
            _check_family_name(name)
        object.__setattr__(self, "families", MappingProxyType(dict(self.families)))
        if not any(FAMILIES[name].primary for name in self.families) and self.insecure is None:
            raise PolicyFileError("no family that vouches for a machine is named, so nothing could be accepted")

    @classmethod
    def load(cls, path: Path | str) -> Policy:
        """Read a policy file. Raises PolicyFileError naming the key at fault."""
        return cls.parse(read_text(Path(path)))

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parse the TOML text. Raises PolicyFileError naming the key at fault."""
        table = parse_toml(text)
        check_version(table)
        receipt = take_table(table, "receipt") if "receipt" in table else {}
        limits = take_table(table, "limits") if "limits" in table else {}
        families = take_table(table, "families") if "families" in table else {}
        models = take_table(table, "models")
        policy = cls(
            models={name: _parse_pins(pins, f"models.{name}") for name, pins in models.items()},
            families=parse_families(families, report_only=False),
            insecure=_parse_opt_in(table),
            configs=_parse_pins(table.pop("configs"), "configs") if "configs" in table else None,
            required_claims=_parse_names(receipt, "required_claims") or frozenset(),
            devices=_parse_names(receipt, "devices"),
            arithmetic=_parse_names(receipt, "arithmetic"),
            require_gap_free_chain=_parse_bool(receipt, "require_gap_free_chain"),
            **{name: _parse_limit(limits, name) for name in _LIMITS if name in limits},
        )
        check_nothing_left(table, "")
        check_nothing_left(receipt, "receipt")
        check_nothing_left(limits, "limits")
        return policy

    def to_toml(self) -> str:
        """The same policy as a file; `Policy.parse` reads it back."""
        lines = ["version = 1"]
        if self.insecure is not None:
            lines.append("unsafe_accept_insecure = true")
        if self.configs is not None:
            lines.append(f"configs = {_toml_pins(self.configs)}")
        lines += ["", "[models]"]
        lines += [f"{toml_text(name)} = {_toml_pins(pins)}" for name, pins in sorted(self.models.items())]
        for name, family in sorted(self.families.items()):
            lines += ["", f"[families.{name}]"]
            lines += [f"{key} = {toml_value(value)}" for key, value in family.to_table().items()]
        lines += ["", "[receipt]"]
        if self.required_claims:
            lines.append(f"required_claims = [{', '.join(toml_text(c) for c in sorted(self.required_claims))}]")
        for key, pinned in (("devices", self.devices), ("arithmetic", self.arithmetic)):
            if pinned is not None:
                lines.append(f"{key} = {toml_value(sorted(pinned))}")
        lines.append(f"require_gap_free_chain = {'true' if self.require_gap_free_chain else 'false'}")
        lines += ["", "[limits]"]
        lines += [f"{name} = {getattr(self, name)}" for name in _LIMITS]
        return "\n".join(lines) + "\n"

    @property
    def digest(self) -> bytes:
        """32 bytes over the meaning of the policy (layout and order of the file do not count)."""
        # Where it is pinned only: policies from before there was such a pin keep their digest.
        arithmetic = {} if self.arithmetic is None else {"arithmetic": sorted(self.arithmetic)}
        return digests.labelled(
            "policy v1",
            cbor.encode(
                {
                    "families": {name: family.to_table() for name, family in self.families.items()},
                    "insecure": self.insecure is not None,
                    "models": {name: sorted(pins) for name, pins in self.models.items()},
                    "configs": None if self.configs is None else sorted(self.configs),
                    "required-claims": sorted(self.required_claims),
                    "devices": None if self.devices is None else sorted(self.devices),
                    "gap-free": self.require_gap_free_chain,
                    "limits": [getattr(self, name) for name in _LIMITS],
                    **arithmetic,
                }
            ),
        )


def parse_families(tables: Mapping[str, object], *, report_only: bool) -> dict[str, FamilyPolicy]:
    """The `[families.NAME]` tables. `report_only` admits tables without launch measurement (foreign evidence only).

    Raises PolicyFileError naming the key at fault.
    """
    families: dict[str, FamilyPolicy] = {}
    for name, table in tables.items():
        _check_family_name(name)
        if type(table) is not dict:
            raise PolicyFileError(f"families.{name}: a table is needed")
        families[name] = FAMILIES[name].parse_policy(dict(table), f"families.{name}", report_only=report_only)
    return families


def _check_family_name(name: str) -> None:
    if name == FAMILY_INSECURE:
        raise PolicyFileError("families.insecure: the only way to admit it is unsafe_accept_insecure = true")
    if name not in FAMILIES:
        raise PolicyFileError(f"families.{name}: this version cannot verify that family, so cannot enforce it")


def policy_from_reference(reference: ReferenceValues, *, unsafe_accept_insecure: bool) -> Policy:
    """The policy that accepts exactly what `reference` names. Raises PolicyFileError if that is no usable policy."""
    return Policy(
        models={name: frozenset({identity}) for name, identity in reference.models.items()},
        configs=None if reference.config is None else frozenset({reference.config}),
        arithmetic=None if reference.arithmetic is None else frozenset({reference.arithmetic}),
        families=parse_families(reference.families, report_only=False),
        insecure=UnsafeAcceptInsecure() if unsafe_accept_insecure else None,
    )


def _check_models(models: Mapping[str, Iterable[bytes]]) -> None:
    if not isinstance(models, Mapping) or not models:
        raise PolicyFileError("models: at least one model identity is needed")
    for name, pins in models.items():
        check_model_name(name)
        _check_pins(pins, f"models.{name}")


def _check_pins(pins: object, where: str) -> None:
    if not isinstance(pins, frozenset | set | list | tuple) or not pins:
        raise PolicyFileError(f"{where}: a set of at least one digest is needed")
    for pin in pins:
        check_digest(pin, where)


def _check_limit(name: str, value: object) -> None:
    least = 1 if name == "max_channel_age_s" else 0
    if type(value) is not int or not least <= value <= _MAX_LIMIT_S:
        raise PolicyFileError(f"limits.{name}: whole seconds, {least} to {_MAX_LIMIT_S}")


def _check_names(names: frozenset[str] | None, where: str, what: str) -> None:
    if names is not None and (not names or not all(_is_plain_name(name) for name in names)):
        raise PolicyFileError(f"{where}: name at least one {what}; there is no wildcard")


def _is_plain_name(name: object) -> bool:
    return type(name) is str and bool(name) and name.isprintable() and name.lower() not in ("any", "*", "all", "none")


def _parse_opt_in(table: dict[str, object]) -> UnsafeAcceptInsecure | None:
    value = table.pop("unsafe_accept_insecure", False)
    if type(value) is not bool:
        raise PolicyFileError("unsafe_accept_insecure: true or false, nothing else")
    return UnsafeAcceptInsecure() if value else None


def _parse_pins(value: object, where: str) -> frozenset[bytes]:
    if type(value) is not list or not value:
        raise PolicyFileError(f"{where}: a list of at least one digest is needed")
    return frozenset(parse_digest(item, where) for item in value)


def _parse_names(table: dict[str, object], key: str) -> frozenset[str] | None:
    if key not in table:
        return None
    value = table.pop(key)
    if type(value) is not list or not value or not all(type(item) is str for item in value):
        raise PolicyFileError(f"receipt.{key}: a list of at least one name is needed")
    return frozenset(value)


def _parse_bool(table: dict[str, object], key: str) -> bool:
    value = table.pop(key, False)
    if type(value) is not bool:
        raise PolicyFileError(f"receipt.{key}: true or false")
    return value


def _parse_limit(table: dict[str, object], name: str) -> int:
    value = table.pop(name)
    _check_limit(name, value)
    assert type(value) is int
    return value


def _toml_pins(pins: Iterable[bytes]) -> str:
    return "[" + ", ".join(f'"{pin.hex()}"' for pin in sorted(pins)) + "]"
