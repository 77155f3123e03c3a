"""Evidence: to parse, authenticate and judge one genuine piece of each family, endorsements at hand, warm.

    python tests/bench/bench_evidence.py [--repeats 200]

A family joins by a line in CASES: its evidence, what vouches for it, the time it is judged at, and its target.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from client_sdk.checks import CheckLog
from client_sdk.tee.evidence import ForeignBinding
from client_sdk.tee.families import FAMILIES
from client_sdk.tee.files import FAMILY_NAMES, read_evidence
from tests.bench.harness import Figure, report

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "tee"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    family: str
    evidence: str
    endorsements: tuple[str, ...]
    now: float
    target: str
    policy: dict[str, object] = field(default_factory=dict)

    def prepared(self) -> Callable[[], None]:
        """One verification, files read and endorsements recognised before."""
        family, (name,) = FAMILIES[self.family], [short for short, full in FAMILY_NAMES.items() if full == self.family]
        beside = [(VECTORS / file).read_bytes() for file in self.endorsements]
        read = read_evidence(name, (VECTORS / self.evidence).read_bytes(), beside)
        (content,), endorsements = read.contents, read.endorsements
        policy = family.parse_policy(dict(self.policy), self.family, report_only=True)

        def verify() -> None:
            log = CheckLog()
            authentic = family.parse_evidence(content).authenticate(log, endorsements, now=self.now)
            authentic.check_foreign(log, ForeignBinding())
            authentic.appraise(log, policy, now=self.now)

        return verify


CASES = (
    Case(
        name="Nitro document, with its chain",
        family="nitro",
        evidence="nitro/prod_2025-12-25a.cose.cbor",
        endorsements=(),
        now=1_766_678_659.0,
        target="<= 8",
    ),
    Case(
        name="TPM quote",
        family="tpm2",
        evidence="tpm2/swtpm_quote.item.cbor",
        endorsements=(),
        now=1_766_678_659.0,
        target="<= 6",
        policy={"ak_pins": ["4105232bb9010b817822cf6ee6b0c249b38bf322cfdcefe4542ec53ecda25661"]},
    ),
    Case(
        name="TDX quote, version 4",
        family="tdx",
        evidence="tdx/v4_b0c06f_uptodate.quote.bin",
        endorsements=("tdx/v4_b0c06f_uptodate.collateral.json",),
        now=1_750_332_000.0,
        target="<= 5",
    ),
    Case(
        name="TDX quote, version 4, with its event log",
        family="tdx",
        evidence="tdx/v4_90c06f_dstack.quote.bin",
        endorsements=("tdx/90c06f_2026-02-18.collateral.json", "tdx/v4_90c06f_dstack.eventlog.json"),
        now=1_771_498_731.0,
        target="<= 5",
    ),
    Case(
        name="SGX quote, version 3",
        family="sgx",
        evidence="sgx/v3_00a067_confswhardening.quote.bin",
        endorsements=("sgx/v3_00a067_confswhardening.collateral.json",),
        now=1_750_334_171.0,
        target="<= 5",
        policy={"allow_tcb_status": ["ConfigurationAndSWHardeningNeeded"]},
    ),
    Case(
        name="SNP report, version 3, with its chain",
        family="sev-snp",
        evidence="snp/genoa_v3_azure.report.bin",
        endorsements=("snp/genoa_v3_azure.vcek.pem", "snp/chain_genoa_ask_ark_asvk.pem", "snp/crl_genoa.der"),
        now=1_760_000_000.0,
        target="<= 8",
    ),
    Case(
        name="NVIDIA report with its chain",
        family="nvidia",
        evidence="nvidia/hopper_580.159.03.report.bin",
        endorsements=("nvidia/hopper_580.159.03.chain.pem",),
        now=1_750_334_171.0,
        target="<= 12",
    ),
    Case(
        name="NVIDIA report with its chain and a manifest",
        family="nvidia",
        evidence="nvidia/hopper_535.86.09.report.bin",
        endorsements=("nvidia/hopper_535.86.09.chain.pem", "nvidia/rim_vbios_96.00.5E.00.01.xml"),
        now=1_740_000_000.0,
        target="<= 12",
    ),
)


def figure(case: Case, repeats: int) -> Figure:
    verify, taken = case.prepared(), []
    for _ in range(repeats + repeats // 10):
        start = time.perf_counter()
        verify()
        taken.append((time.perf_counter() - start) * 1e3)
    return Figure(name=case.name, samples=taken[repeats // 10 :], unit="ms", target=case.target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    report("evidence", [figure(case, options.repeats) for case in CASES])


if __name__ == "__main__":
    main()
