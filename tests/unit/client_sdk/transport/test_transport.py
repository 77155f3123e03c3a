"""The verifying transports over real sockets against a simulated appliance, one lie at a time."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import httpx
import pytest

from client_sdk.errors import ApplianceError, Rejection, UndecidedError, VerificationError
from client_sdk.policy.policy import Policy, UnsafeAcceptInsecure
from client_sdk.system import Surroundings
from client_sdk.transport.httpx_transport import AsyncVerifyingTransport, VerifyingTransport
from client_sdk.transport.protocol import Judge, VerifiedAnswer
from client_sdk.wire import names
from tests.simulators.insecure_appliance import CHAT, MODEL, Options, SigningKey, chat_request
from tests.simulators.wired_appliance import LATER_S, Response, WiredAppliance


@pytest.fixture
def wired() -> Iterator[WiredAppliance]:
    with WiredAppliance() as appliance:
        yield appliance


@dataclass
class Clock:
    """Real time, plus what a test adds to it."""

    skipped_s: float = 0.0

    def surroundings(self) -> Surroundings:
        return Surroundings(now=time.time, monotonic=lambda: time.monotonic() + self.skipped_s, draw=os.urandom)


def policy_for(wired: WiredAppliance, **changes: object) -> Policy:
    pins = {MODEL: frozenset({wired.simulator.model.identity})}
    return replace(Policy(models=pins, insecure=UnsafeAcceptInsecure()), **changes)  # type: ignore[arg-type]


def judge_for(
    wired: WiredAppliance, policy: Policy | None = None, clock: Clock | None = None, **options: object
) -> Judge:
    around = (clock or Clock()).surroundings()
    return Judge(httpx.URL(wired.url), policy or policy_for(wired), around, **options)  # type: ignore[arg-type]


def client_for(wired: WiredAppliance, policy: Policy | None = None, **options: object) -> httpx.Client:
    transport = VerifyingTransport(judge_for(wired, policy, **options))  # type: ignore[arg-type]
    return httpx.Client(transport=transport, base_url=wired.url, trust_env=False, timeout=5)


def aclient_for(wired: WiredAppliance, policy: Policy | None = None) -> httpx.AsyncClient:
    transport = AsyncVerifyingTransport(judge_for(wired, policy))
    return httpx.AsyncClient(transport=transport, base_url=wired.url, trust_env=False, timeout=5)


def rejected(wired: WiredAppliance, request: dict[str, object] | None = None) -> VerificationError:
    """What a client raises for one question; at most one inference request reaches the appliance."""
    with client_for(wired) as client, pytest.raises(VerificationError) as caught:
        client.post(CHAT, json=request or chat_request())
    assert len(wired.inference) <= 1
    return caught.value


# --- what leaves -----------------------------------------------------------------------------------------------------


def test_answer_is_handed_out_with_its_verified_receipt(wired: WiredAppliance) -> None:
    with client_for(wired) as client:
        response = client.post(CHAT, json=chat_request())
    assert response.json()["choices"][0]["message"]["content"] == "Four."
    assert response.extensions["verified"] is True
    assert response.extensions["verified_receipt"].claims.cti.hex() in response.json()["id"]
    assert response.extensions["attestation"].family == "insecure"


def test_requests_ask_for_identity_and_carry_a_nonce_of_ours_alone(wired: WiredAppliance) -> None:
    with client_for(wired) as client:
        for _ in range(2):
            given = {"x-inference-nonce": "00" * 32, "accept-encoding": "gzip", "transfer-encoding": "chunked"}
            client.post(CHAT, json=chat_request(), headers=given)
    first, second = wired.inference
    nonces = {seen.headers["x-inference-nonce"] for seen in (first, second)}
    assert len(nonces) == 2
    assert all(len(bytes.fromhex(nonce)) == 32 and nonce != "00" * 32 for nonce in nonces)
    assert first.headers["accept-encoding"] == "identity"
    assert first.headers["content-length"] == str(len(first.body))
    assert "transfer-encoding" not in first.headers
    assert first.connection == second.connection


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:1/v1/models", "http://127.0.0.1:{port}/", "https://localhost:{port}/"]
)
def test_no_byte_goes_to_another_origin(wired: WiredAppliance, url: str) -> None:
    with client_for(wired) as client, pytest.raises(VerificationError) as caught:
        client.get(url.format(port=wired.port))
    assert caught.value.code == Rejection.FOREIGN_ORIGIN
    assert wired.connections == 0


@pytest.mark.parametrize("path", [names.PATH_ATTESTATION])
def test_callers_cannot_attest_by_themselves(wired: WiredAppliance, path: str) -> None:
    with client_for(wired) as client, pytest.raises(ValueError, match="attests its connections itself"):
        client.post(path, content=b"x")
    with client_for(wired) as client, pytest.raises(ValueError, match="Content-Encoding"):
        client.post(CHAT, content=b"x", headers={"content-encoding": "gzip"})
    assert wired.connections == 0


# --- what comes back -------------------------------------------------------------------------------------------------


def with_body(response: Response, edit: Callable[[bytes], bytes]) -> Response:
    return replace(response, body=edit(response.body))


@dataclass
class Swap:
    """Answers every request with the receipt (and its id) of another one."""

    wired: WiredAppliance

    def __call__(self, response: Response) -> Response:
        state = self.wired._live[-1].state
        assert state is not None
        other = self.wired.simulator.answer(chat_request(), state)
        text = names.HEADER_EXECUTION_RECEIPT
        from client_sdk.wire.stream import encode_base64url

        return response.without(text).having(text, encode_base64url(other.receipt).decode())


WHOLE_LIES: dict[str, tuple[Callable[[Response], Response], Rejection]] = {
    "text changed": (lambda r: with_body(r, lambda b: b.replace(b"Four", b"Five")), Rejection.RESPONSE_MISMATCH),
    "text cut": (lambda r: with_body(r, lambda b: b[:-1]), Rejection.RESPONSE_MISMATCH),
    "space added": (lambda r: with_body(r, lambda b: b + b" "), Rejection.RESPONSE_MISMATCH),
    "no receipt at all": (
        lambda r: r.without(names.HEADER_RECEIPT_ID).without(names.HEADER_EXECUTION_RECEIPT),
        Rejection.RECEIPT_MISSING,
    ),
    "receipt id of another": (
        lambda r: r.without(names.HEADER_RECEIPT_ID).having(names.HEADER_RECEIPT_ID, "00" * 16),
        Rejection.RECEIPT_ID_MISMATCH,
    ),
    "receipt id no hex": (
        lambda r: r.without(names.HEADER_RECEIPT_ID).having(names.HEADER_RECEIPT_ID, "x" * 32),
        Rejection.MALFORMED_RESPONSE,
    ),
    "receipt id twice": (lambda r: r.having(names.HEADER_RECEIPT_ID, "00" * 16), Rejection.MALFORMED_RESPONSE),
    "receipt no base64url": (
        lambda r: r.without(names.HEADER_EXECUTION_RECEIPT).having(names.HEADER_EXECUTION_RECEIPT, "+/+/"),
        Rejection.MALFORMED_BASE64,
    ),
    "other status": (lambda r: replace(r, status=201), Rejection.STATUS_MISMATCH),
    "other media type": (
        lambda r: r.without("content-type").having("content-type", "text/plain"),
        Rejection.RESPONSE_MISMATCH,
    ),
    "content coding": (lambda r: r.having("content-encoding", "gzip"), Rejection.CONTENT_ENCODING),
    "redirect": (lambda r: replace(r, status=307).having("location", "https://elsewhere/"), Rejection.REDIRECT),
}


@pytest.mark.parametrize("name", WHOLE_LIES)
def test_a_lie_about_a_whole_answer_is_rejected(wired: WiredAppliance, name: str) -> None:
    wired.edit_response, code = WHOLE_LIES[name]
    assert rejected(wired).code == code


def test_a_receipt_of_another_request_is_rejected(wired: WiredAppliance) -> None:
    wired.edit_response = Swap(wired)
    assert rejected(wired).code == Rejection.RECEIPT_NONCE_MISMATCH


def test_a_receipt_by_another_key_is_rejected(wired: WiredAppliance) -> None:
    wired.options = Options(signer=SigningKey("somebody else"))
    assert rejected(wired).code == Rejection.WRONG_KEY


def test_a_live_receipt_without_its_salt_is_rejected(wired: WiredAppliance) -> None:
    wired.options = Options(salted=False)
    assert rejected(wired).code == Rejection.REQUIRED_CLAIM_MISSING


def test_a_receipt_too_long_for_a_header_is_fetched(wired: WiredAppliance) -> None:
    wired.receipt_in_header, wired.pending_fetches = False, 2
    with client_for(wired) as client:
        response = client.post(CHAT, json=chat_request(), headers={"authorization": "Bearer k"})
    assert response.extensions["verified"] is True
    fetches = [seen for seen in wired.seen if seen.path.startswith(names.PATH_RECEIPTS)]
    assert len(fetches) == 3
    assert {seen.headers["authorization"] for seen in fetches} == {"Bearer k"}
    assert wired.connections == 1


def test_an_answer_whose_receipt_is_nowhere_is_rejected(wired: WiredAppliance) -> None:
    wired.receipt_in_header = False
    wired.edit_response = lambda r: r if r.status == 200 and r.body.startswith(b"{") else replace(r, status=404)
    assert rejected(wired).code == Rejection.RECEIPT_MISSING


def test_a_success_on_an_unknown_route_is_no_answer(wired: WiredAppliance) -> None:
    wired.edit_response = lambda r: r.without(names.HEADER_RECEIPT_ID).without(names.HEADER_EXECUTION_RECEIPT)
    with client_for(wired) as client:
        for method, path in (("GET", "/v1/chat/completions"), ("DELETE", "/v1/models/x"), ("GET", "/v1/anything")):
            with pytest.raises(VerificationError) as caught:
                client.request(method, path, json={} if method == "DELETE" else None)
            assert caught.value.code == Rejection.RECEIPT_MISSING


def test_operational_routes_pass_as_unverified(wired: WiredAppliance) -> None:
    with client_for(wired) as client:
        response = client.get("/v1/models")
    assert response.json() == {"object": "list", "data": []}
    assert response.extensions["verified"] is False
    assert "x-inference-nonce" not in wired.seen[-1].headers


@pytest.mark.parametrize("status", [401, 403, 404, 429, 503])
def test_errors_without_a_receipt_pass_as_unverified(wired: WiredAppliance, status: int) -> None:
    wired.edit_response = lambda r: Response(status=status, body=b'{"error":{"code":"x"}}')
    with client_for(wired) as client:
        response = client.post(CHAT, json=chat_request())
    assert (response.status_code, response.extensions["verified"]) == (status, False)
    assert "verified_receipt" not in response.extensions


def test_errors_with_a_receipt_are_verified(wired: WiredAppliance) -> None:
    body = b'{"error":{"message":"no","type":"invalid_request_error","param":"messages","code":"refused"}}'
    wired.options = Options(status="refused", http_status=400, error_body=body)
    with client_for(wired) as client:
        response = client.post(CHAT, json=chat_request())
        assert (response.status_code, response.content) == (400, body)
        assert response.extensions["verified_receipt"].claims.response.status == "refused"
        wired.edit_response = lambda r: with_body(r, lambda b: b.replace(b"no", b"NO"))
        with pytest.raises(VerificationError) as caught:
            client.post(CHAT, json=chat_request())
    assert caught.value.code == Rejection.RESPONSE_MISMATCH


def test_an_answer_beyond_the_limit_is_rejected(wired: WiredAppliance) -> None:
    with client_for(wired, response_limit_bytes=64) as client, pytest.raises(VerificationError) as caught:
        client.post(CHAT, json=chat_request())
    assert caught.value.code == Rejection.MALFORMED_RESPONSE


UNASKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize("filler", [0, 60_000], ids=["small head", "large head"])
def test_an_answer_that_follows_another_at_once_is_rejected(wired: WiredAppliance, filler: int) -> None:
    """A head that only httpcore's parser still takes must not hide what comes behind the answer."""
    wired.edit_response = lambda r: replace(r.having("x-filler", "a" * filler), trailing=UNASKED)
    assert rejected(wired).code == Rejection.UNSOLICITED_BYTES


