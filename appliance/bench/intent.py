"""Why the output of two configurations may differ: only by what their receipts state that it does."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from appliance.bench.runs import Arm, Run
from appliance.errors import BootError

_NOT_STATED = "not stated"
_DIGEST_SHOWN = 12


class Intent(Enum):
    """What is said to make the difference."""

    ARITHMETIC = "arithmetic"
    ENGINE = "engine"
    SETTINGS = "settings"


class NothingStated(BootError):
    """The receipts of both configurations say the same where they were said to differ."""


def stated(runs: Sequence[Run], intent: Intent) -> dict[Arm, str]:
    """What the receipts of each configuration say, in words. Raises NothingStated where that is the same.

    Call it with runs of both configurations.
    """
    first = {arm: next(run for run in runs if run.arm is arm) for arm in Arm}
    words = {arm: _words(run, intent) for arm, run in first.items()}
    if words[Arm.BASELINE] == words[Arm.CANDIDATE]:
        raise NothingStated(
            f"the output may differ by {intent.value}, it was said, and by their receipts both configurations have the "
            f"same: {words[Arm.BASELINE]}"
        )
    return words


def _words(run: Run, intent: Intent) -> str:
    match intent:
        case Intent.ARITHMETIC:
            return _text(run, "engine", "arithmetic") or _NOT_STATED
        case Intent.ENGINE:
            digest = _text(run, "engine", "digest")[:_DIGEST_SHOWN]
            return f"{_text(run, 'engine', 'name')} {_text(run, 'engine', 'version')} ({digest})"
        case Intent.SETTINGS:
            config, model = str(run.identity.get("config", "")), _text(run, "model", "identity")
            return f"configuration {config[:_DIGEST_SHOWN]}, model {model[:_DIGEST_SHOWN]}"


def _text(run: Run, section: str, name: str) -> str:
    values = run.identity.get(section)
    found = values.get(name) if isinstance(values, dict) else None
    return found if isinstance(found, str) else ""
