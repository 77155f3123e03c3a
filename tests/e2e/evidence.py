"""What a session saw on the wire, kept for the tests of the published format."""

from __future__ import annotations

from dataclasses import dataclass, field

from client_sdk.judge import VerifiedAnswer


@dataclass
class Collected:
    """A callable for `Appliance(save=...)`: gets every verified answer."""

    answers: list[VerifiedAnswer] = field(default_factory=list)

    def __call__(self, answer: VerifiedAnswer) -> None:
        self.answers.append(answer)
