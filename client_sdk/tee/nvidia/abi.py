"""Layout of NVIDIA device evidence: SPDM 1.1 GET_MEASUREMENTS and its answer (DMTF DSP0274 1.1, sections 10.11).

The wire item is dCBOR {"request": bstr .size 37, "response": bstr, "chain": [+ bstr]}: request and response as the
device exchanged them, `chain` the DER certificates of the device, leaf first, the root with or without. The opaque
fields inside the response are NVIDIA's own (nvtrust and attestation-sdk, both Apache-2.0/BSD, have the tables).
Pure bytes, nothing verified.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from client_sdk.wire import cbor
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader

KIND = "nvidia"
LIMIT_ITEM_BYTES = 64 << 10
NONCE_BYTES = 32
REQUEST_BYTES = 37
SIGNATURE_BYTES = 96
DIGEST_BYTES = 48
MAX_CERTIFICATES = 8

_CODE = "MALFORMED_EVIDENCE"
_SPDM_1_1 = 0x11
_SPDM_OTHERS = frozenset({0x10, 0x12, 0x13, 0x14})
_GET_MEASUREMENTS, _MEASUREMENTS = 0xE0, 0x60
_DMTF = 1
_HEADER_BYTES = 8
_MAGIC_TYPED_OPAQUE = b"NVDAOD"
_TYPED_OPAQUE_HEADER = 12
_MAX_OPAQUE_VERSION = 1
_TEXT = re.compile(rb"[\x20-\x7e]{1,64}")
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----")

DRIVER_VERSION, VBIOS_VERSION, NVDEC0_STATUS = 3, 6, 11
BOARD_ID, CHIP_SKU, PROJECT, PROJECT_SKU = 14, 15, 17, 18
FWID, PROTECTED_PCIE, SWITCH_PDI, OPAQUE_VERSION, FEATURE_FLAG = 20, 21, 22, 34, 36
MODES: Mapping[int, str] = MappingProxyType({0: "spt", 1: "mpt", 2: "ppcie"})
ENABLED, DISABLED = 0xAA, 0x55


class UnsupportedReport(Exception):
    """A report of a version this code does not know: neither a yes nor a no. The message names the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaItem:
    """`request` and `response` are SPDM messages, `chain` DER certificates, leaf first."""

    request: bytes
    response: bytes
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A parsed exchange. `nonce` is the requester's (32 bytes), `signed` the bytes under `signature` (raw r || s).

    `measurements` maps SPDM block indices (from 1) to values, `opaque` field numbers to contents.
    """

    nonce: bytes
    device_nonce: bytes
    measurements: Mapping[int, bytes]
    opaque: Mapping[int, bytes]
    signed: bytes
    signature: bytes

    @property
    def driver_version(self) -> str | None:
        """As the device was told by the driver, such as "580.159.03"; None for switches. Raises WireError."""
        return _text(self.opaque, DRIVER_VERSION, "driver version")

    @property
    def vbios_version(self) -> str | None:
        """Such as "96.00.5E.00.01". GPUs pack it into 8 bytes, switches have it as text. Raises WireError."""
        value = self.opaque.get(VBIOS_VERSION)
        if value is not None and len(value) == 8:
            # Little-endian: one word that is the first four parts, then a byte that is the last one.
            parts = (*value[3::-1], value[4])
            return ".".join(f"{part:02X}" for part in parts)
        return _text(self.opaque, VBIOS_VERSION, "VBIOS version")

    @property
    def nvdec0_status(self) -> int | None:
        value = self.opaque.get(NVDEC0_STATUS)
        return value[0] if value else None

    @property
    def protected_pcie(self) -> bool | None:
        """Whether the device is one of a protected PCIe system; None where it does not say. Raises WireError."""
        value = self.opaque.get(PROTECTED_PCIE)
        if value is None:
            return None
        if value not in (bytes([ENABLED]), bytes([DISABLED])):
            raise WireError(_CODE, "the protected PCIe status is neither on nor off")
        return value[0] == ENABLED

    @property
    def mode(self) -> str | None:
        """Feature flag: "spt", "mpt", "ppcie"; None where it does not say. Raises WireError, UnsupportedReport."""
        value = self.opaque.get(FEATURE_FLAG)
        if value is None:
            return None
        number = int.from_bytes(value, "little")
        if number not in MODES:
            raise UnsupportedReport(f"unsupported feature flag {number}")
        return MODES[number]

    @property
    def switch_ids(self) -> tuple[bytes, ...]:
        """Ids of 8 bytes, each once: the switches that a GPU's links lead to, or a switch's own. Raises WireError.

        A link that leads nowhere has zeros or ones for an id and does not count.
        """
        value = self.opaque.get(SWITCH_PDI, b"")
        if len(value) % 8:
            raise WireError(_CODE, "the switch ids are not of 8 bytes each")
        found = dict.fromkeys(value[at : at + 8] for at in range(0, len(value), 8))
        return tuple(entry for entry in found if set(entry) not in ({0}, {0xFF}))

    def text(self, field: int, what: str) -> str | None:
        """An opaque field that holds text with NULs behind. Raises WireError."""
        return _text(self.opaque, field, what)


def encode_item(item: NvidiaItem) -> bytes:
    """Content of the evidence item."""
    return cbor.encode({"request": item.request, "response": item.response, "chain": list(item.chain)})


def parse_item(content: bytes) -> NvidiaItem:
    """Parse the content of an `nvidia` item. Raises WireError."""
    reader = MapReader(cbor.decode(content, limit_bytes=LIMIT_ITEM_BYTES), "NVIDIA evidence", _CODE)
    request, response = reader.bstr("request", REQUEST_BYTES), reader.take("response", bytes)
    chain = reader.take("chain", list)
    reader.finish()
    if not 1 <= len(chain) <= MAX_CERTIFICATES or not all(type(entry) is bytes for entry in chain):
        raise WireError(_CODE, f"the chain is not 1 to {MAX_CERTIFICATES} certificates")
    return NvidiaItem(request=request, response=response, chain=tuple(chain))


def split_report(data: bytes) -> tuple[bytes, bytes]:
    """(request, response) of a report as NVML returns it: the one behind the other. Raises WireError."""
    if data[1:2] == bytes([_MEASUREMENTS]):
        raise WireError(_CODE, "a response alone; the request it answers belongs to what is signed")
    if len(data) < REQUEST_BYTES + _HEADER_BYTES or len(data) > LIMIT_ITEM_BYTES:
        raise WireError(_CODE, f"a report of {len(data)} bytes")
    return data[:REQUEST_BYTES], data[REQUEST_BYTES:]


def pem_to_der(data: bytes) -> tuple[bytes, ...]:
    """DER certificates of the PEM text that NVML returns, in its order; NULs behind it do not count.

    Raises WireError.
    """
    found = _PEM.findall(data)
    if not 1 <= len(found) <= MAX_CERTIFICATES or len(found) != data.count(b"-----BEGIN"):
        raise WireError(_CODE, f"the chain is not 1 to {MAX_CERTIFICATES} PEM certificates")
    try:
        return tuple(base64.b64decode(b"".join(body.split()), validate=True) for body in found)
    except (binascii.Error, ValueError):
        raise WireError(_CODE, "PEM with bad base64") from None


def parse_report(request: bytes, response: bytes) -> Report:
    """Parse an exchange. Raises WireError, UnsupportedReport for another version of SPDM or of the opaque data."""
    nonce = _parse_request(request)
    if len(response) < _HEADER_BYTES or len(response) > LIMIT_ITEM_BYTES:
        raise WireError(_CODE, f"a response of {len(response)} bytes")
    _check_version(response[0], "response")
    if response[1] != _MEASUREMENTS:
        raise WireError(_CODE, f"the response has code {response[1]:#04x}, not MEASUREMENTS")
    blocks, record_end = response[4], _HEADER_BYTES + int.from_bytes(response[5:8], "little")
    tail = record_end + NONCE_BYTES
    if tail + 2 > len(response):
        raise WireError(_CODE, "the measurement record exceeds the response")
    opaque_end = tail + 2 + int.from_bytes(response[tail : tail + 2], "little")
    if opaque_end + SIGNATURE_BYTES != len(response):
        raise WireError(_CODE, "the lengths inside the response do not add up to it")
    return Report(
        nonce=nonce,
        device_nonce=response[record_end:tail],
        measurements=MappingProxyType(_parse_blocks(response[_HEADER_BYTES:record_end], blocks)),
        opaque=MappingProxyType(_parse_opaque(response[tail + 2 : opaque_end])),
        signed=request + response[:opaque_end],
        signature=response[opaque_end:],
    )


def _parse_request(request: bytes) -> bytes:
    if len(request) != REQUEST_BYTES:
        raise WireError(_CODE, f"the request has {len(request)} bytes instead of {REQUEST_BYTES}")
    _check_version(request[0], "request")
    if request[1] != _GET_MEASUREMENTS or not request[2] & 1:
        raise WireError(_CODE, "the request does not ask for signed measurements")
    if request[3] != 0xFF:
        raise WireError(_CODE, "the request does not ask for all measurements")
    return request[4:36]


def _check_version(version: int, what: str) -> None:
    if version in _SPDM_OTHERS:
        raise UnsupportedReport(f"unsupported version {version >> 4}.{version & 15} of SPDM in the {what}")
    if version != _SPDM_1_1:
        raise WireError(_CODE, f"the {what} is not SPDM")


def _parse_blocks(record: bytes, count: int) -> dict[int, bytes]:
    """Measurement blocks: index, specification, u16 size, then DMTF type, u16 size, value (DSP0274 table 45)."""
    found: dict[int, bytes] = {}
    offset = 0
    for _ in range(count):
        if offset + 7 > len(record):
            raise WireError(_CODE, "truncated measurement block")
        index, specification, size, _, value_size = struct.unpack_from("<BBHBH", record, offset)
        end = offset + 4 + size
        if specification != _DMTF or size != value_size + 3 or end > len(record):
            raise WireError(_CODE, f"malformed measurement block {index}")
        if index in found:
            raise WireError(_CODE, f"measurement block {index} is there twice")
        found[index] = record[offset + 7 : end]
        offset = end
    if not found or offset != len(record):
        raise WireError(_CODE, "the measurement record is empty or has bytes behind its blocks")
    return found


def _parse_opaque(data: bytes) -> dict[int, bytes]:
    """Fields of type u16, length u16, value; with the header "NVDAOD" a u16 kind of value stands between the two."""
    typed = data.startswith(_MAGIC_TYPED_OPAQUE)
    offset = 0
    if typed:
        if len(data) < _TYPED_OPAQUE_HEADER:
            raise WireError(_CODE, "truncated opaque data")
        profile, version = struct.unpack_from("<HB", data, len(_MAGIC_TYPED_OPAQUE))
        if profile != 0:
            raise UnsupportedReport(f"unsupported profile {profile} of opaque data")
        _check_opaque_version(version)
        offset = _TYPED_OPAQUE_HEADER
    head = 6 if typed else 4
    found: dict[int, bytes] = {}
    while offset < len(data):
        if offset + head > len(data):
            raise WireError(_CODE, "truncated opaque data")
        field, (size,) = struct.unpack_from("<H", data, offset)[0], struct.unpack_from("<H", data, offset + head - 2)
        end = offset + head + size
        if end > len(data) or field in found:
            raise WireError(_CODE, f"opaque field {field} is truncated or there twice")
        found[field] = data[offset + head : end]
        offset = end
    if not typed and OPAQUE_VERSION in found:
        _check_opaque_version(int.from_bytes(found[OPAQUE_VERSION], "little"))
    return found


def _check_opaque_version(version: int) -> None:
    if version > _MAX_OPAQUE_VERSION:
        raise UnsupportedReport(f"unsupported version {version} of opaque data")


def _text(opaque: Mapping[int, bytes], field: int, what: str) -> str | None:
    value = opaque.get(field)
    if value is None:
        return None
    text = value.rstrip(b"\x00")
    if _TEXT.fullmatch(text) is None:
        raise WireError(_CODE, f"the {what} is not short text")
    return text.decode("ascii")
