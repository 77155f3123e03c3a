"""The Attester of RFC 9334: whatever can make evidence over 64 bytes we computed. One family each, chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from appliance.errors import BootError
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.names import MODE_INSECURE


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What evidence has to bind: H (64 bytes) over the encoded claims, and the parts some families carry as such."""

    report_data: bytes
    claims: bytes
    nonce: bytes
    spki: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Evidence, and what travels with it. `evidence` is the CPU's or TPM's first; the device list of claims rests on
    its order.

    `endorsements` and `event_logs` are items as the bundle carries them (docs/attestation.md); they are helpful, never
    needed, and the verifier believes none of them.
    """

    evidence: tuple[EvidenceItem, ...]
    endorsements: tuple[EvidenceItem, ...] = ()
    event_logs: tuple[EvidenceItem, ...] = ()


class Attester(Protocol):
    """Collects evidence. `collect` may block for over a second: call it off the event loop, one at a time."""

    @property
    def family(self) -> str: ...

    @property
    def mode(self) -> str:
        """ "production", or "insecure" where no hardware vouches for anything."""

    def collect(self, binding: Binding) -> Collected:
        """Evidence over `binding`: one item of this family. Raises AttestationUnavailable."""


class DeviceAttester(Protocol):
    """Collects the evidence of devices beside the CPU (GPUs). `collect` may block, as an Attester's."""

    @property
    def kind(self) -> str:
        """The `kind` of its entries in the claims' device list and of its evidence items."""

    def collect(self, nonce: bytes) -> Collected:
        """One item per device over `nonce` (32 bytes, `digests.gpu_nonce`). Raises AttestationUnavailable.

        It is collected before the claims are made, because they name each item's digest.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One way to attest. `missing` tells why this machine cannot use it (None: it can); `create` makes the attester."""

    missing: Callable[[], str | None]
    create: Callable[[Callable[[int], bytes]], Attester]


def _create_insecure(random_bytes: Callable[[int], bytes]) -> Attester:
    from appliance.attestation.insecure import InsecureAttester

    return InsecureAttester(random_bytes(32))


ATTESTERS: Mapping[str, Family] = {
    MODE_INSECURE: Family(missing=lambda: None, create=_create_insecure),
}


def choose(name: str, *, random_bytes: Callable[[int], bytes]) -> Attester:
    """The attester `name`, or for "auto" the first hardware family of this machine.

    "auto" never falls back to "insecure": without evidence the appliance does not listen. Raises BootError.
    """
    if name == "auto":
        return _choose_hardware(random_bytes)
    family = ATTESTERS.get(name)
    if family is None:
        raise BootError(f"attestation.attester {name!r} is unknown; known: auto, {', '.join(sorted(ATTESTERS))}")
    reason = family.missing()
    if reason is not None:
        raise BootError(f"attestation.attester {name!r} cannot be used here: {reason}")
    return family.create(random_bytes)


def _choose_hardware(random_bytes: Callable[[int], bytes]) -> Attester:
    for name, family in ATTESTERS.items():
        if name != MODE_INSECURE and family.missing() is None:
            return family.create(random_bytes)
    raise BootError(
        "no attestation hardware was found, and without evidence this appliance does not listen. "
        "`appliance doctor` tells what is missing; `--attester insecure` is for trying things out: it proves nothing "
        "and every receipt says so"
    )
