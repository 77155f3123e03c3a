"""Mutated reports, certificates, tables and Azure items: a typed error or nothing changed, never a crash or a yes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import SdkError
from client_sdk.tee.azure import verify as azure_verify
from client_sdk.tee.endorsements import recognise
from client_sdk.tee.snp import abi, verify
from client_sdk.wire.errors import WireError
from tests.fuzz.mutations import mutated
from tests.simulators import amd, azure

FOLDER = Path(__file__).parents[1] / "vectors" / "tee" / "snp"
REPORT, VCEK = (FOLDER / "milan_v2_ok.report.bin").read_bytes(), (FOLDER / "milan_v2_ok.vcek.der").read_bytes()
CHIP = amd.chip()
TABLE = amd.certificate_table({abi.GUIDS["VCEK"].bytes: b"\x30" * 99, abi.GUIDS["ASK"].bytes_le: b"\x30" * 9})
AZURE = azure.Machine().item(CHIP)


INTERESTING = (b"\xff\xff\xff\xff", bytes(4), b"\x30\x84\xff\xff", b"\x7f\xff\xff\xff")


def judge_report(content: bytes) -> None:
    verify.parse_evidence(content).authenticate(CheckLog(), recognise(VCEK), now=amd.NOW)
    assert content == REPORT, "a changed report was accepted"


def judge_certificate(content: bytes) -> None:
    endorsements = recognise(content)
    verify.parse_evidence(REPORT).authenticate(CheckLog(), endorsements, now=amd.NOW)
    assert endorsements.certificates[0].der == VCEK, "a changed certificate was accepted"


def judge_azure(content: bytes) -> None:
    evidence = azure_verify.parse_evidence(content, CHIP.anchors)
    evidence.authenticate(CheckLog(), recognise(CHIP.certificate), now=amd.NOW)


def judge_table(content: bytes) -> None:
    abi.parse_certificate_table(content)


TARGETS: dict[str, tuple[bytes, Callable[[bytes], None]]] = {
    "report": (REPORT, judge_report),
    "certificate": (VCEK, judge_certificate),
    "azure": (AZURE, judge_azure),
    "table": (TABLE, judge_table),
}


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_end_in_typed_errors(name: str, fuzz_seconds: float) -> None:
    seed, target = TARGETS[name]
    draw, end, tried = random.Random(f"snp {name}"), time.monotonic() + fuzz_seconds / 2, 0
    while time.monotonic() < end:
        data = mutated(seed, draw, INTERESTING)
        started = time.perf_counter()
        try:
            target(data)
        except (SdkError, WireError):
            pass
        except BaseException:
            print(data.hex())
            raise
        assert time.perf_counter() - started < 0.5
        tried += 1
    assert tried > 20
