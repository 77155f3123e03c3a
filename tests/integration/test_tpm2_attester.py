"""The TPM attester against a real TPM in software, judged by the verifier."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.attestation.attester import Binding, Measured, choose
from appliance.attestation.families import tpm2
from appliance.attestation.families.tpm2 import Tpm2Attester, Tpm2Settings
from appliance.config.settings import AttestationConfig
from appliance.errors import AttestationUnavailable, BootError
from client_sdk.checks import CheckLog
from client_sdk.errors import VerificationError
from client_sdk.tee.evidence import Endorsements, SessionBinding
from client_sdk.tee.tpm2.policy import parse_policy
from client_sdk.tee.tpm2.verify import AuthenticTpm2, parse_evidence
from tests import cddl
from tests.simulators.software_tpm import AkChain, ak_chain
from tests.simulators.swtpm import BOOT, Swtpm, free_ports, swtpm

NOW = 1_790_000_000.0
PCRS = tuple(BOOT)


@pytest.fixture(scope="module")
def tpm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swtpm]:
    with swtpm(tmp_path_factory.mktemp("tpm") / "state") as running:
        yield running


@pytest.fixture
def attester(tpm: Swtpm) -> Iterator[Tpm2Attester]:
    one = Tpm2Attester(Tpm2Settings(tcti=tpm.tcti, pcrs=PCRS))
    yield one
    one.close()


def binding(claims: bytes) -> Binding:
    return Binding.of_session(claims, nonce=b"n" * 32, spki=None)


def quoted(attester: Tpm2Attester, claims: bytes) -> AuthenticTpm2:
    (item,) = attester.collect(binding(claims)).evidence
    assert item.kind == "tpm2"
    cddl.validate("tpm2-evidence", item.content)
    return parse_evidence(item.content).authenticate(CheckLog(), Endorsements(), now=NOW)


def session(claims: bytes) -> SessionBinding:
    return SessionBinding(claims=claims, nonce=b"n" * 32, binder=None, spki=None)


def test_a_quote_is_accepted_by_the_reference_values_of_its_machine(attester: Tpm2Attester) -> None:
    log = CheckLog()
    authentic = quoted(attester, b"claims")
    authentic.check_session(log, session(b"claims"))
    assert isinstance(attester, Measured)
    authentic.appraise(log, parse_policy(dict(attester.reference_table()), "tpm2", False), now=NOW)
    assert all(check.status != "failed" for check in log.checks)
    assert dict(authentic.facts)["TPM attestation key hierarchy"] == "endorsement"
    with pytest.raises(VerificationError, match="EVIDENCE_BINDING"):
        authentic.check_session(CheckLog(), session(b"other claims"))


def test_the_reference_values_are_what_was_measured(attester: Tpm2Attester) -> None:
    table = attester.reference_table()
    expected = {str(r): hashlib.sha256(bytes(32) + digest).hexdigest() for r, digest in BOOT.items()}
    assert table["pcr_sets"] == [expected]


def test_whatever_is_measured_later_changes_the_quote(attester: Tpm2Attester, tpm: Swtpm) -> None:
    demanded = parse_policy(dict(attester.reference_table()), "tpm2", False)
    attester.close()
    tpm.extend(9, b"\xee" * 32)
    with pytest.raises(VerificationError, match="MEASUREMENT_NOT_ALLOWED"):
        quoted(attester, b"claims").appraise(CheckLog(), demanded, now=NOW)


def test_the_key_outlives_a_reset_and_the_connection_is_made_anew(tpm: Swtpm) -> None:
    one = Tpm2Attester(Tpm2Settings(tcti=tpm.tcti, pcrs=PCRS))
    before = quoted(one, b"claims")
    tpm.stop()
    with pytest.raises(AttestationUnavailable, match="does not answer"):
        one.collect(binding(b"claims"))
    tpm.start()
    after = quoted(one, b"claims")
    one.close()
    assert before.identity == after.identity
    assert after.item.attest.reset_count > before.item.attest.reset_count
    pinned = {"ak_pins": [after.identity.hex()], "reset_counts": [before.item.attest.reset_count]}
    with pytest.raises(VerificationError, match="PLATFORM_NOT_ALLOWED"):
        after.appraise(CheckLog(), parse_policy(pinned, "tpm2", True), now=NOW)


def test_another_tpm_has_another_key(attester: Tpm2Attester, tmp_path: Path) -> None:
    demanded = parse_policy(dict(attester.reference_table()), "tpm2", False)
    with swtpm(tmp_path / "other") as other:
        impostor = Tpm2Attester(Tpm2Settings(tcti=other.tcti, pcrs=PCRS))
        with pytest.raises(VerificationError, match="PLATFORM_NOT_ALLOWED"):
            quoted(impostor, b"claims").appraise(CheckLog(), demanded, now=NOW)
        impostor.close()


def test_a_persistent_key_and_its_certificate_are_used(tpm: Swtpm, tmp_path: Path) -> None:
    public = tpm.persist_key(0x81010002)
    certificate = tmp_path / "ak.der"
    certificate.write_bytes(ak_chain(AkChain())[2])
    config = AttestationConfig(
        attester="tpm2",
        tpm2_tcti=tpm.tcti,
        tpm2_key_handle="0x81010002",
        tpm2_ak_certificate=str(certificate),
    )
    one = choose(config, random_bytes=bytes)
    assert isinstance(one, Tpm2Attester)
    (item,) = one.collect(binding(b"claims")).evidence
    one.close()
    evidence = parse_evidence(item.content)
    assert evidence.item.public.encoded == public
    assert evidence.item.certificate == certificate.read_bytes()
    with pytest.raises(VerificationError, match="ENDORSEMENT_MISMATCH"):  # it is a certificate of another key
        evidence.authenticate(CheckLog(), Endorsements(), now=NOW)


def test_a_tpm_without_the_bank_makes_no_evidence(tmp_path: Path) -> None:
    with swtpm(tmp_path / "other") as other:
        other.drop_bank()
        other.stop()
        other.start(measured={})
        one = Tpm2Attester(Tpm2Settings(tcti=other.tcti, pcrs=PCRS))
        with pytest.raises(AttestationUnavailable, match="keeps no SHA-256 bank"):
            one.collect(binding(b"claims"))
        with pytest.raises(AttestationUnavailable, match="cannot be read"):
            one.reference_table()
        one.close()


def test_a_key_that_is_not_there_is_no_evidence(tpm: Swtpm) -> None:
    one = Tpm2Attester(Tpm2Settings(tcti=tpm.tcti, pcrs=PCRS, key_handle=0x81010009))
    with pytest.raises(AttestationUnavailable):
        one.collect(binding(b"claims"))
    one.close()


def test_no_tpm_is_no_attester(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Tpm2Attester(Tpm2Settings(tcti=f"swtpm:host=127.0.0.1,port={free_ports()}", pcrs=PCRS))
    with pytest.raises(AttestationUnavailable, match="does not answer"):
        one.collect(binding(b"claims"))
    absent = AttestationConfig(attester="tpm2", tpm2_tcti=f"device:{tmp_path}/none")
    with pytest.raises(BootError, match=f"there is no {tmp_path}/none"):
        choose(absent, random_bytes=bytes)
    assert tpm2.missing(AttestationConfig(tpm2_tcti="swtpm:port=1")) is None
    monkeypatch.setattr(tpm2, "_LIBRARY", "no_such_library")
    assert "not installed" in str(tpm2.missing(absent))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tpm2_pcrs": ()}, "empty"),
        ({"tpm2_pcrs": ("24",)}, "no register"),
        ({"tpm2_pcrs": ("-1",)}, "no register"),
        ({"tpm2_pcrs": ("1.5",)}, "no register"),
        ({"tpm2_pcrs": ("²",)}, "no register"),
        ({"tpm2_key_handle": "key"}, "persistent handle"),
        ({"tpm2_key_handle": "0x40000001"}, "persistent handle"),
        ({"tpm2_ak_certificate": "none"}, "cannot be read"),
        ({"tpm2_ak_certificate": __file__}, "no DER certificate"),
    ],
)
def test_settings_that_make_no_sense_stop_the_start(settings: dict[str, object], message: str) -> None:
    config = AttestationConfig(attester="tpm2", tpm2_tcti="swtpm:port=1", **settings)  # type: ignore[arg-type]
    with pytest.raises(BootError, match=message):
        choose(config, random_bytes=bytes)
