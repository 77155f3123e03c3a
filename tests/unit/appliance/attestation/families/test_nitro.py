"""The Nitro attester against a Nitro Secure Module that checks what the driver checks."""

from __future__ import annotations

import errno
from pathlib import Path

import cbor2
import pytest

from appliance.attestation.attester import Attester, Binding, Measured
from appliance.attestation.families import nitro
from appliance.attestation.families.nitro import NitroAttester, device_exchange
from appliance.config.settings import AttestationConfig
from appliance.errors import AttestationUnavailable
from client_sdk.checks import CheckLog
from client_sdk.tee.evidence import Endorsements, SessionBinding
from client_sdk.tee.nitro.policy import parse_policy
from client_sdk.tee.nitro.verify import parse_evidence
from tests.simulators import nitro as simulated
from tests.simulators.nsm import Nsm

CLAIMS, NONCE, SPKI = b"claims", b"n" * 32, b"k" * 91
BINDING = Binding.of_session(CLAIMS, nonce=NONCE, spki=SPKI)


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "nsm"
    path.write_bytes(b"")
    return path


def attester(nsm: Nsm, device: Path) -> NitroAttester:
    return NitroAttester(lambda request: device_exchange(request, device=device, ioctl=nsm.ioctl))


def test_a_document_of_the_module_binds_this_session(device: Path) -> None:
    one = attester(Nsm(), device)
    (item,) = one.collect(BINDING).evidence
    assert (item.kind, one.family, one.mode) == ("nitro", "nitro", "production")
    log = CheckLog()
    evidence = parse_evidence(item.content, simulated.root())
    authentic = evidence.authenticate(log, Endorsements(), now=simulated.NOW)
    authentic.check_session(log, SessionBinding(claims=CLAIMS, nonce=NONCE, binder=None, spki=SPKI))
    authentic.appraise(log, parse_policy(dict(one.reference_table()), "nitro", False), now=simulated.NOW)
    assert all(check.status != "failed" for check in log.checks)


def test_without_tls_no_key_is_named(device: Path) -> None:
    nsm = Nsm()
    attester(nsm, device).collect(Binding(report_data=b"h" * 64, extra_data=b"e" * 32, nonce=NONCE, spki=None))
    assert nsm.requests == [{"Attestation": {"user_data": b"h" * 64, "nonce": NONCE, "public_key": None}}]


def test_reference_values_are_the_registers_that_measure_something(device: Path) -> None:
    one = attester(Nsm(), device)
    expected = {f"pcr{register}": simulated.PCRS[register].hex() for register in (0, 1, 2, 4)}
    assert one.reference_table() == {"measurements": [expected]}
    assert isinstance(one, Measured)
    family: Attester = one
    assert family.family == "nitro"


def test_an_enclave_in_debug_mode_has_no_reference_values(device: Path) -> None:
    with pytest.raises(AttestationUnavailable, match="debug mode"):
        attester(Nsm(pcrs=dict.fromkeys(range(16), bytes(48))), device).reference_table()


@pytest.mark.parametrize(
    ("nsm", "message"),
    [
        (Nsm(failure=errno.EMSGSIZE), "does not answer"),
        (Nsm(answer=cbor2.dumps({"Error": "InternalError"})), "InternalError"),
        (Nsm(answer=cbor2.dumps("InvalidOperation")), "no document"),
        (Nsm(answer=cbor2.dumps({"Attestation": {"document": b""}})), "no document"),
        (Nsm(answer=cbor2.dumps({"Attestation": []})), "no document"),
        (Nsm(answer=cbor2.dumps({"GetRandom": {"random": b"r"}})), "no document"),
        (Nsm(answer=b"\xff"), "foreign CBOR"),
        (Nsm(answer=b""), "truncated"),
    ],
)
def test_a_module_that_gives_no_document_is_no_evidence(nsm: Nsm, message: str, device: Path) -> None:
    with pytest.raises(AttestationUnavailable, match=message):
        attester(nsm, device).collect(BINDING)


def test_a_document_that_is_none_has_no_reference_values(device: Path) -> None:
    nsm = Nsm(answer=cbor2.dumps({"Attestation": {"document": b"junk"}}))
    with pytest.raises(AttestationUnavailable, match="answers"):
        attester(nsm, device).reference_table()


def test_what_the_module_could_not_take_is_not_asked(device: Path) -> None:
    nsm = Nsm()
    with pytest.raises(AttestationUnavailable, match="larger than"):
        attester(nsm, device).collect(Binding(report_data=b"h" * 5000, extra_data=b"e" * 32, nonce=NONCE, spki=None))
    assert nsm.requests == []


def test_no_device_is_no_attester(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttestationUnavailable, match="No such file"):
        attester(Nsm(), tmp_path / "none").collect(BINDING)
    assert nitro.missing(AttestationConfig()) == "there is no /dev/nsm"
    monkeypatch.setattr(nitro, "DEVICE", tmp_path)
    assert nitro.missing(AttestationConfig()) is None


def test_the_real_system_call_refuses_a_file_that_is_no_device(device: Path) -> None:
    one = nitro.create(AttestationConfig(), bytes)
    with pytest.raises(AttestationUnavailable, match="does not answer"):
        one.collect(BINDING)
    with pytest.raises(OSError, match="Inappropriate ioctl"):
        device_exchange(b"\xa0", device=device)
