"""Chains without gaps, whoever answers first, and the receipts kept for later."""

from __future__ import annotations

import asyncio
import gc

import pytest

from appliance.engine.generation.fake import FakeScript
from appliance.errors import NotFound, ReceiptPending
from appliance.receipts.issuer import ChainScope, ReceiptStore
from client_sdk.wire import cose
from tests import cddl
from tests import reference_decoder as reference
from tests.unit.appliance.inference.service.rig import Rig, chat, fake


def check_chain(rig: Rig, receipts: list[bytes]) -> bytes:
    """The chain these receipts are, in order: from 0, without gaps, each naming the one before it."""
    claims = [rig.claims(receipt) for receipt in receipts]
    assert [entry[-70001] for entry in claims] == list(range(len(receipts)))
    previous = [None, *(reference.link(receipt) for receipt in receipts[:-1])]
    assert [entry[-70002] for entry in claims] == previous
    assert len({entry[-70000] for entry in claims}) == 1
    chain: bytes = claims[0][-70000]
    return chain


async def test_interleaved_answers_of_two_identities_make_two_chains() -> None:
    rig = Rig(fake(FakeScript(delay_s=0.001)), max_active=64)
    scopes = [ChainScope("key_a"), ChainScope("key_b"), ChainScope("key_a")]
    bodies = [chat(stream=True), chat(), b"{", chat(model="absent"), chat(stream=True, max_tokens=1)]
    wires = [rig.post(body, scope=scope) for body in bodies for scope in scopes]
    await asyncio.gather(*(wire.done() for wire in wires))
    by_chain: dict[bytes, list[bytes]] = {}
    for receipt in rig.receipts:
        by_chain.setdefault(rig.claims(receipt)[-70000], []).append(receipt)
    assert {check_chain(rig, receipts) for receipts in by_chain.values()} == set(by_chain)
    assert sorted(len(receipts) for receipts in by_chain.values()) == [5, 5, 5]
    statuses = [rig.claims(receipt)[-70013]["status"] for receipt in rig.receipts]
    assert statuses != sorted(statuses), "the answers were not interleaved"


async def test_a_chain_is_forgotten_with_its_connection() -> None:
    rig = Rig()
    scope = ChainScope(None)
    await rig.ask(chat(), scope=scope)
    chains = rig.issuer._chains
    assert len(chains) == 1
    del scope
    gc.collect()
    assert len(chains) == 0


async def test_redacting_keeps_the_signature_and_the_link_and_opens_nothing() -> None:
    rig = Rig()
    await rig.ask(chat())
    await rig.ask(chat())
    bare = cose.redacted(rig.receipts[0], limit_bytes=1 << 16)
    cddl.validate("receipt", bare)
    claims, salt = reference.read_receipt(bare, rig.cose_key)
    assert salt is None
    assert rig.salt(rig.receipts[0]) not in bare
    assert reference.link(bare) == rig.claims(rig.receipts[1])[-70002]
    assert claims == rig.claims(rig.receipts[0])


async def test_a_receipt_is_pending_until_its_answer_ends() -> None:
    rig = Rig(fake(FakeScript(delay_s=0.02)))
    wire = rig.post(chat(stream=True))
    await wire.started.wait()
    cti = bytes.fromhex(wire.headers["x-receipt-id"])
    with pytest.raises(ReceiptPending):
        rig.issuer.store.get(cti, None)
    with pytest.raises(NotFound):
        rig.issuer.store.get(cti, "key_a")
    await wire.done()
    assert rig.issuer.store.get(cti, None) == rig.receipts[0]


def test_the_store_is_bounded_for_each_identity_alone() -> None:
    store = ReceiptStore(per_identity=2)
    names = [bytes([index]) * 16 for index in range(4)]
    store.keep(names[3], "other", b"of other")
    for name in names[:3]:
        store.expect(name, "me")
        store.keep(name, "me", name)
    with pytest.raises(NotFound) as evicted:
        store.get(names[0], "me")
    with pytest.raises(NotFound) as foreign:
        store.get(names[3], "me")
    with pytest.raises(NotFound) as unknown:
        store.get(b"?" * 16, None)
    assert len({str(caught.value) for caught in (evicted, foreign, unknown)}) == 1
    assert store.get(names[1], "me") == names[1]
    assert store.get(names[3], "other") == b"of other"
