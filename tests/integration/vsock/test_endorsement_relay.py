"""Certificates through a relay nobody trusts: AMD's service is a simulator over TLS, the proxy is the appliance's own.

Whatever relay and service do, evidence goes out in time: with certificates that fit, or as it does without a relay.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote as percent_encoded

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from appliance.attestation import attester as attesters
from appliance.attestation.attester import Attester, Binding, Collected, Family
from appliance.attestation.endorsements import amd_kds, intel_pcs
from appliance.attestation.endorsements import relay as endorsement_relay
from appliance.attestation.endorsements.fetch import Fetcher
from appliance.attestation.endorsements.keeper import EndorsedAttester, EndorsementKeeper, Patience
from appliance.attestation.families.insecure import InsecureAttester
from appliance.attestation.families.snp import SnpAttester
from appliance.attestation.families.tdx import TdxAttester
from appliance.attestation.families.tsm import TsmReport
from appliance.boot import boot
from appliance.config import settings as configuration
from appliance.config.addresses import TcpAddress, parse_address
from appliance.inference.service import Surroundings
from appliance.vsock.connect_proxy import ConnectProxy
from client_sdk.checks import CheckLog
from client_sdk.errors import AuthenticityError, Rejection, UndecidedError
from client_sdk.tee.dcap import abi as dcap
from client_sdk.tee.endorsements import stapled
from client_sdk.tee.evidence import Endorsements
from client_sdk.tee.families import FAMILIES
from client_sdk.tee.snp import abi
from client_sdk.tee.snp.certificates import Anchors
from client_sdk.tee.snp.verify import AuthenticSnp, parse_evidence
from client_sdk.tee.tdx import abi as tdx_abi
from client_sdk.wire.attestation import EvidenceItem
from tests.integration.vsock.conftest import Peer, Running, StartForwarder
from tests.simulators import amd
from tests.simulators.kds import KeyService, answer, running, write_identity

VECTORS = Path(__file__).parents[2] / "vectors" / "tee" / "snp"
GENUINE_AT = 1_790_000_000.0
"""All three certificates are valid then (September 2026)."""
CHIP = amd.chip()
STRANGER = amd.chip(generation=1)
NAMES = ("ASK", "ARK")


def pem(der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).encode()


def chain(chip: amd.Chip) -> bytes:
    return b"".join(pem(chip.authority.der(name)) for name in NAMES)


@pytest.fixture
def kds(tmp_path: Path) -> Iterator[KeyService]:
    with running(tmp_path) as service:
        yield service


def give(kds: KeyService, report: bytes, vcek: bytes, certificates: bytes, *, product: str = "Milan") -> None:
    kds.documents[abi.vcek_path(abi.parse_report(report), product).partition("?")[0]] = vcek
    kds.documents[abi.chain_path(product)] = certificates


@dataclass
class Guest:
    """Evidence of one report through the relay at `relay`."""

    kds: KeyService
    proxy: Running
    relay: str
    patience: Patience

    def attester(self, outblob: bytes, auxblob: bytes = b"") -> EndorsedAttester:
        fetcher = Fetcher(proxy=parse_address(self.relay), tls=self.kds.tls, limit_bytes=65_536, timeout_s=5.0)
        return EndorsedAttester(
            SnpAttester(lambda _inblob: TsmReport(outblob=outblob, auxblob=auxblob)),
            lambda collected: amd_kds.lacking(collected, bring=fetcher.get, service=self.kds.url),
            EndorsementKeeper(monotonic=time.monotonic, patience=self.patience),
        )


@pytest.fixture
def guest(forward: StartForwarder, tmp_path: Path, kds: KeyService) -> Guest:
    relay = f"unix:{tmp_path}/relay"
    proxy = forward(relay, ConnectProxy([TcpAddress(host="localhost", port=kds.port)]).reach, reach_s=5.0)
    patience = Patience(wait_s=5.0, try_s=6.0, pause_s=60.0)
    return Guest(kds=kds, proxy=proxy, relay=relay, patience=patience)


def collect(attester: Attester, outblob: bytes) -> Collected:
    data = abi.parse_report(outblob[: abi.REPORT_BYTES]).report_data
    return attester.collect(Binding(report_data=data, extra_data=bytes(32), nonce=None, spki=None))


def judge(collected: Collected, anchors: Anchors | None, now: float) -> AuthenticSnp:
    """What a client makes of it, with nothing of its own."""
    (item,) = collected.evidence
    endorsements = stapled(collected.endorsements, (), Endorsements())
    return parse_evidence(item.content, anchors).authenticate(CheckLog(), endorsements, now=now)


@pytest.mark.parametrize(
    ("name", "vcek", "product"),
    [
        ("milan_v2_ok", "milan_v2_ok.vcek.der", "Milan"),
        ("milan_v3_dstack", "milan_v3_dstack.vcek.pem", "Milan"),
        ("genoa_v3_azure", "genoa_v3_azure.vcek.pem", "Genoa"),
    ],
)
def test_a_genuine_report_verifies_under_amd_s_own_roots(guest: Guest, name: str, vcek: str, product: str) -> None:
    report = (VECTORS / f"{name}.report.bin").read_bytes()[: abi.REPORT_BYTES]
    certificate = (VECTORS / vcek).read_bytes()
    if certificate[:1] == b"-":
        certificate = ssl.PEM_cert_to_DER_cert(certificate.decode())
    certificates = (VECTORS / f"chain_{product.lower()}_ask_ark_asvk.pem").read_bytes()
    give(guest.kds, report, certificate, certificates, product=product)
    collected = collect(guest.attester(report), report)
    assert [item.kind for item in collected.endorsements] == ["certificates"] * 3
    assert collected.endorsements[0].content == certificate
    assert judge(collected, None, GENUINE_AT).product == product
    path = abi.vcek_path(abi.parse_report(report), product)
    assert guest.kds.asked[-2:] == [path, f"/vcek/v1/{product}/cert_chain"]


def test_the_product_of_an_old_report_is_found_by_asking(guest: Guest) -> None:
    """Version 2 does not say whether it is of Milan or Genoa; only one of them has the chip."""
    genoa = amd.chip(amd.Vek(product="Genoa"))
    report = amd.Report(version=2, product="Genoa").sign(genoa.key)
    give(guest.kds, report, genoa.certificate, chain(genoa), product="Genoa")
    collected = collect(guest.attester(report), report)
    assert judge(collected, genoa.anchors, amd.NOW).product == "Genoa"
    assert [path.split("/")[3] for path in guest.kds.asked] == ["Milan", "Genoa", "Genoa"]


def test_each_chip_and_patch_level_is_asked_for_once(guest: Guest) -> None:
    report = amd.Report().sign(CHIP.key)
    give(guest.kds, report, CHIP.certificate, chain(CHIP))
    attester = guest.attester(report)
    found: list[Collected] = []
    threads = [threading.Thread(target=lambda: found.append(collect(attester, report))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = tuple(
        EvidenceItem(kind="certificates", content=content)
        for content in (CHIP.certificate, *(CHIP.authority.der(name) for name in NAMES))
    )
    assert [one.endorsements for one in found] == [expected] * 8
    assert len(guest.kds.asked) == 2
    assert judge(found[0], CHIP.anchors, amd.NOW).vek.certificate.der == CHIP.certificate


def test_updated_firmware_is_asked_for_anew(guest: Guest) -> None:
    level = amd.Tcb(snp=24)
    updated = amd.chip(amd.Vek(tcb=level))
    reports = [amd.Report().sign(CHIP.key), amd.Report(tcb=level).sign(updated.key)]
    outblob = reports[:1]
    fetcher = Fetcher(proxy=parse_address(guest.relay), tls=guest.kds.tls, timeout_s=5.0)
    attester = EndorsedAttester(
        SnpAttester(lambda _inblob: TsmReport(outblob=outblob[0], auxblob=b"")),
        lambda collected: amd_kds.lacking(collected, bring=fetcher.get, service=guest.kds.url),
        EndorsementKeeper(monotonic=time.monotonic),
    )
    for report, chip in zip(reports, (CHIP, updated), strict=True):
        outblob[0] = report
        give(guest.kds, report, chip.certificate, chain(chip))
        assert judge(collect(attester, report), chip.anchors, amd.NOW).tcb == abi.parse_tcb(
            abi.parse_report(report).reported_tcb, "Milan"
        )


def test_what_the_host_hands_over_is_not_asked_for(guest: Guest) -> None:
    report = amd.Report().sign(CHIP.key)
    table = amd.certificate_table({abi.GUIDS["VCEK"].bytes: CHIP.certificate})
    assert [item.content for item in collect(guest.attester(report, table), report).endorsements] == [CHIP.certificate]
    assert guest.kds.asked == []


def test_a_table_with_another_certificate_is_completed(guest: Guest) -> None:
    """A host that kept the certificate of the chip it had before: the right one comes beside it."""
    report = amd.Report().sign(CHIP.key)
    ask = CHIP.authority.der("ASK")
    table = amd.certificate_table({abi.GUIDS["VCEK"].bytes: b"0" * 900, abi.GUIDS["ASK"].bytes: pem(ask)})
    give(guest.kds, report, CHIP.certificate, chain(CHIP))
    collected = collect(guest.attester(report, table), report)
    assert [item.content for item in collected.endorsements][2] == CHIP.certificate


@pytest.mark.parametrize(
    "report",
    [
        amd.Report(flags=1 << 2).sign(CHIP.key),
        amd.Report(flags=2, chip_id=bytes(64)).sign(CHIP.key),
        amd.Report(raw={0x188: bytes((0x30, 1, 1))}).sign(CHIP.key),
    ],
    ids=["provider's key", "masked chip", "unknown product"],
)
def test_where_there_is_nothing_to_ask_for_nobody_is_asked(guest: Guest, report: bytes) -> None:
    assert collect(guest.attester(report), report).endorsements == ()
    assert guest.kds.asked == []


# Lies


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"0" * 65_536)


def dripping(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"0")
        time.sleep(0.05)


def garbage(handler: BaseHTTPRequestHandler) -> None:
    answer(handler, 200, os.urandom(1400))


def no_http(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"\x16\x03\x01\r\n\r\n")


LIES: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "garbage": garbage,
    "nothing": lambda handler: answer(handler, 200, b""),
    "an endless body": endless,
    "a redirect elsewhere": lambda handler: answer(handler, 302, b"", location="https://example.com/"),
    "a redirect to itself": lambda handler: answer(handler, 302, b"", location=handler.path),
    "a redirect out of TLS": lambda handler: answer(handler, 307, b"", location="http://localhost/"),
    "busy": lambda handler: answer(handler, 429, b""),
    "absent": lambda handler: answer(handler, 404, b""),
    "cut": lambda handler: answer(handler, 200, b"0" * 100, **{"content-length": "1400"}),
    "no HTTP": no_http,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_leaves_evidence_without_certificates(
    guest: Guest, lie: Callable[[BaseHTTPRequestHandler], None], caplog: pytest.LogCaptureFixture
) -> None:
    guest.kds.lie = lie
    report = amd.Report().sign(CHIP.key)
    attester = guest.attester(report)
    started = time.monotonic()
    collected = [collect(attester, report) for _ in range(3)]
    assert time.monotonic() - started < 4.0
    assert [one.endorsements for one in collected] == [()] * 3
    assert len(guest.kds.asked) <= 4, "one try, at most three redirects; the next is a minute away"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "evidence goes out without the vendor's endorsements" in record.getMessage()
    assert amd.CHIP_ID.hex()[:16] not in caplog.text
    with pytest.raises(UndecidedError) as undecided:
        judge(collected[0], CHIP.anchors, amd.NOW)
    assert undecided.value.code == "ENDORSEMENTS_MISSING"
    attester.close()


@pytest.mark.parametrize(
    "case", ["another chip's", "its own chain", "no chain", "another product's", "a leaf as chain"]
)
def test_certificates_that_do_not_fit_are_not_passed_on(guest: Guest, case: str) -> None:
    """The verifier would refuse them, where without them it can ask elsewhere."""
    report = amd.Report().sign(CHIP.key)
    other = amd.Vek().issue(CHIP.authority, ec.generate_private_key(ec.SECP384R1()))
    served = {
        "another chip's": (other, chain(CHIP)),
        "its own chain": (CHIP.certificate, chain(STRANGER)),
        "no chain": (CHIP.certificate, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        "another product's": (CHIP.certificate, chain(amd.chip(amd.Vek(product="Genoa")))),
        "a leaf as chain": (CHIP.certificate, pem(CHIP.certificate) * 2),
    }
    give(guest.kds, report, *served[case])
    attester = guest.attester(report)
    assert collect(attester, report).endorsements == ()
    attester.close()


def test_a_whole_forged_hierarchy_is_refused_by_the_client(guest: Guest) -> None:
    """What fits the report and itself is passed on; that it is not AMD's is for the verifier to find."""
    report = amd.Report().sign(STRANGER.key)
    give(guest.kds, report, STRANGER.certificate, chain(STRANGER))
    collected = collect(guest.attester(report), report)
    assert len(collected.endorsements) == 3
    with pytest.raises(AuthenticityError) as refused:
        judge(collected, CHIP.anchors, amd.NOW)
    assert refused.value.code == Rejection.CHAIN_NOT_TRUSTED


