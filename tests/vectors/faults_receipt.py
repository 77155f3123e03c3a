"""Receipts with exactly one fault each: encoding, COSE envelope, signature, form of the claims, content."""

# ruff: noqa: E501 - one fault a line is a table, and reads as one
from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from client_sdk.wire import cbor, cose, names
from tests.vectors import honest as h

WHOLE = "000-whole-answer"
STREAMED = "001-streamed-answer"
REFUSED = "002-refusal"
EMBEDDED = "010-embedding"
CUT_SHORT = "011-embedding-interrupted"

L = 2**252 + 27742317777372353535851937790883648493
Claims = dict[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`stage` is where it must be caught: `wire` by form alone, `verify` by what the verifier holds.

    `cddl` tells whether the published CDDL sees it too (it cannot see encodings, signatures and relations).
    """

    name: str
    what: str
    kind: str
    code: str
    data: bytes
    twin: str
    stage: str = "wire"
    cddl: bool = False
    bugs: tuple[str, ...] = ()


def receipt(name: str, what: str, code: str, data: bytes, **more: Any) -> Fault:
    return Fault(name=name, what=what, kind="receipt", code=code, data=data, **{"twin": WHOLE, **more})


# ---------------------------------------------------------------- encoding


def pairs(payload: bytes) -> list[tuple[bytes, bytes]]:
    decoded = cbor.decode(payload, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    assert isinstance(decoded, dict)
    entries = [(cbor.encode(key), cbor.encode(value)) for key, value in decoded.items()]
    return sorted(entries)


def joined(entries: list[tuple[bytes, bytes]]) -> bytes:
    assert len(entries) < 24
    return bytes((0xA0 | len(entries),)) + b"".join(key + value for key, value in entries)


def resealed(payload: bytes) -> bytes:
    return h.RECEIPT.seal(names.TYP_RECEIPT, payload, h.SALT)


def with_value(key: int, value: bytes) -> bytes:
    """A sealed receipt whose claim `key` has this raw encoding."""
    wanted = cbor.encode(key)
    entries = [(at, value if at == wanted else old) for at, old in pairs(h.whole_answer().encode())]
    return resealed(joined(entries))


def with_decoding(**raw: bytes) -> bytes:
    decoding = h.whole_answer().decoding
    assert decoding is not None
    entries = pairs(cbor.encode(decoding))
    changed = [(key, raw.get(key[1:].decode(), value)) for key, value in entries]
    return with_value(names.CLAIM_DECODING, joined(changed))


def encoding_faults() -> Iterator[Fault]:
    payload = h.whole_answer().encode()
    entries = pairs(payload)
    iat = h.IAT.to_bytes(8, "big")
    bomb = b"\xa1\x61a" + b"\x81" * 40 + b"\x00"
    twice = joined([(b"\x01", b"\xa2\x61a\x01\x61a\x02")])[1:]
    table = (
        ("100-repeated-claim", "claim 1 occurs twice", resealed(joined([entries[0], *entries])), ("B065",)),
        ("101-repeated-nested-key", "an execution fact twice", with_value(names.CLAIM_EXECUTION, twice[1:]), ("B065",)),
        ("102-claims-out-of-order", "claims 6 and 1 swapped", resealed(joined([entries[1], entries[0], *entries[2:]])), ()),
        ("103-integer-not-shortest", "iat written with 8 bytes", with_value(names.CLAIM_IAT, b"\x1b" + iat), ()),
        ("104-float-not-shortest", "1.0 as binary64", with_decoding(temperature=b"\xfb\x3f\xf0" + bytes(6)), ()),
        ("105-float-not-a-number", "temperature is NaN", with_decoding(temperature=b"\xf9\x7e\x00"), ()),
        ("106-indefinite-length", "the claims are an indefinite map", resealed(b"\xbf" + payload[1:] + b"\xff"), ()),
        ("107-trailing-byte", "one byte follows the claims", resealed(payload + b"\x00"), ()),
        ("108-shareable-tag", "iss is marked shareable (tag 28)", with_value(1, b"\xd8\x1c\x61x"), ("B066",)),
        ("109-shared-reference", "iss refers to a shared value (tag 29)", with_value(1, b"\xd8\x1d\x00"), ("B066",)),
        ("110-string-reference", "iss refers to a string (tag 25)", with_value(1, b"\xd8\x19\x00"), ("B066",)),
        ("111-string-namespace", "iss opens a namespace (tag 256)", with_value(1, b"\xd9\x01\x00\x61x"), ("B066",)),
        ("112-true-as-key", "claim 1 has the key true", resealed(joined([*entries[1:], (b"\xf5", entries[0][1])])), ()),
        ("113-float-as-key", "claim 1 has the key 1.0", resealed(joined([*entries[1:], (b"\xf9\x3c\x00", b"\x61x")])), ()),
        ("114-nesting-bomb", "an execution fact nested 40 deep", with_value(names.CLAIM_EXECUTION, bomb), ("B064",)),
        ("115-giant-string", "iss declares 2**63 bytes", with_value(1, b"\x7b\x80" + bytes(7)), ("B067",)),
        ("116-giant-array", "output declares 2**63 choices", with_value(names.CLAIM_OUTPUT, b"\x9b\x80" + bytes(7)), ("B067",)),
        ("117-undefined", "previous is undefined instead of null", with_value(names.CLAIM_PREVIOUS, b"\xf7"), ()),
        ("118-not-utf8", "iss is not UTF-8", with_value(1, b"\x61\xff"), ()),
    )  # fmt: skip
    for name, what, data, bugs in table:
        yield receipt(name, what, "MALFORMED_CBOR", data, bugs=bugs)


# ---------------------------------------------------------------- envelope


def envelope(
    *, protected: object, unprotected: object = None, payload: object = None, tag: bytes = b"\xd2", cut: int = 64
) -> bytes:
    """Like `cose.sign1`, with any header and parts, honestly signed over what it holds."""
    header = protected if isinstance(protected, bytes) else cbor.encode(protected)
    body = h.whole_answer().encode() if payload is None else payload
    signature = h.RECEIPT.sign(cose.signature_input(header, body if isinstance(body, bytes) else b""))[:cut]
    unprotected = {"salt": h.SALT} if unprotected is None else unprotected
    return tag + cbor.encode([header, unprotected, None if body == "detached" else body, signature])


def header_faults() -> Iterator[Fault]:
    kid = cose.key_id(h.RECEIPT.cose_key())
    good: Claims = {1: -8, 4: kid, 16: names.TYP_RECEIPT}
    salt: Claims = {"salt": h.SALT}
    no_alg, no_kid, no_typ = ({key: good[key] for key in good if key != gone} for gone in (1, 4, 16))
    long_form = b"\xa3\x01\x38\x07" + cbor.encode(good)[3:]
    odd_order = b"\xa3" + cbor.encode({4: kid})[1:] + b"\x01\x27" + cbor.encode({16: names.TYP_RECEIPT})[1:]
    table: tuple[tuple[str, str, str, bytes, tuple[str, ...]], ...] = (
        ("200-untagged", "tag 18 is missing", "MALFORMED_COSE", envelope(protected=good, tag=b""), ()),
        ("201-algorithm-unsigned", "alg only in the unprotected header", "MALFORMED_COSE", envelope(protected=no_alg, unprotected={1: -8}), ("B075",)),
        ("202-algorithm-twice", "alg in both headers, different", "MALFORMED_COSE", envelope(protected=good, unprotected={1: -7, **salt}), ("B075",)),
        ("203-no-algorithm", "alg is missing", "MALFORMED_COSE", envelope(protected=no_alg), ("B075",)),
        ("204-critical-unknown", "crit names label 99", "MALFORMED_COSE", envelope(protected={**good, 2: [99], 99: 1}), ("B076",)),
        ("205-critical-unsigned", "crit in the unprotected header", "MALFORMED_COSE", envelope(protected=good, unprotected={2: [16], **salt}), ("B076",)),
        ("206-critical-empty", "crit is empty", "MALFORMED_COSE", envelope(protected={**good, 2: []}), ("B076",)),
        ("207-no-kid", "kid is missing", "MALFORMED_COSE", envelope(protected=no_kid), ("B082",)),
        ("208-kid-unsigned", "kid only in the unprotected header", "MALFORMED_COSE", envelope(protected=no_kid, unprotected={4: kid, **salt}), ("B082",)),
        ("209-kid-short", "kid has 31 bytes", "MALFORMED_COSE", envelope(protected={**good, 4: kid[:31]}), ("B082",)),
        ("210-no-type", "typ is missing", "MALFORMED_COSE", envelope(protected=no_typ), ()),
        ("211-checkpoint-type", "typ says checkpoint", "MALFORMED_TYP", envelope(protected={**good, 16: names.TYP_CHECKPOINT}), ()),
        ("212-unsigned-extra", "an unknown unprotected field", "MALFORMED_COSE", envelope(protected=good, unprotected={**salt, "note": 1}), ()),
        ("213-salt-short", "the salt has 31 bytes", "MALFORMED_COSE", envelope(protected=good, unprotected={"salt": h.SALT[:31]}), ()),
        ("214-signature-short", "the signature has 63 bytes", "MALFORMED_COSE", envelope(protected=good, cut=63), ()),
        ("215-detached-payload", "the payload is null", "MALFORMED_COSE", envelope(protected=good, payload="detached"), ()),
    )  # fmt: skip
    for name, what, code, data, bugs in table:
        yield receipt(name, what, code, data, cddl=True, bugs=bugs)
    for name, what, header in (
        ("216-header-not-shortest", "alg -8 written with two bytes, honestly signed", long_form),
        ("217-header-out-of-order", "kid before alg, honestly signed", odd_order),
    ):
        yield receipt(name, what, "MALFORMED_CBOR", envelope(protected=header), bugs=("B079",))


# ---------------------------------------------------------------- signature


def with_signature(signature: bytes) -> bytes:
    parts = cbor.decode(h.sealed(h.whole_answer())[1:], limit_bytes=names.LIMIT_RECEIPT_BYTES)
    assert isinstance(parts, list)
    return b"\xd2" + cbor.encode([*parts[:3], signature])


def small_order_r() -> bytes:
    """A signature that verifies, made by the key's owner with the identity as R: S = k * a."""
    protected = cose.protected_header(kid=cose.key_id(h.RECEIPT.cose_key()), typ=names.TYP_RECEIPT)
    message = cose.signature_input(protected, h.whole_answer().encode())
    identity = (1).to_bytes(32, "little")
    scalar = int.from_bytes(hashlib.sha512(h.seed(h.RECEIPT.name)).digest()[:32], "little")
    scalar = scalar & ((1 << 254) - 8) | 1 << 254
    public = h.RECEIPT.key().public_key().public_bytes_raw()
    challenge = int.from_bytes(hashlib.sha512(identity + public + message).digest(), "little")
    return identity + (challenge * scalar % L).to_bytes(32, "little")


def signature_faults() -> Iterator[Fault]:
    honest = h.sealed(h.whole_answer())
    kid = cose.key_id(h.RECEIPT.cose_key())
    signature = honest[-64:]
    malleable = signature[:32] + (int.from_bytes(signature[32:], "little") + L).to_bytes(32, "little")
    stranger = h.STRANGER.seal(names.TYP_RECEIPT, h.whole_answer().encode(), h.SALT)
    later = dataclasses.replace(h.whole_answer(), iat=h.IAT + 1).encode()
    table: tuple[tuple[str, str, str, bytes, tuple[str, ...]], ...] = (
        ("300-other-algorithm", "the protected algorithm is ES256", "BAD_ALGORITHM", envelope(protected={1: -7, 4: kid, 16: names.TYP_RECEIPT}), ("B075",)),
        ("301-other-key", "signed by a stranger who says so", "WRONG_KEY", stranger, ("B082", "B085")),
        ("302-claimed-kid", "signed by a stranger under our kid", "BAD_SIGNATURE", with_signature(stranger[-64:]), ("B082",)),
        ("303-payload-changed", "iat one second later, not signed again", "BAD_SIGNATURE", honest.replace(h.whole_answer().encode(), later), ()),
        ("304-scalar-not-reduced", "S + L instead of S", "BAD_SIGNATURE", with_signature(malleable), ()),
        ("305-small-order-r", "R is the identity point", "BAD_SIGNATURE", with_signature(small_order_r()), ()),
    )  # fmt: skip
    for name, what, code, data, bugs in table:
        yield receipt(name, what, code, data, stage="verify", cddl=code == "BAD_ALGORITHM", bugs=bugs)


# ---------------------------------------------------------------- form of the claims


def edited(claims: bytes, change: Callable[[Claims], object]) -> bytes:
    decoded = cbor.decode(claims, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    assert isinstance(decoded, dict)
    change(decoded)
    return resealed(cbor.encode(decoded))


def drop(*keys: int) -> Callable[[Claims], object]:
    return lambda claims: [claims.pop(key) for key in keys]


def put(key: int, value: object) -> Callable[[Claims], object]:
    return lambda claims: claims.update({key: value})


def put_in(key: int, **fields: object) -> Callable[[Claims], object]:
    return lambda claims: claims[key].update({name.replace("__", "-"): value for name, value in fields.items()})


def form_faults() -> Iterator[Fault]:
    whole, streamed, refused = (c.encode() for c in (h.whole_answer(), h.streamed_answer(), h.refusal()))
    embedded, cut_short = (c.encode() for c in (h.embedding(), h.interrupted_embedding()))
    evaluated = {key: pairs_of(whole)[key] for key in (-70006, -70011, -70012, -70014, -70016)}
    digest = h.seed("digest")
    table: tuple[tuple[str, str, bytes, Callable[[Claims], object]], ...] = (
        ("400-unknown-claim", "a claim nobody defined", whole, put(-70099, 1)),
        ("401-unknown-field", "a field nobody defined inside model", whole, put_in(-70006, alias="x")),
        ("402-integer-temperature", "temperature is the integer 1", whole, put_in(-70012, temperature=1)),
        ("403-parameter-missing", "top_p is missing", whole, lambda claims: claims[-70012].pop("top_p")),
        ("404-parameter-unknown", "mirostat was never defined", whole, put_in(-70012, mirostat=2)),
        ("405-complete-unevaluated", "complete without prompt and output", whole, drop(-70011, -70012, -70014, -70016)),
        ("406-refused-evaluated", "a refusal with prompt and output", refused, lambda claims: claims.update(evaluated)),
        ("407-half-evaluated", "output without prompt", whole, drop(-70011)),
        ("408-stream-facts-on-answer", "stream facts on a JSON answer", whole, put(-70015, {"frames": 0, "chain": digest})),
        ("409-stream-facts-missing", "an event stream without stream facts", streamed, drop(-70015)),
        ("410-no-finish-reason", "complete, finish reason null", whole, lambda claims: claims[-70014][0].update(finish=None)),
        ("411-previous-missing", "sequence 2 without previous", whole, put(-70002, None)),
        ("412-previous-at-zero", "sequence 0 with a previous", refused, put(-70002, digest)),
        ("413-id-short", "cti has 15 bytes", whole, put(7, h.CTI[:15])),
        ("414-nonce-short", "eat_nonce has 7 bytes", whole, put(10, digest[:7])),
        ("415-unknown-status", "status is done", whole, put_in(-70013, status="done")),
        ("416-unknown-mode", "mode is debug", whole, put(-70003, "debug")),
        ("417-no-model", "evaluated without a model", whole, drop(-70006)),
        ("418-negative-time", "iat is negative", whole, put(6, -1)),
        ("419-integer-as-boolean", "complete is the integer 1", whole, put_in(-70010, complete=1)),
        ("420-length-without-body", "response body null, length given", whole, put_in(-70013, body=None)),
        ("421-nested-fact", "an execution fact is an array", whole, put_in(-70016, threads=[2])),
        ("422-no-weights", "model without weights", whole, put_in(-70006, weights=[])),
        ("423-no-choices", "output is empty", whole, put(-70014, [])),
        ("424-config-missing", "no configuration digest", whole, drop(-70007)),
        ("427-vectors-missing", "complete, the commitment to its vectors null", embedded, put_in(-70017, vectors=None)),
        ("428-pooling-unknown", "pooling is sum", embedded, put_in(-70017, pooling="sum")),
        ("429-not-normalized", "normalization is none", embedded, put_in(-70017, normalization="none")),
        ("430-no-inputs", "vectors of no inputs", embedded, put_in(-70017, inputs=0)),
        ("431-encoding-unknown", "numbers are written in hex", embedded, put_in(-70017, encoding="hex")),
        ("432-embedding-field-unknown", "a field nobody defined inside embedding", embedded, put_in(-70017, scale=2)),
        ("433-embedding-without-prompt", "vectors of no prompt", embedded, drop(-70011)),
        ("434-embedding-and-output", "vectors and generated text in one receipt", embedded, lambda c: c.update({-70012: pairs_of(whole)[-70012], -70014: pairs_of(whole)[-70014]})),
        ("437-arithmetic-empty", "an arithmetic without a name", whole, put_in(-70009, arithmetic="")),
        ("438-kernels-null", "null for a variant that is not stated", whole, put_in(-70009, kernels=None)),
        ("435-refused-embedding", "a refusal with vectors", cut_short, put_in(-70013, status="refused")),
    )  # fmt: skip
    twins = {whole: WHOLE, streamed: STREAMED, refused: REFUSED, embedded: EMBEDDED, cut_short: CUT_SHORT}
    for name, what, base, change in table:
        data = edited(base, change)
        yield receipt(name, what, "MALFORMED_RECEIPT_CLAIMS", data, cddl=True, twin=twins[base])
    wider = edited(embedded, put_in(-70017, dimensions=5))
    yield receipt(
        "436-wider-than-native", "more dimensions than the model has", "MALFORMED_RECEIPT_CLAIMS", wider, twin=EMBEDDED
    )
    ahead = edited(streamed, put_in(-70015, checkpoint=[9, digest]))
    what = "the last checkpoint lies behind the last frame"
    yield receipt("425-checkpoint-ahead", what, "MALFORMED_RECEIPT_CLAIMS", ahead, twin=STREAMED)
    profile = edited(whole, put(265, "tag:attested-inference,2026:receipt-v2"))
    yield receipt("426-other-profile", "the profile is v2", "UNSUPPORTED_PROFILE", profile, cddl=True)


def pairs_of(payload: bytes) -> Claims:
    decoded = cbor.decode(payload, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    assert isinstance(decoded, dict)
    return dict(decoded)


# ---------------------------------------------------------------- content


def content_faults() -> Iterator[Fault]:
    """Genuinely signed, well formed, but about something else than the verifier holds."""
    whole = h.whole_answer().encode()
    digest = h.seed("digest")
    other_salt = h.RECEIPT.seal(names.TYP_RECEIPT, whole, h.seed("another salt"))
    table: tuple[tuple[str, str, str, Callable[[Claims], object]], ...] = (
        ("500-other-request", "commits to other request bytes", "REQUEST_MISMATCH", put_in(-70010, body=digest)),
        ("501-other-request-length", "one byte fewer received", "REQUEST_MISMATCH", put_in(-70010, length=len(h.REQUEST_BODY) - 1)),
        ("502-other-response", "commits to other response bytes", "RESPONSE_MISMATCH", put_in(-70013, body=digest)),
        ("503-other-text", "commits to another generated text", "OUTPUT_MISMATCH", lambda c: c[-70014][0].update(text=digest)),
        ("504-other-tokens", "commits to other generated tokens", "OUTPUT_MISMATCH", lambda c: c[-70014][0].update(tokens=digest)),
        ("505-other-token-count", "one token more than generated", "OUTPUT_MISMATCH", lambda c: c[-70014][0].update(count=10)),
        ("506-other-stop", "commits to another stop list", "PARAMETER_MISMATCH", put_in(-70012, stop=digest)),
    )  # fmt: skip
    for name, what, code, change in table:
        yield receipt(name, what, code, edited(whole, change), stage="verify", bugs=("B084",))
    vectors = edited(h.embedding().encode(), put_in(-70017, vectors=digest))
    yield receipt(
        "508-other-vectors", "commits to other vectors", "OUTPUT_MISMATCH", vectors, stage="verify", twin=EMBEDDED
    )
    yield receipt("507-other-salt", "the salt was exchanged", "REQUEST_MISMATCH", other_salt, stage="verify")


def faults() -> Iterator[Fault]:
    for group in (encoding_faults, header_faults, signature_faults, form_faults, content_faults):
        yield from group()
