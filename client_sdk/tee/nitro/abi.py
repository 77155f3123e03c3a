"""Layout of Nitro attestation documents: a COSE_Sign1 (RFC 9052) by ES384, and the payload AWS documents.

Enclaves sign `pcrs`, NitroTPM (EC2 instances) signs `nitrotpm_pcrs`: the same registers by number mean different
things, so a document is of one kind or the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from client_sdk.wire import cbor, foreign_cbor
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader
from client_sdk.wire.foreign_cbor import CODE

KIND: Final = "nitro"
ENCLAVE: Final = "Nitro Enclave"
NITROTPM: Final = "NitroTPM"
LIMIT_DOCUMENT_BYTES: Final = 32 << 10
PCR_BYTES: Final = 48
SIGNATURE_BYTES: Final = 96
LIMIT_USER_DATA_BYTES: Final = 512
LIMIT_NONCE_BYTES: Final = 512
LIMIT_PUBLIC_KEY_BYTES: Final = 1024

_TAG_SIGN1 = 18
_PROTECTED = cbor.encode({1: -35})  # alg: ES384 (RFC 9053), and nothing else
_MAX_REGISTERS = 32
_MAX_CERTIFICATES = 16
_MAX_CERTIFICATE_BYTES = 4096
_MAX_TIMESTAMP_MS = 253_402_300_800_000  # the year 10000


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document; nothing about it is verified. `kind` is ENCLAVE or NITROTPM, `pcrs` has 48 bytes by register.

    `certificate` is the signer's (DER), `cabundle` the issuers from the root down. `timestamp_ms` is Unix milliseconds.
    """

    protected: bytes
    payload: bytes
    signature: bytes
    kind: str
    module_id: str
    timestamp_ms: int
    pcrs: Mapping[int, bytes]
    certificate: bytes
    cabundle: tuple[bytes, ...]
    public_key: bytes | None
    user_data: bytes | None
    nonce: bytes | None

    @property
    def signed(self) -> bytes:
        """What the signature is over: Sig_structure of RFC 9052 section 4.4."""
        return cbor.encode(["Signature1", self.protected, b"", self.payload])


def parse_document(content: bytes) -> Document:
    """Parse a document as the NSM returned it, with or without tag 18. Raises WireError MALFORMED_EVIDENCE."""
    outer = foreign_cbor.decode(content, limit_bytes=LIMIT_DOCUMENT_BYTES, optional_tag=_TAG_SIGN1)
    if type(outer) is not list or len(outer) != 4:
        raise WireError(CODE, "a Nitro document is a COSE_Sign1 of four parts")
    protected, unprotected, payload, signature = outer
    if type(protected) is not bytes or protected != _PROTECTED:
        raise WireError(CODE, "the protected header is not ES384 alone")
    if type(unprotected) is not dict or unprotected:
        raise WireError(CODE, "the unprotected header is not empty")
    if type(payload) is not bytes or type(signature) is not bytes or len(signature) != SIGNATURE_BYTES:
        raise WireError(CODE, f"payload or signature is missing, or the signature is not {SIGNATURE_BYTES} bytes")
    return _parse_payload(protected, payload, signature)


def _parse_payload(protected: bytes, payload: bytes, signature: bytes) -> Document:
    reader = MapReader(foreign_cbor.decode(payload, limit_bytes=LIMIT_DOCUMENT_BYTES), "Nitro document", CODE)
    module_id = reader.text("module_id")
    if not module_id.isprintable():
        raise WireError(CODE, "module_id is not printable")
    digest = reader.take("digest", str)
    if digest != "SHA384":
        raise WireError(CODE, f"the registers' digest is {digest[:16]!r} instead of SHA384")
    timestamp_ms = reader.uint("timestamp")
    if not 0 < timestamp_ms < _MAX_TIMESTAMP_MS:
        raise WireError(CODE, "timestamp is outside any calendar")
    kind, key = (NITROTPM, "nitrotpm_pcrs") if reader.has("nitrotpm_pcrs") else (ENCLAVE, "pcrs")
    document = Document(
        protected=protected,
        payload=payload,
        signature=signature,
        kind=kind,
        module_id=module_id,
        timestamp_ms=timestamp_ms,
        pcrs=_registers(reader.take(key, dict), key),
        certificate=_certificate(reader.take("certificate", bytes)),
        cabundle=_cabundle(reader.take("cabundle", list)),
        public_key=_optional(reader, "public_key", LIMIT_PUBLIC_KEY_BYTES),
        user_data=_optional(reader, "user_data", LIMIT_USER_DATA_BYTES),
        nonce=_optional(reader, "nonce", LIMIT_NONCE_BYTES),
    )
    reader.finish()
    return document


def _registers(found: dict[object, object], key: str) -> dict[int, bytes]:
    if not 1 <= len(found) <= _MAX_REGISTERS:
        raise WireError(CODE, f"{key} has {len(found)} registers")
    registers: dict[int, bytes] = {}
    for index, value in found.items():
        if type(index) is not int or not 0 <= index < _MAX_REGISTERS:
            raise WireError(CODE, f"{key} has a key that is no register")
        if type(value) is not bytes or len(value) != PCR_BYTES:
            raise WireError(CODE, f"{key}[{index}] is not {PCR_BYTES} bytes")
        registers[index] = value
    return registers


def _cabundle(found: list[object]) -> tuple[bytes, ...]:
    if not 1 <= len(found) <= _MAX_CERTIFICATES:
        raise WireError(CODE, f"cabundle has {len(found)} certificates")
    return tuple(_certificate(entry) for entry in found)


def _certificate(found: object) -> bytes:
    if type(found) is not bytes or not 1 <= len(found) <= _MAX_CERTIFICATE_BYTES:
        raise WireError(CODE, f"a certificate is not 1 to {_MAX_CERTIFICATE_BYTES} bytes")
    return found


def _optional(reader: MapReader, key: str, limit_bytes: int) -> bytes | None:
    """null and absent mean the same in AWS's own specification."""
    value = reader.take_or_null(key, bytes) if reader.has(key) else None
    if value is not None and len(value) > limit_bytes:
        raise WireError(CODE, f"{key} is longer than {limit_bytes} bytes")
    return value
