"""What a replay comes to: reproduced, differs, or cannot be reproduced and why (docs/replay.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

FORMAT_VERSION: Final = 1


class Outcome(StrEnum):
    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    CANNOT = "cannot be reproduced"


EXIT_STATUS: Final[Mapping[Outcome, int]] = {Outcome.REPRODUCED: 0, Outcome.DIFFERS: 10, Outcome.CANNOT: 20}


class Reason(StrEnum):
    """Why an answer cannot be reproduced. The names are API; docs/replay.md explains each."""

    DAMAGED = "damaged"
    NOT_AUTHENTIC = "not-authentic"
    REDACTED = "redacted"
    REQUEST_INCOMPLETE = "request-incomplete"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    NOT_EXACT = "not-exact"
    OTHER_ARITHMETIC = "other-arithmetic"
    WEIGHTS_MISSING = "weights-missing"
    OTHER_WEIGHTS = "other-weights"
    OTHER_TOKENIZER = "other-tokenizer"
    OTHER_CHAT_TEMPLATE = "other-chat-template"
    OTHER_CONFIGURATION = "other-configuration"
    CONFIGURATION_UNKNOWN = "configuration-unknown"
    ENGINE = "engine"
    UNCERTAIN = "uncertain"


class CannotReproduce(Exception):
    """Nothing can be said for or against the answer. The message is prose without content of request or answer."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing that is not the same. `place` says where: `choice` and `token`, `input` and `dimension`, or
    the `path` in the answer's JSON. `answer` and `replay` are the two values, as JSON has them."""

    what: str
    answer: object
    replay: object
    place: Mapping[str, int | str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {"what": self.what, **self.place, "answer": self.answer, "replay": self.replay}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`compared` lists what was found equal; `facts` say which answer it was and what evaluated it again."""

    outcome: Outcome
    message: str
    reason: Reason | None = None
    difference: Difference | None = None
    compared: tuple[str, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.outcome]

    def to_json(self) -> dict[str, object]:
        return {
            "version": FORMAT_VERSION,
            "verdict": self.outcome.value,
            "exit": self.exit_status,
            "message": self.message,
            "reason": None if self.reason is None else self.reason.value,
            "difference": None if self.difference is None else self.difference.to_json(),
            "compared": list(self.compared),
            **self.facts,
        }
