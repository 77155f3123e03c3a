"""The one error of init."""

from __future__ import annotations


class Stop(Exception):
    """The machine has to end. The message is the line on the console that says why."""
