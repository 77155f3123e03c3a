"""Mutated quotes, collateral and logs: a typed error or an unsigned change, never a crash. Same seed, same inputs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import SdkError
from client_sdk.tee.dcap.collateral import parse_collateral
from client_sdk.tee.evidence import Endorsements, EventLog
from client_sdk.tee.sgx import verify as sgx
from client_sdk.tee.tdx import event_log
from client_sdk.tee.tdx import verify as tdx
from client_sdk.wire.errors import WireError
from tests.fuzz.mutations import mutated

FOLDER = Path(__file__).parents[1] / "vectors" / "tee"
TDX_QUOTE = (FOLDER / "tdx/v4_b0c06f_uptodate.quote.bin").read_bytes()
V5_QUOTE = (FOLDER / "tdx/v5_90c06f_uptodate.quote.bin").read_bytes()
SGX_QUOTE = (FOLDER / "sgx/v3_00a067_confswhardening.quote.bin").read_bytes()
COLLATERAL = (FOLDER / "tdx/v4_b0c06f_uptodate.collateral.json").read_text()
DSTACK = (FOLDER / "tdx/v4_90c06f_dstack.eventlog.json").read_bytes()
CCEL = (FOLDER / "tdx/v4_00806f_cos113.ccel.bin").read_bytes()
NOW = 1_750_332_000.0
INTERESTING = (
    b"",
    b"\x00",
    b"\xff" * 4,
    b"\x00" * 4,
    b"\xff" * 2,
    b"\x30\x84\xff\xff\xff\xff",
    b"\x7f" * 8,
    b'"',
    b"[",
)


def judge_tdx(content: bytes) -> None:
    endorsements = Endorsements(collateral=(COLLATERAL,))
    evidence = tdx.parse_evidence(content)
    evidence.authenticate(CheckLog(), endorsements, now=NOW)
    assert evidence.quote.signed == TDX_QUOTE[:632], "a changed quote was accepted"


def judge_sgx(content: bytes) -> None:
    sgx.parse_evidence(content).authenticate(CheckLog(), Endorsements(), now=NOW)


def judge_collateral(content: bytes) -> None:
    text = content.decode("utf-8", "replace")
    parse_collateral(text)
    tdx.parse_evidence(TDX_QUOTE).authenticate(CheckLog(), Endorsements(collateral=(text,)), now=NOW)


def replay(kind: str) -> Callable[[bytes], None]:
    def run(content: bytes) -> None:
        events = event_log.parse(EventLog(kind=kind, content=content))
        event_log.check(events, event_log.replay(events))

    return run


TARGETS: dict[str, tuple[bytes, Callable[[bytes], None]]] = {
    "tdx-4": (TDX_QUOTE, judge_tdx),
    "tdx-5": (V5_QUOTE, judge_tdx),
    "sgx-3": (SGX_QUOTE, judge_sgx),
    "collateral": (json.dumps(json.loads(COLLATERAL)).encode(), judge_collateral),
    "dstack": (DSTACK, replay("dstack")),
    "ccel": (CCEL, replay("ccel")),
}


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_end_in_typed_errors(name: str, fuzz_seconds: float) -> None:
    seed, target = TARGETS[name]
    draw, end = random.Random(f"intel {name}"), time.monotonic() + fuzz_seconds / 2
    tried = 0
    while time.monotonic() < end:
        data = mutated(seed, draw, INTERESTING)
        try:
            target(data)
        except (SdkError, WireError):
            pass
        except BaseException:
            print(data.hex())
            raise
        tried += 1
    assert tried > 20
