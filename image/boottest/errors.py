"""The one error of the boot test."""

from __future__ import annotations


class BootTestError(Exception):
    """The image did not do what it has to. The message says what was expected and what the console showed."""
