"""What was given to vouch for evidence: recognised by content, gathered from a bundle, a directory or files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from client_sdk.tee import der, json_text, x509
from client_sdk.tee.evidence import Endorsements, EventLog
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.errors import WireError

_CODE = "MALFORMED_ENDORSEMENT"
_CCEL_SPEC_ID = b"Spec ID Event03\x00"
_LIMIT_BYTES = 1 << 20
_MAX_STAPLED_CERTIFICATES = 64
_MAX_STAPLED_REVOKED = 8192


def recognise(data: bytes) -> Endorsements:
    """What a file is by its content: certificates and CRLs (DER or PEM), OCSP, DCAP collateral, RIM, log, token, JWKS.

    Raises WireError MALFORMED_ENDORSEMENT or MALFORMED_CERTIFICATE.
    """
    if not data or len(data) > _LIMIT_BYTES:
        raise WireError(_CODE, f"an endorsement is empty or larger than {_LIMIT_BYTES} bytes")
    stripped = data.lstrip()
    if stripped[:1] in (b"{", b"["):
        return _recognise_json(data)
    if stripped[:1] == b"<":
        return Endorsements(rims=(data,))
    if _CCEL_SPEC_ID in data[:128]:
        return Endorsements(event_logs=(EventLog(kind="ccel", content=data),))
    if _is_ocsp_answer(data):
        return Endorsements(ocsp=(data,))
    certificates, crls = x509.split(data)
    return Endorsements(
        certificates=tuple(x509.parse_certificate(block) for block in certificates),
        crls=tuple(x509.parse_crl(block) for block in crls),
    )


def merge(parts: Iterable[Endorsements]) -> Endorsements:
    """All parts as one, in order. Of two JWKS the first counts: put the caller's own first."""
    merged = Endorsements()
    for part in parts:
        merged = replace(
            merged,
            certificates=merged.certificates + part.certificates,
            crls=merged.crls + part.crls,
            collateral=merged.collateral + part.collateral,
            rims=merged.rims + part.rims,
            ocsp=merged.ocsp + part.ocsp,
            tokens=merged.tokens + part.tokens,
            event_logs=merged.event_logs + part.event_logs,
            jwks=merged.jwks or part.jwks,
        )
    return merged


def stapled(items: Iterable[EvidenceItem], event_logs: Iterable[EvidenceItem], own: Endorsements) -> Endorsements:
    """The caller's `own` endorsements, then those an appliance stapled to its bundle. Raises WireError.

    A stapled JWKS is refused: whose keys sign tokens is the caller's to say. So is more than evidence could need: a
    megabyte of tiny certificates takes a fifth of a second to parse.
    """
    found, certificates, revoked = [own], 0, 0
    for item in items:
        part = recognise(item.content)
        if part.jwks is not None:
            raise WireError(_CODE, "an appliance cannot say whose keys sign tokens about it")
        certificates += len(part.certificates)
        revoked += sum(len(crl.revoked) for crl in part.crls)
        if certificates > _MAX_STAPLED_CERTIFICATES or revoked > _MAX_STAPLED_REVOKED:
            raise WireError(_CODE, "more certificates or revoked ones than evidence could need")
        found.append(part)
    logs = tuple(EventLog(kind=item.kind, content=item.content) for item in event_logs)
    return merge([*found, Endorsements(event_logs=logs)])


def _is_ocsp_answer(data: bytes) -> bool:
    """An OCSPResponse begins with its status, an ENUMERATED of one byte; nothing else here does (RFC 6960 4.2.1)."""
    if data[:1] != bytes([der.SEQUENCE]):
        return False
    content = der.read(data)[0].content
    return content[:2] == b"\x0a\x01"


def _recognise_json(data: bytes) -> Endorsements:
    text = json_text.decode(data, _CODE, "endorsement")
    document = json_text.read(text, _CODE, "endorsement")
    if isinstance(document, list) and document[:1] and isinstance(document[0], list) and document[0][:1] == ["JWT"]:
        return Endorsements(tokens=(data,))
    if isinstance(document, list):
        return Endorsements(event_logs=(EventLog(kind="dstack", content=data),))
    if "keys" in document:
        return Endorsements(jwks=data)
    if "tcb_info" in document and "qe_identity" in document:
        return Endorsements(collateral=(text,))
    raise WireError(_CODE, "JSON that is neither DCAP collateral, event log nor key set")
