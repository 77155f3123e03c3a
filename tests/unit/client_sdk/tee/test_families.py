"""The table of families: each one's roots are an argument, and the pinned ones are what is used without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import VerificationError
from client_sdk.tee.endorsements import recognise
from client_sdk.tee.evidence import Endorsements
from client_sdk.tee.families import FAMILIES
from tests.simulators import amd, azure, intel, nitro, nvidia

SGX, TDX, CHIP, MAKER = intel.Intel(tee=intel.SGX), intel.Intel(), amd.chip(), nvidia.Maker()
MADE: dict[str, tuple[Any, bytes, Endorsements, float]] = {
    "sgx": (SGX.root(), intel.quote(SGX, intel.enclave_body()), SGX.endorsements(), intel.NOW),
    "tdx": (TDX.root(), intel.quote(TDX, intel.TdBody()), TDX.endorsements(), intel.NOW),
    "sev-snp": (CHIP.anchors, amd.Report().sign(CHIP.key), recognise(CHIP.certificate), amd.NOW),
    "azure-snp-vtpm": (CHIP.anchors, azure.Machine().item(CHIP), recognise(CHIP.certificate), amd.NOW),
    "nitro": (nitro.root(), nitro.document(), Endorsements(), nitro.NOW),
    "nvidia": (MAKER.anchors, MAKER.device().item(), Endorsements(), nvidia.NOW),
}


def test_every_family_with_roots_is_here() -> None:
    assert set(FAMILIES) - set(MADE) == {"insecure", "tpm2"}, "those have none: a key nobody vouches for, and policy's"


@pytest.mark.parametrize("name", MADE)
def test_roots_are_an_argument_and_the_vendor_s_without_it(name: str) -> None:
    roots, content, endorsements, now = MADE[name]
    with_test_roots = replace(FAMILIES[name], anchors=roots)
    with_test_roots.parse_evidence(content).authenticate(CheckLog(), endorsements, now=now)
    with pytest.raises(VerificationError):
        FAMILIES[name].parse_evidence(content).authenticate(CheckLog(), endorsements, now=now)
