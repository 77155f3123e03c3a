"""The endorsement relay: through it come the vendors' certificates and collateral that the host does not hand over.

A relay is a CONNECT proxy that nobody trusts. TLS ends here, and the verifier judges what came against its own roots:
all that a relay can do is to withhold, and then evidence goes out as it would without one.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from appliance.attestation.attester import Attester, Collected
from appliance.attestation.endorsements import amd_kds, intel_pcs
from appliance.attestation.endorsements.fetch import Fetcher
from appliance.attestation.endorsements.keeper import EndorsedAttester, EndorsementKeeper, Wanted
from appliance.config.addresses import parse_address

_LOG = logging.getLogger(__name__)

LIMIT_BYTES: Final = 256 << 10
"""Of one document, as is the time."""
TIMEOUT_S: Final = 12.0
_BUNDLE: Final = Path("/etc/ssl/certs/ca-certificates.crt")

Lacking = Callable[[Collected], Wanted | None]
LACKING: Final[Mapping[str, Callable[[Fetcher], Lacking]]] = {
    "sev-snp": lambda fetcher: partial(amd_kds.lacking, bring=fetcher.get),
    "tdx": lambda fetcher: partial(intel_pcs.lacking, bring=fetcher.fetch),
}
"""By family: what its evidence may come without."""


def endorsed(attester: Attester, relay: str, *, monotonic: Callable[[], float]) -> Attester:
    """`attester`, with what its evidence lacks fetched through `relay`; itself where there is none, or no use for it.

    Raises BootError for what is no address.
    """
    if not relay:
        return attester
    lacking = LACKING.get(attester.family)
    if lacking is None:
        _LOG.info("attestation.endorsement_relay: nothing is fetched for evidence of the family %s", attester.family)
        return attester
    fetcher = Fetcher(proxy=parse_address(relay), tls=public_roots(), limit_bytes=LIMIT_BYTES, timeout_s=TIMEOUT_S)
    return EndorsedAttester(attester, lacking(fetcher), EndorsementKeeper(monotonic=monotonic))


def public_roots(bundle: Path = _BUNDLE) -> ssl.SSLContext:
    """Verifies names and certificates by the system's roots, also where OpenSSL does not find their bundle itself."""
    context = ssl.create_default_context()
    if bundle.is_file():
        context.load_verify_locations(cafile=bundle)
    return context
