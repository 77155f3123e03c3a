"""Attested Inference Receipt (AIR) v1 of others: draft-tsyrulnikov-rats-attested-inference-receipt-02, bytes only.

Structure (layer 1) and claims (layer 3) are read by two functions, because nothing of the payload may be decoded before
its signature (layer 2) verifies. The draft names an IPR disclosure: docs/air.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from client_sdk.wire import cbor
from client_sdk.wire.cose import signature_input
from client_sdk.wire.errors import WireError

PROFILE: Final = "https://spec.cyntrisec.com/air/v1"
MEDIA_TYPE: Final = "application/eat+cwt"
LIMIT_RECEIPT_BYTES: Final = 65_536
PROTECTED: Final = bytes.fromhex("a2012703183d")  # {1: -8, 3: 61}, the only one there is
MEASUREMENT_BYTES: Final = 48
MODES: Final = frozenset({"production", "evaluation"})
SCHEMES: Final = frozenset({"sha256-single", "sha256-concat", "sha256-manifest"})
TYPE_NITRO: Final = "nitro-pcr"
TYPE_TDX: Final = "tdx-mrtd-rtmr"
# measurement_type -> (required registers, optional ones)
REGISTERS: Final[Mapping[str, tuple[frozenset[str], frozenset[str]]]] = {
    TYPE_NITRO: (frozenset({"pcr0", "pcr1", "pcr2"}), frozenset({"pcr3", "pcr4", "pcr8"})),
    TYPE_TDX: (frozenset({"pcr0", "pcr1", "pcr2"}), frozenset({"pcr3", "pcr4"})),
}

_TAG: Final = b"\xd2"
_ALG, _CONTENT_TYPE = 1, 3
_EDDSA, _EAT_CWT = -8, 61
_TEXT_BYTES = 1024
_EMITTED_TEXT_BYTES: Final[Mapping[str, int]] = {
    "iss": 256,
    "model_id": 256,
    "model_version": 128,
    "policy_version": 256,
}
_KEYS: Final[Mapping[str, int]] = {
    "iss": 1,
    "iat": 6,
    "cti": 7,
    "eat_nonce": 10,
    "eat_profile": 265,
    "model_id": -65537,
    "model_version": -65538,
    "model_hash": -65539,
    "request_hash": -65540,
    "response_hash": -65541,
    "attestation_doc_hash": -65542,
    "enclave_measurements": -65543,
    "policy_version": -65544,
    "sequence_number": -65545,
    "execution_time_ms": -65546,
    "memory_peak_mb": -65547,
    "security_mode": -65548,
    "model_hash_scheme": -65549,
}
_OPTIONAL = frozenset({"eat_nonce", "model_hash_scheme"})
_TEXTS = ("iss", "eat_profile", "model_id", "model_version", "policy_version", "security_mode")
_HASHES = ("model_hash", "request_hash", "response_hash", "attestation_doc_hash")
_COUNTERS = ("iat", "sequence_number", "execution_time_ms", "memory_peak_mb")


class AirError(ValueError):
    """A receipt that is refused. `layer` 1 to 4, `check` and `code` are the reference implementation's names."""

    def __init__(self, layer: int, check: str, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.layer = layer
        self.check = check
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A receipt of sound structure, nothing more. `payload` is not decoded."""

    payload: bytes
    signature: bytes

    def signed_bytes(self) -> bytes:
        return signature_input(PROTECTED, self.payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """`registers` maps pcr0, pcr1, ... to 48 bytes each (on TDX pcr0 is MRTD, pcr1 RTMR0 and so on)."""

    measurement_type: str
    registers: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class AirClaims:
    """The claims, closed. Times in Unix seconds and milliseconds, memory in MB, hashes 32 bytes, `cti` 16."""

    iss: str
    iat: int
    cti: bytes
    model_id: str
    model_version: str
    model_hash: bytes
    request_hash: bytes
    response_hash: bytes
    attestation_doc_hash: bytes
    enclave_measurements: Measurements
    policy_version: str
    sequence_number: int
    execution_time_ms: int
    memory_peak_mb: int
    security_mode: str
    eat_nonce: bytes | None = None
    model_hash_scheme: str | None = None

    def encode(self) -> bytes:
        """The payload. Raises AirError for claims that a verifier would refuse, text beyond the tight set included."""
        claims: dict[int, object] = {}
        for name, key in _KEYS.items():
            value = PROFILE if name == "eat_profile" else getattr(self, name)
            if isinstance(value, Measurements):
                value = {"measurement_type": value.measurement_type, **value.registers}
            if value is not None:
                claims[key] = value
        payload = cbor.encode(claims)
        parse_claims(payload)
        for name, limit in _EMITTED_TEXT_BYTES.items():
            if len(getattr(self, name).encode()) > limit:
                raise AirError(3, "CLAIMS_DECODE", f"WRONG_TYPE:{name}", f"{name} is longer than {limit} bytes")
        return payload


def encode_receipt(payload: bytes, signature: bytes) -> bytes:
    """The tagged COSE_Sign1 of an encoded payload and the signature over its `signature_input(PROTECTED, payload)`."""
    return _TAG + cbor.encode([PROTECTED, {}, payload, signature])


def parse_envelope(data: bytes) -> Envelope:
    """Layer 1, structure. Raises AirError."""
    if len(data) > LIMIT_RECEIPT_BYTES:
        raise AirError(1, "SIZE", "RECEIPT_TOO_LARGE", f"larger than {LIMIT_RECEIPT_BYTES} bytes")
    if data[:1] != _TAG:
        raise _bad_cose("tag 18 is missing")
    parts = _decode_cose(data[1:])
    if type(parts) is not list or len(parts) != 4:
        raise _bad_cose("not an array of four")
    protected, unprotected, payload, signature = parts
    if type(protected) is not bytes or type(unprotected) is not dict:
        raise _bad_cose("headers are not a byte string and a map")
    header = _decode_cose(protected)
    if type(header) is not dict:
        raise _bad_cose("the protected header is not a map")
    if unprotected:
        raise AirError(1, "UNPROTECTED", "NON_EMPTY_UNPROTECTED", "the unprotected header is not empty")
    if not _is(header.get(_ALG), _EDDSA):
        raise AirError(1, "ALG", "BAD_ALG", "the algorithm is not EdDSA (-8)")
    if not _is(header.get(_CONTENT_TYPE), _EAT_CWT):
        raise AirError(1, "CONTENT_TYPE", "BAD_CONTENT_TYPE", "the content type is not 61")
    if protected != PROTECTED:
        raise _bad_cose("the protected header has further parameters")
    if type(payload) is not bytes or not payload:
        raise AirError(1, "PAYLOAD", "MISSING_PAYLOAD", "no payload is attached")
    if type(signature) is not bytes or len(signature) != 64:
        raise AirError(1, "SIG", "BAD_SIG_LENGTH", "the signature has not 64 bytes")
    return Envelope(payload=payload, signature=signature)


def parse_claims(payload: bytes) -> AirClaims:
    """Layer 3, claims of a payload whose signature verified. Raises AirError."""
    try:
        decoded = cbor.decode(payload, limit_bytes=LIMIT_RECEIPT_BYTES)
    except WireError as error:
        raise AirError(3, "CLAIMS_DECODE", "PAYLOAD_NOT_MAP", error.detail) from None
    if type(decoded) is not dict:
        raise AirError(3, "CLAIMS_DECODE", "PAYLOAD_NOT_MAP", "the payload is not a map")
    names = {key: name for name, key in _KEYS.items()}
    for key in decoded:
        if type(key) is not int or key not in names:
            raise _claim("UNKNOWN_CLAIM", str(key)[:32], "is not a claim of this profile")
    claims: dict[str, Any] = {names[key]: value for key, value in decoded.items()}  # type: ignore[index]
    for name in _KEYS:
        if name not in claims and name not in _OPTIONAL:
            raise _claim("MISSING_CLAIM", name, "is missing")
    _check_types(claims)
    _check_values(claims)
    del claims["eat_profile"]
    claims["enclave_measurements"] = _measurements(claims["enclave_measurements"])
    return AirClaims(**claims)


def _check_types(claims: Mapping[str, Any]) -> None:
    if claims["eat_profile"] != PROFILE:
        raise AirError(3, "EAT_PROFILE", "WRONG_PROFILE", "another profile")
    for name in (*_TEXTS, *(("model_hash_scheme",) if "model_hash_scheme" in claims else ())):
        value = claims[name]
        if type(value) is not str or not 0 < len(value.encode()) <= _TEXT_BYTES:
            raise _claim("WRONG_TYPE", name, f"is not text of 1 to {_TEXT_BYTES} bytes")
    for name in _COUNTERS:
        if type(claims[name]) is not int or claims[name] < 0:
            raise _claim("WRONG_TYPE", name, "is not an unsigned integer")
    for name in ("cti", *_HASHES, *(("eat_nonce",) if "eat_nonce" in claims else ())):
        if type(claims[name]) is not bytes:
            raise _claim("WRONG_TYPE", name, "is not a byte string")
    if type(claims["enclave_measurements"]) is not dict:
        raise _claim("WRONG_TYPE", "enclave_measurements", "is not a map")


def _check_values(claims: Mapping[str, Any]) -> None:
    if claims["iat"] == 0:
        raise _claim("WRONG_TYPE", "iat", "is zero")
    if len(claims["cti"]) != 16 or not any(claims["cti"]):
        raise AirError(3, "CTI", "BAD_CTI_LENGTH", "cti is not 16 bytes, or all zero")
    if "eat_nonce" in claims and not 8 <= len(claims["eat_nonce"]) <= 64:
        raise _claim("WRONG_TYPE", "eat_nonce", "is not 8 to 64 bytes")
    for name in _HASHES:
        if len(claims[name]) != 32:
            check = "MHASH_PRESENT" if name == "model_hash" else "CLAIMS_DECODE"
            raise AirError(3, check, f"BAD_HASH_LENGTH:{name}", f"{name} is not 32 bytes")
    if not any(claims["model_hash"]):
        raise AirError(3, "MHASH_PRESENT", "ZERO_MODEL_HASH", "model_hash is all zero")
    scheme = claims.get("model_hash_scheme")
    if scheme is not None and scheme not in SCHEMES:
        raise AirError(3, "MHASH_SCHEME", f"UNKNOWN_MODEL_HASH_SCHEME:{scheme[:32]}", "unknown model hash scheme")
    mode = claims["security_mode"]
    if mode not in MODES:
        raise AirError(3, "SECURITY_MODE", f"UNKNOWN_SECURITY_MODE:{mode[:32]}", "unknown security mode")


def _measurements(found: Mapping[Any, Any]) -> Measurements:
    kind = found.get("measurement_type")
    if type(kind) is not str or kind not in REGISTERS:
        raise AirError(3, "MTYPE", f"UNKNOWN_MTYPE:{str(kind)[:32]}", "unknown measurement type")
    required, optional = REGISTERS[kind]
    registers = {name: value for name, value in found.items() if name != "measurement_type"}
    for name in sorted(required):
        if name not in registers:
            raise _meas(f"MISSING_CLAIM:{name}", f"{name} is missing")
    for name, value in registers.items():
        if name not in required | optional:
            raise _meas(f"UNKNOWN_CLAIM:{str(name)[:32]}", f"a register that {kind} has not")
        if type(value) is not bytes:
            raise _meas(f"WRONG_TYPE:{name}", f"{name} is not a byte string")
        if len(value) != MEASUREMENT_BYTES:
            raise _meas("BAD_MEASUREMENT_LENGTH", f"{name} is not {MEASUREMENT_BYTES} bytes")
    return Measurements(measurement_type=kind, registers=registers)


def _decode_cose(data: bytes) -> cbor.Value:
    try:
        return cbor.decode(data, limit_bytes=LIMIT_RECEIPT_BYTES)
    except WireError as error:
        raise _bad_cose(error.detail) from None


def _is(value: object, expected: int) -> bool:
    return type(value) is int and value == expected


def _bad_cose(detail: str) -> AirError:
    return AirError(1, "COSE", "COSE_DECODE_FAILED", detail)


def _claim(code: str, name: str, detail: str) -> AirError:
    return AirError(3, "CLAIMS_DECODE", f"{code}:{name}", f"{name} {detail}")


def _meas(code: str, detail: str) -> AirError:
    return AirError(3, "MEAS", code, detail)
