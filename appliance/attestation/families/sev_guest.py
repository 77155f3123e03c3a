"""SNP reports through /dev/sev-guest, for kernels without configfs-tsm (linux/sev-guest.h).

How the ioctl reaches the driver is an argument; numbers, layouts and what is believed of the answer are here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
from collections.abc import Callable
from pathlib import Path

from appliance.attestation.families.tsm import TsmReport
from appliance.errors import AttestationUnavailable

DEVICE = Path("/dev/sev-guest")
SNP_GET_REPORT = 0xC0205300  # _IOWR('S', 0x0, struct snp_guest_request_ioctl)
SNP_GET_EXT_REPORT = 0xC0205302  # _IOWR('S', 0x2, struct snp_guest_request_ioctl)
CERTIFICATES_BYTES = 0x4000  # SEV_FW_BLOB_MAX_SIZE, a whole number of pages

_MESSAGE_VERSION = 1
_REPORT_AT = 32
_REPORT_BYTES = 1184

Ioctl = Callable[[int, int, ctypes.Structure], object]


class ReportRequest(ctypes.Structure):
    """struct snp_report_req"""

    _fields_ = (("user_data", ctypes.c_uint8 * 64), ("vmpl", ctypes.c_uint32), ("reserved", ctypes.c_uint8 * 28))


class ExtendedRequest(ctypes.Structure):
    """struct snp_ext_report_req"""

    _fields_ = (
        ("data", ReportRequest),
        ("certs_address", ctypes.c_uint64),
        ("certs_len", ctypes.c_uint32),
    )


class ReportResponse(ctypes.Structure):
    """struct snp_report_resp, whose 4000 bytes begin as the firmware's MSG_REPORT_RSP does."""

    _fields_ = (
        ("status", ctypes.c_uint32),
        ("report_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint8 * 24),
        ("report", ctypes.c_uint8 * (4000 - _REPORT_AT)),
    )


class GuestRequest(ctypes.Structure):
    """struct snp_guest_request_ioctl"""

    _fields_ = (
        ("msg_version", ctypes.c_uint8),
        ("req_data", ctypes.c_uint64),
        ("resp_data", ctypes.c_uint64),
        ("fw_error", ctypes.c_uint32),
        ("vmm_error", ctypes.c_uint32),
    )


def report(inblob: bytes, *, device: Path = DEVICE, ioctl: Ioctl = fcntl.ioctl) -> TsmReport:
    """A report over 64 bytes with the host's certificates, or without where the host gives none.

    Raises AttestationUnavailable.
    """
    plain = ReportRequest((ctypes.c_uint8 * 64)(*inblob))
    certificates = ctypes.create_string_buffer(CERTIFICATES_BYTES)
    extended = ExtendedRequest(plain, ctypes.addressof(certificates), CERTIFICATES_BYTES)
    try:
        with device.open("r+b", buffering=0) as file:
            with contextlib.suppress(OSError):
                outblob = _ask(file.fileno(), SNP_GET_EXT_REPORT, extended, ioctl)
                return TsmReport(outblob=outblob, auxblob=certificates.raw)
            return TsmReport(outblob=_ask(file.fileno(), SNP_GET_REPORT, plain, ioctl), auxblob=b"")
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown error")
        raise AttestationUnavailable(
            "evidence_failed", f"No evidence can be made: {device.name} answers {name}.", retry_after_s=5
        ) from error


def _ask(descriptor: int, number: int, request: ctypes.Structure, ioctl: Ioctl) -> bytes:
    """The report of one request. Raises OSError."""
    response = ReportResponse()
    message = GuestRequest(_MESSAGE_VERSION, ctypes.addressof(request), ctypes.addressof(response))
    ioctl(descriptor, number, message)
    if message.fw_error or message.vmm_error or response.status or response.report_size != _REPORT_BYTES:
        raise OSError(errno.EIO, "the firmware made no report")
    return bytes(response.report[:_REPORT_BYTES])
