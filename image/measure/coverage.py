"""What a measured command line covers: the root and the model disk, by the roots of their hash trees.

The initrd opens both disks with dm-verity under exactly these digests, so that a measurement of the command line is one
of every byte of both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from image.measure.errors import MeasureError

ROOT_HASH, MODEL_HASH = "appliance.root_hash", "appliance.model_hash"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """dm-verity root hashes, 32 bytes each. `model` None: the weights are not covered."""

    root: bytes
    model: bytes | None


def roots_of(cmdline: str) -> Roots:
    """Raises MeasureError where the root disk is not covered, or an option is malformed or repeated.

    A repeated option is refused because its readers might disagree about which one counts.
    """
    root, model = _digest(cmdline, ROOT_HASH), _digest(cmdline, MODEL_HASH)
    if root is None:
        raise MeasureError(f"the command line has no {ROOT_HASH}: its measurement does not cover the root file system")
    return Roots(root=root, model=model)


def _digest(cmdline: str, option: str) -> bytes | None:
    values = [word.partition("=")[2] for word in cmdline.split() if word.partition("=")[0] == option]
    if not values:
        return None
    if len(values) > 1:
        raise MeasureError(f"the command line has {option} {len(values)} times")
    if _DIGEST.fullmatch(values[0]) is None or not any(bytes.fromhex(values[0])):
        raise MeasureError(f"{option}: 64 lower-case hex digits that are not all zero are needed")
    return bytes.fromhex(values[0])
