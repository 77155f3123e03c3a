"""What a receipt says of vectors: a closed map beside `prompt`, in place of `decoding` and `output`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader

_CODE = "MALFORMED_RECEIPT_CLAIMS"

POOLINGS: Final = frozenset({"mean", "cls", "last"})
ENCODINGS: Final = frozenset({"float", "base64"})
NORM_L2: Final = "l2"
NUMBER_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFacts:
    """`inputs` vectors of `dimensions` numbers each, cut from the `native` ones of the model and brought to length 1.

    `vectors` is the commitment to all numbers in the order of the inputs, float32 little-endian, null where the answer
    did not come to its end. `encoding` is how the answer writes them.
    """

    inputs: int
    dimensions: int
    native: int
    pooling: str
    encoding: str
    vectors: bytes | None

    def to_map(self) -> dict[str, object]:
        return {
            "inputs": self.inputs,
            "dimensions": self.dimensions,
            "native": self.native,
            "pooling": self.pooling,
            "normalization": NORM_L2,
            "encoding": self.encoding,
            "vectors": self.vectors,
        }

    @classmethod
    def parse(cls, value: object) -> EmbeddingFacts:
        reader = MapReader(value, "embedding", _CODE)
        facts = cls(
            inputs=reader.uint("inputs"),
            dimensions=reader.uint("dimensions"),
            native=reader.uint("native"),
            pooling=reader.one_of("pooling", POOLINGS),
            encoding=reader.one_of("encoding", ENCODINGS),
            vectors=reader.bstr_or_null("vectors", 32),
        )
        reader.one_of("normalization", frozenset({NORM_L2}))
        reader.finish()
        if facts.inputs < 1 or not 1 <= facts.dimensions <= facts.native:
            raise WireError(_CODE, "embedding needs an input, and 1 to native dimensions")
        return facts


def joined(vectors: Sequence[bytes]) -> bytes:
    """What `vectors` commits to."""
    return b"".join(vectors)
