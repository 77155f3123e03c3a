"""The one error of the builder."""

from __future__ import annotations


class BuildError(Exception):
    """The image cannot be built as asked. The message says what is missing or wrong, and what to do."""
