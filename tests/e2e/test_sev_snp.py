"""A guest of SEV-SNP end to end: the kernel's interface, the appliance, RA-TLS, the SDK; AMD is a simulator."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from appliance.attestation import attester as attesters
from appliance.attestation.endorsements import amd_kds
from appliance.attestation.endorsements.fetch import Fetcher
from appliance.attestation.endorsements.keeper import EndorsedAttester, EndorsementKeeper
from appliance.attestation.families import snp
from appliance.config.addresses import TcpAddress, parse_address
from appliance.vsock.connect_proxy import ConnectProxy
from client_sdk import Appliance, AsyncAppliance, Policy, Rejection, UndecidedError, VerificationError
from client_sdk.checks import CheckLog
from client_sdk.tee import families
from client_sdk.tee.certificate.verify import Question, verify_certificate
from client_sdk.tee.evidence import Endorsements, ForeignBinding
from client_sdk.tee.snp import abi
from client_sdk.tee.snp.policy import parse_policy
from client_sdk.tee.x509 import parse_certificates
from tests.e2e.glass import GlassAppliance
from tests.e2e.programs import MODEL
from tests.integration.vsock.conftest import StartForwarder
from tests.integration.vsock.conftest import forward as forward
from tests.simulators import amd, kds, tsm

pytestmark = [pytest.mark.model, pytest.mark.skipif(bool(tsm.why_not()), reason=tsm.why_not())]
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class Guest:
    """What the processor and the host of this guest say. `with_certificate`: the host hands out the VCEK."""

    def __init__(self) -> None:
        now = time.time()
        self.chip = amd.chip(amd.Vek(not_before=now - 3600, not_after=now + 86_400))
        self.report = amd.Report()
        self.with_certificate = True

    def make(self, inblob: bytes, level: int) -> tuple[bytes, bytes]:
        table = amd.certificate_table({abi.GUIDS["VCEK"].bytes: self.chip.certificate})
        report = replace(self.report, report_data=inblob, vmpl=level)
        return report.sign(self.chip.key), table if self.with_certificate else b""


@pytest.fixture(scope="module")
def guest() -> Guest:
    return Guest()


@pytest.fixture(scope="module")
def appliance(guest: Guest, workspace: Path) -> Iterator[GlassAppliance]:
    folder = workspace / "tsm"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, tsm.mounted(tsm.Machine(make=guest.make), folder) as root:
        family = attesters.Family(
            missing=lambda config: snp.missing(config, root=root),
            create=lambda config, random_bytes: snp.create(config, random_bytes, root=root),
        )
        patch.setitem(attesters.ATTESTERS, "sev-snp", family)
        test_roots = families.Family(folder="snp", anchors=guest.chip.anchors)
        patch.setitem(families.FAMILIES, "sev-snp", test_roots)
        with GlassAppliance(
            MODEL, overrides={"attestation": {"attester": "auto", "certificate_evidence": True}}
        ) as running:
            yield running


def demanding(policy: Policy, **table: object) -> Policy:
    demands = {"measurements": [amd.MEASUREMENT.hex()], **table}
    return Policy(models=policy.models, families={"sev-snp": parse_policy(demands, "families.sev-snp", False)})


def refused(appliance: GlassAppliance, policy: Policy) -> VerificationError:
    with Appliance(appliance.url, policy=policy) as client, pytest.raises(VerificationError) as caught:
        client.chat(QUESTION, model=MODEL, max_tokens=4)
    return caught.value


def test_an_answer_of_a_guest_is_production_and_names_its_hardware(appliance: GlassAppliance, policy: Policy) -> None:
    pinned = demanding(policy, chip_ids=[amd.CHIP_ID.hex()], min_tcb={"snp": 23, "microcode": 213})
    with Appliance(appliance.url, policy=pinned) as client:
        answer = client.chat(QUESTION, model=MODEL, temperature=0, max_tokens=8)
        result = client.attest()
    assert answer.text
    assert answer.receipt.claims.mode == "production"
    assert (result.family, result.claims.mode) == ("sev-snp", "production")
    shown = {fact.name: (fact.value, fact.trust) for fact in result.facts}
    assert shown["SNP launch measurement"] == (amd.MEASUREMENT.hex(), "hardware-signed")
    states = {check.name: check.status for check in result.checks}
    assert states["AMD certificate chain"] == states["report data binds the claims"] == states["chip id"] == "passed"


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ({"measurements": ["11" * 48]}, Rejection.MEASUREMENT_NOT_ALLOWED),
        ({"chip_ids": ["11" * 64]}, Rejection.DEVICE_NOT_ALLOWED),
        ({"min_tcb": {"snp": 24}}, Rejection.TCB_NOT_ALLOWED),
    ],
)
def test_a_guest_that_is_not_the_one_is_asked_nothing(
    appliance: GlassAppliance, policy: Policy, table: dict[str, object], code: Rejection
) -> None:
    asked = len(appliance.seen)
    assert refused(appliance, demanding(policy, **table)).code == code
    assert len(appliance.seen) == asked, "no prompt left before the verdict"


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"policy": 0x30000 | 1 << 19}, Rejection.DEBUG_NOT_ALLOWED),
        ({"policy": 0x30000 | 1 << 40}, Rejection.GUEST_POLICY_NOT_ALLOWED),
        ({"product": "Genoa"}, Rejection.ENDORSEMENT_MISMATCH),
    ],
)
async def test_b005_both_clients_refuse_a_guest_that_the_host_may_look_into(
    appliance: GlassAppliance, guest: Guest, policy: Policy, changed: dict[str, Any], code: Rejection
) -> None:
    guest.report = replace(guest.report, **changed)
    try:
        assert (await asyncio.to_thread(refused, appliance, demanding(policy))).code == code
        async with AsyncAppliance(appliance.url, policy=demanding(policy)) as client:
            with pytest.raises(VerificationError) as caught:
                await client.chat(QUESTION, model=MODEL, max_tokens=4)
        assert caught.value.code == code
    finally:
        guest.report = amd.Report()


def test_without_its_certificate_there_is_no_verdict(appliance: GlassAppliance, guest: Guest, policy: Policy) -> None:
    guest.with_certificate = False
    try:
        with Appliance(appliance.url, policy=demanding(policy)) as client, pytest.raises(UndecidedError):
            client.chat(QUESTION, model=MODEL, max_tokens=4)
    finally:
        guest.with_certificate = True


def test_what_the_host_withholds_comes_through_a_relay_nobody_trusts(
    appliance: GlassAppliance,
    guest: Guest,
    policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forward: StartForwarder,
) -> None:
    """The host hands over no certificate, only bytes to and from AMD: a client with nothing of its own accepts.

    `appliance` stands for the roots that this guest's chain leads to.
    """
    (tmp_path / "tsm").mkdir()
    monkeypatch.setattr(guest, "with_certificate", False)
    with kds.running(tmp_path) as amd_service, tsm.mounted(tsm.Machine(make=guest.make), tmp_path / "tsm") as root:
        report = abi.parse_report(guest.report.sign(guest.chip.key))
        ask_and_ark = (guest.chip.authority.der(name) for name in ("ASK", "ARK"))
        amd_service.documents[abi.vcek_path(report, "Milan").partition("?")[0]] = guest.chip.certificate
        amd_service.documents[abi.chain_path("Milan")] = "".join(map(ssl.DER_cert_to_PEM_cert, ask_and_ark)).encode()
        relay = f"unix:{tmp_path}/relay"
        forward(relay, ConnectProxy([TcpAddress(host="localhost", port=amd_service.port)]).reach)
        fetcher = Fetcher(proxy=parse_address(relay), tls=amd_service.tls)
        lacking = partial(amd_kds.lacking, bring=fetcher.get, service=amd_service.url)
        family = attesters.Family(
            missing=lambda _config: None,
            create=lambda config, random_bytes: EndorsedAttester(
                snp.create(config, random_bytes, root=root), lacking, EndorsementKeeper(monotonic=time.monotonic)
            ),
        )
        monkeypatch.setitem(attesters.ATTESTERS, "sev-snp", family)
        with GlassAppliance(MODEL, overrides={"attestation": {"attester": "sev-snp"}}) as running:
            fetched = list(amd_service.asked)
            with Appliance(running.url, policy=demanding(policy)) as client:
                answer = client.chat(QUESTION, model=MODEL, temperature=0, max_tokens=4)
        assert answer.receipt.claims.mode == "production"
        assert len(fetched) == 2, "before anything listened"
        assert amd_service.asked == fetched, "and not again"


def test_amd_s_own_roots_refuse_this_guest(
    appliance: GlassAppliance, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.FAMILIES, "sev-snp", families.Family(folder="snp"))
    assert refused(appliance, demanding(policy)).code == Rejection.CHAIN_NOT_TRUSTED


def test_the_served_certificate_convinces_a_verifier_of_certificates(appliance: GlassAppliance, guest: Guest) -> None:
    """Another stack's client: any TLS library, no challenge, and so only `binding: key`."""
    presented = ssl.get_server_certificate(("127.0.0.1", appliance.port)).encode()
    question = Question(
        policies={"sev-snp": parse_policy({"measurements": [amd.MEASUREMENT.hex()]}, "families.sev-snp", False)},
        endorsements=Endorsements(certificates=parse_certificates(guest.chip.certificate)),
        binding=ForeignBinding(),
        now=time.time(),
    )
    log = CheckLog()
    assert verify_certificate(presented, log, question).schemes == ("id-pe-cmw",)
    states = {check.name: check.status for check in log.checks}
    assert states["evidence binds the certificate's key"] == "passed"
    assert states["freshness"] == "not checked"
