"""Which attester is chosen, and what the insecure one says."""

from __future__ import annotations

import hashlib

import pytest

from appliance.attestation import attester
from appliance.attestation.attester import ATTESTERS, Binding, Collected, Family, choose
from appliance.attestation.families.insecure import InsecureAttester
from appliance.boot import boot
from appliance.config.settings import AttestationConfig, load
from appliance.errors import AttestationUnavailable, BootError
from appliance.inference.service import Surroundings
from client_sdk.wire.names import MODE_INSECURE
from tests import cddl
from tests import reference_decoder as reference


def seeded(count: int) -> bytes:
    return bytes(range(count))


def named(name: str) -> AttestationConfig:
    return AttestationConfig(attester=name)


def test_b053_auto_never_falls_back_to_insecure() -> None:
    assert [name for name, family in ATTESTERS.items() if family.missing(named("auto")) is None] == [MODE_INSECURE]
    with pytest.raises(BootError, match="no attestation hardware was found"):
        choose(named("auto"), random_bytes=seeded)


@pytest.mark.parametrize("name", ["", "Insecure", "snp ", "nonsense"])
def test_an_unknown_name_is_refused_and_the_known_ones_are_named(name: str) -> None:
    with pytest.raises(BootError, match="known: auto, insecure"):
        choose(named(name), random_bytes=seeded)


def test_a_family_that_is_missing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    families = {
        **ATTESTERS,
        "tpm": Family(missing=lambda _: "no /dev/tpmrm0", create=lambda *_: InsecureAttester(b"s" * 32)),
    }
    monkeypatch.setattr(attester, "ATTESTERS", families)
    with pytest.raises(BootError, match="no /dev/tpmrm0"):
        choose(named("tpm"), random_bytes=seeded)
    with pytest.raises(BootError, match="no attestation hardware"):
        choose(named("auto"), random_bytes=seeded)


@pytest.mark.parametrize("rate", [0.0, 5.0])
def test_b053_an_attester_that_makes_no_evidence_stops_the_start(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    class Failing(InsecureAttester):
        def collect(self, binding: Binding) -> Collected:
            raise AttestationUnavailable("evidence_failed", "the device does not answer")

    broken = Family(missing=lambda _: None, create=lambda _, random_bytes: Failing(random_bytes(32)))
    monkeypatch.setattr(attester, "ATTESTERS", {"insecure": broken})
    config = load(f"[attestation]\nattester = 'insecure'\nquotes_per_s = {rate}\n", environ={})
    around = Surroundings(clock=lambda: 0.0, monotonic=lambda: 0.0, random_bytes=seeded)
    with pytest.raises(BootError, match="the device does not answer"):
        boot.choose_attester(config, around)


def test_insecure_evidence_signs_h_and_nothing_else() -> None:
    one = choose(named("insecure"), random_bytes=seeded)
    assert (one.family, one.mode) == ("insecure", "insecure")
    claims = b"claims bytes"
    report_data = hashlib.sha512(b"attested-inference report-data v1\0" + claims).digest()
    (item,) = one.collect(Binding.of_session(claims, nonce=b"n" * 32, spki=None)).evidence
    assert item.kind == "insecure"
    cddl.validate("insecure-evidence", item.content)
    statement = reference.read_cbor(item.content)
    signed, _ = reference.read_sign1(statement["evidence"], "insecure-evidence", statement["key"])
    assert signed == report_data
    binding = Binding.of_session(claims, nonce=b"n" * 32, spki=None)
    (other,) = InsecureAttester(b"z" * 32).collect(binding).evidence
    assert reference.read_cbor(other.content)["key"] != statement["key"]
