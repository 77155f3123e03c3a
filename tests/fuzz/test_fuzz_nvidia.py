"""Mutated NVIDIA evidence and what vouches for it: a typed error or nothing new. Same seed, same inputs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import SdkError
from client_sdk.tee.evidence import Endorsements
from client_sdk.tee.nvidia import foreign, nras, ocsp, rim
from client_sdk.tee.nvidia.anchors import pinned
from client_sdk.tee.nvidia.verify import parse_evidence
from client_sdk.wire.errors import WireError
from tests.fuzz.mutations import mutated
from tests.simulators import nvidia as sim

FOLDER = Path(__file__).parents[1] / "vectors" / "tee" / "nvidia"
NOW = 1_740_000_000.0
REPORT, CHAIN = (FOLDER / "switch_ls10.report.bin").read_bytes(), (FOLDER / "switch_ls10.chain.pem").read_bytes()
(ITEM,) = foreign.read_items(REPORT, [CHAIN])
RIM = (FOLDER / "rim_vbios_96.00.5E.00.01.xml").read_bytes()
GENUINE = parse_evidence(ITEM).report
GOLDEN = rim.authenticate(RIM, pinned().rim, now=NOW).golden
MAKER = sim.Maker()
ANSWER = MAKER.ocsp_answers([MAKER.provisioner, MAKER.product])[0]
INTERESTING = (
    b"",
    b"\x00",
    b"\xff" * 4,
    b"\xff\xff",
    b"\x30\x84\xff\xff\xff\xff",
    b"<",
    b"<!--x-->",
    b'"',
    b"[",
    b"\xa3",
)


def judge_item(content: bytes) -> None:
    evidence = parse_evidence(content)
    evidence.authenticate(CheckLog(), Endorsements(), now=NOW)
    assert evidence.report == GENUINE, "a changed report was accepted"


def judge_file(content: bytes) -> None:
    for item in foreign.read_items(content, [CHAIN]):
        judge_item(item)


def judge_manifest(content: bytes) -> None:
    assert rim.authenticate(content, pinned().rim, now=NOW).golden == GOLDEN, "a changed manifest was accepted"


def judge_token(content: bytes) -> None:
    nras.authenticate(content, b'{"keys": []}', now=1_749_602_000)


def judge_answer(content: bytes) -> None:
    anchor = MAKER.anchors.device
    path = [sim.parse_certificate(MAKER.provisioner.der), sim.parse_certificate(MAKER.product.der)]
    ocsp.good(path, anchor, ocsp.parse(content), now=sim.NOW)


TARGETS: dict[str, tuple[bytes, Callable[[bytes], None]]] = {
    "item": (ITEM, judge_item),
    "report": (REPORT, judge_file),
    "json": ((FOLDER / "switch_ls10.evidence.json").read_bytes(), judge_file),
    "manifest": (RIM, judge_manifest),
    "token": ((FOLDER / "nras_v3_expired.detached_eat.json").read_bytes(), judge_token),
    "ocsp": (ANSWER, judge_answer),
}


@pytest.mark.parametrize(("seed", "judge"), TARGETS.values(), ids=TARGETS.keys())
def test_mutations_are_typed_errors(seed: bytes, judge: Callable[[bytes], None], fuzz_seconds: float) -> None:
    draw = random.Random(20261129)
    until = time.monotonic() + fuzz_seconds / len(TARGETS)
    while time.monotonic() < until:
        content = mutated(seed, draw, INTERESTING)
        started = time.thread_time()
        try:
            judge(content)
        except (SdkError, WireError):
            pass
        except BaseException:
            print(content.hex())
            raise
        assert time.thread_time() - started < 0.5, content.hex()
