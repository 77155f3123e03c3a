"""Verify `insecure` evidence: a well-formed signature by a key nobody vouches for."""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk import signatures
from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection
from client_sdk.tee.evidence import Endorsements, FamilyPolicy, ForeignBinding, SessionBinding, Trust
from client_sdk.tee.insecure import abi
from client_sdk.wire import digests
from client_sdk.wire.names import MODE_INSECURE

_NO_HARDWARE = "no hardware stands behind the insecure family"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticInsecure:
    """A signature that verifies, by a key that means nothing."""

    item: abi.InsecureItem
    mode: str = MODE_INSECURE
    trust: Trust = "self-asserted"

    @property
    def identity(self) -> bytes:
        return self.item.sign1.kid

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        return (("insecure key id", self.item.sign1.kid.hex()),)

    def check_session(self, log: CheckLog, binding: SessionBinding) -> None:
        expected = digests.report_data(binding.claims)
        log.equal(
            "evidence binds the claims",
            Rejection.EVIDENCE_BINDING,
            expected=expected,
            actual=self.item.report_data,
        )

    def check_foreign(self, log: CheckLog, binding: ForeignBinding) -> None:
        log.reject("report data", Rejection.INSECURE_NOT_ALLOWED, "insecure evidence proves nothing by itself")

    def appraise(self, log: CheckLog, policy: FamilyPolicy | None, *, now: float) -> None:
        for name in ("launch measurement", "debug mode", "platform TCB", "vendor certificate chain"):
            log.not_checked(name, _NO_HARDWARE)


@dataclass(frozen=True, slots=True)
class InsecureEvidence:
    item: abi.InsecureItem

    def authenticate(self, log: CheckLog, endorsements: Endorsements, *, now: float) -> AuthenticInsecure:
        """Check the signature under the key inside the item. `now` plays no part: the key has no validity."""
        with log.step("evidence authentic"):
            signatures.authenticate(self.item.sign1, self.item.public)
        return AuthenticInsecure(item=self.item)


def parse_evidence(content: bytes) -> InsecureEvidence:
    """Parse the content of an `insecure` item. Raises WireError."""
    return InsecureEvidence(abi.parse_item(content))
