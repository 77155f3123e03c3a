"""Verify `insecure` evidence: a well-formed signature by a key nobody vouches for."""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk import signatures
from client_sdk.tee.evidence import AuthenticEvidence
from client_sdk.tee.insecure import abi
from client_sdk.wire.names import MODE_INSECURE

_NO_HARDWARE = "no hardware stands behind the insecure family"


@dataclass(frozen=True, slots=True)
class InsecureEvidence:
    item: abi.InsecureItem

    def authenticate(self, *, now: float) -> AuthenticEvidence:
        """Check the signature under the key inside the item. `now` plays no part: the key has no validity."""
        signatures.authenticate(self.item.sign1, self.item.public)
        return AuthenticEvidence(
            report_data=self.item.report_data,
            mode=MODE_INSECURE,
            trust="self-asserted",
            facts=(("insecure key id", self.item.sign1.kid.hex()),),
            not_checked=(
                ("launch measurement", _NO_HARDWARE),
                ("debug mode", _NO_HARDWARE),
                ("platform TCB", _NO_HARDWARE),
                ("vendor certificate chain", _NO_HARDWARE),
            ),
        )


def parse_evidence(content: bytes) -> InsecureEvidence:
    """Parse the content of an `insecure` item. Raises WireError."""
    return InsecureEvidence(abi.parse_item(content))
