"""AIR receipts beside our own: what they say, when there are none, and that nothing else is signed by their key."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.attestation.families.insecure import InsecureAttester
from appliance.attestation.responder import InForce
from appliance.boot import boot
from appliance.boot.instance_keys import make_keys
from appliance.config.settings import AttestationConfig, Config, ModelConfig, ReceiptsConfig, ServerConfig
from appliance.errors import BootError
from appliance.receipts import air as issuing
from appliance.receipts.air import AirIssuer, AirRecord
from appliance.receipts.transcript import Subject
from client_sdk.offline.air import AirPolicy, verify_air
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.receipt import ModelFacts
from client_sdk.wire.stream import decode_base64url
from tests.unit.appliance.inference.service.rig import Rig, chat

VECTORS = Path(__file__).parents[3] / "vectors" / "tee"
TDX = EvidenceItem(kind="tdx", content=(VECTORS / "tdx/v4_b0c06f_uptodate.quote.bin").read_bytes())
NITRO = EvidenceItem(kind="nitro", content=(VECTORS / "nitro/prod_2025-12-25a.cose.cbor").read_bytes())
KEY = Ed25519PrivateKey.from_private_bytes(b"\x05" * 32)
PUBLIC = KEY.public_key().public_bytes_raw()
IN_FORCE = b"\x11" * 32
MODEL = ModelFacts(
    name="small",
    identity=b"\x21" * 32,
    weights=((10, b"\x22" * 32),),
    tokenizer=b"\x23" * 32,
    chat_template=None,
    format="gguf",
)
RECORD = AirRecord(
    subject=Subject(
        cti=bytes(range(1, 17)),
        salt=b"\x01" * 32,
        iat=1_800_000_000,
        eat_nonce=b"\x02" * 32,
        attestation=IN_FORCE,
        channel=None,
    ),
    model=MODEL,
    request=b'{"q":1}',
    response=b'{"a":2}',
    took_ms=12,
    finished_at=1_800_000_001,
)


def issuer() -> AirIssuer:
    return AirIssuer(iss="example.com", policy_version="config-00", sign=KEY.sign, memory_mb=lambda: 77)


@pytest.mark.parametrize(("item", "kind"), [(TDX, "tdx-mrtd-rtmr"), (NITRO, "nitro-pcr")])
def test_a_receipt_names_the_document_in_force_and_its_registers(item: EvidenceItem, kind: str) -> None:
    made = issuer()
    made.remember(IN_FORCE, [item])
    receipt = made.issue(RECORD)
    assert receipt is not None
    demanded = AirPolicy(
        nonce=RECORD.subject.eat_nonce,
        model_hash=b"\x22" * 32,
        request_hash=hashlib.sha256(RECORD.request).digest(),
        response_hash=hashlib.sha256(RECORD.response).digest(),
        attestation_doc_hash=hashlib.sha256(item.content).digest(),
        platform=kind,
        required_registers=frozenset({"pcr3", "pcr4"}),
        max_age_s=60,
    )
    result = verify_air(receipt, key=PUBLIC, policy=demanded, now=1_800_000_010)
    claims = result.claims
    assert (claims.model_id, claims.model_version, claims.model_hash_scheme) == ("small", "21" * 32, "sha256-single")
    assert (claims.execution_time_ms, claims.memory_peak_mb, claims.sequence_number) == (12, 77, 0)
    assert claims.cti == RECORD.subject.cti
    registers = claims.enclave_measurements.registers
    assert set(registers) == ({f"pcr{n}" for n in range(5)} | (set() if item is TDX else {"pcr8"}))


def test_several_weight_files_have_no_scheme() -> None:
    made = issuer()
    made.remember(IN_FORCE, [TDX])
    receipt = made.issue(replace(RECORD, model=replace(MODEL, weights=((1, b"\x31" * 32), (2, b"\x32" * 32)))))
    assert receipt is not None
    claims = verify_air(receipt, key=PUBLIC, policy=AirPolicy(), now=0).claims
    assert (claims.model_hash, claims.model_hash_scheme) == (MODEL.identity, None)


def test_without_an_attestation_in_force_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = issuer()
    assert made.issue(RECORD) is None
    assert made.issue(replace(RECORD, subject=replace(RECORD.subject, attestation=None))) is None
    monkeypatch.setattr(issuing, "_MAX_REMEMBERED", 1)
    made.remember(IN_FORCE, [TDX])
    made.remember(b"\x12" * 32, [NITRO])
    assert made.issue(RECORD) is None


class Named(InsecureAttester):
    """An attester by another name: only the name is asked for."""

    family = "tdx"


def config(**more: object) -> Config:
    made = Config(
        receipts=ReceiptsConfig(air=True),
        models=(ModelConfig(name="small"),),
        attestation=AttestationConfig(attester="insecure"),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def test_the_appliance_issues_them_only_where_air_has_a_layout() -> None:
    keys = make_keys(lambda size: bytes(range(1, size + 1)))
    assert keys.air_cose != keys.receipt_cose or keys.air.private_bytes_raw() == keys.receipt.private_bytes_raw()
    made = boot._air(config(), keys, Named(b"\x01" * 32))
    made.remember(IN_FORCE, [TDX])
    receipt = made.issue(RECORD)
    assert receipt is not None
    claims = verify_air(receipt, key=keys.air.public_key().public_bytes_raw(), policy=AirPolicy(), now=0).claims
    assert claims.memory_peak_mb > 0
    assert claims.policy_version == f"config-{config().digest().hex()}"
    with pytest.raises(BootError, match="no layout for 'insecure'"):
        boot._air(config(), keys, InsecureAttester(b"\x01" * 32))
    for wrong in ({"server": ServerConfig(issuer="x" * 257)}, {"models": (ModelConfig(name="x" * 257),)}):
        with pytest.raises(BootError, match="256 bytes"):
            boot._air(config(**wrong), keys, Named(b"\x01" * 32))


def test_they_are_off_by_default() -> None:
    assert Config().receipts.air is False


async def test_the_header_comes_with_whole_answers_alone() -> None:
    rig, made = Rig(), issuer()
    in_force = InForce(attestation=IN_FORCE, binder=None)
    made.remember(IN_FORCE, [TDX])
    rig.service._air = made
    whole = await rig.ask(chat(), headers={"x-inference-nonce": "02" * 32}, latched=in_force)
    receipt = decode_base64url(whole.headers["x-air-receipt"].encode(), limit_bytes=8192)
    demanded = AirPolicy(nonce=b"\x02" * 32, response_hash=hashlib.sha256(whole.body).digest())
    claims = verify_air(receipt, key=PUBLIC, policy=demanded, now=0).claims
    assert claims.cti.hex() == whole.headers["x-receipt-id"]
    for body in (chat(stream=True), chat(model="another")):
        assert "x-air-receipt" not in (await rig.ask(body, latched=in_force)).headers
    assert "x-air-receipt" not in (await rig.ask(chat())).headers
