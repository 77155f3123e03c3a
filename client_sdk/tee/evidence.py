"""The seam of the evidence families: what each one parses, authenticates, binds and lets a policy judge.

Every family has a folder with the same three files: `abi.py` (bytes <-> frozen values, pure), `verify.py`
(`parse_evidence`), `policy.py` (`parse_policy`: what a caller may demand of this family). All checks of all families go
into one CheckLog, so that online, offline and command-line verification list the same checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from client_sdk.checks import CheckLog
    from client_sdk.tee.x509 import Certificate, Crl

Trust = Literal["hardware-signed", "key-signed", "self-asserted", "holder-asserted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLog:
    """A measured-boot log. `kind` is "dstack" (JSON) or "ccel" (TCG2 crypto-agile, binary)."""

    kind: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Endorsements:
    """What vouches for evidence and was given along with it, from wherever: nothing in here is believed unverified.

    `collateral` are DCAP quote collaterals (JSON texts), `rims` NVIDIA reference manifests (XML), `ocsp` answers about
    certificates (DER), `tokens` detached EATs of NVIDIA's attestation service (JSON), `jwks` a JSON Web Key Set that
    the caller trusts for tokens.
    """

    certificates: tuple[Certificate, ...] = ()
    crls: tuple[Crl, ...] = ()
    collateral: tuple[str, ...] = ()
    rims: tuple[bytes, ...] = ()
    ocsp: tuple[bytes, ...] = ()
    tokens: tuple[bytes, ...] = ()
    event_logs: tuple[EventLog, ...] = ()
    jwks: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBinding:
    """What evidence of our own protocol has to bind: these claims, on this connection (docs/attestation.md).

    `claims` are the encoded claims, `nonce` the caller's 32 bytes, `binder` the connection's (None without TLS), `spki`
    the DER key of the connection's leaf.
    """

    claims: bytes
    nonce: bytes
    binder: bytes | None
    spki: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignBinding:
    """What the caller expects in evidence of somebody else's protocol. Both None: the binding is not checked.

    `report_data` is compared with the family's report data (shorter values are the prefix of a zero-padded field),
    `nonce` with its nonce field.
    """

    report_data: bytes | None = None
    nonce: bytes | None = None


class FamilyPolicy(Protocol):
    """What the caller demands of one family: a frozen value made by the family's `parse_policy`."""

    @property
    def count(self) -> int:
        """How many devices of this family must have evidence; 1 for a primary family."""
        ...

    def to_table(self) -> Mapping[str, object]:
        """The TOML table it came from, normalised: text, integers, booleans, lists and tables of them."""
        ...


@runtime_checkable
class DeviceSetPolicy(Protocol):
    """The policy of a family whose devices are of several kinds, each counted by itself."""

    def check_devices(self, log: CheckLog, devices: Sequence[AuthenticEvidence]) -> None:
        """All devices of the family together are as many of each kind as demanded. Raises PolicyError via `log`."""
        ...


class AuthenticEvidence(Protocol):
    """Evidence whose signatures and certificate chain hold, as of the time given. Not yet judged by any policy."""

    @property
    def mode(self) -> str:
        """The only mode that claims under this family may state."""
        ...

    @property
    def trust(self) -> Trust: ...

    @property
    def identity(self) -> bytes:
        """What tells one device of this family from another (chip id, certificate, module): no device counts twice."""
        ...

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """(name, value) texts to show; all of them are signed by what `trust` says."""
        ...

    def check_session(self, log: CheckLog, binding: SessionBinding) -> None:
        """The evidence was made for these claims on this connection. Raises EVIDENCE_BINDING through `log`."""
        ...

    def check_foreign(self, log: CheckLog, binding: ForeignBinding) -> None:
        """The evidence carries what the caller expects; what is not expected is logged as not checked."""
        ...

    def appraise(self, log: CheckLog, policy: FamilyPolicy | None, *, now: float) -> None:
        """Judge by `policy`; what it does not demand is logged as not checked. Raises PolicyError through `log`.

        None is the policy of a caller who admitted the family without demands (`insecure` only).
        """
        ...


class ParsedEvidence(Protocol):
    """Evidence that is well formed, nothing more."""

    def authenticate(self, log: CheckLog, endorsements: Endorsements, *, now: float) -> AuthenticEvidence:
        """Check chain, revocation and signature as of `now` (Unix seconds), each as a check of its own in `log`.

        Raises VerificationError through `log`; UndecidedError where an endorsement is missing that could still come.
        """
        ...
