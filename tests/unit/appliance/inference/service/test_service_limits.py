"""Limits a request or its key brings with it, and whose prompts are reused for whom."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from appliance.engine.generation.fake import FakeScript
from appliance.errors import Overloaded
from appliance.inference.cache_scopes import CacheScopes
from appliance.receipts.issuer import ChainScope
from tests.unit.appliance.inference.service.rig import CHAT, TEXT, Rig, chat, fake, stuck, text


@pytest.mark.parametrize("value", ["0", "-1", "1e3", "x", "", "1234567", "1.", "\u0661"])
async def test_a_timeout_that_is_none_is_refused_with_a_receipt(value: str) -> None:
    rig = Rig()
    wire = await rig.ask(chat(), raw_headers=[(b"x-request-timeout", value.encode())])
    assert wire.error == (400, "invalid_timeout", "x-request-timeout")
    assert rig.claims(rig.receipts[0])[-70013]["status"] == "refused"


async def test_a_timeout_given_twice_is_refused() -> None:
    rig = Rig()
    wire = await rig.ask(chat(), raw_headers=[(b"x-request-timeout", b"5")] * 2)
    assert wire.error == (400, "invalid_timeout", "x-request-timeout")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_timeout_of_the_request_ends_its_answer(stream: bool) -> None:
    engine, _gate = stuck()
    rig = Rig(engine)
    wire = await rig.ask(chat(stream=stream), headers={"x-request-timeout": "0.05"})
    rig.only(wire, "deadline")


async def test_h41_a_key_holds_no_more_places_than_it_may() -> None:
    engine, gate = stuck()
    rig = Rig(engine)
    rig.service._limits = replace(rig.service._limits, max_active_per_key=1)
    first, other = ChainScope("first"), ChainScope("other")
    running = rig.post(chat(), scope=first)
    while not rig.service.active:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await rig.ask(chat(), scope=first)
    assert caught.value.code == "key_busy"
    second = rig.post(chat(), scope=other)
    gate.set()
    assert [(await wire.done()).status for wire in (running, second)] == [200, 200]
    assert (await rig.ask(chat(), scope=first)).status == 200
    rig.at_rest()


async def test_usage_tells_what_was_reused() -> None:
    rig = Rig(fake(FakeScript()))
    usage = (await rig.ask(chat(n=2))).document["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens", "reasoning_tokens")
    assert usage["completion_tokens_details"] == dict.fromkeys(names, 0)


async def test_b139_h48_scopes_never_span_two_tenants_routes_or_cache_keys() -> None:
    scopes = CacheScopes(os.urandom)
    key, same, other = ChainScope("a"), ChainScope("a"), ChainScope("b")
    connection, another = ChainScope(None), ChainScope(None)
    assert scopes.scope(key, CHAT, "") == scopes.scope(same, CHAT, "")
    assert scopes.scope(connection, CHAT, "x") == scopes.scope(connection, CHAT, "x")
    made = {
        scopes.scope(identity, route, cache)
        for identity in (key, other, connection, another)
        for route in (CHAT, TEXT, "")
        for cache in ("", "x", "y")
    }
    assert len(made) == 36
    assert CacheScopes(os.urandom).scope(key, CHAT, "") not in made


async def test_h48_h49_the_engine_gets_the_scope_of_identity_route_and_cache_key() -> None:
    engine = fake()
    rig = Rig(engine)
    for fields in ({}, {"prompt_cache_key": "a"}, {"prompt_cache_key": "a"}):
        assert (await rig.ask(chat(**fields))).status == 200
    assert (await rig.ask(text(prompt_cache_key="a"), route=TEXT)).status == 200
    plain, first, again, elsewhere = [job.cache_scope for job in engine.counters.jobs]
    assert (len(plain), first) == (32, again)
    assert len({plain, first, elsewhere}) == 3


@pytest.mark.parametrize("key", ["", "k", "\u00fc" * 512])
@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_h47_a_cache_key_of_any_text_up_to_its_limit_is_taken(key: str, route: str) -> None:
    body = chat if route == CHAT else text
    assert (await Rig().ask(body(prompt_cache_key=key), route=route)).status == 200


@pytest.mark.parametrize("key", ["k" * 513, 7, True, ["k"], {"k": 1}])
@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_h47_a_cache_key_that_is_none_is_refused_by_name(key: object, route: str) -> None:
    rig = Rig()
    body = chat if route == CHAT else text
    wire = await rig.ask(body(prompt_cache_key=key), route=route)
    assert wire.error == (400, "invalid_field", "prompt_cache_key")
    assert rig.claims(rig.receipts[0])[-70013]["status"] == "refused"
