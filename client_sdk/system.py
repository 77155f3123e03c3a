"""Clock and randomness of this process, gathered once so that everything else takes them as arguments."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """`now` is Unix time in seconds, `monotonic` seconds that never jump, `draw(n)` n unpredictable bytes."""

    now: Callable[[], float]
    monotonic: Callable[[], float]
    draw: Callable[[int], bytes]


def of_this_process() -> Surroundings:
    """The real ones: the SDK's composition root for clock and randomness."""
    return Surroundings(
        now=time.time,  # noqa: TID251
        monotonic=time.monotonic,
        draw=os.urandom,  # noqa: TID251
    )
