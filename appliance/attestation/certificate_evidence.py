"""Evidence inside the TLS certificate, for RA-TLS stacks of other makers: it binds the certificate's key, nothing else.

It is made once, when the appliance starts: the key stays the same for the boot, however often the certificate is
renewed. Our own clients ask for evidence on their connection and never look at this (docs/attestation.md, section 9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from appliance.attestation.attester import Attester, Binding
from appliance.errors import AttestationUnavailable, BootError
from appliance.listener.certificates import CertificateExtension
from client_sdk.wire import cbor, digests
from client_sdk.wire.names import CMW_IND_EVIDENCE, HASH_SHA256, MEDIA_TYPE_PREFIX, OID_CCC, OID_CMW, TAG_CCC

_REPORT_DATA_BYTES = 64
_DER_OCTET_STRING = 0x04
_TAG_CCC = b"\xd9" + TAG_CCC.to_bytes(2, "big")  # major type 6, two bytes (RFC 8949 section 3)
LIMIT_EXTENSION_BYTES = 24 << 10
"""A handshake carries the certificate: clients bound it, and so do we."""


def make_extension(attester: Attester, spki: bytes) -> CertificateExtension:
    """The extension with evidence for the DER key `spki`. Blocks as long as one quote takes.

    Raises BootError for a family without hardware, and where the hardware makes none.
    """
    form = _FORMS.get(attester.family)
    if form is None:
        known = ", ".join(sorted(_FORMS))
        raise BootError(f"attestation.certificate_evidence: {attester.family!r} has none, only {known}")
    try:
        extension = form(attester, spki)
    except AttestationUnavailable as error:
        raise BootError(f"attestation.certificate_evidence: none could be made: {error.message}") from error
    if len(extension.der) > LIMIT_EXTENSION_BYTES:
        raise BootError(f"attestation.certificate_evidence: {len(extension.der)} bytes are too many for a certificate")
    return extension


def _cmw(attester: Attester, spki: bytes) -> CertificateExtension:
    """CMW record [media type, evidence, indicator] in CBOR (draft-ietf-rats-msg-wrap), as the OCTET STRING of a CMW."""
    (item,) = attester.collect(Binding.of_certificate(spki)).evidence
    record = cbor.encode([MEDIA_TYPE_PREFIX + item.kind, item.content, CMW_IND_EVIDENCE])
    return CertificateExtension(oid=OID_CMW, der=_octet_string(record))


def _ccc(attester: Attester, spki: bytes) -> CertificateExtension:
    """60000([quote, claims]): the claims name the key, the report data the claims (CCC interoperable RA-TLS)."""
    claims = cbor.encode({"pubkey-hash": cbor.encode([HASH_SHA256, digests.sha256(spki)])})
    report_data = digests.sha256(claims).ljust(_REPORT_DATA_BYTES, b"\x00")
    (item,) = attester.collect(replace(Binding.of_certificate(spki), report_data=report_data)).evidence
    return CertificateExtension(oid=OID_CCC, der=_TAG_CCC + cbor.encode([item.content, claims]))


def _octet_string(content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([_DER_OCTET_STRING, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([_DER_OCTET_STRING, 0x80 | len(length)]) + length + content


_FORMS: Mapping[str, Callable[[Attester, bytes], CertificateExtension]] = {
    "sev-snp": _cmw,
    "tdx": _ccc,
    "nitro": _cmw,
    "tpm2": _cmw,
}
