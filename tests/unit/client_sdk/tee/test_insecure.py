"""The insecure family where it does not belong: as evidence of its own, as one of several devices, without a policy."""

from __future__ import annotations

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection, VerificationError
from client_sdk.tee.evidence import Endorsements, ForeignBinding
from client_sdk.tee.families import FAMILIES
from client_sdk.wire.attestation import AttestationBundle
from tests.simulators.insecure_appliance import NOW, InsecureAppliance, seeded


def content(label: str) -> bytes:
    appliance = InsecureAppliance(label)
    return AttestationBundle.parse(appliance.bundle(seeded("nonce"), appliance.connect())).evidence[0].content


def test_it_proves_nothing_by_itself() -> None:
    evidence = FAMILIES["insecure"].parse_evidence(content("one")).authenticate(CheckLog(), Endorsements(), now=NOW)
    with pytest.raises(VerificationError) as caught:
        evidence.check_foreign(CheckLog(), ForeignBinding())
    assert caught.value.code == Rejection.INSECURE_NOT_ALLOWED
    assert (evidence.mode, evidence.trust) == ("insecure", "self-asserted")


def test_its_identity_is_its_key() -> None:
    read = FAMILIES["insecure"].parse_evidence
    first, again, other = (
        read(content(label)).authenticate(CheckLog(), Endorsements(), now=NOW).identity
        for label in ("one", "one", "another")
    )
    assert first == again != other
