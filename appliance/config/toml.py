"""Plain values as TOML."""

from __future__ import annotations

from collections.abc import Mapping


def lines(values: Mapping[str, object]) -> list[str]:
    """`key = value` for each of `values`."""
    return [f"{key} = {text_of(value)}" for key, value in values.items()]


def text_of(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(text_of(item) for item in value) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in text) + '"'
