"""What may go out and what may come back on an attested connection. Pure: no I/O, both transports use it.

Everything is allowed by list. A success that carries no receipt is handed out only for the operational routes, which
give no answers of a model; anything else without a receipt is a rejection.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import httpx

from client_sdk.appraisal.session import media_type
from client_sdk.errors import AuthenticityError, MalformedError, Rejection
from client_sdk.wire.errors import WireError
from client_sdk.wire.names import (
    CTI_BYTES,
    HEADER_EXECUTION_RECEIPT,
    HEADER_INFERENCE_NONCE,
    HEADER_RECEIPT_ID,
    LIMIT_RECEIPT_HEADER_BYTES,
    MEDIA_EVENT_STREAM,
    PATH_ATTESTATION,
    PATH_ATTESTATION_JSON,
    PATH_RECEIPTS,
)
from client_sdk.wire.stream import decode_base64url

RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]
Kind: TypeAlias = Literal["whole", "stream", "error without receipt", "operational"]

# Statuses that the appliance sends without a receipt: before authentication, before the request is read as one of an
# inference route, or when it cannot serve at all.
NO_RECEIPT_STATUSES = frozenset({400, 401, 403, 404, 405, 408, 409, 411, 417, 429, 431}) | frozenset(range(500, 600))
_OPERATIONAL_ROUTES = frozenset({"/v1/models", PATH_ATTESTATION_JSON, "/healthz", "/readyz", "/metrics"})
_OPERATIONAL_PREFIXES = ("/v1/models/", PATH_RECEIPTS)
_HOP_HEADERS = frozenset({b"transfer-encoding", b"content-length", b"accept-encoding", b"host", b"expect", b"te"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One attempt at a request, exactly as it leaves. `nonce` is the inference nonce, b"" on other routes."""

    method: str
    route: str
    url: httpx.URL
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    nonce: bytes

    @property
    def judged(self) -> bool:
        """Whether the answer needs a receipt."""
        return bool(self.nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head of a response. `receipt` is the decoded receipt when the head carries it."""

    status: int
    media_type: str
    receipt_id: bytes | None
    receipt: bytes | None
    kind: Kind


def check_origin(url: httpx.URL, origin: httpx.URL) -> None:
    """Refuse any other origin before a byte leaves. Raises AuthenticityError FOREIGN_ORIGIN."""
    if (url.scheme, url.host, _port(url)) != (origin.scheme, origin.host, _port(origin)):
        raise AuthenticityError(
            Rejection.FOREIGN_ORIGIN,
            "this transport talks to its own appliance only",
            expected=f"{origin.scheme}://{origin.host}:{_port(origin)}",
            actual=f"{url.scheme}://{url.host}:{_port(url)}",
        )


def is_operational(method: str, route: str) -> bool:
    """Reads that give no model's answer; they come over the attested channel and carry no receipt."""
    return method in ("GET", "HEAD") and (route in _OPERATIONAL_ROUTES or route.startswith(_OPERATIONAL_PREFIXES))


def prepare(request: httpx.Request, body: bytes, *, nonce: bytes) -> Outgoing:
    """Lay out one attempt: identity encodings only, the whole body with its length, our nonce and no other.

    Raises ValueError for requests that this transport must not send: a coded body, or an attestation of one's own,
    which would change what the connection's receipts are bound to.
    """
    route = request.url.path
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ValueError("request bodies are sent as they are: remove Content-Encoding")
    if request.url.path == PATH_ATTESTATION:
        raise ValueError("the transport attests its connections itself")
    judged = not is_operational(request.method, route)
    dropped = _HOP_HEADERS | {HEADER_INFERENCE_NONCE.encode()}
    headers = [(name, value) for name, value in request.headers.raw if name.lower() not in dropped]
    headers.insert(0, (b"host", request.url.netloc))
    headers.append((b"accept-encoding", b"identity"))
    if body or request.method not in ("GET", "HEAD"):
        headers.append((b"content-length", str(len(body)).encode()))
    if judged:
        headers.append((HEADER_INFERENCE_NONCE.encode(), nonce.hex().encode()))
    return Outgoing(
        method=request.method,
        route=route,
        url=request.url,
        headers=tuple(headers),
        body=body,
        nonce=nonce if judged else b"",
    )


def read_head(outgoing: Outgoing, status: int, headers: RawHeaders) -> Head:
    """Judge a response head. Raises AuthenticityError (REDIRECT, CONTENT_ENCODING), MalformedError MALFORMED_RESPONSE
    or MALFORMED_BASE64, VerificationError RECEIPT_MISSING.
    """
    if 300 <= status < 400:
        raise AuthenticityError(Rejection.REDIRECT, f"the appliance answered with a redirect ({status})")
    if (_single(headers, "content-encoding") or "identity").lower() != "identity":
        raise AuthenticityError(Rejection.CONTENT_ENCODING, "the answer is content-coded; identity was asked for")
    content_type = _single(headers, "content-type")
    media = media_type(content_type)
    if not outgoing.judged:
        return Head(status=status, media_type=media, receipt_id=None, receipt=None, kind="operational")
    if (content_type or "").partition(";")[2].strip().lower() not in ("", "charset=utf-8"):
        # No receipt binds these parameters, and HTTP libraries decode the text by them.
        raise MalformedError(Rejection.MALFORMED_RESPONSE, "the answer's media type has parameters other than UTF-8")
    receipt_id = _receipt_id(headers)
    if receipt_id is None:
        if status not in NO_RECEIPT_STATUSES:
            raise AuthenticityError(Rejection.RECEIPT_MISSING, f"an answer with status {status} came without a receipt")
        return Head(status=status, media_type=media, receipt_id=None, receipt=None, kind="error without receipt")
    return Head(
        status=status,
        media_type=media,
        receipt_id=receipt_id,
        receipt=_receipt(headers),
        kind="stream" if media == MEDIA_EVENT_STREAM else "whole",
    )


def receipt_headers(outgoing: Outgoing) -> tuple[tuple[bytes, bytes], ...]:
    """Headers for fetching the receipt of `outgoing`: the same host and credentials, nothing else."""
    kept = {b"host", b"authorization", b"user-agent"}
    return (
        *((name, value) for name, value in outgoing.headers if name.lower() in kept),
        (b"accept-encoding", b"identity"),
    )


def _receipt_id(headers: RawHeaders) -> bytes | None:
    text = _single(headers, HEADER_RECEIPT_ID)
    if text is None:
        return None
    try:
        value = binascii.unhexlify(text)
    except (binascii.Error, ValueError):
        value = b""
    if len(value) != CTI_BYTES or value.hex() != text:
        raise MalformedError(Rejection.MALFORMED_RESPONSE, f"{HEADER_RECEIPT_ID} is not {2 * CTI_BYTES} hex digits")
    return value


def _receipt(headers: RawHeaders) -> bytes | None:
    text = _single(headers, HEADER_EXECUTION_RECEIPT)
    if text is None:
        return None
    try:
        return decode_base64url(text.encode("latin-1"), limit_bytes=LIMIT_RECEIPT_HEADER_BYTES)
    except WireError as error:
        raise MalformedError.of(error) from None


def _single(headers: RawHeaders, name: str) -> str | None:
    values = [value for key, value in headers if key.lower() == name.encode()]
    if len(values) > 1:
        raise MalformedError(Rejection.MALFORMED_RESPONSE, f"the response has {name} more than once")
    return values[0].decode("latin-1") if values else None


def _port(url: httpx.URL) -> int:
    return url.port or {"https": 443, "http": 80}.get(url.scheme, 0)
