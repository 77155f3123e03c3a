"""Appliance, AsyncAppliance and the stock openai client on top of them, over real sockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

import client_sdk
from client_sdk import (
    Appliance,
    ApplianceError,
    AsyncAppliance,
    Pending,
    Policy,
    PolicyError,
    PolicyFileError,
    Rejection,
    RequestError,
    TransportError,
    UndecidedError,
    UnsafeAcceptInsecure,
    VerificationError,
    Verified,
)
from client_sdk.client.client import parse_appliance_url
from client_sdk.wire import names
from tests.simulators.insecure_appliance import MODEL, Options, SigningKey
from tests.simulators.wired_appliance import Response, WiredAppliance


@pytest.fixture
def wired() -> Iterator[WiredAppliance]:
    with WiredAppliance() as appliance:
        yield appliance


@pytest.fixture
def policy(wired: WiredAppliance) -> Policy:
    return Policy(
        models={MODEL: frozenset({wired.simulator.model.identity})}, insecure=UnsafeAcceptInsecure(), configs=None
    )


MESSAGES: list[Any] = [{"role": "user", "content": "What is two plus two?"}]


def test_chat_returns_text_and_receipt(wired: WiredAppliance, policy: Policy) -> None:
    with Appliance(wired.url, policy=policy, api_key="secret") as appliance:
        answer = appliance.chat("What is two plus two?", model=MODEL, temperature=0, max_tokens=9)
        assert answer.text == "Four."
        assert answer.receipt is appliance.receipt_for(answer.response_id)
        assert answer.receipt.claims.decoding is not None
        assert answer.receipt.claims.decoding["max_tokens"] == 9
    assert wired.inference[0].headers["authorization"] == "Bearer secret"


def test_the_policy_may_be_a_file(wired: WiredAppliance, policy: Policy, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(policy.to_toml())
    with Appliance(wired.url, policy=path) as appliance:
        assert appliance.attest().claims.mode == "insecure"
    path.write_text("version = 1\n")
    with pytest.raises(PolicyFileError):
        Appliance(wired.url, policy=str(path))


def test_stream_yields_verified_text(wired: WiredAppliance, policy: Policy) -> None:
    with Appliance(wired.url, policy=policy) as appliance:
        stream = appliance.stream(MESSAGES, model=MODEL)
        with pytest.raises(RuntimeError):
            _ = stream.receipt
        assert "".join(stream) == "Four." == stream.text
        assert stream.receipt is appliance.receipt_for(stream.response_id)


def test_pending_text_is_marked_and_verified_later(wired: WiredAppliance, policy: Policy) -> None:
    with Appliance(wired.url, policy=policy) as appliance:
        pieces = list(appliance.stream(MESSAGES, model=MODEL, pending=True))
    assert "".join(piece.text for piece in pieces if isinstance(piece, Pending)) == "Four."
    assert "".join(piece.text for piece in pieces if isinstance(piece, Verified)) == "Four."
    assert pieces.index(Pending("ur")) < pieces.index(Verified("ur."))


def test_pending_text_of_a_lie_never_becomes_verified(wired: WiredAppliance, policy: Policy) -> None:
    wired.edit_response = lambda r: replace(r, chunks=tuple(b.replace(b'"ur"', b'"ve"') for b in r.chunks or ()))
    pieces: list[Pending | Verified] = []
    with Appliance(wired.url, policy=policy) as appliance, pytest.raises(VerificationError):
        _drain(appliance.stream(MESSAGES, model=MODEL, pending=True), pieces)
    assert Pending("ve") in pieces
    assert [piece for piece in pieces if isinstance(piece, Verified)] == [Verified("Fo")]


def _drain(stream: Any, pieces: list[Any]) -> None:
    for piece in stream:
        pieces.append(piece)


def test_a_stream_may_be_left(wired: WiredAppliance, policy: Policy) -> None:
    with Appliance(wired.url, policy=policy) as appliance:
        pieces = iter(appliance.stream(MESSAGES, model=MODEL))
        assert next(pieces) == "Fo"
        pieces.close()  # type: ignore[attr-defined]
        assert appliance.chat(MESSAGES, model=MODEL).text == "Four."


def test_a_verified_refusal_says_so(wired: WiredAppliance, policy: Policy) -> None:
    body = b'{"error":{"message":"no","type":"invalid_request_error","param":"messages","code":"refused"}}'
    wired.options = Options(status="refused", http_status=400, error_body=body)
    with Appliance(wired.url, policy=policy) as appliance, pytest.raises(ApplianceError) as caught:
        appliance.chat(MESSAGES, model=MODEL)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "refused", "messages")
    assert caught.value.verified is True


def test_an_error_without_a_receipt_says_so(wired: WiredAppliance, policy: Policy) -> None:
    wired.edit_response = lambda r: Response(status=401, body=b'{"error":{"code":"bad_key","message":"who?"}}')
    with Appliance(wired.url, policy=policy) as appliance:
        for ask in (lambda: appliance.chat(MESSAGES, model=MODEL), lambda: list(appliance.stream("x", model=MODEL))):
            with pytest.raises(ApplianceError) as caught:
                ask()
            assert (caught.value.code, caught.value.verified) == ("bad_key", False)


def test_a_stream_that_fails_honestly_raises_after_its_text(wired: WiredAppliance, policy: Policy) -> None:
    wired.options = Options(status="error", fail_after=2)
    pieces: list[str] = []
    with Appliance(wired.url, policy=policy) as appliance, pytest.raises(ApplianceError) as caught:
        _drain(appliance.stream(MESSAGES, model=MODEL), pieces)
    assert "".join(pieces) == "Four"
    assert (caught.value.code, caught.value.verified) == ("engine_failed", True)


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
SURROGATE = "a secret \ud83d"
UNSENDABLE: list[tuple[Any, dict[str, Any], str]] = [
    (SURROGATE, {}, "messages[0].content: holds a lone surrogate"),
    (
        [*MESSAGES, {"role": "user", "content": [{"type": "text", "text": SURROGATE}]}],
        {},
        "messages[1].content[0].text: ",
    ),
    (MESSAGES, {"stop": ["fine", SURROGATE]}, "stop[1]: holds a lone surrogate"),
    (MESSAGES, {"metadata": {SURROGATE: "x"}}, "metadata: holds a lone surrogate"),
    (MESSAGES, {"metadata": {"secret key": SURROGATE}}, "metadata.(a key): holds a lone surrogate"),
    (MESSAGES, {"temperature": float("nan")}, "temperature: a number that is not finite"),
    (MESSAGES, {"top_p": float("inf")}, "top_p: a number that is not finite"),
    (MESSAGES, {"seed": {1}}, "seed: a value of this type"),
    (MESSAGES, {"tools": ITSELF}, "tools[0]"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), UNSENDABLE)
async def test_what_cannot_be_sent_is_refused_by_its_place_before_anything_is_sent(
    wired: WiredAppliance, policy: Policy, prompt: Any, params: dict[str, Any], message: str
) -> None:
    with Appliance(wired.url, policy=policy) as appliance:
        asks: list[Callable[[], Any]] = [
            lambda: appliance.chat(prompt, model=MODEL, **params),
            lambda: list(appliance.stream(prompt, model=MODEL, **params)),
            lambda: list(appliance.stream(prompt, model=MODEL, pending=True, **params)),
        ]
        for ask in asks:
            with pytest.raises(RequestError) as caught:
                ask()
            assert str(caught.value).startswith(message)
            assert "secret" not in str(caught.value)
            assert caught.value.__context__ is None, "the error of the encoder holds the whole prompt"
    async with AsyncAppliance(wired.url, policy=policy) as waiting:
        with pytest.raises(RequestError):
            await waiting.chat(prompt, model=MODEL, **params)
        with pytest.raises(RequestError):
            waiting.stream(prompt, model=MODEL, **params)
    assert wired.connections == 0


def test_network_trouble_is_a_transport_error(wired: WiredAppliance, policy: Policy) -> None:
    with Appliance(wired.url, policy=policy) as appliance:
        wired.hang_up_on_inference = True
        with pytest.raises(TransportError) as caught:
            appliance.chat(MESSAGES, model=MODEL)
        assert caught.value.code == "CONNECTION_BROKEN"
    with Appliance("https://127.0.0.1:1", policy=policy) as appliance, pytest.raises(TransportError) as caught:
        appliance.attest()
    assert caught.value.code == "CONNECT_FAILED"


def test_a_slow_appliance_times_out(wired: WiredAppliance, policy: Policy) -> None:
    wired.edit_response = lambda r: replace(r, pause_s=1.0)
    with Appliance(wired.url, policy=policy, timeout_s=0.3) as appliance, pytest.raises(TransportError) as caught:
        list(appliance.stream(MESSAGES, model=MODEL))
    assert caught.value.code == "TIMED_OUT"


def test_gaps_in_the_chain_are_reported_and_refused_where_the_policy_says_so(
    wired: WiredAppliance, policy: Policy
) -> None:
    def ask_with_a_gap(appliance: Appliance) -> None:
        appliance.chat(MESSAGES, model=MODEL)
        state = wired._live[-1].state
        assert state is not None
        wired.simulator.answer({"model": MODEL, "messages": MESSAGES}, state)
        appliance.chat(MESSAGES, model=MODEL)
        assert len(appliance.receipt_gaps()) == 1

    with Appliance(wired.url, policy=policy) as appliance:
        ask_with_a_gap(appliance)
    wired.restart("second boot")
    strict = Appliance(wired.url, policy=replace(policy, require_gap_free_chain=True))
    ask_with_a_gap(strict)
    with pytest.raises(PolicyError) as caught:
        strict.close()
    assert caught.value.code == Rejection.RECEIPT_CHAIN_GAP


def test_receipts_are_remembered_up_to_a_bound(
    wired: WiredAppliance, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client_sdk.client.client.RECEIPTS_KEPT", 2)
    with Appliance(wired.url, policy=policy) as appliance:
        ids = [appliance.chat(MESSAGES, model=MODEL).response_id for _ in range(3)]
        for unknown in (ids[0], "chatcmpl-nothex", ""):
            with pytest.raises(KeyError):
                appliance.receipt_for(unknown)
        assert appliance.receipt_for(ids[2]).claims.cti.hex() == ids[2].removeprefix("chatcmpl-")


def test_every_answer_can_be_saved(wired: WiredAppliance, policy: Policy, tmp_path: Path) -> None:
    with Appliance(wired.url, policy=policy, save=tmp_path) as appliance:
        whole = appliance.chat(MESSAGES, model=MODEL)
        list(appliance.stream(MESSAGES, model=MODEL))
    assert len(list(tmp_path.iterdir())) == 2
    verified = client_sdk.verify_saved(tmp_path / whole.receipt.claims.cti.hex(), policy)
    assert verified.receipt.claims == whole.receipt.claims


@pytest.mark.parametrize(
    "url",
    ["http://host:1", "https://", "host:1", "https://host/v1", "https://user@host", "https://host/?q=1", "https://h#f"],
)
def test_addresses_are_origins(url: str) -> None:
    with pytest.raises(ValueError, match="address of an appliance"):
        parse_appliance_url(url)


# --- asynchronous ----------------------------------------------------------------------------------------------------


async def test_the_async_client_does_the_same(wired: WiredAppliance, policy: Policy) -> None:
    async with AsyncAppliance(wired.url, policy=policy) as appliance:
        assert (await appliance.attest()).family == "insecure"
        assert (await appliance.chat(MESSAGES, model=MODEL)).text == "Four."
        stream = appliance.stream(MESSAGES, model=MODEL)
        assert "".join([piece async for piece in stream]) == "Four."
        assert stream.receipt is appliance.receipt_for(stream.response_id)
        marked = [piece async for piece in appliance.stream(MESSAGES, model=MODEL, pending=True)]
        assert Pending("ur") in marked
        answer = await appliance.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == "Four."


async def test_the_async_client_rejects(wired: WiredAppliance, policy: Policy) -> None:
    wired.options = Options(signer=SigningKey("somebody else"))
    async with AsyncAppliance(wired.url, policy=policy) as appliance:
        with pytest.raises(VerificationError):
            await appliance.chat(MESSAGES, model=MODEL)
        with pytest.raises(VerificationError):
            _ = [piece async for piece in appliance.stream(MESSAGES, model=MODEL)]
        with pytest.raises(VerificationError):
            await appliance.openai(max_retries=3).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(wired.inference) == 3


# --- the stock openai client -----------------------------------------------------------------------------------------


def test_openai_works_unchanged(wired: WiredAppliance, policy: Policy) -> None:
    with Appliance(wired.url, policy=policy) as appliance:
        client = appliance.openai()
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0.5, seed=3, stop="x")
        assert answer.choices[0].message.content == "Four."
        assert appliance.receipt_for(answer.id).claims.decoding is not None
        chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "Four."
        assert appliance.receipt_for(chunks[0].id).claims.stream is not None
        assert client.completions.create(model=MODEL, prompt="2+2=").choices[0].text == "Four."
        client.close()
        assert appliance.chat(MESSAGES, model=MODEL).text == "Four."


LIES: dict[str, Callable[[Response], Response]] = {
    "text": lambda r: replace(r, body=r.body.replace(b"Four", b"Five")),
    "receipt stripped": lambda r: r.without(names.HEADER_RECEIPT_ID).without(names.HEADER_EXECUTION_RECEIPT),
    "redirect": lambda r: replace(r, status=302).having("location", "https://127.0.0.1:1/v1/chat/completions"),
    "server error": lambda r: replace(r, status=500),
    "retry asked for": lambda r: replace(r, status=409).having("x-should-retry", "true"),
    "coding": lambda r: r.having("content-encoding", "br"),
}


@pytest.mark.parametrize("name", LIES)
def test_openai_neither_catches_nor_retries_a_rejection(wired: WiredAppliance, policy: Policy, name: str) -> None:
    wired.edit_response = LIES[name]
    with Appliance(wired.url, policy=policy) as appliance, pytest.raises(VerificationError):
        appliance.openai(max_retries=3).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(wired.inference) == 1


STREAM_LIES: dict[str, Callable[[tuple[bytes, ...]], tuple[bytes, ...]]] = {
    "text": lambda b: tuple(x.replace(b'"ur"', b'"ve"') for x in b),
    "receipt stripped": lambda b: tuple(x for x in b if not x.startswith(b": receipt")),
    "cut": lambda b: b[:4],
    "an error made up": lambda b: (*b[:3], b'data: {"error":{"message":"m"}}\n\n'),
    "done at once": lambda b: (names.DONE_BLOCK,),
}


@pytest.mark.parametrize("name", STREAM_LIES)
def test_openai_streams_neither_catch_nor_retry_a_rejection(wired: WiredAppliance, policy: Policy, name: str) -> None:
    wired.edit_response = lambda r: replace(r, chunks=STREAM_LIES[name](r.chunks or ()))
    with Appliance(wired.url, policy=policy) as appliance:
        stream = appliance.openai(max_retries=3).chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(VerificationError):
            list(stream)
    assert len(wired.inference) == 1


def test_openai_neither_catches_nor_retries_a_failed_attestation(wired: WiredAppliance, policy: Policy) -> None:
    wrong = replace(policy, models={MODEL: frozenset({b"\x01" * 32})})
    with Appliance(wired.url, policy=wrong) as appliance, pytest.raises(VerificationError):
        appliance.openai(max_retries=3).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert wired.connections == 1
    wired.attestation_response = Response(status=503)
    with Appliance(wired.url, policy=policy) as appliance, pytest.raises(UndecidedError):
        appliance.openai(max_retries=3).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert wired.connections == 2


def test_openai_cannot_be_led_elsewhere(wired: WiredAppliance, policy: Policy) -> None:
    with Appliance(wired.url, policy=policy) as appliance:
        other = appliance.openai().with_options(base_url="https://127.0.0.1:1/v1")
        with pytest.raises(VerificationError) as caught:
            other.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.code == Rejection.FOREIGN_ORIGIN
    assert wired.connections == 0


def test_openai_maps_verified_errors(wired: WiredAppliance, policy: Policy) -> None:
    body = b'{"error":{"message":"no","type":"invalid_request_error","param":"messages","code":"refused"}}'
    wired.options = Options(status="refused", http_status=400, error_body=body)
    with Appliance(wired.url, policy=policy) as appliance, pytest.raises(openai.BadRequestError) as caught:
        appliance.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.response.extensions["verified"] is True


def test_openai_retries_draw_new_nonces_where_they_are_asked_for(wired: WiredAppliance, policy: Policy) -> None:
    answers = iter([Response(status=503, headers=(("retry-after", "0"),)), None])
    wired.edit_response = lambda r: next(answers) or r
    with Appliance(wired.url, policy=policy) as appliance:
        answer = appliance.openai(max_retries=1).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Four."
    assert len({seen.headers["x-inference-nonce"] for seen in wired.inference}) == 2


# --- the package -----------------------------------------------------------------------------------------------------


def test_the_package_exports_what_it_says() -> None:
    assert {"Appliance", "AsyncAppliance", "Policy", "UnsafeAcceptInsecure", "VerificationError"} <= set(
        dir(client_sdk)
    )
    for name in client_sdk.__all__:
        assert getattr(client_sdk, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = client_sdk.nothing


def test_the_sdk_loads_none_of_the_server() -> None:
    code = (
        "import sys, client_sdk;"
        "assert not any(m.startswith(('client_sdk.', 'httpx', 'OpenSSL')) for m in sys.modules);"
        "from client_sdk import Appliance, Policy;"
        "heavy = {'fastapi', 'uvicorn', 'torch', 'llama_cpp', 'appliance', 'openai', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("option", ["http_client", "websocket_base_url", "provider"])
def test_the_openai_client_cannot_be_given_a_way_around_verification(
    wired: WiredAppliance, policy: Policy, option: str
) -> None:
    with Appliance(wired.url, policy=policy) as appliance, pytest.raises(ValueError, match=option):
        appliance.openai(**{option: None})


def test_websockets_of_the_openai_client_lead_nowhere(wired: WiredAppliance, policy: Policy) -> None:
    """They would be opened past the HTTP client: to anybody with a certificate for this name, unattested."""
    with Appliance(wired.url, policy=policy) as appliance:
        client = appliance.openai()
        for base in (client, client.with_options(base_url="https://127.0.0.1:1/v1")):
            url = base.websocket_base_url
            assert str(url).startswith("refused://")
            assert ".invalid" in str(url)
