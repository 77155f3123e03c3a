"""Evidence as people have it in files: which parts belong together, and what is told from what by content."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from client_sdk.errors import SdkError
from client_sdk.offline.evidence import FAMILY_CHOICES, ForeignFiles, ForeignPolicy, judge
from client_sdk.tee import der
from client_sdk.tee.azure import abi as azure
from client_sdk.tee.endorsements import merge, recognise, stapled
from client_sdk.tee.evidence import Endorsements, ForeignBinding
from client_sdk.tee.files import FAMILY_NAMES, read_evidence
from client_sdk.tee.tpm2 import abi as tpm2
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.errors import WireError
from tests.unit.client_sdk.tee.test_der import tlv

V = Path(__file__).parents[2] / "vectors" / "tee"
QUOTE, SIGNATURE, KEY, PEM = (
    (V / "tpm2" / name).read_bytes()
    for name in ("swtpm_quote.msg", "swtpm_quote.sig.der", "swtpm_ak.tpm2b_public.bin", "swtpm_ak.pub.pem")
)
REPORT, RUNTIME, VTPM_QUOTE, VTPM_SIGNATURE = (
    (V / "snp" / f"genoa_v3_azure.{name}").read_bytes()
    for name in ("report.bin", "hcl-runtime.json", "vtpm-quote.msg", "vtpm-quote.sig")
)


def test_the_parts_of_a_tpm_quote_in_every_form() -> None:
    whole = read_evidence("tpm2", QUOTE, [SIGNATURE, KEY]).contents[0]
    item = tpm2.parse_item(whole)
    wrapped = b"\x00\x18\x00\x0b" + b"".join(
        b"\x00\x20" + number.to_bytes(32, "big") for number in (item.signature.r, item.signature.s)
    )
    for parts in ([KEY, SIGNATURE], [SIGNATURE, KEY[2:]], [PEM, SIGNATURE], [wrapped, KEY]):
        assert read_evidence("tpm2", QUOTE, parts).contents == (whole,)
    assert read_evidence("tpm2", whole, []).contents == (whole,)
    for parts in ([], [SIGNATURE], [KEY], [SIGNATURE, b"-----BEGIN PUBLIC KEY-----"]):
        with pytest.raises(WireError):
            read_evidence("tpm2", QUOTE, parts)
    with pytest.raises(WireError):
        read_evidence("tpm2", QUOTE, [b"\x30\x03\x02\x01\x01", KEY])
    large = rsa.generate_private_key(65537, 2048).public_key()
    other = large.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(WireError, match="P-256"):
        read_evidence("tpm2", QUOTE, [SIGNATURE, other])


def test_what_is_beside_a_tpm_quote_stays_an_endorsement() -> None:
    chain = (V / "snp/chain_milan_ask_ark_asvk.pem").read_bytes()
    assert len(read_evidence("tpm2", QUOTE, [chain, SIGNATURE, KEY]).endorsements.certificates) == 3


def test_azure_from_its_parts_and_from_the_paravisors_report() -> None:
    beside = [VTPM_SIGNATURE, RUNTIME, VTPM_QUOTE]
    made = read_evidence("azure", REPORT, beside).contents[0]
    item = azure.parse_item(made)
    assert item.runtime.encoded == RUNTIME
    framed = (
        b"HCLA"
        + bytes(28)
        + REPORT
        + b"".join(number.to_bytes(4, "little") for number in (20 + len(RUNTIME), 1, 2, 1, len(RUNTIME)))
    )
    again = read_evidence("azure", framed + RUNTIME, [VTPM_QUOTE, VTPM_SIGNATURE]).contents[0]
    assert azure.parse_item(again).report == item.report
    assert read_evidence("azure", made, []).contents == (made,)
    for parts in ([VTPM_QUOTE, VTPM_SIGNATURE], [RUNTIME, VTPM_QUOTE], [RUNTIME, VTPM_SIGNATURE]):
        with pytest.raises(WireError):
            read_evidence("azure", REPORT, parts)


def test_quotes_lose_their_padding_and_strange_ones_are_left_to_their_family() -> None:
    quote = (V / "tdx/v4_00806f_cos113.quote.bin").read_bytes()
    assert len(read_evidence("tdx", quote, []).contents[0]) < len(quote)
    assert read_evidence("tdx", b"\x09" * 60, []).contents == (b"\x09" * 60,)


def test_sizes() -> None:
    for data in (b"", bytes((1 << 20) + 1)):
        with pytest.raises(WireError):
            read_evidence("snp", data, [])


def test_endorsements_are_told_by_their_content() -> None:
    collateral = (V / "tdx/v4_b0c06f_uptodate.collateral.json").read_bytes()
    assert len(recognise(b"  \n" + collateral).collateral) == 1
    assert len(recognise((V / "tdx/v4_00806f_cos113.ccel.bin").read_bytes()).event_logs) == 1
    assert len(recognise((V / "tdx/v4_90c06f_dstack.eventlog.json").read_bytes()).event_logs) == 1
    assert len(recognise((V / "nvidia/nras_v3_expired.detached_eat.json").read_bytes()).tokens) == 1
    assert len(recognise((V / "nvidia/rim_driver_gh100_550.144.03.xml").read_bytes()).rims) == 1
    assert len(recognise((V / "snp/crl_milan.der").read_bytes()).crls) == 1
    assert len(recognise((V / "snp/chain_milan_ask_ark_asvk.pem").read_bytes()).certificates) == 3
    assert recognise(b'{"keys": []}').jwks == b'{"keys": []}'
    assert recognise(b"\x30\x03\x0a\x01\x06").ocsp == (b"\x30\x03\x0a\x01\x06",)
    utf16 = json.dumps({"tcb_info": "\u00e9", "qe_identity": ""}, ensure_ascii=False).encode("utf-16-le")
    for junk in (b"", b"{", b"{}", b'{"a": 1}', b"[" * 100_000, b"\xff", bytes((1 << 20) + 1), utf16, b"{\xff"):
        with pytest.raises(WireError):
            recognise(junk)


def test_the_callers_own_come_first_and_an_appliance_names_no_keys() -> None:
    own = Endorsements(jwks=b"own")
    crl = EvidenceItem(kind="crl", content=(V / "snp/crl_milan.der").read_bytes())
    log = EvidenceItem(kind="dstack", content=b"[]")
    found = stapled([crl], [log], own)
    assert (found.jwks, len(found.crls), len(found.event_logs)) == (b"own", 1, 1)
    assert merge([own, Endorsements(jwks=b"other")]).jwks == b"own"
    with pytest.raises(WireError, match="whose keys"):
        stapled([EvidenceItem(kind="jwks", content=b'{"keys": []}')], [], Endorsements())


def test_an_appliance_staples_no_more_than_evidence_could_need() -> None:
    chain = EvidenceItem(kind="chain", content=(V / "snp/chain_milan_ask_ark_asvk.pem").read_bytes())
    assert len(stapled([chain] * 21, [], Endorsements()).certificates) == 63
    with pytest.raises(WireError, match="could need"):
        stapled([chain] * 22, [], Endorsements())
    signed, *rest = der.read_one((V / "snp/crl_milan.der").read_bytes()).children()
    entries = tlv(0x30, b"".join(tlv(0x30, tlv(2, number.to_bytes(3, "big"))) for number in range(5000)))
    fields = b"".join(field.encoded for field in signed.children()[:5])
    longer = tlv(0x30, tlv(0x30, fields + entries) + b"".join(part.encoded for part in rest))
    crl = EvidenceItem(kind="crl", content=longer)
    assert len(stapled([crl], [], Endorsements()).crls[0].revoked) == 5000
    with pytest.raises(WireError, match="could need"):
        stapled([crl] * 2, [], Endorsements())


POLICY = ForeignPolicy.parse(
    "version = 1\n"
    + "".join(
        f"[families.{name}]\n" + (f'ak_pins = ["{"41" * 32}"]\n' if name == "tpm2" else "")
        for name in FAMILY_NAMES.values()
    ),
    report_only=True,
)
SEEDS = [
    path.read_bytes()
    for pattern in (
        "*/*.report.bin",
        "*/*.cose.cbor",
        "tdx/*.quote.bin",
        "certificates/*",
        "*/*.evidence.json",
        "tpm2/*",
    )
    for path in sorted(V.glob(pattern))
]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FAMILY_CHOICES),
    st.one_of(st.binary(max_size=200), st.sampled_from(SEEDS)),
    st.integers(0, 20_000),
    st.binary(max_size=8),
    st.lists(st.one_of(st.binary(max_size=100), st.sampled_from(SEEDS)), max_size=2),
)
def test_any_file_under_any_family_is_judged_or_refused(
    family: str, data: bytes, at: int, put: bytes, beside: list[bytes]
) -> None:
    at %= len(data) + 1
    spoilt = data[:at] + put + data[at + len(put) :]
    try:
        judge(ForeignFiles(family=family, evidence=spoilt, endorsements=beside), POLICY, ForeignBinding(), now=1.75e9)
    except SdkError:
        pass


def test_base64_of_keys() -> None:
    body = base64.b64encode(b"x" * 91)
    with pytest.raises(WireError):
        read_evidence("tpm2", QUOTE, [SIGNATURE, b"-----BEGIN PUBLIC KEY-----\n" + body + b"-----END PUBLIC KEY-----"])
