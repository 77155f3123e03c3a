"""Tokens of NVIDIA's attestation service: a detached EAT, [["JWT", overall], {"GPU-0": token, ...}] (RFC 9711).

The overall token holds SHA-256 digests of the devices' tokens; each is a JWT signed by ES384 (RFC 7515, 7519). Whose
keys those are is the caller's to say, as a JSON Web Key Set (RFC 7517). The service judged what the token says; this
code checks that the service said it, and about which device.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from client_sdk.errors import AuthenticityError, Rejection, UndecidedError
from client_sdk.wire.errors import WireError

ISSUER = "https://nras.attestation.nvidia.com"

_CODE = "MALFORMED_ENDORSEMENT"
_LIMIT_BYTES = 256 << 10
_MAX_DEVICES = 64
_MAX_STRUCTURE = 4096
_COORDINATE_BYTES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Jwt:
    """A decoded token; nothing about it is verified. `text` is its compact form."""

    text: str
    algorithm: str
    key_id: str
    claims: Mapping[str, object]
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the service said of one device: its claims, and whether the whole submission passed."""

    claims: Mapping[str, object]
    overall: bool

    def is_about(self, serial: int) -> bool:
        """Whether the device's leaf certificate has this serial number (the claim `ueid`, decimal)."""
        return self.claims.get("ueid") == str(serial)

    def shortcomings(self) -> tuple[str, ...]:
        """Names of what the service did not find in order, none for a clean verdict."""
        expected = {"measres": "success", "secboot": True, "dbgstat": "disabled"}
        wrong = [name for name, value in expected.items() if self.claims.get(name) != value]
        return (*wrong, *(() if self.overall else ("overall result",)))


def authenticate(token: bytes, keys: bytes | None, *, now: float) -> tuple[Verdict, ...]:
    """The service's verdicts, one for each device, verified as of `now` (Unix seconds) under the caller's `keys`.

    Raises WireError, AuthenticityError; UndecidedError where `keys` is None and nothing else is wrong.
    """
    overall, devices = _parse(token)
    for jwt in (overall, *devices.values()):
        if jwt.algorithm != "ES384":
            raise AuthenticityError(Rejection.BAD_ALGORITHM, f"a token signed by {jwt.algorithm[:16]!r}, not ES384")
        if jwt.claims.get("iss") != ISSUER:
            raise AuthenticityError(
                Rejection.CHAIN_NOT_TRUSTED, "a token of another issuer", expected=ISSUER, actual=_shown(jwt, "iss")
            )
        _check_times(jwt, now)
    _check_digests(overall, devices)
    if keys is None:
        raise UndecidedError("ENDORSEMENTS_MISSING", "the attestation service's key set is needed to believe its token")
    known = _parse_keys(keys)
    for jwt in (overall, *devices.values()):
        _check_signature(jwt, known)
    passed = overall.claims.get("x-nvidia-overall-att-result") is True
    return tuple(Verdict(claims=jwt.claims, overall=passed) for jwt in devices.values())


def _parse(token: bytes) -> tuple[Jwt, Mapping[str, Jwt]]:
    document = _json(token, "token")
    if not isinstance(document, list) or len(document) != 2:
        raise WireError(_CODE, "a token that is not a detached EAT")
    head, devices = document
    if not isinstance(head, list) or len(head) != 2 or head[0] != "JWT" or not isinstance(devices, dict):
        raise WireError(_CODE, "a token that is not a detached EAT")
    if not 1 <= len(devices) <= _MAX_DEVICES:
        raise WireError(_CODE, f"a token about {len(devices)} devices")
    return _parse_jwt(head[1]), {name: _parse_jwt(text) for name, text in devices.items()}


