"""Layout of an SGX quote, version 3 (Intel, "SGX ECDSA Quote Library API", appendix A.4). Pure bytes.

header 48 | enclave report 384 | u32 n | signature section n | padding
"""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk.tee.dcap import abi as dcap

KIND = "sgx"
VERSIONS = (3,)
MR_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SgxQuote:
    """`trimmed` is the quote without padding, `signed` the part of it under the attestation key's signature."""

    header: dcap.Header
    report: dcap.EnclaveReport
    section: dcap.SignatureSection
    signed: bytes
    trimmed: bytes


def parse_quote(data: bytes) -> SgxQuote:
    """Parse a quote, padding behind it allowed. Raises WireError MALFORMED_EVIDENCE."""
    header = dcap.parse_header(data)
    dcap.check_header(header, VERSIONS, dcap.TEE_SGX)
    reader = dcap.Reader(data, "SGX quote")
    signed = reader.take(dcap.HEADER_BYTES + dcap.REPORT_BYTES)
    section_size = reader.integer(4)
    section = dcap.parse_signature_section(reader.take(section_size), nested=False)
    return SgxQuote(
        header=header,
        report=dcap.parse_enclave_report(signed[dcap.HEADER_BYTES :]),
        section=section,
        signed=signed,
        trimmed=data[: len(signed) + 4 + section_size],
    )
