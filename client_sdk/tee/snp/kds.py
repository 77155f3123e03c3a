"""What to ask AMD's key distribution service for (AMD document 57230): paths, no network here."""

from __future__ import annotations

from client_sdk.tee.snp import abi
from client_sdk.tee.snp.abi import Report

HOST = "kdsintf.amd.com"


def vcek_path(report: Report, product: str) -> str:
    """Path and query of the VCEK for this report's chip and reported patch levels. Raises WireError.

    A VLEK cannot be fetched so: the cloud provider hands it to its guests.
    """
    tcb = abi.parse_tcb(report.reported_tcb, product)
    chip_id = report.chip_id[:8] if product == abi.TURIN else report.chip_id
    levels = [] if tcb.fmc is None else [f"fmcSPL={tcb.fmc:02}"]
    levels += [f"blSPL={tcb.bootloader:02}", f"teeSPL={tcb.tee:02}", f"snpSPL={tcb.snp:02}"]
    levels += [f"ucodeSPL={tcb.microcode:02}"]
    return f"/vcek/v1/{product}/{chip_id.hex()}?{'&'.join(levels)}"


def crl_path(product: str) -> str:
    """Path of the revocation list of the product's root."""
    return f"/vcek/v1/{product}/crl"
