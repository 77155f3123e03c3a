"""Every vector through our parser, the published CDDL and the reference decoder; and the generator reproduces them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.signatures import authenticate
from client_sdk.wire import attestation, cose, names, receipt, stream
from client_sdk.wire.errors import WireError
from tests import cddl
from tests import reference_decoder as reference
from tests.vectors import make_vectors

HERE = Path(__file__).parent
NAMES = sorted(path.parent.name for path in HERE.glob("*/vector.json"))
HONEST = [name for name in NAMES if name.startswith("0")]
FAULTY = [name for name in NAMES if not name.startswith("0")]

HONEST_KEYS = {"what", "kind", "data", "held"}
FAULT_KEYS = {"what", "kind", "bugs", "stage", "code", "cddl_refuses", "twin", "data"}
HEX = {"key", "request", "response", "nonce", "spki", "exported", "claims"}
HELD_KEYS = HEX | {"prompt_text", "prompt_tokens", "outputs", "stop", "inputs", "input_tokens", "vectors"}


def load(name: str) -> dict[str, Any]:
    vector: dict[str, Any] = json.loads((HERE / name / "vector.json").read_text(encoding="utf-8"))
    expected = HONEST_KEYS if name in HONEST else FAULT_KEYS
    assert set(vector) == expected, f"{name}: keys {set(vector) ^ expected}"
    if "held" in vector:
        assert set(vector["held"]) <= HELD_KEYS, f"{name}: unknown {set(vector['held']) - HELD_KEYS}"
        vector["held"] = {k: bytes.fromhex(v) if k in HEX else v for k, v in vector["held"].items()}
    vector["data"] = bytes.fromhex(vector["data"])
    return vector


def parse(kind: str, data: bytes) -> None:
    """Our own parsers, everything inside included. Raises WireError."""
    if kind == "receipt":
        limit = names.LIMIT_RECEIPT_BYTES
        envelope = cose.parse_sign1(data, typ=names.TYP_RECEIPT, salted=True, limit_bytes=limit)
        receipt.ReceiptClaims.parse(envelope.payload)
    elif kind == "checkpoint":
        limit = names.LIMIT_CHECKPOINT_BYTES
        envelope = cose.parse_sign1(data, typ=names.TYP_CHECKPOINT, salted=True, limit_bytes=limit)
        stream.Checkpoint.parse(envelope.payload)
    elif kind == "bundle":
        parse_bundle(data)
    elif kind == "attestation-request":
        attestation.AttestationRequest.parse(data)
    else:
        assert kind == "event-stream"
        for block in data.split(b"\n\n"):
            for mark, inner in ((names.COMMENT_CHECKPOINT, "checkpoint"), (names.COMMENT_RECEIPT, "receipt")):
                if block.startswith(mark):
                    parse(inner, stream.decode_base64url(block[len(mark) :], limit_bytes=1 << 20))


def parse_bundle(data: bytes) -> None:
    bundle = attestation.AttestationBundle.parse(data)
    if bundle.claims is not None:
        attestation.AttestationClaims.parse(bundle.claims)
    limit = names.LIMIT_CHANNEL_PROOF_BYTES
    proof = cose.parse_sign1(bundle.channel_proof, typ=names.TYP_CHANNEL_PROOF, salted=False, limit_bytes=limit)
    attestation.ChannelProof.parse(proof.payload)


def verify_by_reference(kind: str, data: bytes, held: dict[str, Any]) -> None:
    """The whole of what the documents tell a verifier to check. Raises reference.Refused."""
    if kind == "receipt":
        claims, salt = reference.read_receipt(data, held["key"])
        if salt is not None:
            reference.check_content(claims, salt, held)
    elif kind == "checkpoint":
        reference.read_checkpoint(data, held["key"])
    elif kind == "bundle":
        reference.check_bundle(data, held)
    elif kind == "event-stream":
        reference.check_stream(data, held["key"], held["request"])
    else:
        reference.read_request(data)


@pytest.mark.parametrize("name", HONEST)
def test_honest_vector_is_accepted_by_all_three(name: str) -> None:
    vector = load(name)
    parse(vector["kind"], vector["data"])
    if vector["kind"] != "event-stream":
        cddl.validate(vector["kind"], vector["data"])
    verify_by_reference(vector["kind"], vector["data"], vector["held"])


def with_bugs(name: str) -> str:
    """The vector and the public bugs it stands for."""
    return "-".join([name, *load(name)["bugs"]])


@pytest.mark.parametrize("name", FAULTY, ids=with_bugs)
def test_faulty_vector_is_refused_with_its_code(name: str) -> None:
    vector = load(name)
    twin = load(vector["twin"])
    assert vector["kind"] == twin["kind"]
    assert vector["data"] != twin["data"]
    if vector["stage"] == "wire":
        with pytest.raises(WireError) as caught:
            parse(vector["kind"], vector["data"])
        assert caught.value.code == vector["code"]
    else:
        assert vector["stage"] == "verify"
        parse(vector["kind"], vector["data"])
        with pytest.raises(reference.Refused) as refused:
            verify_by_reference(vector["kind"], vector["data"], twin["held"])
        assert refused.value.code == vector["code"]


@pytest.mark.parametrize("name", [name for name in NAMES if load(name)["kind"] == "receipt"])
def test_our_signature_check_gives_the_code_too(name: str) -> None:
    """Signature faults fail in the SDK with their code; every other receipt that parses is genuinely signed."""
    vector = load(name)
    if vector.get("stage") == "wire":
        return
    limit = names.LIMIT_RECEIPT_BYTES
    envelope = cose.parse_sign1(vector["data"], typ=names.TYP_RECEIPT, salted=True, limit_bytes=limit)
    key = load("000-whole-answer")["held"]["key"]
    public = cose.parse_okp_key(key, curve=names.CURVE_ED25519)
    if not name.startswith("3"):
        authenticate(envelope, public)
        return
    with pytest.raises(AuthenticityError) as caught:
        authenticate(envelope, public)
    assert caught.value.code == vector["code"]


@pytest.mark.parametrize("name", FAULTY)
def test_codes_are_published(name: str) -> None:
    code = load(name)["code"]
    assert code in set(Rejection) | {"MALFORMED_ATTESTATION_REQUEST"}, "the last one is the server's own"


@pytest.mark.parametrize("name", [name for name in FAULTY if load(name)["kind"] != "event-stream"])
def test_the_cddl_sees_what_a_cddl_can_see(name: str) -> None:
    vector = load(name)
    if vector["cddl_refuses"]:
        with pytest.raises(cddl.CddlMismatch):
            cddl.validate(vector["kind"], vector["data"])
    elif vector["stage"] == "verify":
        cddl.validate(vector["kind"], vector["data"])


@pytest.mark.parametrize("name", [name for name in FAULTY if load(name)["stage"] == "wire"])
def test_a_second_reader_refuses_it_too(name: str) -> None:
    """Whatever our parser refuses, the CDDL or the reference decoder refuses independently of it."""
    vector = load(name)
    if vector["cddl_refuses"]:
        return  # proven above
    with pytest.raises(reference.Refused):
        verify_by_reference(vector["kind"], vector["data"], load(vector["twin"])["held"])


def test_the_generator_reproduces_every_file_byte_for_byte() -> None:
    made = make_vectors.files()
    assert set(made) == {f"{name}/vector.json" for name in NAMES}
    assert set(NAMES) == {path.name for path in HERE.iterdir() if path.is_dir() and path.name[0].isdigit()}
    for path, content in made.items():
        assert (HERE / path).read_text(encoding="utf-8") == content, path


def test_the_first_digits_are_unique() -> None:
    assert len({name[:3] for name in NAMES}) == len(NAMES)
