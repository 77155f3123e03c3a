"""Layout of a TDX quote, version 4 and 5 (Intel, "TDX DCAP Quoting Library API", appendix A.3). Pure bytes.

    4: header 48 | TD report 584                             | u32 n | signature section n | padding
    5: header 48 | u16 body type | u32 body size | TD report | u32 n | signature section n | padding

Body type 2 is the TD report 1.0 of version 4, type 3 the one of TDX 1.5 (648 bytes: + tee_tcb_svn2, mr_service_td).
"""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk.tee.dcap import abi as dcap
from client_sdk.wire.errors import WireError

KIND = "tdx"
VERSIONS = (4, 5)
BODY_TD_10, BODY_TD_15 = 2, 3
_BODY_BYTES = {BODY_TD_10: 584, BODY_TD_15: 648}
MR_BYTES = 48

DEBUG_BITS = 0xFF
"""TD_ATTRIBUTES.TUD: every bit of it lets the host look into the domain (DEBUG, profiling)."""
SEPT_VE_DISABLE = 1 << 28
MIGRATABLE = 1 << 29


@dataclass(frozen=True, slots=True, kw_only=True)
class TdReport:
    """What the TDX module says of a trust domain. Measurements are 48 bytes, `td_attributes` and `xfam` 8 as they
    stand (little-endian), `report_data` 64. `tee_tcb_svn2` (16) and `mr_service_td` (48) are None before TDX 1.5.
    """

    tee_tcb_svn: bytes
    mr_seam: bytes
    mr_signer_seam: bytes
    seam_attributes: bytes
    td_attributes: bytes
    xfam: bytes
    mr_td: bytes
    mr_config_id: bytes
    mr_owner: bytes
    mr_owner_config: bytes
    rtmrs: tuple[bytes, bytes, bytes, bytes]
    report_data: bytes
    tee_tcb_svn2: bytes | None
    mr_service_td: bytes | None

    @property
    def attribute_bits(self) -> int:
        return int.from_bytes(self.td_attributes, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class TdxQuote:
    """`trimmed` is the quote without padding, `signed` the part of it under the attestation key's signature."""

    header: dcap.Header
    body_type: int
    report: TdReport
    section: dcap.SignatureSection
    signed: bytes
    trimmed: bytes


def parse_quote(data: bytes) -> TdxQuote:
    """Parse a quote, padding behind it allowed. Raises WireError MALFORMED_EVIDENCE."""
    header = dcap.parse_header(data)
    dcap.check_header(header, VERSIONS, dcap.TEE_TDX)
    reader = dcap.Reader(data, "TDX quote")
    reader.take(dcap.HEADER_BYTES)
    body_type, before = BODY_TD_10, dcap.HEADER_BYTES
    if header.version == 5:
        body_type, size, before = reader.integer(2), reader.integer(4), before + 6
        if body_type not in _BODY_BYTES or size != _BODY_BYTES[body_type]:
            raise WireError(dcap.CODE, f"TD report of type {body_type} and {size} bytes")
    body = reader.take(_BODY_BYTES[body_type])
    section_size = reader.integer(4)
    section = dcap.parse_signature_section(reader.take(section_size), nested=True)
    signed = data[: before + len(body)]
    return TdxQuote(
        header=header,
        body_type=body_type,
        report=_parse_report(body),
        section=section,
        signed=signed,
        trimmed=data[: len(signed) + 4 + section_size],
    )


def body_type(data: bytes) -> int | None:
    """The body type that a version 5 quote declares; None where there is none. Raises WireError."""
    if dcap.parse_header(data).version != 5 or len(data) < dcap.HEADER_BYTES + 2:
        return None
    return int.from_bytes(data[dcap.HEADER_BYTES : dcap.HEADER_BYTES + 2], "little")


def trim(data: bytes) -> bytes:
    """The quote without the padding that firmware appends: what belongs into an evidence item. Raises WireError."""
    return parse_quote(data).trimmed


def _parse_report(body: bytes) -> TdReport:
    later = len(body) > _BODY_BYTES[BODY_TD_10]
    return TdReport(
        tee_tcb_svn=body[0:16],
        mr_seam=body[16:64],
        mr_signer_seam=body[64:112],
        seam_attributes=body[112:120],
        td_attributes=body[120:128],
        xfam=body[128:136],
        mr_td=body[136:184],
        mr_config_id=body[184:232],
        mr_owner=body[232:280],
        mr_owner_config=body[280:328],
        rtmrs=(body[328:376], body[376:424], body[424:472], body[472:520]),
        report_data=body[520:584],
        tee_tcb_svn2=body[584:600] if later else None,
        mr_service_td=body[600:648] if later else None,
    )
