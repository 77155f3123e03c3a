"""Mutated Nitro documents and TPM quotes: a typed error, never a crash, never a yes. Same seed, same inputs."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import SdkError
from client_sdk.tee.evidence import Endorsements, FamilyPolicy
from client_sdk.tee.families import FAMILIES
from client_sdk.wire.errors import WireError
from tests.fuzz.mutations import mutated

FOLDER = Path(__file__).parents[1] / "vectors" / "tee"
NOW = 1_766_678_659.0
SEEDS = {
    "nitro": ("nitro/prod_2025-12-25a.cose.cbor", {}),
    # The public area is not signed: what makes it count is that policies pin its digest.
    "tpm2": (
        "tpm2/swtpm_quote.item.cbor",
        {"ak_pins": ["4105232bb9010b817822cf6ee6b0c249b38bf322cfdcefe4542ec53ecda25661"]},
    ),
}
PIECES = (
    b"",
    b"\x00",
    b"\xff",
    b"\xbf",
    b"\x9f",
    b"\x5f",
    b"\xff" * 8,
    b"\x9b" + b"\xff" * 8,
    b"\x30\x84\xff\xff\xff\xff",
)


@pytest.mark.parametrize("family", SEEDS)
def test_evidence_of_another_family_is_a_typed_error(family: str) -> None:
    others = [path for path in sorted(FOLDER.rglob("*")) if path.is_file() and not path.match(f"*{family}/*.cbor")]
    assert len(others) > 10
    for path in others:
        with pytest.raises(WireError):
            FAMILIES[family].parse_evidence(path.read_bytes())


def judge(family: str, content: bytes, policy: FamilyPolicy) -> None:
    authentic = FAMILIES[family].parse_evidence(content).authenticate(CheckLog(), Endorsements(), now=NOW)
    authentic.appraise(CheckLog(), policy, now=NOW)


@pytest.mark.parametrize("family", SEEDS)
def test_mutated_evidence_is_a_typed_error(family: str, fuzz_seconds: float) -> None:
    name, table = SEEDS[family]
    seed, draw = (FOLDER / name).read_bytes(), random.Random(2026)
    policy = FAMILIES[family].parse_policy(dict(table), family, report_only=True)
    judge(family, seed, policy)
    until, slowest, worst = time.monotonic() + fuzz_seconds, 0.0, b""
    while time.monotonic() < until:
        content = mutated(seed, draw, PIECES)
        if content == seed:
            continue
        took = taken(family, content, policy)
        if took > slowest:
            slowest, worst = took, content
    assert min(taken(family, worst, policy) for _ in range(5)) < 0.05, "whatever else the machine did meanwhile"


def taken(family: str, content: bytes, policy: FamilyPolicy) -> float:
    """Seconds of this thread until the refusal."""
    started = time.thread_time()
    with pytest.raises((WireError, SdkError)):
        judge(family, content, policy)
    return time.thread_time() - started
