"""Where certificates carry evidence: one reader for each scheme, and what each scheme's evidence binds of the key.

id-pe-cmw        1.3.6.1.5.5.7.1.35          draft-ietf-rats-msg-wrap: CMW record or collection, JSON or CBOR
CCC              2.23.133.5.4.9              CBOR 60000([quote, claims]), claims["pubkey-hash"]
Intel, Gramine   1.2.840.113741.1337.6       raw quote (and the same arcs encoded twice, as Gramine writes them)
dstack           1.3.6.1.4.1.62397.1.1, .8   raw TDX quote; SCALE or MessagePack attestation
SAN              <hex COSE_Sign1>.<domain>   a Nitro document spelt as a DNS name
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from client_sdk.errors import UndecidedError
from client_sdk.tee import der, x509
from client_sdk.tee.certificate import formats
from client_sdk.tee.evidence import Endorsements, EventLog
from client_sdk.tee.x509 import Certificate
from client_sdk.wire import digests
from client_sdk.wire.errors import WireError
from client_sdk.wire.names import CMW_IND_EVIDENCE, HASH_SHA256, MEDIA_TYPE_PREFIX, OID_CCC, OID_CMW, TAG_CCC

OID_INTEL = "1.2.840.113741.1337.6"
OID_INTEL_TWICE = "0.6.9.42.840.113741.1337.6"
OID_DSTACK_QUOTE = "1.3.6.1.4.1.62397.1.1"
OID_DSTACK_EVENTS = "1.3.6.1.4.1.62397.1.2"
OID_DSTACK = "1.3.6.1.4.1.62397.1.8"
OID_SGX_SAMPLE = "1.2.840.113741.1.13.1"

_CMW_TAGS = range(1668546817, 1668612096)
_CCC_OTHER_TAGS = (60001, 60002)
_HASHES: Mapping[object, Callable[[bytes], bytes]] = {
    HASH_SHA256: lambda data: hashlib.sha256(data).digest(),
    7: lambda data: hashlib.sha384(data).digest(),
    8: lambda data: hashlib.sha512(data).digest(),
}
_SAN_DOCUMENT_HEX = 512
_DSTACK_SCALE_KINDS = {0: formats.TDX, 1: formats.TDX, 2: formats.NITRO, 3: formats.SNP}
_DSTACK_KINDS = {
    "tdx": (formats.TDX, "quote"),
    "gcp-tdx": (formats.TDX, "quote"),
    "nitro-enclave": (formats.NITRO, "nsm_quote"),
    "sev-snp": (formats.SNP, "report"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Evidence found in a certificate. `expected` are the report data that would bind its key: any one of them.

    `nonce` is one that the report data covers (CCC claims), `endorsements` what came along with the evidence.
    """

    scheme: str
    family: str
    content: bytes
    expected: tuple[bytes, ...]
    nonce: bytes | None = None
    endorsements: Endorsements = field(default_factory=Endorsements)


def find(certificate: Certificate) -> tuple[Carried, ...]:
    """All evidence the certificate carries in a scheme known here. Raises WireError for a damaged or doubled one.

    UndecidedError UNSUPPORTED_VERSION where the scheme is known and its form is not.
    """
    return tuple(_find(certificate))


def evidence_oids() -> frozenset[str]:
    return frozenset({*_EXTENSIONS, OID_DSTACK_EVENTS})


def _find(certificate: Certificate) -> Iterator[Carried]:
    for oid, read in _EXTENSIONS.items():
        value = certificate.extension(oid)
        if value is not None:
            yield from read(value, certificate)
    yield from _alternative_names(certificate)


def _unknown(detail: str) -> UndecidedError:
    """A known scheme in a form that this version does not know: not a no, and never a yes."""
    return UndecidedError("UNSUPPORTED_VERSION", f"unsupported version of evidence in a certificate: {detail}")


def _quote(scheme: str, quote: bytes, expected: tuple[bytes, ...]) -> Carried:
    family = formats.quote_family(quote)
    return Carried(scheme=scheme, family=family, content=formats.trim_quote(quote), expected=expected)


def _cmw(value: bytes, certificate: Certificate) -> Iterator[Carried]:
    """CMW ::= CHOICE { json UTF8String, cbor OCTET STRING }."""
    choice = der.read_one(value)
    if choice.tag == der.UTF8_STRING:
        cmw, is_json = formats.read_json(choice.content), True
    else:
        cmw, is_json = formats.read_cbor(choice.expect(der.OCTET_STRING, "CMW").content), False
    found = list(_cmw_records(cmw, is_json, 0))
    if not found:
        raise WireError(formats.CODE, "a CMW without evidence of a known family")
    if len(found) > 1:
        raise WireError(formats.CODE, f"a CMW with {len(found)} pieces of evidence")
    family, content = found[0]
    content = formats.trim_quote(content) if family in (formats.SGX, formats.TDX) else content
    yield Carried(scheme="id-pe-cmw", family=family, content=content, expected=_key_bindings(family, certificate.spki))


