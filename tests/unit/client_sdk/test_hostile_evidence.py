"""Whatever is offered as evidence or as an endorsement: a typed no within 50 ms and 64 MiB, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from client_sdk.errors import Rejection
from client_sdk.offline.evidence import ForeignPolicy
from tests.simulators.hostile import GENUINE, POLICY, outcome, read

ROOT = Path(__file__).parents[3]
LIMIT_MS, LIMIT_MIB = 50.0, 64.0
NAMED = {code.value for code in Rejection} | {"ENDORSEMENTS_MISSING", "UNSUPPORTED_VERSION"}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    code = "from tests.simulators.hostile import main; main()"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert len(found["rows"]) > 1000
    return found


def test_none_is_evidence_and_every_no_has_a_name(report: dict[str, Any]) -> None:
    said = {(family, name): code for family, role, name, _, code in report["rows"] if role == "evidence"}
    assert {key: code for key, code in said.items() if code not in NAMED} == {}


def test_beside_genuine_evidence_none_changes_the_verdict_but_into_a_named_no(report: dict[str, Any]) -> None:
    alone = report["alone"]
    assert {family for family, code in alone.items() if code != "accept"} == {"certificate"}, (
        "that one is in debug mode"
    )
    for family, role, name, _, code in report["rows"]:
        if role == "endorsement":
            assert code == alone[family] or code in NAMED, (family, name, code)
    assert {code for family, role, _, _, code in report["rows"] if family == "certificate"} <= NAMED


def test_each_is_judged_within_the_time(report: dict[str, Any]) -> None:
    assert [row for row in report["rows"] if row[3] > LIMIT_MS] == []


def test_all_together_take_no_more_than_the_memory(report: dict[str, Any]) -> None:
    assert report["grown_mib"] < LIMIT_MIB


@pytest.mark.parametrize("family", [family for family in GENUINE if family != "certificate"])
def test_no_beginning_of_genuine_evidence_is_evidence(family: str) -> None:
    evidence, *beside = read(*GENUINE[family])
    policy = ForeignPolicy.parse(POLICY, report_only=True)
    assert outcome(family, evidence, beside, policy) == "accept"
    whole = len(evidence.rstrip(b"\x00")) if family in ("tdx", "sgx") else len(evidence)  # padding is no part of quotes
    for length in range(whole):
        assert outcome(family, evidence[:length], beside, policy) in NAMED


@pytest.mark.parametrize("family", [family for family, names in GENUINE.items() if len(names) > 1])
def test_no_beginning_of_an_endorsement_changes_the_verdict_but_into_a_named_no(family: str) -> None:
    evidence, *beside = read(*GENUINE[family])
    policy = ForeignPolicy.parse(POLICY, report_only=True)
    for number, whole in enumerate(beside):
        for length in range(1, len(whole), 1 + len(whole) // 800):
            cut = [*beside[:number], whole[:length], *beside[number + 1 :]]
            assert outcome(family, evidence, cut, policy) in {*NAMED, "accept"}
