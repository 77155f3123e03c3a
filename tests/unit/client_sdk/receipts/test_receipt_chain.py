"""Chains of receipts: any order of arrival, no contradiction, gaps told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_sdk.errors import PolicyError, Rejection
from client_sdk.receipts.chain import MAX_RUNS, ChainTracker, Gap
from client_sdk.receipts.verify import VerifiedReceipt
from tests.simulators.attested import attested
from tests.simulators.insecure_appliance import seeded

CLIENT = attested()
RECEIPTS = [CLIENT.verify(CLIENT.answer()) for _ in range(8)]


def record(tracker: ChainTracker, receipt: VerifiedReceipt) -> None:
    tracker.record(receipt.claims, receipt.digest)


@given(st.permutations(RECEIPTS))
def test_any_order_of_arrival_makes_one_whole_chain(receipts: list[VerifiedReceipt]) -> None:
    tracker = ChainTracker()
    for receipt in receipts:
        record(tracker, receipt)
    assert tracker.gaps() == ()
    tracker.require_no_gaps()


def test_a_gap_is_named() -> None:
    tracker = ChainTracker()
    for receipt in (RECEIPTS[1], RECEIPTS[4], RECEIPTS[5]):
        record(tracker, receipt)
    assert tracker.gaps() == (Gap(chain=CLIENT.appliance.chain, first=2, last=3),)
    with pytest.raises(PolicyError, match="2 to 3") as caught:
        tracker.require_no_gaps()
    assert caught.value.code == Rejection.RECEIPT_CHAIN_GAP


@pytest.mark.parametrize("seen", [[0], [2], [0, 1, 2]])
def test_two_receipts_in_one_place_contradict_each_other(seen: list[int]) -> None:
    tracker = ChainTracker()
    for index in seen:
        record(tracker, RECEIPTS[index])
    with pytest.raises(PolicyError) as caught:
        record(tracker, RECEIPTS[seen[-1]])
    assert caught.value.code == Rejection.RECEIPT_CHAIN_GAP


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2)])
def test_a_broken_link_is_refused_from_either_side(first: int, second: int) -> None:
    tracker = ChainTracker()
    later = {first: RECEIPTS[first], second: RECEIPTS[second]}
    forged = replace(later[3], claims=replace(later[3].claims, previous=seeded("other")))
    later[3] = forged
    record(tracker, later[first])
    with pytest.raises(PolicyError) as caught:
        record(tracker, later[second])
    assert caught.value.code == Rejection.RECEIPT_CHAIN_GAP


def test_chains_do_not_mix() -> None:
    tracker = ChainTracker()
    for receipt in RECEIPTS[:3]:
        record(tracker, receipt)
        other = replace(receipt.claims, chain=seeded("other chain", 16))
        tracker.record(other, receipt.digest)
    assert tracker.gaps() == ()


def test_endless_gaps_are_bounded() -> None:
    tracker = ChainTracker()
    claims = RECEIPTS[1].claims
    for number in range(1, 2 * MAX_RUNS, 2):
        tracker.record(replace(claims, sequence=number), seeded("digest"))
    with pytest.raises(PolicyError, match="gaps"):
        tracker.record(replace(claims, sequence=2 * MAX_RUNS + 1), seeded("digest"))