def _key_bindings(family: str, spki: bytes) -> tuple[bytes, ...]:
    """What evidence may carry to bind a key in a CMW: this project's rule, and the bare hashes of others."""
    own = digests.certificate_report_data(spki)
    if family == formats.TPM2:
        return (digests.certificate_extra_data(spki),)
    bare = (hashlib.sha256(spki).digest(), hashlib.sha512(spki).digest())
    return (own, spki) if family == formats.NITRO else (own, *bare)


def _cmw_records(cmw: object, is_json: bool, depth: int) -> Iterator[tuple[str, bytes]]:
    """(family, content) of each evidence record; endorsements and results in a CMW are passed over."""
    if depth > formats.MAX_DEPTH:
        raise WireError(formats.CODE, "a CMW nested too deep")
    if isinstance(cmw, formats.Tagged):
        if cmw.tag not in _CMW_TAGS or not isinstance(cmw.value, bytes):
            raise WireError(formats.CODE, f"CBOR tag {cmw.tag} is no CMW")
        yield from _cmw_record(None, cmw.value, None)
    elif isinstance(cmw, list):
        if len(cmw) not in (2, 3) or not isinstance(cmw[0], str | int):
            raise WireError(formats.CODE, "a CMW record is [type, value, ? indicator]")
        content = formats.base64url(cmw[1]) if is_json else cmw[1]
        yield from _cmw_record(cmw[0], content, cmw[2] if len(cmw) == 3 else None)
    else:
        for label, member in formats.mapping(cmw, "CMW").items():
            if label != "__cmwc_t":
                yield from _cmw_records(member, is_json, depth + 1)


def _cmw_record(kind: object, content: object, indicator: object) -> Iterator[tuple[str, bytes]]:
    if not isinstance(content, bytes) or not (indicator is None or type(indicator) is int):
        raise WireError(formats.CODE, "a CMW record holds bytes and an integer indicator")
    if indicator is not None and not indicator & CMW_IND_EVIDENCE:
        return
    if isinstance(kind, str) and kind.startswith(MEDIA_TYPE_PREFIX):
        yield kind.removeprefix(MEDIA_TYPE_PREFIX).partition(";")[0], content
        return
    family = formats.sniff(content)
    if family is not None:
        yield family, content


def _ccc(value: bytes, certificate: Certificate) -> Iterator[Carried]:
    wrapped = formats.read_cbor(value)
    if isinstance(wrapped, formats.Tagged) and wrapped.tag in _CCC_OTHER_TAGS:
        raise _unknown(f"evidence under CBOR tag {wrapped.tag} in {OID_CCC}")
    if not isinstance(wrapped, formats.Tagged) or wrapped.tag != TAG_CCC:
        raise WireError(formats.CODE, f"{OID_CCC} without CBOR tag {TAG_CCC}")
    parts = wrapped.value
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, bytes) for part in parts):
        raise WireError(formats.CODE, "CBOR tag 60000 holds [quote, claims]")
    quote, encoded = parts
    claims = formats.mapping(formats.read_cbor(encoded), "claims")
    nonce = claims.get("nonce")
    if nonce is not None and not isinstance(nonce, bytes):
        raise WireError(formats.CODE, "the claims' nonce is not bytes")
    found = _quote("CCC", quote, (hashlib.sha256(encoded).digest(),) if _names_key(claims, certificate) else ())
    yield Carried(scheme=found.scheme, family=found.family, content=found.content, expected=found.expected, nonce=nonce)


def _names_key(claims: Mapping[object, object], certificate: Certificate) -> bool:
    """claims["pubkey-hash"] = CBOR [algorithm, hash of the SPKI] is this certificate's. Raises WireError."""
    encoded = claims.get("pubkey-hash")
    if not isinstance(encoded, bytes):
        raise WireError(formats.CODE, "claims without pubkey-hash")
    entry = formats.read_cbor(encoded)
    if not isinstance(entry, list) or len(entry) != 2 or type(entry[0]) is not int or entry[0] not in _HASHES:
        raise WireError(formats.CODE, "pubkey-hash with an unknown algorithm")
    return bool(entry[1] == _HASHES[entry[0]](certificate.spki))


