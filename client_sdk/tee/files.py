"""Evidence as people have it in files, made into what the families read.

A file that already is the content of an evidence item passes as it is. Some families come in several files: the parts
of a TPM quote and of an Azure report lie beside it, as does the chain of a GPU; they are recognised by content.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client_sdk.tee import der
from client_sdk.tee.azure import abi as azure
from client_sdk.tee.certificate import formats
from client_sdk.tee.endorsements import merge, recognise
from client_sdk.tee.evidence import Endorsements
from client_sdk.tee.nvidia import foreign as nvidia
from client_sdk.tee.tpm2 import abi as tpm2
from client_sdk.wire.errors import WireError

LIMIT_EVIDENCE_BYTES = 1 << 20
FAMILY_NAMES = {
    "snp": "sev-snp",
    "azure": "azure-snp-vtpm",
    "tdx": "tdx",
    "sgx": "sgx",
    "nitro": "nitro",
    "tpm2": "tpm2",
    "nvidia": "nvidia",
}
_CODE = "MALFORMED_EVIDENCE"
_TPM_GENERATED = tpm2.MAGIC.to_bytes(4, "big")
_TPM_SIGNATURES = tuple(scheme.to_bytes(2, "big") for scheme in (tpm2.ALG_ECDSA, tpm2.ALG_RSASSA, tpm2.ALG_RSAPSS))
_TPM_KEY_TYPES = tuple(kind.to_bytes(2, "big") for kind in (tpm2.ALG_RSA, tpm2.ALG_ECC))
_SNP_REPORT_BYTES = 1184
_HCL_MAGIC = b"HCLA"
_HCL_DATA_AT = 32 + _SNP_REPORT_BYTES
_SPKI_P256 = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")
# TPMT_PUBLIC of the template for attestation keys (ECC P-256, ECDSA with SHA-256, restricted signing; TCG "TPM 2.0
# Keys for Device Identity and Attestation", 7.3), up to the coordinates: a PEM file says no more than those.
_AK_P256 = bytes.fromhex("0023000b0005007200000010" + "0018000b" + "0003" + "0010")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignEvidence:
    """`contents` are evidence items' contents, one for each device; `endorsements` are all the files beside them."""

    contents: tuple[bytes, ...]
    endorsements: Endorsements


def read_evidence(family: str, data: bytes, beside: Sequence[bytes]) -> ForeignEvidence:
    """`family` by its name on the command line, `data` the evidence file, `beside` the endorsement files.

    Raises WireError; UndecidedError where a part is missing or of an unknown version.
    """
    if not data or len(data) > LIMIT_EVIDENCE_BYTES:
        raise WireError(_CODE, f"the evidence is empty or larger than {LIMIT_EVIDENCE_BYTES} bytes")
    rest = list(beside)
    contents: tuple[bytes, ...] = (data,)
    if family == "tpm2" and data.startswith(_TPM_GENERATED):
        contents = (_tpm2(data, rest),)
    elif family == "azure" and (data.startswith(_HCL_MAGIC) or len(data) == _SNP_REPORT_BYTES):
        contents = (_azure(data, rest),)
    elif family == "nvidia":
        contents = nvidia.read_items(data, rest)
    elif family in ("tdx", "sgx"):
        contents = (_trimmed(data),)
    return ForeignEvidence(contents=contents, endorsements=merge(recognise(file) for file in rest))


def _trimmed(quote: bytes) -> bytes:
    """The quote without the padding that carriers leave behind it; the family judges one that has another form."""
    try:
        return formats.trim_quote(quote)
    except WireError:
        return quote


def _tpm2(attest: bytes, rest: list[bytes]) -> bytes:
    """TPMS_ATTEST with its signature (TPMT_SIGNATURE, or DER or RSA bytes alone) and key (TPM2B or TPMT, or PEM)."""
    key = _take(rest, lambda file: _tpm_public(file) is not None)
    signed = _take(rest, lambda file: _tpm_signature(file) is not None)
    public = None if key is None else _tpm_public(key)
    signature = None if signed is None else _tpm_signature(signed)
    if public is None or signature is None:
        raise WireError(_CODE, "a TPM quote needs its signature and its key's public part as --endorsement files")
    return tpm2.encode_item(attest=attest, signature=signature, public=public)


