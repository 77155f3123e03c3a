"""The Attester of RFC 9334: whatever can make evidence over 64 bytes we computed. One family each, chosen by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from appliance.config.settings import AttestationConfig
from appliance.errors import BootError
from client_sdk.wire import digests
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.names import MODE_INSECURE


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What evidence has to bind: 64 bytes, the 32 a TPM has room for, and the parts some families carry as such.

    Both digests are computed here, over what this appliance says under one of two labels: nobody has bytes of their
    choice signed.
    """

    report_data: bytes
    extra_data: bytes
    nonce: bytes | None
    spki: bytes | None

    @classmethod
    def of_session(cls, claims: bytes, *, nonce: bytes, spki: bytes | None) -> Binding:
        """For a client: these encoded claims, its nonce, and the DER key of its connection (None without TLS)."""
        return cls(
            report_data=digests.report_data(claims),
            extra_data=digests.tpm_extra_data(claims),
            nonce=nonce,
            spki=spki,
        )

    @classmethod
    def of_certificate(cls, spki: bytes) -> Binding:
        """For the certificate of the DER key `spki`: no session starts with it, because nothing else is in it."""
        return cls(
            report_data=digests.certificate_report_data(spki),
            extra_data=digests.certificate_extra_data(spki),
            nonce=None,
            spki=spki,
        )


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


@runtime_checkable
class Measured(Protocol):
    """An attester that can say what a policy would have to name for this very machine, as it runs now."""

    def reference_table(self) -> Mapping[str, object]:
        """The table `[families.NAME]` of a policy. Raises AttestationUnavailable."""


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
    """One way to attest. `missing` tells why this machine cannot use it (None: it can); `create` makes the attester.

    `automatic` families are those that "auto" may choose: hardware that keeps the host out of memory.
    """

    missing: Callable[[AttestationConfig], str | None]
    create: Callable[[AttestationConfig, Callable[[int], bytes]], Attester]
    automatic: bool = True


def _create_insecure(_config: AttestationConfig, random_bytes: Callable[[int], bytes]) -> Attester:
    from appliance.attestation.families.insecure import InsecureAttester

    return InsecureAttester(random_bytes(32))


def _of_module(name: str, *, automatic: bool = True) -> Family:
    """A family whose module below this package has `missing` and `create`; it is imported when it is asked."""

    def missing(config: AttestationConfig) -> str | None:
        found: str | None = importlib.import_module(f"{__package__}.families.{name}").missing(config)
        return found

    def create(config: AttestationConfig, random_bytes: Callable[[int], bytes]) -> Attester:
        attester: Attester = importlib.import_module(f"{__package__}.families.{name}").create(config, random_bytes)
        return attester

    return Family(missing=missing, create=create, automatic=automatic)


# "auto" takes the first that the machine has, in this order.
ATTESTERS: Mapping[str, Family] = {
    "sev-snp": _of_module("snp"),
    "tdx": _of_module("tdx"),
    "nitro": _of_module("nitro"),
    "tpm2": _of_module("tpm2", automatic=False),
    MODE_INSECURE: Family(missing=lambda _config: None, create=_create_insecure, automatic=False),
}


def _create_nvidia() -> DeviceAttester:
    from appliance.attestation.families import nvidia

    return nvidia.create()


DEVICES: Mapping[str, Callable[[], DeviceAttester]] = {"nvidia": _create_nvidia}


def choose(config: AttestationConfig, *, random_bytes: Callable[[int], bytes]) -> Attester:
    """The attester that `config` names, or for "auto" the first hardware family of this machine.

    "auto" never falls back to "insecure": without evidence the appliance does not listen. Raises BootError.
    """
    name = config.attester
    if name == "auto":
        return _choose_hardware(config, random_bytes)
    family = ATTESTERS.get(name)
    if family is None:
        raise BootError(f"attestation.attester {name!r} is unknown; known: auto, {', '.join(sorted(ATTESTERS))}")
    reason = family.missing(config)
    if reason is not None:
        raise BootError(f"attestation.attester {name!r} cannot be used here: {reason}")
    return family.create(config, random_bytes)


def choose_devices(config: AttestationConfig) -> tuple[DeviceAttester, ...]:
    """The devices that `config` wants evidence of. Raises BootError where those cannot attest."""
    if config.devices == "none":
        return ()
    create = DEVICES.get(config.devices)
    if create is None:
        raise BootError(f"attestation.devices {config.devices!r} is unknown; known: none, {', '.join(sorted(DEVICES))}")
    return (create(),)


def _choose_hardware(config: AttestationConfig, random_bytes: Callable[[int], bytes]) -> Attester:
    for family in ATTESTERS.values():
        if family.automatic and family.missing(config) is None:
            return family.create(config, random_bytes)
    raise BootError(
        "no attestation hardware was found, and without evidence this appliance does not listen. "
        "`appliance doctor` tells what is missing; `--attester insecure` is for trying things out: it proves nothing "
        "and every receipt says so"
    )
