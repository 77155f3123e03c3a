"""What the 64 bytes of report data in a DCAP quote have to be."""

from __future__ import annotations

import hmac

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection
from client_sdk.tee.dcap.abi import REPORT_DATA_BYTES
from client_sdk.tee.evidence import ForeignBinding, SessionBinding
from client_sdk.wire import digests


def check_session(log: CheckLog, report_data: bytes, binding: SessionBinding) -> None:
    """The report data is H over these claims (docs/attestation.md)."""
    expected = digests.report_data(binding.claims)
    log.equal("evidence binds the claims", Rejection.EVIDENCE_BINDING, expected=expected, actual=report_data)


def check_foreign(log: CheckLog, report_data: bytes, binding: ForeignBinding) -> None:
    """The report data is what the caller expects, shorter values zero-padded. A quote has no nonce of its own."""
    if binding.nonce is not None:
        log.reject("nonce", Rejection.NONCE_MISMATCH, "a quote has no nonce field: give the report data instead")
    if binding.report_data is None:
        log.not_checked("report data", "the caller expects none")
        return
    if len(binding.report_data) > REPORT_DATA_BYTES:
        log.reject(
            "report data", Rejection.EVIDENCE_BINDING, f"report data has {REPORT_DATA_BYTES} bytes; more are expected"
        )
    expected = binding.report_data.ljust(REPORT_DATA_BYTES, b"\x00")
    if not hmac.compare_digest(expected, report_data):
        log.reject(
            "report data",
            Rejection.EVIDENCE_BINDING,
            "report data differs",
            expected=expected.hex(),
            actual=report_data.hex(),
        )
    log.passed("report data")
