"""A prediction in words: where each value comes from, what it covers, what nothing covers."""

from __future__ import annotations

from image.measure import outside
from image.measure.predict import Family, Prediction


def render(prediction: Prediction) -> str:
    """Plain text for people, ending with a newline. The same prediction gives the same text."""
    lines = [f"Reference values: {prediction.reference.source}", "", "Measured inputs (SHA-256):"]
    lines += [f"  {one.role:<18} {one.sha256.hex()}  {one.size_bytes} bytes" for one in prediction.inputs]
    for family in prediction.families:
        lines += ["", *_family(family)]
    lines += ["", "In no measurement:", outside.make_text()]
    return "\n".join(lines) + "\n"


def _family(family: Family) -> list[str]:
    verdict = "the weights are covered" if family.covers_weights else "the weights are NOT covered"
    lines = [f"[{family.name}] {verdict}"]
    for one in family.values:
        lines += [f"  {one.name}: {one.value.hex()}", f"      {one.origin}; covers: {one.covers}"]
    return [*lines, *(f"  {caveat}" for caveat in family.caveats)]
