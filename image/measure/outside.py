"""Settings that no measurement covers, by name, each with what holds it. Whatever is not in this list is measured.

`make_text` goes into every report, so that nobody takes a matching measurement for more than it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "operator disk: api_keys": "who may ask, by hashes; chosen by the operator, shown in no measurement",
        "operator disk: port": "where it listens; the channel is bound to the evidence, not to an address",
        "operator disk: vsock_port": "whether and where it listens on vsock as well; likewise",
        "operator disk: endorsement_relay": "whom certificates are fetched through; can withhold: callers verify them",
        "SMBIOS type 11 command line": "reaches the kernel on plain machines; a TPM policy requires PCR 12 to be zero",
        "boot option's load options": "replaces the command line; measured into PCR 9 and 12 (must be zero), RTMR2",
        "add-ons, credentials, system extensions beside the image": "measured into PCR 12, 13 (must be zero), RTMR2",
        "boot order, partition table, SMBIOS tables (TPM)": "PCR 1 and 5 are not pinned; what is started is PCR 4",
        "memory size, vCPUs (but SEV-SNP), devices, network": "the host's; they can stop the service, not change it",
        "clock": "the host's; receipts show it as a claim, never as freshness",
        "TEE firmware version and settings": "the policy's minimum versions and flags of each family, not this tool",
    }
)


def make_text() -> str:
    """The list, one setting a line."""
    return "\n".join(f"- {name}: {what}" for name, what in SETTINGS.items())
