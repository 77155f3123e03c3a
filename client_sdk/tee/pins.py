"""Readers for the tables of families in a policy: full-length pins, non-empty sets, bounded numbers, nothing guessed.

Each takes its key out of the table, so that `tables.check_nothing_left` finds the unknown ones. `where` is
the table's name in errors; all raise PolicyFileError naming the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from client_sdk.errors import PolicyFileError

_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_WILDCARDS = frozenset({"any", "*", "all", "none"})
_MAX_PINS = 1024


def parse_hex(value: object, size: int, where: str, *, zero: bool = False) -> bytes:
    """Exactly `size` bytes in hex, either case. All-zero pins nothing, so it is refused unless `zero`."""
    if type(value) is not str:
        raise PolicyFileError(f"{where}: text of {2 * size} hex digits is needed")
    text = value.strip().lower()
    if len(text) != 2 * size or _HEX.fullmatch(text) is None:
        raise PolicyFileError(f"{where}: exactly {2 * size} hex digits are needed, got {len(text)} characters")
    pin = bytes.fromhex(text)
    if not zero and not any(pin):
        raise PolicyFileError(f"{where}: all zeros pin nothing")
    return pin


def take_pins(
    table: dict[str, object], key: str, size: int, where: str, *, zero: bool = False
) -> frozenset[bytes] | None:
    """An any-of list of `size`-byte pins in hex; None where the key is absent."""
    values = take_list(table, key, where)
    if values is None:
        return None
    return frozenset(parse_hex(value, size, f"{where}.{key}", zero=zero) for value in values)


def take_list(table: dict[str, object], key: str, where: str) -> list[object] | None:
    """A list of at least one entry; None where the key is absent."""
    if key not in table:
        return None
    value = table.pop(key)
    if type(value) is not list or not 1 <= len(value) <= _MAX_PINS:
        raise PolicyFileError(f"{where}.{key}: a list of 1 to {_MAX_PINS} entries is needed")
    return value


def take_names(table: dict[str, object], key: str, where: str) -> frozenset[str] | None:
    """An any-of list of texts, without wildcards; None where the key is absent."""
    values = take_list(table, key, where)
    if values is None:
        return None
    names = set()
    for name in values:
        if type(name) is not str or not name.strip() or not name.isprintable() or name.lower() in _WILDCARDS:
            raise PolicyFileError(f"{where}.{key}: each entry is a name; there is no wildcard")
        names.add(name)
    return frozenset(names)


def take_integer(table: dict[str, object], key: str, where: str, *, low: int, high: int) -> int | None:
    """A whole number from `low` to `high`; None where the key is absent."""
    if key not in table:
        return None
    value = table.pop(key)
    if type(value) is not int or not low <= value <= high:
        raise PolicyFileError(f"{where}.{key}: a whole number from {low} to {high} is needed")
    return value


def take_integers(table: dict[str, object], key: str, where: str, *, low: int, high: int) -> frozenset[int] | None:
    """An any-of list of whole numbers from `low` to `high`; None where the key is absent."""
    values = take_list(table, key, where)
    if values is None:
        return None
    numbers = set()
    for value in values:
        if type(value) is not int or not low <= value <= high:
            raise PolicyFileError(f"{where}.{key}: whole numbers from {low} to {high} are needed")
        numbers.add(value)
    return frozenset(numbers)


def take_flag(table: dict[str, object], key: str, where: str) -> bool:
    """true or false; false where the key is absent."""
    value = table.pop(key, False)
    if type(value) is not bool:
        raise PolicyFileError(f"{where}.{key}: true or false is needed")
    return value


def hex_list(pins: Iterable[bytes]) -> list[str]:
    """Pins as `to_table` gives them: hex, sorted."""
    return [pin.hex() for pin in sorted(pins)]