def test_a_relay_that_ends_tls_itself_is_found_out(guest: Guest, tmp_path: Path) -> None:
    """It has every certificate, but none for the name that an authority of ours signed."""
    identity = write_identity(tmp_path / "impostor.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity)
    heard: list[bytes] = []

    def impersonate(sock: socket.socket) -> None:
        sock.recv(4096)
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with context.wrap_socket(sock, server_side=True) as inside:
            heard.append(inside.recv(4096))

    report = amd.Report().sign(CHIP.key)
    with Peer(impersonate, tmp_path / "impostor") as peer:
        attester = replace(guest, relay=peer.address).attester(report)
        assert collect(attester, report).endorsements == ()
        attester.close()
    assert heard == []


@pytest.mark.parametrize("service_lies", [False, True], ids=["a relay that says nothing", "a body that drips"])
def test_who_keeps_us_waiting_holds_up_the_first_evidence_alone(
    guest: Guest, tmp_path: Path, service_lies: bool
) -> None:
    report = amd.Report().sign(CHIP.key)
    guest.kds.lie = dripping

    def listen(sock: socket.socket) -> None:
        while sock.recv(4096):
            pass

    with Peer(listen, tmp_path / "silent") as peer:
        relay = guest.relay if service_lies else peer.address
        patience = Patience(wait_s=0.5, try_s=2.0, pause_s=0.1)
        attester = replace(guest, relay=relay, patience=patience).attester(report)
        took: list[float] = []
        for _ in range(20):
            started = time.monotonic()
            assert collect(attester, report).endorsements == ()
            took.append(time.monotonic() - started)
            time.sleep(0.15)
        attester.close()
        tries = len(guest.kds.asked) if service_lies else peer.connections
    assert tries >= 2
    assert 0.45 < took[0] < 1.0
    assert max(took[1:]) < 0.2, "later tries are made behind its back"


def test_what_fails_is_tried_again_at_growing_distances_and_told_once(
    guest: Guest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "appliance")
    report = amd.Report().sign(CHIP.key)
    give(guest.kds, report, CHIP.certificate, chain(CHIP))
    moments: list[float] = []

    def busy(handler: BaseHTTPRequestHandler) -> None:
        moments.append(time.monotonic())
        if len(moments) == 4:
            guest.kds.lie = None
        answer(handler, 503, b"")

    guest.kds.lie = busy
    attester = replace(guest, patience=replace(guest.patience, pause_s=0.1, longest_pause_s=0.4)).attester(report)
    assert collect(attester, report).endorsements == ()
    deadline = time.monotonic() + 10
    while not (found := collect(attester, report)).endorsements:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert judge(found, CHIP.anchors, amd.NOW).product == "Milan"
    distances = [after - before for before, after in itertools.pairwise(moments)]
    assert [distance >= least for distance, least in zip(distances, (0.1, 0.2, 0.4), strict=True)] == [True] * 3
    assert [record.levelname for record in caplog.records if "endorsements" in record.getMessage()] == [
        "WARNING",
        "INFO",
    ]


@pytest.mark.parametrize(
    "answer_of_the_relay", [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 502 x\r\n\r\n", b"H" * (1 << 20)]
)
def test_a_relay_that_is_none_is_given_up(guest: Guest, tmp_path: Path, answer_of_the_relay: bytes) -> None:
    def speak(sock: socket.socket) -> None:
        sock.recv(4096)
        sock.sendall(answer_of_the_relay)

    report = amd.Report().sign(CHIP.key)
    with Peer(speak, tmp_path / "other") as peer:
        attester = replace(guest, relay=peer.address).attester(report)
        started = time.monotonic()
        assert collect(attester, report).endorsements == ()
        assert time.monotonic() - started < 4.0
        attester.close()


# TDX: Intel's collateral in AMD's certificates' place

QUOTE = (VECTORS.parent / "tdx" / "v4_b0c06f_uptodate.quote.bin").read_bytes()
COLLATERAL = json.loads((VECTORS.parent / "tdx" / "v4_b0c06f_uptodate.collateral.json").read_bytes())
IN_WINDOW = 1_750_332_000.0
"""19 June 2025, when this quote and this collateral were made."""
TCB, QE = "/tdx/certification/v4/tcb", "/tdx/certification/v4/qe/identity"
PCK_CRL, ROOT_CRL = "/sgx/certification/v4/pckcrl", "/sgx/certification/v4/rootcacrl"


@pytest.fixture
def pcs(kds: KeyService) -> KeyService:
    """Intel's service, with the genuine answers for the platform of QUOTE."""
    signed = {TCB: ("tcbInfo", "tcb_info"), QE: ("enclaveIdentity", "qe_identity")}
    for path, (outer, name) in signed.items():
        kds.documents[path] = (
            f'{{"{outer}":{COLLATERAL[name]},"signature":"{COLLATERAL[f"{name}_signature"]}"}}'.encode()
        )
    kds.documents[PCK_CRL] = bytes.fromhex(COLLATERAL["pck_crl"])
    kds.documents[ROOT_CRL] = bytes.fromhex(COLLATERAL["root_ca_crl"])
    chains = ("tcb_info_issuer_chain", "qe_identity_issuer_chain", "pck_crl_issuer_chain")
    for path, header, chain_name in zip((TCB, QE, PCK_CRL), dcap.COLLATERAL_HEADERS, chains, strict=True):
        kds.headers[path] = {header: percent_encoded(COLLATERAL[chain_name], safe="")}
    return kds


def trust_domain(guest: Guest, quote: bytes = QUOTE) -> EndorsedAttester:
    fetcher = Fetcher(proxy=parse_address(guest.relay), tls=guest.kds.tls, limit_bytes=65_536, timeout_s=5.0)
    return EndorsedAttester(
        TdxAttester(lambda _inblob: TsmReport(outblob=quote, auxblob=b""), event_log=Path("/nonexistent")),
        lambda collected: intel_pcs.lacking(collected, bring=fetcher.fetch, service=guest.kds.url),
        EndorsementKeeper(monotonic=time.monotonic, patience=guest.patience),
    )


def collect_quote(attester: Attester, quote: bytes = QUOTE) -> Collected:
    data = tdx_abi.parse_quote(quote).report.report_data
    return attester.collect(Binding(report_data=data, extra_data=bytes(32), nonce=None, spki=None))


def test_a_genuine_quote_verifies_with_the_collateral_that_came_along(guest: Guest, pcs: KeyService) -> None:
    attester = trust_domain(guest)
    collected = [collect_quote(attester) for _ in range(3)]
    (item,) = collected[0].endorsements
    assert (item.kind, json.loads(item.content)) == ("collateral", COLLATERAL)
    assert collected[2].endorsements == (item,)
    assert pcs.asked == [f"{TCB}?fmspc=b0c06f000000", QE, f"{PCK_CRL}?ca=platform&encoding=der", ROOT_CRL]
    endorsements = stapled(collected[0].endorsements, (), Endorsements())
    evidence = FAMILIES["tdx"].parse_evidence(collected[0].evidence[0].content)
    assert evidence.authenticate(CheckLog(), endorsements, now=IN_WINDOW).mode == "production"
    with pytest.raises(UndecidedError):
        evidence.authenticate(CheckLog(), Endorsements(), now=IN_WINDOW)


def other_platform(pcs: KeyService) -> None:
    pcs.documents[TCB] = pcs.documents[TCB].replace(b"B0C06F000000", b"00806F050000")


@pytest.mark.parametrize(
    "spoil",
    [
        other_platform,
        lambda pcs: pcs.documents.pop(ROOT_CRL),
        lambda pcs: pcs.headers.pop(QE),
        lambda pcs: pcs.documents.update({PCK_CRL: b"\x30\x00"}),
        lambda pcs: pcs.documents.update({TCB: b"[" * 60_000}),
        lambda pcs: pcs.documents.update({QE: b'{"enclaveIdentity":{},"signature":1}'}),
        lambda pcs: pcs.headers.update({QE: {dcap.COLLATERAL_HEADERS[1]: "none"}}),
        lambda pcs: pcs.documents.update({ROOT_CRL: bytes(65_537)}),
    ],
)
def test_collateral_that_does_not_fit_is_not_passed_on(
    guest: Guest, pcs: KeyService, spoil: Callable[[KeyService], object], caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(pcs.documents), dict(pcs.headers)
    spoil(pcs)
    assert (pcs.documents, pcs.headers) != before
    attester = trust_domain(guest)
    assert collect_quote(attester).endorsements == ()
    attester.close()
    (record,) = caplog.records
    assert "goes out without" in record.getMessage()


def test_a_quote_that_names_no_platform_is_not_asked_about(guest: Guest, pcs: KeyService) -> None:
    first = b"-----BEGIN CERTIFICATE-----\n"
    without_chain = QUOTE.replace(b"-----BEGIN CERTIFICATE-----", b"-----BEGIN CERTIFICATF-----")
    broken = QUOTE.replace(first + b"MII", first + b"MIA", 1)
    for quote in (without_chain, broken):
        assert quote != QUOTE
        assert collect_quote(trust_domain(guest, quote), quote).endorsements == ()
    assert pcs.asked == []


# Composition


class _Peeking:
    """A proxy that writes down what it is asked for, and refuses."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []

    def __call__(self, sock: socket.socket) -> None:
        self.heads.append(sock.recv(4096))
        sock.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")


def choose(relay: str, attester: Attester, monkeypatch: pytest.MonkeyPatch) -> Attester:
    family = Family(missing=lambda _config: None, create=lambda _config, _random: attester)
    monkeypatch.setitem(attesters.ATTESTERS, attester.family, family)
    overrides: dict[str, dict[str, object]] = {"attestation": {"attester": attester.family, "endorsement_relay": relay}}
    config = configuration.load(None, environ={}, overrides=overrides)
    return boot.choose_attester(
        config, Surroundings(clock=time.time, monotonic=time.monotonic, random_bytes=os.urandom)
    )


def make_snp() -> SnpAttester:
    return SnpAttester(lambda inblob: TsmReport(outblob=amd.Report(report_data=inblob).sign(CHIP.key), auxblob=b""))


def test_the_configured_relay_is_asked_for_amd_s_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peeking = _Peeking()
    with Peer(peeking, tmp_path / "relay") as peer:
        chosen = choose(peer.address, make_snp(), monkeypatch)
        assert isinstance(chosen, EndorsedAttester)
        assert (chosen.family, chosen.mode) == ("sev-snp", "production")
        chosen.close()
    assert peeking.heads == [b"CONNECT kdsintf.amd.com:443 HTTP/1.1\r\nhost: kdsintf.amd.com:443\r\n\r\n"]


def test_without_a_relay_or_a_use_for_it_nothing_is_put_before_the_attester(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snp, insecure = make_snp(), InsecureAttester(os.urandom(32))
    assert choose("", snp, monkeypatch) is snp
    assert choose(f"unix:{tmp_path}/nobody", insecure, monkeypatch) is insecure


def test_roots_come_from_the_bundle_where_openssl_has_none(tmp_path: Path) -> None:
    identity = write_identity(tmp_path / "bundle.pem")
    subjects = [entry["subject"] for entry in endorsement_relay.public_roots(identity).get_ca_certs()]
    assert ((("commonName", "localhost"),),) in subjects
    context = endorsement_relay.public_roots(tmp_path / "absent")
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_pem_and_base64_that_are_none_give_no_certificate() -> None:
    assert amd_kds._certificates(b"-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----") == []
    assert amd_kds._certificates(pem(b"0" * 10)) == [b"0" * 10]
    assert base64.b64encode(b"0" * 10) in pem(b"0" * 10)
