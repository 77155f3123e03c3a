"""AIR receipts: the official vectors, every code, every byte, and keys under which anything verifies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client_sdk.cli.main import run
from client_sdk.offline.air import AirPolicy, AirRejected, verify_air
from client_sdk.wire import air, cbor, cose
from client_sdk.wire.air import AirClaims, AirError, Measurements

VECTORS = Path(__file__).parents[3] / "vectors" / "air"
SEED = b"\x2a" * 32
NOW = 1740500100.0
FILES = sorted(VECTORS.glob("*/*.json"))


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def policy_of(vector: dict[str, Any]) -> AirPolicy:
    wanted = vector.get("verify_policy") or {}
    return AirPolicy(
        nonce=bytes.fromhex(wanted["expected_nonce_hex"]) if "expected_nonce_hex" in wanted else None,
        model_hash=bytes.fromhex(wanted["expected_model_hash_hex"]) if "expected_model_hash_hex" in wanted else None,
        platform=wanted.get("expected_platform"),
        max_age_s=wanted.get("max_age_secs"),
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_official_vector(path: Path) -> None:
    vector = load(path)
    receipt, key = bytes.fromhex(vector["receipt_hex"]), bytes.fromhex(vector["public_key_hex"])
    now = NOW + 86_400 * 400
    if path.parent.name == "valid":
        result = verify_air(receipt, key=key, policy=policy_of(vector), now=now)
        assert result.assurance == "AIR-local"
        assert result.claims.encode() == bytes.fromhex(vector["payload_hex"])
        return
    with pytest.raises(AirRejected) as caught:
        verify_air(receipt, key=key, policy=policy_of(vector), now=now)
    assert caught.value.code == vector["expected_failure"]["code"]
    assert caught.value.checks[-1].name == vector["expected_failure"]["check"]
    assert caught.value.layer == vector["expected_failure"]["layer"] or path.stem == "v1-payload-trailing-bytes"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_command_line(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vector = load(path)
    receipt = tmp_path / "receipt.cbor"
    receipt.write_bytes(bytes.fromhex(vector["receipt_hex"]))
    wanted = vector.get("verify_policy") or {}
    options = ["--nonce", wanted["expected_nonce_hex"]] if "expected_nonce_hex" in wanted else []
    options += ["--model-hash", wanted["expected_model_hash_hex"]] if "expected_model_hash_hex" in wanted else []
    options += ["--max-age", str(wanted["max_age_secs"])] if "max_age_secs" in wanted else []
    status = run(["verify-air", str(receipt), "--key", vector["public_key_hex"], *options, "--json"])
    said = json.loads(capsys.readouterr().out)
    if path.parent.name == "valid":
        assert (status, said["result"], said["assurance"]) == (0, "accept", "AIR-local")
        assert said["claims"]["iss"] == {"value": "cyntrisec.com", "trust": "key-signed"}
    else:
        assert status in (10, 30)
        assert (said["result"], said["code"]) == ("reject", vector["expected_failure"]["code"])
    assert run(["verify-air", str(receipt), "--key", vector["public_key_hex"]]) in (0, 10, 30)


def test_command_line_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = tmp_path / "receipt.cbor"
    receipt.write_bytes(sign(CLAIMS.encode()))
    key = public(SEED).hex()
    for wrong in (["--key", "00"], ["--key", "zz" * 32], ["--key", key, "--model-hash", "00"]):
        assert run(["verify-air", str(receipt), *wrong]) == 2
    both = ["--nonce", "0102030405060708", "--platform", "tdx-mrtd-rtmr", "--max-age", "60", "--now", "1740500120"]
    assert run(["verify-air", str(receipt), "--key", key, *both]) == 0
    assert "AIR-local" in capsys.readouterr().out
    receipt.write_bytes(sign(replace(CLAIMS, security_mode="evaluation").encode()))
    assert run(["verify-air", str(receipt), "--key", key]) == 10
    assert run(["verify-air", str(receipt), "--key", key, "--allow-evaluation"]) == 0


CLAIMS = AirClaims(
    iss="example.com",
    iat=1740500100,
    cti=bytes(range(1, 17)),
    model_id="m",
    model_version="1",
    model_hash=b"\x01" * 32,
    request_hash=b"\x02" * 32,
    response_hash=b"\x03" * 32,
    attestation_doc_hash=b"\x04" * 32,
    enclave_measurements=Measurements(
        measurement_type="tdx-mrtd-rtmr", registers={f"pcr{n}": bytes([n + 1]) * 48 for n in range(4)}
    ),
    policy_version="p",
    sequence_number=0,
    execution_time_ms=1,
    memory_peak_mb=2,
    security_mode="production",
    eat_nonce=bytes(range(1, 9)),
    model_hash_scheme="sha256-manifest",
)


def public(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def sign(payload: bytes, protected: bytes = air.PROTECTED) -> bytes:
    signature = Ed25519PrivateKey.from_private_bytes(SEED).sign(cose.signature_input(protected, payload))
    return b"\xd2" + cbor.encode([protected, {}, payload, signature])


def refused(receipt: bytes, policy: AirPolicy | None = None, key: bytes | None = None) -> str:
    with pytest.raises(AirRejected) as caught:
        verify_air(receipt, key=key or public(SEED), policy=policy or AirPolicy(), now=NOW)
    return str(caught.value.code)


def test_own_encoding_verifies() -> None:
    receipt = sign(CLAIMS.encode())
    assert verify_air(receipt, key=public(SEED), policy=AirPolicy(), now=NOW).claims == CLAIMS
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    payload = CLAIMS.encode()
    assert air.encode_receipt(payload, key.sign(cose.signature_input(air.PROTECTED, payload))) == receipt


def edited(change: Callable[[dict[Any, Any]], object]) -> bytes:
    claims = cbor.decode(CLAIMS.encode(), limit_bytes=4096)
    assert isinstance(claims, dict)
    change(claims)
    return sign(cbor.encode(claims))


NAMES = dict(air._KEYS)


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_missing_or_of_another_type(name: str) -> None:
    receipt = edited(lambda c: c.pop(NAMES[name]))
    if name in ("eat_nonce", "model_hash_scheme"):
        verify_air(receipt, key=public(SEED), policy=AirPolicy(), now=NOW)
    else:
        assert refused(receipt) == f"MISSING_CLAIM:{name}"
    for wrong in (None, True, 1.5, [], {"x": 1} if name != "enclave_measurements" else -1):
        code = refused(edited(lambda c, w=wrong: c.__setitem__(NAMES[name], w)))  # type: ignore[misc]
        assert code == ("WRONG_PROFILE" if name == "eat_profile" else f"WRONG_TYPE:{name}")


def put(name: str, value: object) -> bytes:
    return edited(lambda c: c.__setitem__(NAMES[name], value))


def measured(change: Callable[[dict[Any, Any]], object]) -> bytes:
    return edited(lambda c: change(c[NAMES["enclave_measurements"]]))


@pytest.mark.parametrize(
    ("receipt", "code"),
    [
        (put("iat", 0), "WRONG_TYPE:iat"),
        (put("iat", -1), "WRONG_TYPE:iat"),
        (put("cti", b"\x01" * 15), "BAD_CTI_LENGTH"),
        (put("cti", bytes(16)), "BAD_CTI_LENGTH"),
        (put("eat_nonce", b"\x01" * 7), "WRONG_TYPE:eat_nonce"),
        (put("eat_nonce", b"\x01" * 65), "WRONG_TYPE:eat_nonce"),
        (put("eat_profile", "https://cyntrisec.com/spec/air/v1"), "WRONG_PROFILE"),
        (put("iss", ""), "WRONG_TYPE:iss"),
        (put("iss", "x" * 1025), "WRONG_TYPE:iss"),
        (put("model_hash", b"\x01" * 31), "BAD_HASH_LENGTH:model_hash"),
        (put("request_hash", b"\x01" * 33), "BAD_HASH_LENGTH:request_hash"),
        (put("model_hash", bytes(32)), "ZERO_MODEL_HASH"),
        (put("model_hash_scheme", "md5"), "UNKNOWN_MODEL_HASH_SCHEME:md5"),
        (put("security_mode", "test"), "UNKNOWN_SECURITY_MODE:test"),
        (measured(lambda m: m.update(measurement_type="sev-snp")), "UNKNOWN_MTYPE:sev-snp"),
        (measured(lambda m: m.pop("measurement_type")), "UNKNOWN_MTYPE:None"),
        (measured(lambda m: m.pop("pcr0")), "MISSING_CLAIM:pcr0"),
        (measured(lambda m: m.update(pcr8=bytes(48))), "UNKNOWN_CLAIM:pcr8"),
        (measured(lambda m: m.update(pcr1=1)), "WRONG_TYPE:pcr1"),
        (measured(lambda m: m.update(pcr1=bytes(32))), "BAD_MEASUREMENT_LENGTH"),
        (edited(lambda c: c.update({-65550: 1})), "UNKNOWN_CLAIM:-65550"),
        (edited(lambda c: c.update({"x": 1})), "UNKNOWN_CLAIM:x"),
        (sign(cbor.encode([1])), "PAYLOAD_NOT_MAP"),
        (sign(b"\xa2\x01\x61\x61\x01\x61\x62"), "PAYLOAD_NOT_MAP"),
        (sign(b"\xbf\xff"), "PAYLOAD_NOT_MAP"),
    ],
)
def test_claims_that_are_signed_and_wrong(receipt: bytes, code: str) -> None:
    assert refused(receipt) == code


def whole(*parts: object) -> bytes:
    return b"\xd2" + cbor.encode(list(parts))


@pytest.mark.parametrize(
    ("receipt", "code"),
    [
        (b"", "COSE_DECODE_FAILED"),
        (b"\xd2" + bytes(65_536), "RECEIPT_TOO_LARGE"),
        (sign(CLAIMS.encode())[1:], "COSE_DECODE_FAILED"),
        (sign(CLAIMS.encode()) + b"\x00", "COSE_DECODE_FAILED"),
        (b"\xd2" + sign(CLAIMS.encode()), "COSE_DECODE_FAILED"),
        (b"\xd2" + b"\x81" * 60_000, "COSE_DECODE_FAILED"),
        (b"\xd2\x9b" + b"\xff" * 8, "COSE_DECODE_FAILED"),
        (whole(air.PROTECTED, {}, b"x"), "COSE_DECODE_FAILED"),
        (whole({}, {}, b"x", bytes(64)), "COSE_DECODE_FAILED"),
        (whole(b"\x80", {}, b"x", bytes(64)), "COSE_DECODE_FAILED"),
        (whole(air.PROTECTED, {4: b"k"}, b"x", bytes(64)), "NON_EMPTY_UNPROTECTED"),
        (whole(b"\xa0", {}, b"x", bytes(64)), "BAD_ALG"),
        (whole(cbor.encode({1: -8}), {}, b"x", bytes(64)), "BAD_CONTENT_TYPE"),
        (whole(cbor.encode({1: -8, 3: True}), {}, b"x", bytes(64)), "BAD_CONTENT_TYPE"),
        (whole(cbor.encode({1: -8, 3: 61, 4: b"k"}), {}, b"x", bytes(64)), "COSE_DECODE_FAILED"),
        (whole(air.PROTECTED, {}, None, bytes(64)), "MISSING_PAYLOAD"),
        (whole(air.PROTECTED, {}, b"x", bytes(63)), "BAD_SIG_LENGTH"),
        (whole(air.PROTECTED, {}, b"x", bytes(64)), "SIG_FAILED"),
    ],
)
def test_structure(receipt: bytes, code: str) -> None:
    assert refused(receipt) == code


def test_a_small_order_key_is_refused_even_where_the_equation_holds() -> None:
    """A is the identity, R = [r]B and S = r: [S]B = R + [k]A for every message. OpenSSL says yes."""
    payload = CLAIMS.encode()
    private = Ed25519PrivateKey.from_private_bytes(SEED)
    scalar = int.from_bytes(_clamped(SEED), "little") % cose._ORDER
    point = private.public_key().public_bytes_raw()
    identity = b"\x01" + bytes(31)
    receipt = air.encode_receipt(payload, point + scalar.to_bytes(32, "little"))
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    envelope = air.parse_envelope(receipt)
    Ed25519PublicKey.from_public_bytes(identity).verify(envelope.signature, envelope.signed_bytes())  # it holds
    assert refused(receipt, key=identity) == "SIG_FAILED"


def _clamped(seed: bytes) -> bytes:
    import hashlib

    digest = bytearray(hashlib.sha512(seed).digest()[:32])
    digest[0] &= 248
    digest[31] = digest[31] & 63 | 64
    return bytes(digest)


def test_policy() -> None:
    receipt = sign(CLAIMS.encode())
    held = AirPolicy(
        nonce=CLAIMS.eat_nonce,
        model_hash=CLAIMS.model_hash,
        model_id="m",
        request_hash=CLAIMS.request_hash,
        response_hash=CLAIMS.response_hash,
        attestation_doc_hash=CLAIMS.attestation_doc_hash,
        platform="tdx-mrtd-rtmr",
        required_registers=frozenset({"pcr3"}),
        max_age_s=0,
        seen=lambda cti: False,
    )
    result = verify_air(receipt, key=public(SEED), policy=held, now=NOW)
    assert result.freshness == "nonce"
    assert {check.status for check in result.checks} == {"passed"}
    other = b"\x09" * 32
    for change, code in [
        ({"nonce": b"\x01" * 8}, "NONCE_MISMATCH"),
        ({"model_hash": other}, "MODEL_HASH_MISMATCH"),
        ({"model_id": "n"}, "MODEL_ID_MISMATCH"),
        ({"request_hash": other}, "REQUEST_HASH_MISMATCH"),
        ({"response_hash": other}, "RESPONSE_HASH_MISMATCH"),
        ({"attestation_doc_hash": other}, "ATTESTATION_DOC_HASH_MISMATCH"),
        ({"platform": "nitro-pcr"}, "PLATFORM_MISMATCH"),
        ({"required_registers": frozenset({"pcr4"})}, "MISSING_CLAIM:pcr4"),
        ({"seen": lambda cti: True}, "REPLAY_CTI"),
    ]:
        assert refused(receipt, replace(held, **change)) == code  # type: ignore[arg-type]
    without = sign(replace(CLAIMS, eat_nonce=None, security_mode="evaluation").encode())
    assert refused(without, AirPolicy(nonce=b"\x01" * 8)) == "NONCE_MISSING"
    assert refused(without) == "EVALUATION_MODE_REJECTED"
    result = verify_air(without, key=public(SEED), policy=AirPolicy(allow_evaluation=True, max_age_s=5), now=NOW)
    assert result.freshness == "recentness"


@pytest.mark.parametrize(
    ("now", "code"),
    [(NOW - 61, "TIMESTAMP_FUTURE"), (NOW - 60, None), (NOW + 10, None), (NOW + 11, "TIMESTAMP_STALE")],
)
def test_freshness(now: float, code: str | None) -> None:
    receipt, policy = sign(CLAIMS.encode()), AirPolicy(max_age_s=10)
    if code is None:
        verify_air(receipt, key=public(SEED), policy=policy, now=now)
        return
    with pytest.raises(AirRejected) as caught:
        verify_air(receipt, key=public(SEED), policy=policy, now=now)
    assert caught.value.code == code


def test_only_what_a_verifier_takes_is_emitted() -> None:
    with pytest.raises(AirError):
        replace(CLAIMS, model_version="x" * 129).encode()
    with pytest.raises(AirError):
        replace(CLAIMS, iat=0).encode()
    with pytest.raises(ValueError, match="32 bytes"):
        verify_air(b"", key=b"", policy=AirPolicy(), now=NOW)


def test_every_flipped_byte_and_every_cut_is_refused() -> None:
    receipt = sign(CLAIMS.encode())
    for at in range(len(receipt)):
        refused(receipt[:at] + bytes([receipt[at] ^ 1]) + receipt[at + 1 :])
        refused(receipt[:at])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300))
def test_any_bytes_get_a_typed_error(data: bytes) -> None:
    refused(data)
    refused(b"\xd2" + data)
    refused(sign(data or b"\x00"))
