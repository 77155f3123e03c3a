"""What a model is served for: text, or vectors and how they are pooled. By its metadata or the operator's word."""

from __future__ import annotations

from typing import Final

from appliance.engine.weights.gguf import ModelFacts
from appliance.errors import BootError

POOLINGS: Final = ("auto", "none", "mean", "cls", "last")
"""What `models[].pooling` can say."""

_BY_NUMBER: Final = {0: None, 1: "mean", 2: "cls", 3: "last"}
_RANK: Final = 4


def resolve_pooling(configured: str, facts: ModelFacts) -> str | None:
    """How states become a vector; None for a model that generates. Raises BootError for one that can do neither.

    `configured` is one of POOLINGS. "auto" follows the metadata, which embedding models carry; a model's name says
    nothing here.
    """
    if configured not in POOLINGS:
        raise BootError(f"models.pooling {configured!r} is none of {', '.join(POOLINGS)}")
    pooling = configured if configured != "auto" else _by_metadata(facts)
    if pooling not in (None, "none"):
        return pooling
    if not facts.causal:
        raise BootError(
            "every token of this model sees all others, so it generates no text, and nothing says how it is pooled: "
            "set models.pooling to mean, cls or last, as its maker says"
        )
    return None


def _by_metadata(facts: ModelFacts) -> str | None:
    if facts.pooling_type == _RANK:
        raise BootError("the model ranks pairs of texts (pooling_type 4), which no route here asks for")
    if facts.pooling_type not in _BY_NUMBER:
        raise BootError(f"the model's metadata have an unknown pooling_type {facts.pooling_type}")
    return _BY_NUMBER[facts.pooling_type]
