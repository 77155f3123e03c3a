"""Every way to ask, against one real appliance with the real model: each returns verified text, and the same text."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from client_sdk import Appliance, AsyncAppliance, Pending, Policy, Rejection, VerificationError, Verified
from tests.e2e.evidence import Collected
from tests.e2e.glass import GlassAppliance
from tests.e2e.programs import MODEL, Served

pytestmark = pytest.mark.model
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def expected(server: Served, policy: Policy, collected: Collected) -> str:
    """The greedy answer to QUESTION; every other way of asking must give the same."""
    with Appliance(server.url, policy=policy, save=collected) as appliance:
        text = appliance.chat(QUESTION, **GREEDY).text
    assert text
    return text


def test_whole_and_stream(server: Served, policy: Policy, expected: str, collected: Collected) -> None:
    with Appliance(server.url, policy=policy, save=collected) as appliance:
        answer = appliance.chat(QUESTION, **GREEDY)
        stream = appliance.stream(QUESTION, **GREEDY)
        assert "".join(stream) == stream.text == answer.text == expected
        assert stream.receipt.claims.stream is not None
        assert answer.receipt.claims.sequence + 1 == stream.receipt.claims.sequence
        assert stream.receipt.claims.previous == answer.receipt.digest
        assert appliance.receipt_gaps() == ()


def test_pending_text_comes_before_verified_text(server: Served, policy: Policy, expected: str) -> None:
    with Appliance(server.url, policy=policy) as appliance:
        pieces = list(appliance.stream(QUESTION, pending=True, **GREEDY))
    assert "".join(piece.text for piece in pieces if isinstance(piece, Pending)) == expected
    assert "".join(piece.text for piece in pieces if isinstance(piece, Verified)) == expected


async def test_async_whole_and_stream(server: Served, policy: Policy, expected: str, collected: Collected) -> None:
    async with AsyncAppliance(server.url, policy=policy, save=collected) as appliance:
        assert (await appliance.chat(QUESTION, **GREEDY)).text == expected
        stream = appliance.stream(QUESTION, **GREEDY)
        assert "".join([piece async for piece in stream]) == expected
        assert stream.receipt is appliance.receipt_for(stream.response_id)


def test_the_stock_openai_client(server: Served, policy: Policy, expected: str, collected: Collected) -> None:
    with Appliance(server.url, policy=policy, save=collected) as appliance:
        client = appliance.openai()
        whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
        assert whole.choices[0].message.content == expected
        assert whole.usage is not None
        chunks = list(
            client.chat.completions.create(
                messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens  # what was reused differs
        assert appliance.receipt_for(chunks[0].id).claims.response.status == "complete"
        assert appliance.receipt_for(whole.id).claims.output is not None
        assert [model.id for model in client.models.list()] == [MODEL]


async def test_the_stock_async_openai_client(server: Served, policy: Policy, expected: str) -> None:
    async with AsyncAppliance(server.url, policy=policy) as appliance:
        client = appliance.openai()
        whole = await client.chat.completions.create(messages=QUESTION, **GREEDY)
        assert whole.choices[0].message.content == expected
        stream = await client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_completions(server: Served, policy: Policy, collected: Collected, stream: bool) -> None:
    with Appliance(server.url, policy=policy, save=collected) as appliance:
        client = appliance.openai()
        answer: Any = client.completions.create(
            prompt="One, two, three,", stream=stream, seed=7, stop=["seven"], **GREEDY
        )
        if stream:
            chunks = list(answer)
            identifier, text = chunks[0].id, "".join(chunk.choices[0].text for chunk in chunks)
        else:
            identifier, text = answer.id, answer.choices[0].text
        assert "four" in text
        decoding = appliance.receipt_for(identifier).claims.decoding
        assert decoding is not None
        assert (decoding["seed"], decoding["max_tokens"]) == (7, 12)
        assert decoding["stop"] is not None


def test_a_seed_repeats_an_answer(server: Served, policy: Policy) -> None:
    with Appliance(server.url, policy=policy) as appliance:
        first = appliance.chat(QUESTION, model=MODEL, max_tokens=16, temperature=1.2)
        assert first.receipt.claims.decoding is not None
        seed = first.receipt.claims.decoding["seed"]
        again = appliance.chat(QUESTION, model=MODEL, max_tokens=16, temperature=1.2, seed=seed)
    assert again.text == first.text


def test_parallel_answers_equal_their_solo_answers(server: Served, policy: Policy) -> None:
    prompts = [
        f"Name {count} things that are {color}." for count in range(2, 6) for color in ("red", "blue", "green", "old")
    ]
    params: dict[str, Any] = {"model": MODEL, "temperature": 0.8, "seed": 11, "max_tokens": 10}
    with Appliance(server.url, policy=policy) as appliance:
        solo = [appliance.chat(prompt, **params).text for prompt in prompts]
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda prompt: "".join(appliance.stream(prompt, **params)), prompts))
    assert together == solo
    assert len(set(solo)) > 8


async def test_b104_two_hundred_short_streams_all_end(server: Served, policy: Policy) -> None:
    """A stream that does not end with its receipt and [DONE] raises; none may."""
    async with AsyncAppliance(server.url, policy=policy) as appliance:
        client, places = appliance.openai(), asyncio.Semaphore(8)

        async def one(number: int) -> str:
            async with places:
                stream = await client.completions.create(
                    model=MODEL, prompt=f"{number}", max_tokens=2, seed=number, stream=True
                )
                chunks = [chunk async for chunk in stream]
                return appliance.receipt_for(chunks[0].id).claims.response.status

        statuses = await asyncio.gather(*(one(number) for number in range(200)))
    assert statuses == ["complete"] * 200


@pytest.mark.parametrize("retries", [0, 2])
def test_a_rejection_is_neither_retried_nor_hidden(glass: GlassAppliance, policy: Policy, retries: int) -> None:
    """The openai client retries what derives from httpx errors; a verdict does not, whatever max_retries says."""
    glass.seen.clear()
    glass.tamper = lambda sent: sent.with_header("x-receipt-id", "00" * 16)
    try:
        with Appliance(glass.url, policy=policy) as appliance:
            client = appliance.openai(**({"max_retries": retries} if retries else {}))
            assert client.max_retries == retries
            with pytest.raises(VerificationError) as caught:
                client.chat.completions.create(messages=QUESTION, **GREEDY)
    finally:
        glass.tamper = None
    assert caught.value.code is Rejection.RECEIPT_ID_MISMATCH
    assert glass.seen == ["/v1/chat/completions"]


def test_a_verified_refusal_is_not_retried_unless_asked(glass: GlassAppliance, policy: Policy) -> None:
    glass.seen.clear()
    with Appliance(glass.url, policy=policy) as appliance:
        with pytest.raises(openai.BadRequestError) as caught:
            appliance.openai().chat.completions.create(messages=QUESTION, model=MODEL, temperature=17)
        assert caught.value.param == "temperature"
    assert glass.seen == ["/v1/chat/completions"]