def _intel(value: bytes, certificate: Certificate) -> Iterator[Carried]:
    yield _quote("Intel", value, (hashlib.sha256(certificate.spki).digest(),))


def _dstack_bindings(certificate: Certificate, family: str) -> tuple[bytes, ...]:
    tagged = hashlib.sha512(b"ratls-cert:" + certificate.spki).digest()
    return (tagged,) if family != formats.NITRO else (tagged, certificate.spki)


def _dstack_quote(value: bytes, certificate: Certificate) -> Iterator[Carried]:
    quote = der.read_one(value).expect(der.OCTET_STRING, "dstack quote").content
    found = _quote("dstack", quote, _dstack_bindings(certificate, formats.TDX))
    log = certificate.extension(OID_DSTACK_EVENTS)
    logs: tuple[EventLog, ...] = ()
    if log is not None:
        events = der.read_one(log).expect(der.OCTET_STRING, "dstack event log").content
        logs = (EventLog(kind="dstack", content=events),)
    yield Carried(
        scheme=found.scheme,
        family=found.family,
        content=found.content,
        expected=found.expected,
        endorsements=Endorsements(event_logs=logs),
    )


def _dstack(value: bytes, certificate: Certificate) -> Iterator[Carried]:
    content = der.read_one(value).expect(der.OCTET_STRING, "dstack attestation").content
    if content[:1] == b"\x00":
        family, evidence, chain = _dstack_scale(content)
    elif content and 0x80 <= content[0] <= 0x8F:
        family, evidence, chain = _dstack_msgpack(content)
    else:
        raise _unknown("a dstack attestation that is neither SCALE version 0 nor MessagePack")
    if family == formats.TDX:
        evidence = formats.trim_quote(evidence)
    yield Carried(
        scheme="dstack",
        family=family,
        content=evidence,
        expected=_dstack_bindings(certificate, family),
        endorsements=Endorsements(certificates=chain),
    )


def _dstack_scale(content: bytes) -> tuple[str, bytes, tuple[Certificate, ...]]:
    """Version 0: 0x00, the platform's number, the evidence as Vec<u8>; what follows says nothing that is signed."""
    family = _DSTACK_SCALE_KINDS.get(content[1]) if len(content) > 1 else None
    if family is None:
        raise _unknown("a dstack attestation of an unknown platform")
    return family, formats.read_scale_bytes(content, 2), ()


def _dstack_msgpack(content: bytes) -> tuple[str, bytes, tuple[Certificate, ...]]:
    document = formats.mapping(formats.read_msgpack(content), "dstack attestation")
    if document.get("version") != 1:
        raise _unknown(f"dstack attestation version {str(document.get('version'))[:20]}")
    platform = formats.mapping(document.get("platform"), "platform")
    data = formats.mapping(platform.get("data"), "platform data")
    kind = platform.get("kind")
    if not isinstance(kind, str) or kind not in _DSTACK_KINDS:
        raise _unknown("a dstack attestation of an unknown platform")
    family, field = _DSTACK_KINDS[kind]
    chain = data.get("cert_chain", [])
    if not isinstance(chain, list):
        raise WireError(formats.CODE, "cert_chain is not a list")
    found = [parsed for entry in chain for parsed in x509.parse_certificates(formats.msgpack_bytes(entry))]
    return family, formats.msgpack_bytes(data.get(field)), tuple(found)


def _alternative_names(certificate: Certificate) -> Iterator[Carried]:
    value = certificate.extension(x509.OID_SUBJECT_ALT_NAME)
    if value is None:
        return
    documents = []
    for name in der.read_one(value).expect(der.SEQUENCE, "alternative names").children():
        label = name.content.partition(b".")[0]
        if name.tag == der.context(2, constructed=False) and len(label) > _SAN_DOCUMENT_HEX:
            documents.append(_hex(label))
    if len(documents) > 1:
        raise WireError(formats.CODE, f"{len(documents)} attestation documents among the alternative names")
    for document in documents:
        yield Carried(scheme="alternative name", family=formats.NITRO, content=document, expected=(certificate.spki,))


def _hex(label: bytes) -> bytes:
    try:
        return bytes.fromhex(label.decode("ascii"))
    except ValueError:
        raise WireError(formats.CODE, "a long alternative name that is not hex") from None


_EXTENSIONS: Mapping[str, Callable[[bytes, Certificate], Iterator[Carried]]] = {
    OID_CMW: _cmw,
    OID_CCC: _ccc,
    OID_INTEL: _intel,
    OID_INTEL_TWICE: _intel,
    OID_DSTACK: _dstack,
    OID_DSTACK_QUOTE: _dstack_quote,
}
