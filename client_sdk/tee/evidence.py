"""What every evidence family gives the verifier: something parsed, and, once authenticated, what it vouches for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Trust = Literal["hardware-signed", "key-signed", "self-asserted", "holder-asserted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticEvidence:
    """Evidence whose signature chain holds. `report_data` is the 64 bytes it binds.

    `mode` is the only mode that claims under this family may state. `trust` is how far facts it carries reach;
    `facts` are (name, value) texts to show; `not_checked` names what a reader might expect and this family cannot show.
    """

    report_data: bytes
    mode: str
    trust: Trust
    facts: tuple[tuple[str, str], ...]
    not_checked: tuple[tuple[str, str], ...] = ()


class ParsedEvidence(Protocol):
    """Evidence that is well formed, nothing more."""

    def authenticate(self, *, now: float) -> AuthenticEvidence:
        """Check chain and signature as of `now` (Unix seconds). Raises AuthenticityError or UndecidedError."""
        ...
