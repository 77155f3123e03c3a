"""Evidence of Intel TDX guests: quotes over H through configfs-tsm, and the boot's measurement log if there is one."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

from appliance.attestation.attester import Binding, Collected
from appliance.attestation.families import tsm
from appliance.attestation.families.tsm import TsmReport
from appliance.config.settings import AttestationConfig
from appliance.errors import AttestationUnavailable
from client_sdk.tee.tdx import abi
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.errors import WireError
from client_sdk.wire.names import MODE_PRODUCTION

FAMILY = "tdx"
EVENT_LOG = Path("/sys/firmware/acpi/tables/data/CCEL")
EVENT_LOG_KIND = "ccel"
_LIMIT_LOG_BYTES = 512 << 10  # the whole bundle may have 1 MiB

Source = Callable[[bytes], TsmReport]
"""A quote over 64 bytes. Raises AttestationUnavailable."""


class TdxAttester:
    """Makes TDX quotes through `source`; `event_log` is the ACPI table of the boot's log."""

    family = FAMILY
    mode = MODE_PRODUCTION

    def __init__(self, source: Source, *, event_log: Path = EVENT_LOG) -> None:
        self._source = source
        self._event_log = event_log

    def collect(self, binding: Binding) -> Collected:
        found = self._source(binding.report_data)
        try:
            quote = abi.parse_quote(found.outblob)
        except WireError as error:
            raise _unusable(error.detail) from error
        if not hmac.compare_digest(quote.report.report_data, binding.report_data):
            raise _unusable("the quote is over other data than was asked for")
        return Collected(
            evidence=(EvidenceItem(kind=FAMILY, content=quote.trimmed),), event_logs=self._read_event_log()
        )

    def _read_event_log(self) -> tuple[EvidenceItem, ...]:
        """The log as the firmware reserved it, its unused end included; none where it is missing or too large."""
        try:
            with self._event_log.open("rb") as file:
                content = file.read(_LIMIT_LOG_BYTES + 1)
        except OSError:
            return ()
        if not content or len(content) > _LIMIT_LOG_BYTES:
            return ()
        return (EvidenceItem(kind=EVENT_LOG_KIND, content=content),)


def missing(_config: AttestationConfig, *, root: Path = tsm.ROOT) -> str | None:
    """Why this machine makes no TDX quotes; None where it does."""
    return tsm.missing(root, tsm.PROVIDER_TDX)


def create(_config: AttestationConfig, random_bytes: Callable[[int], bytes], *, root: Path = tsm.ROOT) -> TdxAttester:
    client = tsm.default_client(root, random_bytes)
    return TdxAttester(lambda inblob: client.report(inblob, provider=tsm.PROVIDER_TDX))


def _unusable(why: str) -> AttestationUnavailable:
    return AttestationUnavailable("evidence_failed", f"The quote is unusable: {why}.", retry_after_s=5)
