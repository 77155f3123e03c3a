"""Say what a file of this project says, and what would bind each statement. Verifies nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeAlias

from client_sdk.checks import ShownFact
from client_sdk.errors import MalformedError, PolicyFileError, Rejection
from client_sdk.offline.saved import MANIFEST, load_saved
from client_sdk.policy.policy import Policy
from client_sdk.policy.reference_values import ReferenceValues
from client_sdk.wire import cose, digests
from client_sdk.wire.attestation import AttestationBundle, AttestationClaims, ChannelProof
from client_sdk.wire.errors import WireError
from client_sdk.wire.names import (
    LIMIT_ATTESTATION_BUNDLE_BYTES,
    TYP_CHANNEL_PROOF,
    TYP_CHECKPOINT,
    TYP_INSECURE_EVIDENCE,
    TYP_RECEIPT,
)
from client_sdk.wire.receipt import ReceiptClaims
from client_sdk.wire.stream import Checkpoint, decode_base64url

Facts: TypeAlias = tuple[ShownFact, ...]
Described: TypeAlias = tuple[str, Facts]

_SIGN1_TAG = 0xD2
_TRUST = "holder-asserted"  # whoever holds the file says so: nothing here was verified
_RECEIPT_KEY = "signature by the receipt key"
_CHANNEL_KEY = "signature by the channel key"
_EVIDENCE = "the evidence, through its hash of the claims"
_NOTHING = "nothing"


def describe(path: Path) -> Described:
    """The kind of a file (or saved answer) and its facts. Raises MalformedError, PolicyFileError."""
    if path.is_dir():
        return "saved answer", _saved(path)
    with path.open("rb") as file:
        data = file.read(LIMIT_ATTESTATION_BUNDLE_BYTES + 1)
    if path.suffix == ".toml":
        return _toml(data)
    try:
        return _binary(_unwrapped(data))
    except WireError as error:
        raise MalformedError.of(error) from None


def policy_facts(policy: Policy) -> Facts:
    """What a policy accepts, as facts of the caller."""
    rows: list[tuple[str, object]] = [
        ("digest", policy.digest),
        ("families", ", ".join(sorted(policy.families)) or "none"),
        ("unsafe_accept_insecure", policy.insecure is not None),
        *((f"model {name}", sorted(pins)) for name, pins in sorted(policy.models.items())),
        ("configs", "not pinned" if policy.configs is None else sorted(policy.configs)),
        ("devices", "not pinned" if policy.devices is None else sorted(policy.devices)),
        ("arithmetic", "not pinned" if policy.arithmetic is None else sorted(policy.arithmetic)),
        ("required claims", sorted(policy.required_claims) or "none"),
        ("gap-free chain", policy.require_gap_free_chain),
        ("max_channel_age_s", policy.max_channel_age_s),
        ("max_continued_s", policy.max_continued_s),
        ("max_clock_skew_s", policy.max_clock_skew_s),
    ]
    return tuple(ShownFact(name=name, value=_text(value), trust="caller") for name, value in rows)


def _toml(data: bytes) -> Described:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise PolicyFileError("the file is not UTF-8") from None
    try:
        reference = ReferenceValues.parse(text)
    except PolicyFileError:
        return "policy", policy_facts(Policy.parse(text))
    return "file of reference values", tuple(_flatten("", _as_map(reference), "whoever gave you this file"))


def _saved(directory: Path) -> Facts:
    saved = load_saved(directory)
    exchange = saved.exchange
    head: dict[str, object] = {
        "method": exchange.method,
        "route": exchange.route,
        "nonce": exchange.nonce,
        "HTTP status": exchange.http_status,
        "media type": exchange.media_type,
        "receipt id": exchange.receipt_id,
        "sent at": exchange.sent_at,
        "received at": exchange.received_at,
        "policy digest": saved.policy_digest,
        "TLS suite": saved.attestation.suite,
        "first verified at": saved.attestation.verified_at,
    }
    try:
        _, receipt = _binary(saved.receipt)
    except WireError as error:
        raise MalformedError(Rejection.MALFORMED_SAVED_ANSWER, f"the receipt: {error.detail}") from None
    return (*_flatten("", head, f"nothing ({MANIFEST} is the holder's word)"), *receipt)


def _unwrapped(data: bytes) -> bytes:
    """A receipt as it comes in its HTTP header is base64url text."""
    text = data.strip()
    looks_like_text = text.isascii() and text.replace(b"-", b"").replace(b"_", b"").isalnum()
    return decode_base64url(text, limit_bytes=LIMIT_ATTESTATION_BUNDLE_BYTES) if looks_like_text else data


def _binary(data: bytes) -> Described:
    if data[:1] == bytes((_SIGN1_TAG,)):
        return _signed(data)
    try:
        bundle = AttestationBundle.parse(data)
    except WireError as error:
        try:
            return "attestation claims", _claims(AttestationClaims.parse(data))
        except WireError:
            raise error from None
    return "attestation bundle", _bundle(bundle)


def _signed(data: bytes) -> Described:
    known: Mapping[str, Callable[[cose.Sign1], Described]] = {
        TYP_RECEIPT: _receipt,
        TYP_CHECKPOINT: _checkpoint,
        TYP_CHANNEL_PROOF: _proof,
        TYP_INSECURE_EVIDENCE: _insecure_evidence,
    }
    failure = WireError("MALFORMED_TYP", "a signature of a kind that is not known here")
    for typ, reader in known.items():
        try:
            sign1 = cose.parse_sign1(
                data, typ=typ, salted=typ in (TYP_RECEIPT, TYP_CHECKPOINT), limit_bytes=LIMIT_ATTESTATION_BUNDLE_BYTES
            )
        except WireError as error:
            failure = error if error.code != "MALFORMED_TYP" else failure
            continue
        return reader(sign1)
    raise failure


def _receipt(sign1: cose.Sign1) -> Described:
    claims = ReceiptClaims.parse(sign1.payload)
    facts = _flatten("", _as_map(claims), _RECEIPT_KEY)
    return "receipt", (*_signature(sign1), *facts)


def _checkpoint(sign1: cose.Sign1) -> Described:
    return "checkpoint", (*_signature(sign1), *_flatten("", _as_map(Checkpoint.parse(sign1.payload)), _RECEIPT_KEY))


def _proof(sign1: cose.Sign1) -> Described:
    return "channel proof", (
        *_signature(sign1),
        *_flatten("", _as_map(ChannelProof.parse(sign1.payload)), _CHANNEL_KEY),
    )


def _insecure_evidence(sign1: cose.Sign1) -> Described:
    return "insecure evidence", (*_signature(sign1), _fact("report data", sign1.payload, "a key that anybody can make"))


def _signature(sign1: cose.Sign1) -> Facts:
    salt = "none (redacted: its commitments cannot be opened)" if sign1.salt is None else sign1.salt
    return (_fact("key id", sign1.kid, _NOTHING), _fact("salt", salt, "the commitments it opens"))


def _bundle(bundle: AttestationBundle) -> Facts:
    facts = [_fact("form", "continued" if bundle.continued else "full", _NOTHING)]
    if bundle.claims is not None:
        facts.append(_fact("claims digest", digests.sha256(bundle.claims), _EVIDENCE))
        facts += _claims(AttestationClaims.parse(bundle.claims))
    for index, item in enumerate(bundle.evidence):
        facts.append(_fact(f"evidence.{index}", f"{item.kind}, {len(item.content)} bytes", "its own signature"))
    _, proof = _signed(bundle.channel_proof)
    facts += [_fact(f"channel-proof.{fact.name}", fact.value, fact.bound_by) for fact in proof if fact.name != "salt"]
    return tuple(facts)


def _claims(claims: AttestationClaims) -> Facts:
    return tuple(_flatten("", _as_map(claims), _EVIDENCE))


def _as_map(value: object) -> dict[str, object]:
    assert is_dataclass(value)
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _flatten(prefix: str, value: object, bound_by: str) -> Iterator[ShownFact]:
    """One fact per leaf, named by its path."""
    if is_dataclass(value) and not isinstance(value, type):
        value = _as_map(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), item, bound_by)
    elif isinstance(value, tuple) and any(is_dataclass(item) or isinstance(item, tuple) for item in value):
        for index, item in enumerate(value):
            yield from _flatten(f"{prefix}.{index}", item, bound_by)
    else:
        yield _fact(prefix, value, bound_by)


def _fact(name: str, value: object, bound_by: str) -> ShownFact:
    return ShownFact(name=name, value=_text(value), trust=_TRUST, bound_by=bound_by)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or "none"
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
