"""Evidence of NVIDIA devices in files that others wrote, made into wire items.

    report.bin      request || response as NVML returns them; the chain (PEM or DER) lies beside it
    evidence.json   [{"arch", "nonce", "evidence": base64, "certificate": base64 of PEM, ...}, ...] (attestation-sdk)
    evidence.cmw    {"__cmwc_t": ..., "gpu_0": {"evidence": [type, base64url], "certificate": [type, base64url]}, ...}

What a file says about a report beside it (nonce, architecture, versions) proves nothing; where it differs from the
report the file is refused. Other words in it are neither read nor shown.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping

from client_sdk.errors import UndecidedError
from client_sdk.tee import x509
from client_sdk.tee.nvidia import abi, product
from client_sdk.wire.errors import WireError

_CODE = "MALFORMED_EVIDENCE"
_LIMIT_BYTES = 1 << 20
_MAX_DEVICES = 64
_MAX_STRUCTURE = 4096  # commas and opening brackets: a megabyte of empty objects is not worth reading
_STATED = frozenset({"arch", "nonce", "driver_version", "vbios_version"})
_SPDM_MAJOR = 0x10
_COLLECTION = "__cmwc_t"
_ITEM = "tag:nvidia.com,2026:evidence-item/v1"
_TRANSCRIPT = "application/vnd.nvidia.spdm-measurement-transcript"
_CHAIN = "application/vnd.nvidia.pem-cert-chain"
_NONCE = "application/octet-stream"


def read_items(data: bytes, beside: list[bytes]) -> tuple[bytes, ...]:
    """The `nvidia` wire items of the devices in a file of any form above; a wire item passes as it is.

    A chain that a raw report needs is taken out of `beside`. Raises WireError; UndecidedError for an unknown version,
    and where that chain is missing.
    """
    if not data or len(data) > _LIMIT_BYTES:
        raise WireError(_CODE, f"evidence that is empty or larger than {_LIMIT_BYTES} bytes")
    if data.lstrip()[:1] in (b"[", b"{"):
        return _read_json(data)
    if data[0] & 0xF0 == _SPDM_MAJOR:
        return (_item(data, _take_chain(beside), {}),)
    return (data,)


def _take_chain(beside: list[bytes]) -> bytes:
    for file in beside:
        if file.lstrip()[:1] not in (b"{", b"[", b"<") and _holds_leaf(file):
            beside.remove(file)
            return file
    raise UndecidedError("ENDORSEMENTS_MISSING", "a report needs its device's certificate chain beside it")


def _holds_leaf(file: bytes) -> bool:
    try:
        return not all(certificate.is_ca for certificate in x509.parse_certificates(file))
    except WireError:
        return False


def _read_json(data: bytes) -> tuple[bytes, ...]:
    if sum(data.count(mark) for mark in (b"{", b"[", b",")) > _MAX_STRUCTURE:
        raise WireError(_CODE, "JSON with more parts than devices could need")
    try:
        document = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise WireError(_CODE, "not JSON, or JSON with a name twice") from None
    if isinstance(document, dict) and _COLLECTION in document:
        entries = [value for value in document.values() if isinstance(value, dict)]
        read = _read_cmw
    else:
        entries = document if isinstance(document, list) else [document]
        read = _read_entry
    if not 1 <= len(entries) <= _MAX_DEVICES or not all(isinstance(entry, dict) for entry in entries):
        raise WireError(_CODE, f"JSON that is not evidence of 1 to {_MAX_DEVICES} devices")
    return tuple(read(entry) for entry in entries)


def _read_entry(entry: Mapping[str, object]) -> bytes:
    stated = {key: _text(entry, key) for key in sorted(_STATED & entry.keys())}
    return _item(_base64(_text(entry, "evidence")), _base64(_text(entry, "certificate")), stated)


def _read_cmw(entry: Mapping[str, object]) -> bytes:
    if entry.get(_COLLECTION) != _ITEM:
        raise UndecidedError("UNSUPPORTED_VERSION", "unsupported version of evidence items in a collection")
    stated = {"nonce": _record(entry, "nonce", _NONCE).hex()} if "nonce" in entry else {}
    return _item(_record(entry, "evidence", _TRANSCRIPT), _record(entry, "certificate", _CHAIN), stated)


def _item(report: bytes, chain: bytes, stated: Mapping[str, str]) -> bytes:
    request, response = abi.split_report(report)
    certificates = x509.parse_certificates(chain.rstrip(b"\x00"))
    try:
        parsed = abi.parse_report(request, response)
    except abi.UnsupportedReport as error:
        raise UndecidedError("UNSUPPORTED_VERSION", str(error)) from None
    for key, value in stated.items():
        if value.lower() != _reported(key, parsed, certificates):
            raise WireError(_CODE, f"{key} beside the report is not the report's own")
    encoded = tuple(certificate.der for certificate in certificates)
    return abi.encode_item(abi.NvidiaItem(request=request, response=response, chain=encoded))


def _reported(key: str, report: abi.Report, chain: tuple[x509.Certificate, ...]) -> str:
    if key == "nonce":
        return report.nonce.hex()
    if key == "arch":
        return product.of(chain[min(1, len(chain) - 1)]).architecture
    version = report.driver_version if key == "driver_version" else report.vbios_version
    return (version or "").lower()


def _record(entry: Mapping[str, object], key: str, kind: str) -> bytes:
    record = entry.get(key)
    if not isinstance(record, list) or len(record) != 2 or record[0] != kind or type(record[1]) is not str:
        raise WireError(_CODE, f"{key} is not a record of {kind}")
    return _base64(record[1].replace("-", "+").replace("_", "/"))


def _text(entry: Mapping[str, object], key: str) -> str:
    value = entry.get(key)
    if type(value) is not str:
        raise WireError(_CODE, f"{key} is missing or not text")
    return value


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise WireError(_CODE, "bad base64") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found
