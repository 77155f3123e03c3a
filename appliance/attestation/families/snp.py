"""Evidence of AMD SEV-SNP guests: reports over H, with the certificates that the host hands to the guest."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

from appliance.attestation.attester import Binding, Collected
from appliance.attestation.families import sev_guest, tsm
from appliance.attestation.families.tsm import TsmReport
from appliance.config.settings import AttestationConfig
from appliance.errors import AttestationUnavailable
from client_sdk.tee.snp import abi
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.errors import WireError
from client_sdk.wire.names import MODE_PRODUCTION

ENDORSEMENT_KIND = "certificates"
_LIMIT_CERTIFICATE_BYTES = 16 << 10

Source = Callable[[bytes], TsmReport]
"""A report over 64 bytes. Raises AttestationUnavailable."""


class SnpAttester:
    """Makes SNP reports through `source`."""

    family = abi.KIND
    mode = MODE_PRODUCTION

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self, binding: Binding) -> Collected:
        found = self._source(binding.report_data)
        content = found.outblob[: abi.REPORT_BYTES]
        try:
            report = abi.parse_report(content)
        except WireError as error:
            raise _unusable(error.detail) from error
        if not hmac.compare_digest(report.report_data, binding.report_data):
            raise _unusable("the report is over other data than was asked for")
        return Collected(
            evidence=(EvidenceItem(kind=abi.KIND, content=content),), endorsements=_endorsements(found.auxblob)
        )


def _endorsements(table: bytes) -> tuple[EvidenceItem, ...]:
    """The host's certificates. A table that is damaged or empty gives none: verifiers can have them from AMD."""
    try:
        certificates = abi.parse_certificate_table(table) if any(table) else ()
    except WireError:
        return ()
    return tuple(
        EvidenceItem(kind=ENDORSEMENT_KIND, content=certificate)
        for certificate in certificates
        if certificate[:1] in (b"0", b"-") and len(certificate) <= _LIMIT_CERTIFICATE_BYTES
    )


def missing(_config: AttestationConfig, *, root: Path = tsm.ROOT, device: Path = sev_guest.DEVICE) -> str | None:
    """Why this machine makes no SNP reports; None where it does."""
    reason = tsm.missing(root, tsm.PROVIDER_SNP)
    if reason is None or device.exists():
        return None
    return f"{reason}; no {device} either"


def create(
    _config: AttestationConfig,
    random_bytes: Callable[[int], bytes],
    *,
    root: Path = tsm.ROOT,
    device: Path = sev_guest.DEVICE,
) -> SnpAttester:
    """Through configfs-tsm where the kernel has it, else through the older device."""
    if tsm.missing(root, tsm.PROVIDER_SNP) is not None:
        return SnpAttester(lambda inblob: sev_guest.report(inblob, device=device))
    client = tsm.default_client(root, random_bytes)
    return SnpAttester(lambda inblob: client.report(inblob, provider=tsm.PROVIDER_SNP))


def _unusable(why: str) -> AttestationUnavailable:
    return AttestationUnavailable("evidence_failed", f"The report is unusable: {why}.", retry_after_s=5)
