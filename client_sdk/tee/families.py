"""The evidence families this SDK can verify: evidence kind -> parser of its content.

Kept out of the package's `__init__` because the appliance imports the layouts (`client_sdk.tee.*.abi`) and must not
load the verifying code with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from client_sdk.tee.evidence import ParsedEvidence
from client_sdk.tee.insecure import abi as insecure_abi
from client_sdk.tee.insecure import verify as insecure

FAMILIES: Mapping[str, Callable[[bytes], ParsedEvidence]] = {insecure_abi.KIND: insecure.parse_evidence}
