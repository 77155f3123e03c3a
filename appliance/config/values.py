"""Values of settings: read from text, held to the type and the bounds of their field. All raise BootError."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from appliance.errors import BootError

_NUMBER = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?")


def from_text(kind: Any, text: str, where: str) -> object:
    """Text as the type of its setting, strictly: "ten" for a number is an error. Lists have commas between texts."""
    readers: dict[object, Callable[[str], object]] = {
        str: str,
        int: lambda text: _number(int, text),
        float: lambda text: _number(float, text),
        bool: _flag,
    }
    try:
        if get_origin(kind) is tuple:
            return [part.strip() for part in text.split(",") if part.strip()]
        if kind in readers:
            return readers[kind](text)
        return "auto" if text == "auto" else _number(int, text)
    except ValueError:
        raise BootError(f"{where} must be of type {_type_name(kind)}") from None


def checked(value: object, kind: Any, metadata: Mapping[str, Any], where: str) -> object:
    """The value as `kind`; `metadata` may have `words`, `low` and `high`, as `config` writes them."""
    if kind is float and type(value) is int:
        value = float(value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(type(item) is str and item and _is_unicode(item) for item in value):
            raise BootError(f"{where} must be a list of texts")
        return tuple(value)
    if type(value) is str and not _is_unicode(value):
        raise BootError(f"{where} must be UTF-8 text")
    if get_origin(kind) in (typing.Union, types.UnionType):
        alternatives = get_args(kind)
        words = [word for option in alternatives if get_origin(option) is Literal for word in get_args(option)]
        if value in words and type(value) is str:
            return value
        kind = next(option for option in alternatives if get_origin(option) is not Literal)
    if type(value) is not kind:
        raise BootError(f"{where} must be of type {_type_name(kind)}")
    if (spelled := metadata.get("words")) and value not in spelled:
        raise BootError(f"{where} must be one of {', '.join(spelled)}")
    low, high = metadata.get("low"), metadata.get("high")
    size = len(value.encode()) if isinstance(value, str) else value
    if isinstance(size, int | float) and not (
        (low is None or size >= low) and (high is None or size <= high)  # written so that NaN fails
    ):
        unit = " bytes" if isinstance(value, str) else ""
        raise BootError(f"{where} must lie between {low} and {high}{unit}")
    return value


def _flag(text: str) -> bool:
    """Raises ValueError for anything but true and false."""
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def _is_unicode(text: str) -> bool:
    """False for bytes of the environment that were no UTF-8: Python carries them as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return "list of texts"
    names = {str: "text", int: "integer", float: "number", bool: "true/false"}
    return names.get(kind, 'integer or "auto"')


def _number(kind: Callable[[str], object], text: str) -> object:
    """`kind(text)` without what Python tolerates beyond plain numbers: blanks, underscores, other digits, "inf"."""
    if _NUMBER.fullmatch(text) is None:
        raise ValueError
    return kind(text)