@pytest.mark.parametrize("charset", ["utf-7", "utf-16", "latin-1", '"utf-7"', "utf-8; charset=utf-7"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_head_cannot_choose_how_verified_bytes_are_read(wired: WiredAppliance, charset: str, stream: bool) -> None:
    """No receipt binds the parameters of the media type, and httpx would decode the text by them."""

    def edit(response: Response) -> Response:
        media = response.header("content-type")
        return response.without("content-type").having("content-type", f"{media}; charset={charset}")

    wired.edit_response = edit
    assert rejected(wired, chat_request(stream=True) if stream else None).code == Rejection.MALFORMED_RESPONSE


def test_saying_that_json_is_utf8_changes_nothing(wired: WiredAppliance) -> None:
    media = "application/json; charset=UTF-8"
    wired.edit_response = lambda r: r.without("content-type").having("content-type", media)
    with client_for(wired) as client:
        assert client.post(CHAT, json=chat_request()).json()["choices"]


def test_bytes_that_answer_no_request_are_rejected(wired: WiredAppliance) -> None:
    wired.edit_response = lambda r: replace(r, later=b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    with client_for(wired) as client:
        client.post(CHAT, json=chat_request())
        time.sleep(2 * LATER_S)
        with pytest.raises(VerificationError) as caught:
            client.post(CHAT, json=chat_request())
    assert caught.value.code == Rejection.UNSOLICITED_BYTES
    assert len(wired.inference) == 1


# --- streams ---------------------------------------------------------------------------------------------------------

STREAM = chat_request(stream=True, stream_options={"include_usage": True})
Blocks = tuple[bytes, ...]


def edit_blocks(edit: Callable[[Blocks], Blocks]) -> Callable[[Response], Response]:
    return lambda r: r if r.chunks is None else replace(r, chunks=edit(r.chunks))


def without_block(prefix: bytes) -> Callable[[Blocks], Blocks]:
    return lambda blocks: tuple(block for block in blocks if not block.startswith(prefix))


def read_stream(client: httpx.Client, seen: list[bytes]) -> None:
    with client.stream("POST", CHAT, json=STREAM) as response:
        seen.extend(response.iter_raw())


async def aread_stream(client: httpx.AsyncClient) -> bytes:
    async with client.stream("POST", CHAT, json=STREAM) as response:
        return b"".join([chunk async for chunk in response.aiter_raw()])


def test_a_stream_is_handed_out_verified(wired: WiredAppliance) -> None:
    with client_for(wired) as client:
        with client.stream("POST", CHAT, json=STREAM) as response:
            assert response.extensions["verified"] is False
            text = b"".join(response.iter_raw())
        assert response.extensions["verified"] is True
        assert response.extensions["verified_receipt"].claims.stream is not None
        assert text.endswith(names.DONE_BLOCK)
        assert b": checkpoint" not in text
        client.post(CHAT, json=chat_request())
    assert wired.connections == 1


STREAM_LIES: dict[str, tuple[Callable[[Blocks], Blocks], Rejection]] = {
    "frame dropped": (lambda b: (b[0], *b[1:3], *b[4:]), Rejection.STREAM_TRUNCATED),
    "frame twice": (lambda b: (*b[:4], b[3], *b[4:]), Rejection.STREAM_CHAIN_MISMATCH),
    "frames swapped": (lambda b: (*b[:3], b[4], b[3], *b[5:]), Rejection.STREAM_CHAIN_MISMATCH),
    "text changed": (lambda b: tuple(x.replace(b'"ur"', b'"ve"') for x in b), Rejection.STREAM_CHAIN_MISMATCH),
    "receipt dropped": (without_block(b": receipt"), Rejection.RECEIPT_MISSING),
    "receipt and end dropped": (
        lambda b: without_block(b": receipt")(without_block(b"data: [DONE]")(b)),
        Rejection.STREAM_TRUNCATED,
    ),
    "end dropped": (without_block(b"data: [DONE]"), Rejection.STREAM_TRUNCATED),
    "first checkpoint dropped": (without_block(b": checkpoint"), Rejection.STREAM_CHECKPOINT_MISSING),
    "frame after the end": (lambda b: (*b, b[0]), Rejection.STREAM_AFTER_RECEIPT),
    "half a block": (lambda b: (*b[:3], b[3][:9]), Rejection.STREAM_TRUNCATED),
    "CRLF": (lambda b: (b[0].replace(b"\n", b"\r\n"), *b[1:]), Rejection.MALFORMED_STREAM),
}


@pytest.mark.parametrize("name", STREAM_LIES)
def test_a_lie_in_a_stream_is_rejected(wired: WiredAppliance, name: str) -> None:
    edit, code = STREAM_LIES[name]
    wired.edit_response = edit_blocks(edit)
    seen: list[bytes] = []
    with client_for(wired) as client, pytest.raises(VerificationError) as caught:
        read_stream(client, seen)
    assert caught.value.code == code
    assert len(wired.inference) == 1
    assert names.DONE_BLOCK not in b"".join(seen)


def test_what_was_verified_before_a_lie_is_handed_out_and_nothing_else(wired: WiredAppliance) -> None:
    wired.options = Options(checkpoint_every=1, pieces=("a", "b", "c", "d"))
    lie = edit_blocks(lambda b: tuple(x.replace(b'"c"', b'"X"') for x in b))
    # All in one chunk, so that truth and lie arrive together.
    wired.edit_response = lambda r: replace(lie(r), chunks=(b"".join(lie(r).chunks or ()),))
    seen: list[bytes] = []
    with client_for(wired) as client, pytest.raises(VerificationError) as caught:
        read_stream(client, seen)
    text = b"".join(seen)
    assert b'"a"' in text
    assert b'"b"' in text
    assert b'"X"' not in text
    assert "last verified frame: 2" in caught.value.message


def test_a_stream_cut_by_the_network_is_rejected(wired: WiredAppliance) -> None:
    wired.edit_response = lambda r: replace(r, chunks=(r.chunks or ())[:3], cut=True)
    with client_for(wired) as client, pytest.raises(VerificationError) as caught:
        read_stream(client, [])
    assert caught.value.code == Rejection.STREAM_TRUNCATED
    assert "last verified frame is 1" in caught.value.message


def test_a_stream_that_failed_honestly_ends_with_its_error_verified(wired: WiredAppliance) -> None:
    wired.options = Options(status="error", fail_after=2)
    with client_for(wired) as client, client.stream("POST", CHAT, json=STREAM) as response:
        text = b"".join(response.iter_raw())
    assert b"engine_failed" in text
    assert response.extensions["verified_receipt"].claims.response.status == "error"


def test_kept_streams_are_complete(wired: WiredAppliance) -> None:
    kept: list[VerifiedAnswer] = []
    with client_for(wired, on_verified=kept.append, keep_streams=True) as client:
        read_stream(client, [])
    body = kept[0].body or b""
    assert b": checkpoint" in body
    assert b": receipt" in body
    assert body.endswith(names.DONE_BLOCK)


# --- attestation -----------------------------------------------------------------------------------------------------


def test_no_request_leaves_before_the_verdict(wired: WiredAppliance) -> None:
    policy = replace(policy_for(wired), models={MODEL: frozenset({b"\x01" * 32})})
    with client_for(wired, policy) as client, pytest.raises(VerificationError) as caught:
        client.post(CHAT, json=chat_request())
    assert caught.value.code == Rejection.MODEL_NOT_ALLOWED
    assert [seen.path for seen in wired.seen] == [names.PATH_ATTESTATION]


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (Response(status=302, headers=(("location", "/"),)), Rejection.REDIRECT),
        (Response(headers=(("content-type", "text/html"),), body=b"hello"), Rejection.MALFORMED_RESPONSE),
        (Response(headers=(("content-type", names.MEDIA_CBOR),), body=b"\xff"), Rejection.MALFORMED_CBOR),
    ],
)
def test_what_is_no_bundle_is_rejected(wired: WiredAppliance, response: Response, code: Rejection) -> None:
    wired.attestation_response = response
    assert rejected(wired).code == code


@pytest.mark.parametrize("status", [429, 503])
def test_an_appliance_too_busy_to_attest_is_undecided(wired: WiredAppliance, status: int) -> None:
    wired.attestation_response = Response(status=status, headers=(("retry-after", "7"),))
    with client_for(wired) as client, pytest.raises(UndecidedError) as caught:
        client.post(CHAT, json=chat_request())
    assert caught.value.retry_after_s == 7.0


def test_an_attestation_endpoint_that_fails_is_no_verdict(wired: WiredAppliance) -> None:
    wired.attestation_response = Response(status=500, body=b'{"error":{"code":"broken","message":"sorry"}}')
    with client_for(wired) as client, pytest.raises(ApplianceError) as caught:
        client.post(CHAT, json=chat_request())
    assert (caught.value.code, caught.value.verified) == ("broken", False)


def test_a_second_connection_continues_from_evidence_this_process_verified(wired: WiredAppliance) -> None:
    clock = Clock()
    with client_for(wired, clock=clock) as client:
        client.post(CHAT, json=chat_request())
        wired.drop_connections()
        clock.skipped_s = 100.0
        second = client.post(CHAT, json=chat_request())
        wired.drop_connections()
        clock.skipped_s = 601.0
        third = client.post(CHAT, json=chat_request())
    haves = [asked.have for asked in wired.attestations]
    assert haves[0] is None
    assert haves[1] == second.extensions["attestation"].claims_digest
    assert haves[2] is None
    assert 100 <= second.extensions["attestation"].evidence_age_s < 110
    assert third.extensions["attestation"].evidence_age_s == 0


def test_a_policy_can_ask_for_evidence_on_every_connection(wired: WiredAppliance) -> None:
    with client_for(wired, policy_for(wired, max_continued_s=0)) as client:
        for _ in range(2):
            client.post(CHAT, json=chat_request())
            wired.drop_connections()
    assert [asked.have for asked in wired.attestations] == [None, None]


def test_a_continued_answer_that_nobody_asked_for_is_rejected(wired: WiredAppliance) -> None:
    from client_sdk.wire.attestation import AttestationBundle

    wired.edit_bundle = lambda b: AttestationBundle(channel_proof=AttestationBundle.parse(b).channel_proof).encode()
    assert rejected(wired).code == Rejection.CONTINUATION_REFUSED


def test_connections_beyond_their_age_are_replaced(wired: WiredAppliance) -> None:
    clock = Clock()
    with client_for(wired, policy_for(wired, max_channel_age_s=50), clock=clock) as client:
        client.post(CHAT, json=chat_request())
        clock.skipped_s = 49.0
        client.post(CHAT, json=chat_request())
        assert wired.connections == 1
        clock.skipped_s = 51.0
        client.post(CHAT, json=chat_request())
    assert wired.connections == 2


# --- restarts and retries --------------------------------------------------------------------------------------------


def test_after_a_restart_the_appliance_is_attested_anew(wired: WiredAppliance) -> None:
    with client_for(wired) as client:
        first = client.post(CHAT, json=chat_request()).extensions["attestation"]
        wired.restart("second boot")
        second = client.post(CHAT, json=chat_request()).extensions["attestation"]
    assert first.receipt_kid != second.receipt_kid
    assert len(wired.inference) == 2


def test_after_a_restart_an_impostor_is_rejected(wired: WiredAppliance) -> None:
    policy = policy_for(wired)
    with client_for(wired, policy) as client:
        client.post(CHAT, json=chat_request())
        wired.restart("impostor")
        wired.simulator.model = replace(wired.simulator.model, identity=b"\x07" * 32)
        with pytest.raises(VerificationError) as caught:
            client.post(CHAT, json=chat_request())
    assert caught.value.code == Rejection.MODEL_NOT_ALLOWED
    assert len(wired.inference) == 1


class _AtTheLastMoment(logging.Handler):
    """Restarts the appliance when the HTTP client has chosen a connection and is about to write to it."""

    def __init__(self, wired: WiredAppliance) -> None:
        super().__init__()
        self.wired = wired
        self.armed = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.armed and record.getMessage().startswith("send_request_headers.started"):
            self.armed = False
            self.wired.restart("while a request was on its way")
            time.sleep(0.1)


@pytest.fixture
def last_moment(wired: WiredAppliance) -> Iterator[_AtTheLastMoment]:
    logger, handler = logging.getLogger("httpcore.http11"), _AtTheLastMoment(wired)
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_connection_dead_before_the_first_byte_is_replaced_once(
    wired: WiredAppliance, last_moment: _AtTheLastMoment
) -> None:
    with client_for(wired) as client:
        client.post(CHAT, json=chat_request())
        last_moment.armed = True
        response = client.post(CHAT, json=chat_request())
    assert response.extensions["verified"] is True
    assert len(wired.inference) == 2
    assert wired.connections == 2


async def test_a_connection_dead_before_the_first_byte_is_replaced_once_async(
    wired: WiredAppliance, last_moment: _AtTheLastMoment
) -> None:
    async with aclient_for(wired) as client:
        await client.post(CHAT, json=chat_request())
        last_moment.armed = True
        response = await client.post(CHAT, json=chat_request())
    assert response.extensions["verified"] is True
    assert wired.connections == 2


def test_nothing_is_resent_once_a_byte_has_left(wired: WiredAppliance) -> None:
    wired.hang_up_on_inference = True
    with client_for(wired) as client, pytest.raises(httpx.RemoteProtocolError):
        client.post(CHAT, json=chat_request())
    assert len(wired.inference) == 1


def test_nobody_listening_is_a_connect_error(wired: WiredAppliance) -> None:
    with client_for(wired) as client:
        wired._listener.shutdown(socket.SHUT_RDWR)
        wired._listener.close()
        with pytest.raises(httpx.ConnectError):
            client.post(CHAT, json=chat_request())


# --- asynchronous ----------------------------------------------------------------------------------------------------


async def test_async_answers_and_streams_are_verified(wired: WiredAppliance) -> None:
    async with aclient_for(wired) as client:
        whole = await client.post(CHAT, json=chat_request())
        assert whole.extensions["verified"] is True
        async with client.stream("POST", CHAT, json=STREAM) as response:
            text = b"".join([chunk async for chunk in response.aiter_raw()])
    assert text.endswith(names.DONE_BLOCK)
    assert response.extensions["verified"] is True


async def test_async_receipts_are_fetched(wired: WiredAppliance) -> None:
    wired.receipt_in_header, wired.pending_fetches = False, 1
    async with aclient_for(wired) as client:
        response = await client.post(CHAT, json=chat_request())
    assert response.extensions["verified"] is True


@pytest.mark.parametrize("name", WHOLE_LIES)
async def test_async_whole_lies_are_rejected(wired: WiredAppliance, name: str) -> None:
    wired.edit_response, code = WHOLE_LIES[name]
    async with aclient_for(wired) as client:
        with pytest.raises(VerificationError) as caught:
            await client.post(CHAT, json=chat_request())
    assert caught.value.code == code


@pytest.mark.parametrize("name", STREAM_LIES)
async def test_async_stream_lies_are_rejected(wired: WiredAppliance, name: str) -> None:
    edit, code = STREAM_LIES[name]
    wired.edit_response = edit_blocks(edit)
    async with aclient_for(wired) as client:
        with pytest.raises(VerificationError) as caught:
            await aread_stream(client)
    assert caught.value.code == code


async def test_async_cut_streams_are_rejected(wired: WiredAppliance) -> None:
    wired.edit_response = lambda r: replace(r, chunks=(r.chunks or ())[:3], cut=True)
    async with aclient_for(wired) as client:
        with pytest.raises(VerificationError) as caught:
            await aread_stream(client)
    assert caught.value.code == Rejection.STREAM_TRUNCATED


def test_a_connection_that_outlived_its_policy_unseen_is_refused(wired: WiredAppliance) -> None:
    policy = policy_for(wired)
    judge = judge_for(wired, policy)
    with httpx.Client(transport=VerifyingTransport(judge), base_url=wired.url, trust_env=False) as client:
        record = client.get("/healthz").extensions["record"]
        outgoing = judge.prepare(client.build_request("POST", CHAT), b"")
    limit_s = policy.max_channel_age_s + policy.max_clock_skew_s
    with pytest.raises(VerificationError) as caught:
        judge.received(outgoing, 200, [], record, sent_at=record.verified_at + limit_s + 1)
    assert caught.value.code == Rejection.ATTESTATION_TOO_OLD
    with pytest.raises(VerificationError) as caught:
        judge.received(outgoing, 200, [], None, sent_at=0)
    assert caught.value.code == Rejection.BINDER_MISSING
