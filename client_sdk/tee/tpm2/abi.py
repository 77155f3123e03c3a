"""Layouts of TPM 2.0 evidence: TPMS_ATTEST, TPMT_SIGNATURE, TPMT_PUBLIC (TCG TPM 2.0 Library, Part 2) and our item.

The `tpm2` item is dCBOR {"attest": TPMS_ATTEST, "signature": TPMT_SIGNATURE, "ak-public": TPMT_PUBLIC, ? "ak-cert":
DER certificate of the attestation key}, the structures as the TPM marshals them. What tools write instead is read too:
a TPM2B_PUBLIC (its length first) and an ECDSA signature in DER.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from client_sdk.wire import cbor
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader

KIND: Final = "tpm2"
LIMIT_ITEM_BYTES: Final = 16 << 10
LIMIT_STRUCTURE_BYTES: Final = 4096
LIMIT_CERTIFICATE_BYTES: Final = 8192

MAGIC: Final = 0xFF544347  # TPM_GENERATED_VALUE: a restricted key signs nothing from outside that begins so
TYPE_QUOTE: Final = 0x8018  # TPM_ST_ATTEST_QUOTE

ALG_RSA: Final = 0x0001
ALG_NULL: Final = 0x0010
ALG_RSASSA: Final = 0x0014
ALG_RSAES: Final = 0x0015
ALG_RSAPSS: Final = 0x0016
ALG_ECDSA: Final = 0x0018
ALG_ECDAA: Final = 0x001A
ALG_ECC: Final = 0x0023
CURVE_P256: Final = 0x0003
HASHES: Final[Mapping[int, str]] = {0x0004: "sha1", 0x000B: "sha256", 0x000C: "sha384", 0x000D: "sha512"}
SHA256: Final = 0x000B

ATTRIBUTE_FIXED_TPM: Final = 1 << 1
ATTRIBUTE_FIXED_PARENT: Final = 1 << 4
ATTRIBUTE_SENSITIVE_DATA_ORIGIN: Final = 1 << 5
ATTRIBUTE_RESTRICTED: Final = 1 << 16
ATTRIBUTE_DECRYPT: Final = 1 << 17
ATTRIBUTE_SIGN: Final = 1 << 18

_CODE = "MALFORMED_EVIDENCE"
_MAX_BANKS = 16
_MAX_SELECT_BYTES = 4
_MAX_DIGEST_BYTES = 64
_MAX_NAME_BYTES = 66  # TPMU_NAME: an algorithm and a digest
_MAX_EXTRA_DATA_BYTES = 66  # TPM2B_DATA holds a TPMT_HA
_MAX_RSA_BYTES = 512
_MAX_COORDINATE_BYTES = 66
_MAX_DER_BYTES = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class PcrSelection:
    """The registers of one bank that a quote covers; `bank` is a TPM_ALG_ID, `registers` ascending."""

    bank: int
    registers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attest:
    """A quote. `clock_ms` counts milliseconds the TPM was powered; `safe` is False where that clock may have gone back.

    `reset_count` counts TPM resets (boots), `restart_count` resumes since; `pcr_digest` is over the registers of
    `selections`, in their order, with the signature's hash.
    """

    encoded: bytes
    qualified_signer: bytes
    extra_data: bytes
    clock_ms: int
    reset_count: int
    restart_count: int
    safe: bool
    firmware_version: int
    selections: tuple[PcrSelection, ...]
    pcr_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """`scheme` and `hash` are TPM_ALG_IDs. ECDSA has `r` and `s`, the RSA schemes `rsa`."""

    scheme: int
    hash: int
    rsa: bytes = b""
    r: int = 0
    s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Public:
    """A key's public area. RSA keys have `modulus` and `exponent`, ECC keys `curve` and the point `x`, `y`.

    `scheme` and `scheme_hash` are what the key is bound to (ALG_NULL and 0: to nothing).
    """

    encoded: bytes
    kind: int
    name_hash: int
    attributes: int
    policy: bytes
    symmetric: int
    scheme: int
    scheme_hash: int
    modulus: int = 0
    exponent: int = 0
    curve: int = 0
    x: int = 0
    y: int = 0

    @property
    def name(self) -> bytes:
        """The key's Name (Part 1, section 16): hash algorithm, then that hash of the public area."""
        return self.name_hash.to_bytes(2, "big") + hashlib.new(HASHES[self.name_hash], self.encoded).digest()

    @property
    def pin(self) -> bytes:
        """What policies pin: SHA-256 of the public area, so key, attributes and scheme at once."""
        return hashlib.sha256(self.encoded).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The content of a `tpm2` item. `certificate` is DER, None where none came."""

    attest: Attest
    signature: Signature
    public: Public
    certificate: bytes | None


def encode_item(*, attest: bytes, signature: bytes, public: bytes, certificate: bytes | None = None) -> bytes:
    """The content of the evidence item from marshalled structures."""
    fields: dict[str, object] = {"attest": attest, "signature": signature, "ak-public": public}
    if certificate is not None:
        fields["ak-cert"] = certificate
    return cbor.encode(fields)


def parse_item(content: bytes) -> Item:
    """Parse the content of a `tpm2` item. Raises WireError."""
    reader = MapReader(cbor.decode(content, limit_bytes=LIMIT_ITEM_BYTES), "tpm2 evidence", _CODE)
    public = parse_public(reader.take("ak-public", bytes))
    signature = reader.take("signature", bytes)
    item = Item(
        attest=parse_attest(reader.take("attest", bytes)),
        signature=_parse_der(signature, public) if signature[:1] == b"\x30" else parse_signature(signature),
        public=public,
        certificate=reader.take("ak-cert", bytes) if reader.has("ak-cert") else None,
    )
    reader.finish()
    return item


def parse_attest(data: bytes) -> Attest:
    """Parse a TPMS_ATTEST that is a quote (Part 2, section 10.12.12). Raises WireError."""
    reader = _Reader(data, "TPMS_ATTEST", limit_bytes=LIMIT_STRUCTURE_BYTES)
    magic, kind = reader.integer(4, "magic"), reader.integer(2, "type")
    if magic != MAGIC:
        raise WireError(_CODE, f"TPMS_ATTEST has magic {magic:#010x}: not made inside a TPM")
    if kind != TYPE_QUOTE:
        raise WireError(_CODE, f"TPMS_ATTEST has type {kind:#06x} instead of a quote")
    attest = Attest(
        encoded=data,
        qualified_signer=reader.sized("qualifiedSigner", limit_bytes=_MAX_NAME_BYTES),
        extra_data=reader.sized("extraData", limit_bytes=_MAX_EXTRA_DATA_BYTES),
        clock_ms=reader.integer(8, "clock"),
        reset_count=reader.integer(4, "resetCount"),
        restart_count=reader.integer(4, "restartCount"),
        safe=_yes_no(reader, "safe"),
        firmware_version=reader.integer(8, "firmwareVersion"),
        selections=_selections(reader),
        pcr_digest=reader.sized("pcrDigest", limit_bytes=_MAX_DIGEST_BYTES),
    )
    reader.finish()
    return attest


def parse_signature(data: bytes) -> Signature:
    """Parse a TPMT_SIGNATURE (Part 2, section 11.3.4) by RSASSA, RSAPSS or ECDSA. Raises WireError."""
    reader = _Reader(data, "TPMT_SIGNATURE", limit_bytes=LIMIT_STRUCTURE_BYTES)
    scheme = reader.integer(2, "sigAlg")
    if scheme not in (ALG_RSASSA, ALG_RSAPSS, ALG_ECDSA):
        raise WireError(_CODE, f"TPMT_SIGNATURE by unknown scheme {scheme:#06x}")
    hash_id = _hash(reader, "hash")
    if scheme == ALG_ECDSA:
        r = int.from_bytes(reader.sized("signatureR", limit_bytes=_MAX_COORDINATE_BYTES), "big")
        s = int.from_bytes(reader.sized("signatureS", limit_bytes=_MAX_COORDINATE_BYTES), "big")
        signature = Signature(scheme=scheme, hash=hash_id, r=r, s=s)
    else:
        signature = Signature(scheme=scheme, hash=hash_id, rsa=reader.sized("sig", limit_bytes=_MAX_RSA_BYTES))
    reader.finish()
    return signature


def parse_public(data: bytes) -> Public:
    """Parse the TPMT_PUBLIC of an RSA or ECC key (Part 2, section 12.2.4), or a TPM2B_PUBLIC. Raises WireError."""
    if len(data) > 2 and int.from_bytes(data[:2], "big") == len(data) - 2:
        data = data[2:]
    reader = _Reader(data, "TPMT_PUBLIC", limit_bytes=LIMIT_STRUCTURE_BYTES)
    kind = reader.integer(2, "type")
    if kind not in (ALG_RSA, ALG_ECC):
        raise WireError(_CODE, f"TPMT_PUBLIC of unknown type {kind:#06x}")
    name_hash, attributes = _hash(reader, "nameAlg"), reader.integer(4, "objectAttributes")
    policy = reader.sized("authPolicy", limit_bytes=_MAX_DIGEST_BYTES)
    symmetric = reader.integer(2, "symmetric")
    if symmetric != ALG_NULL:
        reader.take(4, "symmetric key bits and mode")
    scheme, scheme_hash = _scheme(reader)
    modulus = exponent = curve = x = y = 0
    if kind == ALG_RSA:
        bits, exponent = reader.integer(2, "keyBits"), reader.integer(4, "exponent") or 65537
        modulus = int.from_bytes(reader.sized("modulus", limit_bytes=_MAX_RSA_BYTES), "big")
        if modulus.bit_length() != bits:
            raise WireError(_CODE, f"TPMT_PUBLIC: the modulus has not {bits} bits")
    else:
        curve, kdf = reader.integer(2, "curveID"), reader.integer(2, "kdf")
        if kdf != ALG_NULL:
            _hash(reader, "kdf hash")
        x = int.from_bytes(reader.sized("x", limit_bytes=_MAX_COORDINATE_BYTES), "big")
        y = int.from_bytes(reader.sized("y", limit_bytes=_MAX_COORDINATE_BYTES), "big")
    reader.finish()
    return Public(
        encoded=data,
        kind=kind,
        name_hash=name_hash,
        attributes=attributes,
        policy=policy,
        symmetric=symmetric,
        scheme=scheme,
        scheme_hash=scheme_hash,
        modulus=modulus,
        exponent=exponent,
        curve=curve,
        x=x,
        y=y,
    )


def _parse_der(data: bytes, public: Public) -> Signature:
    """An ECDSA signature as SEQUENCE of two INTEGERs (RFC 3279), with the hash its key is bound to."""
    if not 2 <= len(data) <= _MAX_DER_BYTES or data[1] != len(data) - 2:
        raise WireError(_CODE, "the signature in DER has a wrong length")
    reader = _Reader(data[2:], "signature in DER", limit_bytes=_MAX_DER_BYTES)
    r, s = (_der_integer(reader) for _ in range(2))
    reader.finish()
    return Signature(scheme=ALG_ECDSA, hash=public.scheme_hash or SHA256, r=r, s=s)


def _der_integer(reader: _Reader) -> int:
    if reader.integer(1, "integer") != 2:
        raise WireError(_CODE, "the signature in DER has no two integers")
    content = reader.take(reader.integer(1, "length"), "integer")
    if not content or content[0] & 0x80 or (content[0] == 0 and content[1:2] < b"\x80"):
        raise WireError(_CODE, "an integer of the signature is negative or not in shortest form")
    return int.from_bytes(content, "big")


def pcr_digest(hash_id: int, selections: Sequence[PcrSelection], values: Mapping[tuple[int, int], bytes]) -> bytes:
    """The digest a quote has over registers (Part 3, TPM2_Quote): `values` by (bank, register). Raises KeyError."""
    digest = hashlib.new(HASHES[hash_id])
    for selection in selections:
        for register in selection.registers:
            digest.update(values[selection.bank, register])
    return digest.digest()


class _Reader:
    """Takes fields from the front of one structure; `where` names it in errors. Raises WireError."""

    __slots__ = ("_at", "_data", "_where")

    def __init__(self, data: bytes, where: str, *, limit_bytes: int) -> None:
        if len(data) > limit_bytes:
            raise WireError(_CODE, f"{where} is larger than {limit_bytes} bytes")
        self._data, self._at, self._where = data, 0, where

    def take(self, size: int, what: str) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise WireError(_CODE, f"{self._where} ends within {what}")
        piece, self._at = self._data[self._at : end], end
        return piece

    def integer(self, size: int, what: str) -> int:
        return int.from_bytes(self.take(size, what), "big")

    def sized(self, what: str, *, limit_bytes: int) -> bytes:
        """A TPM2B: two bytes of length, then that many bytes."""
        size = self.integer(2, what)
        if size > limit_bytes:
            raise WireError(_CODE, f"{self._where}: {what} has {size} bytes, more than {limit_bytes}")
        return self.take(size, what)

    def finish(self) -> None:
        left = len(self._data) - self._at
        if left:
            raise WireError(_CODE, f"{left} bytes after {self._where}")


def _selections(reader: _Reader) -> tuple[PcrSelection, ...]:
    """TPML_PCR_SELECTION (Part 2, section 10.9.7)."""
    count = reader.integer(4, "number of PCR banks")
    if count > _MAX_BANKS:
        raise WireError(_CODE, f"TPMS_ATTEST selects {count} PCR banks")
    found: list[PcrSelection] = []
    for _ in range(count):
        bank = reader.integer(2, "PCR bank")
        size = reader.integer(1, "size of the PCR selection")
        if size > _MAX_SELECT_BYTES:
            raise WireError(_CODE, f"TPMS_ATTEST has a PCR selection of {size} bytes")
        bits = int.from_bytes(reader.take(size, "PCR selection"), "little")
        registers = tuple(register for register in range(8 * size) if bits >> register & 1)
        if any(other.bank == bank for other in found):
            raise WireError(_CODE, f"TPMS_ATTEST selects PCR bank {bank:#06x} twice")
        found.append(PcrSelection(bank=bank, registers=registers))
    return tuple(found)


def _scheme(reader: _Reader) -> tuple[int, int]:
    """The scheme a key is bound to (TPMT_RSA_SCHEME, TPMT_ECC_SCHEME) and its hash."""
    scheme = reader.integer(2, "scheme")
    if scheme in (ALG_NULL, ALG_RSAES):
        return scheme, 0
    hash_id = _hash(reader, "scheme hash")
    if scheme == ALG_ECDAA:
        reader.take(2, "ECDAA count")
    return scheme, hash_id


def _hash(reader: _Reader, what: str) -> int:
    hash_id = reader.integer(2, what)
    if hash_id not in HASHES:
        raise WireError(_CODE, f"{what} is the unknown hash {hash_id:#06x}")
    return hash_id


def _yes_no(reader: _Reader, what: str) -> bool:
    value = reader.integer(1, what)
    if value > 1:
        raise WireError(_CODE, f"{what} is neither 0 nor 1")
    return value == 1