def _tpm_public(file: bytes) -> bytes | None:
    if file[:2] in _TPM_KEY_TYPES:
        return file
    if file[2:4] in _TPM_KEY_TYPES and int.from_bytes(file[:2], "big") == len(file) - 2:
        return file[2:]
    spki = _pem_public_key(file)
    if spki is None:
        return None
    if not spki.startswith(_SPKI_P256) or len(spki) != len(_SPKI_P256) + 64:
        raise WireError(_CODE, "of PEM keys only P-256 is read as a TPM's key; give the TPM2B_PUBLIC")
    point = spki[len(_SPKI_P256) :]
    return _AK_P256 + b"\x00\x20" + point[:32] + b"\x00\x20" + point[32:]


def _pem_public_key(file: bytes) -> bytes | None:
    body = file.strip()
    begin, end = b"-----BEGIN PUBLIC KEY-----", b"-----END PUBLIC KEY-----"
    if not body.startswith(begin) or not body.endswith(end):
        return None
    text = b"".join(body[len(begin) : -len(end)].split()).decode("ascii", "replace")
    return formats.base64url(text.replace("+", "-").replace("/", "_"))


def _tpm_signature(file: bytes) -> bytes | None:
    if file[:2] in _TPM_SIGNATURES:
        return file
    if file[:1] == b"\x30" and len(file) <= 72:
        r, s = (element.expect(der.INTEGER, "signature").content for element in _two(der.read_one(file)))
        return (
            b"\x00\x18\x00\x0b"
            + _sized(r.lstrip(b"\x00").rjust(32, b"\x00"))
            + _sized(s.lstrip(b"\x00").rjust(32, b"\x00"))
        )
    if len(file) in (256, 384, 512):
        return b"\x00\x14\x00\x0b" + _sized(file)
    return None


def _two(element: der.Element) -> tuple[der.Element, der.Element]:
    parts = element.children(limit=2)
    if len(parts) != 2:
        raise WireError(_CODE, "an ECDSA signature has two numbers")
    return parts[0], parts[1]


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def _azure(data: bytes, rest: list[bytes]) -> bytes:
    """A paravisor's report, or the SNP report cut out of it, with the runtime JSON and the virtual TPM's quote beside.

    What frames the two reports is unsigned; the SNP report covers the JSON by its hash.
    """
    attest, runtime = _take(rest, _is_quote), _take(rest, _is_runtime)
    signature = _take(rest, lambda file: _tpm_signature(file) is not None)
    if attest is None or signature is None:
        raise WireError(_CODE, "Azure evidence needs the virtual TPM's quote and signature as --endorsement files")
    if data.startswith(_HCL_MAGIC):
        size = int.from_bytes(data[_HCL_DATA_AT + 16 : _HCL_DATA_AT + 20], "little")
        runtime = runtime or data[_HCL_DATA_AT + 20 : _HCL_DATA_AT + 20 + size]
    elif runtime is not None:
        header = struct.pack("<4sIIIIIII", _HCL_MAGIC, 1, len(data), 2, 0, 0, 0, 0)
        data = header + data + struct.pack("<IIIII", 20 + len(runtime), 1, 2, 1, len(runtime)) + runtime
    else:
        raise WireError(_CODE, "Azure evidence needs the paravisor's runtime JSON as an --endorsement file")
    return azure.encode_item(hcl_report=data, runtime_json=runtime, attest=attest, signature=signature)


def _is_quote(file: bytes) -> bool:
    return file.startswith(_TPM_GENERATED)


def _is_runtime(file: bytes) -> bool:
    return file.lstrip()[:1] == b"{" and b'"HCLAkPub"' in file


def _take(rest: list[bytes], fits: Callable[[bytes], bool]) -> bytes | None:
    """The first file that fits, taken out of `rest`."""
    for file in rest:
        if fits(file):
            rest.remove(file)
            return file
    return None
