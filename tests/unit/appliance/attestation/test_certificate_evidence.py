"""Evidence in our own certificate: other verifiers accept it for this key, and nobody can start a session with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from appliance.attestation.attester import Attester, Binding, Collected
from appliance.attestation.certificate_evidence import LIMIT_EXTENSION_BYTES, make_extension
from appliance.attestation.families.insecure import InsecureAttester
from appliance.attestation.families.nitro import NitroAttester
from appliance.attestation.families.snp import SnpAttester
from appliance.attestation.families.tdx import TdxAttester
from appliance.attestation.families.tsm import TsmReport
from appliance.boot.instance_keys import InstanceKeys, make_keys
from appliance.errors import AttestationUnavailable, BootError
from appliance.listener.certificates import CertificateRotator
from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection, VerificationError
from client_sdk.policy.policy import parse_families
from client_sdk.tee.certificate.verify import AttestedCertificate, Question, verify_certificate
from client_sdk.tee.evidence import Endorsements, ForeignBinding, ParsedEvidence, SessionBinding
from client_sdk.tee.nitro.verify import parse_evidence as parse_nitro
from client_sdk.tee.snp.verify import parse_evidence as parse_snp
from client_sdk.tee.tdx.verify import parse_evidence as parse_tdx
from client_sdk.tee.tpm2.verify import parse_evidence as parse_tpm2
from client_sdk.tee.x509 import parse_certificates
from client_sdk.transport.tls import check_certificate
from client_sdk.wire import digests
from client_sdk.wire.attestation import EvidenceItem
from tests.simulators import amd, intel, nitro, software_tpm
from tests.simulators.insecure_appliance import seeded
from tests.simulators.nsm import Nsm

NOW = amd.NOW
CHIP, INTEL = amd.chip(), intel.Intel()
AK_PIN = digests.sha256(software_tpm.public(software_tpm.Quote())).hex()


class SoftwareTpm:
    """An attester around the simulated TPM."""

    family, mode = "tpm2", "production"

    def collect(self, binding: Binding) -> Collected:
        content = software_tpm.item(software_tpm.Quote(extra_data=binding.extra_data))
        return Collected(evidence=(EvidenceItem(kind=self.family, content=content),))


def snp_report(inblob: bytes) -> TsmReport:
    return TsmReport(outblob=replace(amd.Report(), report_data=inblob).sign(CHIP.key), auxblob=b"")


def tdx_quote(inblob: bytes) -> TsmReport:
    quote = intel.quote(INTEL, intel.TdBody(report_data=inblob))
    return TsmReport(outblob=quote + bytes(64), auxblob=b"")


ATTESTERS: dict[str, Callable[[], Attester]] = {
    "sev-snp": lambda: SnpAttester(snp_report),
    "tdx": lambda: TdxAttester(tdx_quote),
    "nitro": lambda: NitroAttester(Nsm().exchange),
    "tpm2": SoftwareTpm,
}
PARSERS: dict[str, Callable[[bytes], ParsedEvidence]] = {
    "sev-snp": partial(parse_snp, anchors=CHIP.anchors),
    "tdx": partial(parse_tdx, root=INTEL.root()),
    "nitro": partial(parse_nitro, anchor=nitro.root()),
    "tpm2": parse_tpm2,
}
POLICIES = parse_families({"sev-snp": {}, "tdx": {}, "nitro": {}, "tpm2": {"ak_pins": [AK_PIN]}}, report_only=True)
ENDORSEMENTS = Endorsements(certificates=parse_certificates(CHIP.certificate), collateral=(INTEL.collateral(),))


def served(family: str, keys: InstanceKeys, evidence_for: InstanceKeys | None = None) -> CertificateRotator:
    extension = make_extension(ATTESTERS[family](), (evidence_for or keys).tls_spki)
    return CertificateRotator(keys.tls, now=lambda: NOW, random_bytes=seeded_bytes, extensions=[extension])


def seeded_bytes(size: int) -> bytes:
    return seeded("certificate", size)


def judge(rotator: CertificateRotator) -> AttestedCertificate:
    question = Question(
        policies=POLICIES,
        endorsements=ENDORSEMENTS,
        binding=ForeignBinding(),
        now=NOW,
        parse=lambda family, content: PARSERS[family](content),
    )
    return verify_certificate(rotator.certificate.public_bytes(Encoding.DER), CheckLog(), question)


@pytest.fixture(scope="module")
def keys() -> InstanceKeys:
    return make_keys(seeded_bytes)


@pytest.mark.parametrize("family", ATTESTERS)
def test_a_verifier_of_certificates_accepts_it_for_this_key_through_renewals(family: str, keys: InstanceKeys) -> None:
    rotator = served(family, keys)
    for _ in range(2):
        found = judge(rotator)
        assert found.schemes == (("CCC",) if family == "tdx" else ("id-pe-cmw",))
        check_certificate(rotator.certificate, now=NOW)
        rotator.renew()


@pytest.mark.parametrize("family", ATTESTERS)
def test_b043_in_the_certificate_of_another_key_it_is_refused(family: str, keys: InstanceKeys) -> None:
    with pytest.raises(VerificationError) as caught:
        judge(served(family, make_keys(seeded_bytes), evidence_for=keys))
    assert caught.value.code == Rejection.EVIDENCE_BINDING


@pytest.mark.parametrize("family", ATTESTERS)
def test_it_never_starts_a_session(family: str, keys: InstanceKeys) -> None:
    """Not even with claims that are the very key: a session's label is another, and so is its nonce."""
    (evidence,) = judge(served(family, keys)).evidence
    spki = keys.tls_spki
    for claims in (spki, b"", b"claims"):
        binding: Any = SessionBinding(claims=claims, nonce=seeded("nonce"), binder=None, spki=spki)
        with pytest.raises(VerificationError) as caught:
            evidence.check_session(CheckLog(), binding)
        assert caught.value.code in (Rejection.EVIDENCE_BINDING, Rejection.NONCE_MISMATCH)


def test_b186_without_hardware_there_is_none(keys: InstanceKeys) -> None:
    with pytest.raises(BootError, match="'insecure' has none"):
        make_extension(InsecureAttester(bytes(32)), keys.tls_spki)


def test_hardware_that_makes_none_stops_the_start(keys: InstanceKeys) -> None:
    def broken(_inblob: bytes) -> TsmReport:
        raise AttestationUnavailable("evidence_failed", "the device does not answer")

    with pytest.raises(BootError, match="the device does not answer"):
        make_extension(SnpAttester(broken), keys.tls_spki)


def test_a_certificate_has_room_for_so_much(keys: InstanceKeys) -> None:
    class Large(SoftwareTpm):
        def collect(self, binding: Binding) -> Collected:
            return Collected(evidence=(EvidenceItem(kind="tpm2", content=bytes(LIMIT_EXTENSION_BYTES)),))

    with pytest.raises(BootError, match="too many"):
        make_extension(Large(), keys.tls_spki)


def test_short_contents_are_der_too(keys: InstanceKeys) -> None:
    class Short(SoftwareTpm):
        def collect(self, binding: Binding) -> Collected:
            return Collected(evidence=(EvidenceItem(kind="tpm2", content=b"x"),))

    extension = make_extension(Short(), keys.tls_spki).der
    assert extension[:2] == bytes([4, len(extension) - 2])
