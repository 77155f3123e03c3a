"""What a fuzzer does to genuine bytes: the kinds of change that confuse readers of lengths, tags and texts."""

from __future__ import annotations

import random
from collections.abc import Sequence


def mutated(seed: bytes, draw: random.Random, pieces: Sequence[bytes]) -> bytes:
    """`seed` after one to four edits: a flipped bit, one of `pieces` written over it, a cut, an insertion, a copy."""
    data = bytearray(seed)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                piece = draw.choice(pieces)
                data[at : at + len(piece)] = piece
            case 2:
                del data[at : at + draw.randint(1, 64)]
            case 3:
                data[at:at] = draw.randbytes(draw.randint(1, 16))
            case _:
                other = draw.randrange(len(data) + 1)
                data[at : at + 16] = data[other : other + 16]
    return bytes(data)
