"""A saved answer as the appliance's side reads it: bytes in, a receipt that is consistent with them out.

What is checked here needs no policy: forms, the receipt's signature under the key that the saved attestation claims
name, and every commitment to the saved request and response. Whether that key may be trusted is
`appliance-client verify`'s question, never this one's.
"""

from __future__ import annotations

import hmac
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from appliance.replay.verdict import CannotReproduce, Reason
from client_sdk.wire import cose, digests, names
from client_sdk.wire.attestation import AttestationBundle, AttestationClaims
from client_sdk.wire.errors import WireError
from client_sdk.wire.receipt import ReceiptClaims
from client_sdk.wire.stream import StreamContext, decode_base64url, next_chain

T = TypeVar("T")

_FORMAT_VERSION: Final = 1  # of answer.json, as client_sdk/offline/saved.py writes it
_LIMIT_MANIFEST_BYTES: Final = 64 << 10
_LIMIT_BODY_BYTES: Final = 64 << 20
_IGNORED_COMMENTS: Final = (names.COMMENT_CHECKPOINT, names.COMMENT_PADDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAnswer:
    """`response` is the body as it came; `frames` are the payloads of its frames where it is an event stream."""

    request: bytes
    response: bytes
    frames: tuple[bytes, ...] | None
    claims: ReceiptClaims
    salt: bytes
    attested: AttestationClaims

    def commit(self, label: str, content: bytes) -> bytes:
        return digests.commitment(self.salt, label, content)


def load(directory: Path) -> SavedAnswer:
    """Read and check a saved answer. Raises CannotReproduce: damaged, not-authentic, redacted, request-incomplete."""
    manifest = _manifest(directory)
    raw = _read(directory / "receipt", names.LIMIT_RECEIPT_BYTES)
    sign1 = _parsed(
        "receipt",
        lambda: cose.parse_sign1(raw, typ=names.TYP_RECEIPT, salted=True, limit_bytes=names.LIMIT_RECEIPT_BYTES),
    )
    claims = _parsed("receipt", lambda: ReceiptClaims.parse(sign1.payload))
    attested = _attested(directory, manifest, claims)
    _authenticate(sign1, attested)
    _check_manifest(manifest, claims)
    if sign1.salt is None:
        message = "the receipt is redacted: without its salt nothing ties it to the saved request and answer"
        raise CannotReproduce(Reason.REDACTED, message)
    request = _read(directory / "request", _LIMIT_BODY_BYTES)
    _check_request(request, claims, sign1.salt)
    response = _read(directory / "response", _LIMIT_BODY_BYTES)
    frames = None
    if claims.stream is not None:
        frames = _frames(response, claims, sign1.salt, raw)
    elif not _same(digests.commitment(sign1.salt, names.LABEL_RESPONSE, response), claims.response.body):
        raise _damaged("response", "is not the body that the receipt commits to")
    return SavedAnswer(
        request=request, response=response, frames=frames, claims=claims, salt=sign1.salt, attested=attested
    )


# -- the receipt -------------------------------------------------------------------------------------------------------


def _attested(directory: Path, manifest: Mapping[str, object], claims: ReceiptClaims) -> AttestationClaims:
    """The attestation claims that the receipt names, form checked and nothing else."""
    name = "prior-attestation" if "prior-attestation" in manifest else "attestation"
    raw = _read(directory / name, names.LIMIT_ATTESTATION_BUNDLE_BYTES)
    bundle = _parsed(name, lambda: AttestationBundle.parse(raw))
    encoded = bundle.claims
    if encoded is None:
        raise _damaged(name, "has no attestation claims")
    attested = _parsed(name, lambda: AttestationClaims.parse(encoded))
    if not _same(digests.sha256(encoded), claims.attestation):
        raise CannotReproduce(Reason.NOT_AUTHENTIC, "the receipt names other attestation claims than the saved ones")
    if (claims.mode, claims.config) != (attested.mode, attested.config):
        raise CannotReproduce(Reason.NOT_AUTHENTIC, "mode or configuration of the receipt are not the attested ones")
    model = claims.model
    if model is not None:
        identity = digests.model_identity(
            format_name=model.format,
            weights=model.weights,
            tokenizer=model.tokenizer,
            chat_template=model.chat_template,
        )
        if identity != model.identity or attested.models.get(model.name) != identity:
            message = f"the receipt's model {model.name!r} is not the one that was attested under this name"
            raise CannotReproduce(Reason.NOT_AUTHENTIC, message)
    return attested


def _authenticate(sign1: cose.Sign1, attested: AttestationClaims) -> None:
    """The receipt was signed by the key that the attestation claims name, in the one form that counts."""
    public = _parsed("attestation", lambda: cose.parse_okp_key(attested.receipt_key, curve=names.CURVE_ED25519))
    canonical = not cose.has_small_order(sign1.signature[:32]) and cose.scalar_in_range(sign1.signature)
    known = sign1.alg == names.ALG_EDDSA and _same(cose.key_id(attested.receipt_key), sign1.kid)
    if not known or cose.has_small_order(public) or not canonical:
        raise CannotReproduce(Reason.NOT_AUTHENTIC, "the receipt is not signed by the attested receipt key")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(sign1.signature, sign1.signed_bytes())
    except InvalidSignature:
        raise CannotReproduce(Reason.NOT_AUTHENTIC, "the receipt's signature does not verify") from None


def _check_manifest(manifest: Mapping[str, object], claims: ReceiptClaims) -> None:
    """What answer.json says of request and response is what the receipt says."""
    request, response = manifest.get("request"), manifest.get("response")
    if not isinstance(request, dict) or not isinstance(response, dict):
        raise _damaged("answer.json", "does not tell of request and response")
    said = (request.get("method"), request.get("route"), response.get("status"), response.get("media-type"))
    facts = claims.response
    meant = (claims.request.method, claims.request.route, facts.http_status, facts.media_type)
    if said != meant or response.get("receipt-id") != claims.cti.hex():
        raise _damaged("answer.json", "tells of another request or response than the receipt")


def _check_request(request: bytes, claims: ReceiptClaims, salt: bytes) -> None:
    if not claims.request.complete:
        message = "the appliance did not read the whole request, for reasons that no receipt states"
        raise CannotReproduce(Reason.REQUEST_INCOMPLETE, message)
    committed = digests.commitment(salt, names.LABEL_REQUEST, request)
    if len(request) != claims.request.length or not _same(committed, claims.request.body):
        raise _damaged("request", "is not the one that the receipt commits to")


# -- a stream ----------------------------------------------------------------------------------------------------------


def _frames(response: bytes, claims: ReceiptClaims, salt: bytes, receipt: bytes) -> tuple[bytes, ...]:
    """Payloads of the frames, which are those that the receipt's chain covers, the receipt behind them."""
    assert claims.stream is not None
    context = StreamContext(
        cti=claims.cti,
        eat_nonce=claims.eat_nonce,
        attestation=claims.attestation,
        channel=claims.channel,
        request=claims.request.body,
    )
    chain, frames, last = context.initial_chain(salt), list[bytes](), b""
    *blocks, rest = response.split(b"\n\n")
    for block in (block + b"\n\n" for block in blocks):
        if block.startswith(_IGNORED_COMMENTS) or block == names.DONE_BLOCK:
            continue
        if block.startswith(names.COMMENT_RECEIPT):
            encoded = block[len(names.COMMENT_RECEIPT) : -2]
            last = _parsed("response", lambda encoded=encoded: _receipt_of(encoded))  # type: ignore[misc]
            continue
        lines = block[:-2].split(b"\n")
        if last or not all(line.startswith(b"data:") for line in lines):
            raise _damaged("response", "is no event stream with a receipt at its end")
        frames.append(b"\n".join(line[5:].removeprefix(b" ") for line in lines))
        chain = next_chain(chain, len(frames), block)
    if rest or last != receipt:
        raise _damaged("response", "does not end with the saved receipt")
    if len(frames) != claims.stream.frames or not _same(chain, claims.stream.chain):
        raise _damaged("response", "has other frames than the receipt commits to")
    return tuple(frames)


def _receipt_of(encoded: bytes) -> bytes:
    return decode_base64url(encoded, limit_bytes=names.LIMIT_RECEIPT_BYTES)


# -- files -------------------------------------------------------------------------------------------------------------


def _manifest(directory: Path) -> Mapping[str, object]:
    try:
        fields = json.loads(_read(directory / "answer.json", _LIMIT_MANIFEST_BYTES))
    except (ValueError, RecursionError):
        raise _damaged("answer.json", "is not JSON") from None
    if not isinstance(fields, dict) or fields.get("version") != _FORMAT_VERSION:
        raise _damaged("answer.json", f"is not version {_FORMAT_VERSION} of this format")
    return fields


def _read(path: Path, limit_bytes: int) -> bytes:
    try:
        # NONBLOCK: a FIFO in the file's place would be waited for without an end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _damaged(path.name, "is no regular file")
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise _damaged(path.name, f"cannot be read ({error.strerror})") from None
    if len(content) > limit_bytes:
        raise _damaged(path.name, f"is larger than {limit_bytes} bytes")
    return content


def _parsed(name: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except WireError as error:
        raise _damaged(name, f"is malformed ({error.code}: {error.detail})") from None


def _same(found: bytes, stated: bytes | None) -> bool:
    return stated is not None and hmac.compare_digest(found, stated)


def _damaged(name: str, what: str) -> CannotReproduce:
    return CannotReproduce(Reason.DAMAGED, f"the saved answer cannot be used: {name} {what}")
