"""What may be compared: two ways to run the same weights.

Guessing ahead and reusing prefixes leave the model's answers as they are, so a measurement can decide about them.
Quantization makes other weights: another model, with another identity in receipts and answers of its own. It is never
a setting that could become the default because it is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.bench.runs import Arm, Run
from appliance.config.settings import Config
from appliance.errors import BootError
from appliance.models.store import ModelStore

_WHY = (
    "weights that were quantized in another way are another model, never a setting: what may be decided here are "
    "settings that leave every answer as it is, like guessing ahead and the reuse of prefixes"
)


class DifferentModel(BootError):
    """Two configurations of a comparison do not run the same weights."""


def check_same_model(configs: Mapping[Arm, Config], stores: Mapping[Arm, ModelStore]) -> None:
    """Compare by name and by the digests that the stores pin, before anything is started.

    Raises DifferentModel, and what `ModelStore.get` raises for a model that cannot be had. Configurations without a
    model are left to whoever starts them.
    """
    names = {arm: config.models[0].name if config.models else "" for arm, config in configs.items()}
    if len(set(names.values())) != 1:
        raise DifferentModel(f"the two configurations serve different models, {_pair(names)}; {_WHY}")
    if len(configs) > 1 and all(names.values()):
        digests = {arm: stores[arm].get(name).sha256.hex() for arm, name in names.items()}
        if len(set(digests.values())) != 1:
            raise DifferentModel(
                f"the two configurations call different weights {names[Arm.BASELINE]!r}, SHA-256 {_pair(digests)}; "
                f"{_WHY}"
            )


def check_same_weights(runs: Sequence[Run]) -> None:
    """The same by what verified receipts say of the runs. Raises DifferentModel."""
    weights = {run.arm: ", ".join(digest.hex() for _, digest in run.weights) for run in runs}
    if len(set(weights.values())) > 1:
        raise DifferentModel(
            f"by their receipts the two configurations run different weights, {_pair(weights)}; {_WHY}"
        )


def _pair(values: Mapping[Arm, str]) -> str:
    return f"{values[Arm.BASELINE]} and {values[Arm.CANDIDATE]}"
