"""The evidence families this SDK can verify, by the name that evidence items and policies use.

A family's code is imported when it is first needed: some of it is heavy, and the appliance imports only the layouts
(`client_sdk.tee.*.abi`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from client_sdk.tee.evidence import FamilyPolicy, ParsedEvidence

ParsePolicy = Callable[[dict[str, object], str, bool], FamilyPolicy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. `primary` ones vouch for a machine; the others (GPUs) only beside a primary one.

    `anchors` are the roots it trusts, in the family's own type; None are the vendor's, which its code pins.
    """

    folder: str
    primary: bool = True
    anchors: object = None

    def parse_evidence(self, content: bytes) -> ParsedEvidence:
        """Parse the content of an evidence item. Raises WireError."""
        module = importlib.import_module(f"client_sdk.tee.{self.folder}.verify")
        if self.anchors is None:
            return cast(ParsedEvidence, module.parse_evidence(content))
        return cast(ParsedEvidence, module.parse_evidence(content, self.anchors))

    def parse_policy(self, table: dict[str, object], where: str, *, report_only: bool) -> FamilyPolicy:
        """Read the family's table of a policy. `report_only` admits one without launch measurement.

        Raises PolicyFileError naming the key at fault.
        """
        module = importlib.import_module(f"client_sdk.tee.{self.folder}.policy")
        return cast(ParsePolicy, module.parse_policy)(table, where, report_only)


FAMILIES: Mapping[str, Family] = {
    "insecure": Family(folder="insecure"),
    "sgx": Family(folder="sgx"),
    "tdx": Family(folder="tdx"),
    "sev-snp": Family(folder="snp"),
    "azure-snp-vtpm": Family(folder="azure"),
    "nitro": Family(folder="nitro"),
    "tpm2": Family(folder="tpm2"),
    "nvidia": Family(folder="nvidia", primary=False),
}
