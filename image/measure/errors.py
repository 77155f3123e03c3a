"""The one error of the calculator."""

from __future__ import annotations


class MeasureError(Exception):
    """An input that cannot be measured, or whose measurement would not mean what it seems to. The message says why."""
