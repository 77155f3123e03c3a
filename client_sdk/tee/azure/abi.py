"""Layout of Azure's evidence: an SNP report inside the paravisor's report, and a quote of the virtual TPM.

The `azure-snp-vtpm` item is dCBOR {"hcl-report", "runtime-json", "attest", "signature"}: the bytes of NV index
0x01400001, the JSON in them, TPMS_ATTEST, and the quote's signature (TPMT_SIGNATURE, or the RSASSA bytes alone as
Azure's own tools give them). Layout of the paravisor's report: OpenHCL, attestation header and IGVM_REQUEST_DATA.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from dataclasses import dataclass
from typing import Final

from client_sdk.tee.snp import abi as snp
from client_sdk.tee.tpm2 import abi as tpm2
from client_sdk.wire import cbor
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader

KIND: Final = "azure-snp-vtpm"
CODE: Final = "MALFORMED_EVIDENCE"
LIMIT_ITEM_BYTES: Final = 32 << 10
LIMIT_RUNTIME_BYTES: Final = 8 << 10

_MAGIC = b"HCLA"
_HEADER_BYTES = 32
_DATA_AT = _HEADER_BYTES + snp.REPORT_BYTES
_DATA = struct.Struct("<IIIII")
_TYPE_SNP, _HASH_SHA256 = 2, 1
_AK_ID = "HCLAkPub"
_RSA_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What the paravisor states and its SNP report covers. `modulus` and `exponent` are the virtual TPM's quoting key.

    `vm_id` is Azure's name of the machine, "" where it is missing; flags are None where they are missing.
    """

    encoded: bytes
    modulus: int
    exponent: int
    secure_boot: bool | None
    console: bool | None
    vm_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The content of an `azure-snp-vtpm` item. `signature` is the RSASSA-SHA-256 signature over `attest.encoded`."""

    report: snp.Report
    runtime: Runtime
    attest: tpm2.Attest
    signature: bytes


def encode_item(*, hcl_report: bytes, runtime_json: bytes, attest: bytes, signature: bytes) -> bytes:
    """The content of the evidence item."""
    return cbor.encode(
        {"hcl-report": hcl_report, "runtime-json": runtime_json, "attest": attest, "signature": signature}
    )


def parse_item(content: bytes) -> Item:
    """Parse the content of an `azure-snp-vtpm` item. Raises WireError."""
    reader = MapReader(cbor.decode(content, limit_bytes=LIMIT_ITEM_BYTES), "azure evidence", CODE)
    runtime = reader.take("runtime-json", bytes)
    item = Item(
        report=_parse_hcl(reader.take("hcl-report", bytes), runtime),
        runtime=parse_runtime(runtime),
        attest=tpm2.parse_attest(reader.take("attest", bytes)),
        signature=_parse_signature(reader.take("signature", bytes)),
    )
    reader.finish()
    return item


def _parse_hcl(data: bytes, runtime: bytes) -> snp.Report:
    """The SNP report inside; the JSON inside must be the one beside. Raises WireError."""
    if len(data) < _DATA_AT + _DATA.size or data[:4] != _MAGIC:
        raise WireError(CODE, "not a report of Azure's paravisor")
    _, _, report_type, hash_type, size = _DATA.unpack_from(data, _DATA_AT)
    if report_type != _TYPE_SNP or hash_type != _HASH_SHA256:
        raise WireError(CODE, f"the paravisor's report has type {report_type} and hash {hash_type} instead of 2 and 1")
    start = _DATA_AT + _DATA.size
    if data[start : start + size] != runtime or any(data[start + size :]):
        raise WireError(CODE, "the paravisor's report holds another runtime JSON")
    return snp.parse_report(data[_HEADER_BYTES:_DATA_AT])


def parse_runtime(data: bytes) -> Runtime:
    """Parse the paravisor's JSON. Raises WireError."""
    if len(data) > LIMIT_RUNTIME_BYTES:
        raise WireError(CODE, f"the runtime JSON is larger than {LIMIT_RUNTIME_BYTES} bytes")
    try:
        document = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        raise WireError(CODE, "the runtime JSON is not JSON") from None
    keys = document.get("keys") if type(document) is dict else None
    found = [key for key in keys if type(key) is dict and key.get("kid") == _AK_ID] if type(keys) is list else []
    if len(found) != 1 or found[0].get("kty") != "RSA":
        raise WireError(CODE, f"the runtime JSON has not one RSA key {_AK_ID}")
    configuration = document.get("vm-configuration")
    if type(configuration) is not dict:
        configuration = {}
    vm_id = configuration.get("vmUniqueId")
    return Runtime(
        encoded=data,
        modulus=_number(found[0].get("n")),
        exponent=_number(found[0].get("e")),
        secure_boot=_flag(configuration.get("secure-boot")),
        console=_flag(configuration.get("console-enabled")),
        vm_id=vm_id if type(vm_id) is str and vm_id.isprintable() and len(vm_id) <= 64 else "",
    )


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def _number(value: object) -> int:
    """A base64url number (RFC 7518 section 2), 512 bytes at most."""
    if type(value) is not str or not 1 <= len(value) <= 684:
        raise WireError(CODE, "the quoting key lacks a number")
    try:
        return int.from_bytes(base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True), "big")
    except (binascii.Error, ValueError):
        raise WireError(CODE, "a number of the quoting key is not base64url") from None


def _flag(value: object) -> bool | None:
    return value if type(value) is bool else None


def _parse_signature(data: bytes) -> bytes:
    if len(data) == _RSA_BYTES:
        return data
    signature = tpm2.parse_signature(data)
    if signature.scheme != tpm2.ALG_RSASSA or signature.hash != tpm2.SHA256:
        raise WireError(CODE, "the quote is not signed with RSASSA and SHA-256")
    return signature.rsa