def _parse_jwt(text: object) -> Jwt:
    if type(text) is not str or text.count(".") != 2:
        raise WireError(_CODE, "a token that is no compact JWT")
    encoded = text.split(".")
    header, claims = (_json(_base64url(part), "part of a token") for part in encoded[:2])
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise WireError(_CODE, "a token whose parts are no objects")
    algorithm, key_id = header.get("alg"), header.get("kid")
    if type(algorithm) is not str or type(key_id) is not str or "crit" in header:
        raise WireError(_CODE, "a token whose header lacks alg or kid, or has crit")
    return Jwt(text=text, algorithm=algorithm, key_id=key_id, claims=claims, signature=_base64url(encoded[2]))


def _check_times(jwt: Jwt, now: float) -> None:
    start, end = jwt.claims.get("nbf"), jwt.claims.get("exp")
    if type(start) is not int or type(end) is not int:
        raise WireError(_CODE, "a token without whole seconds in nbf and exp")
    if not start <= now < end:
        raise AuthenticityError(
            Rejection.CERTIFICATE_NOT_VALID_NOW,
            "the attestation service's token is not valid at this time",
            expected=f"{start} to {end}",
            actual=str(int(now)),
        )


def _check_digests(overall: Jwt, devices: Mapping[str, Jwt]) -> None:
    named = overall.claims.get("submods")
    expected = {
        name: ["DIGEST", ["SHA-256", hashlib.sha256(jwt.text.encode()).hexdigest()]] for name, jwt in devices.items()
    }
    if named != expected:
        raise AuthenticityError(
            Rejection.ENDORSEMENT_MISMATCH, "the overall token's digests are not those of the devices' tokens"
        )
    nonces = {_shown(jwt, "eat_nonce") for jwt in (overall, *devices.values())}
    if len(nonces) != 1:
        raise AuthenticityError(Rejection.ENDORSEMENT_MISMATCH, "the tokens answer different nonces")


def _check_signature(jwt: Jwt, keys: Mapping[str, ec.EllipticCurvePublicKey]) -> None:
    key = keys.get(jwt.key_id)
    if key is None:
        raise AuthenticityError(
            Rejection.CHAIN_NOT_TRUSTED, "the token's key is not in the key set given", actual=jwt.key_id[:128]
        )
    raw = jwt.signature
    if len(raw) != 2 * _COORDINATE_BYTES:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "a token's signature has a wrong length")
    halves = (int.from_bytes(raw[:_COORDINATE_BYTES], "big"), int.from_bytes(raw[_COORDINATE_BYTES:], "big"))
    try:
        key.verify(encode_dss_signature(*halves), jwt.text.rpartition(".")[0].encode(), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, "a token's signature does not verify") from None


def _parse_keys(data: bytes) -> Mapping[str, ec.EllipticCurvePublicKey]:
    """The P-384 keys of a JWKS by their id; others are passed over."""
    document = _json(data, "key set")
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise WireError(_CODE, "a key set without keys")
    found: dict[str, ec.EllipticCurvePublicKey] = {}
    for entry in entries:
        if not isinstance(entry, dict) or (entry.get("kty"), entry.get("crv")) != ("EC", "P-384"):
            continue
        kid, x, y = entry.get("kid"), entry.get("x"), entry.get("y")
        if type(kid) is not str or type(x) is not str or type(y) is not str or kid in found:
            raise WireError(_CODE, "a key set with a P-384 key without kid, x and y, or with one kid twice")
        try:
            point = b"\x04" + b"".join(_base64url(part).rjust(_COORDINATE_BYTES, b"\x00") for part in (x, y))
            found[kid] = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), point)
        except ValueError:
            raise WireError(_CODE, "a key set with a point that is not on P-384") from None
    return found


def _shown(jwt: Jwt, name: str) -> str:
    return str(jwt.claims.get(name))[:128]


def _json(data: bytes, what: str) -> object:
    if len(data) > _LIMIT_BYTES:
        raise WireError(_CODE, f"a {what} larger than {_LIMIT_BYTES} bytes")
    if sum(data.count(mark) for mark in (b"{", b"[", b",")) > _MAX_STRUCTURE:
        raise WireError(_CODE, f"a {what} with more parts than tokens could need")
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise WireError(_CODE, f"a {what} that is not JSON") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _base64url(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise WireError(_CODE, "a token with bad base64url") from None
