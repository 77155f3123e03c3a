"""Attest, ask, stream, verify: the same protocol, whatever kind of socket carries it."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from appliance.listener.certificates import generate_tls_key
from client_sdk import Appliance, ApplianceError, AsyncAppliance, Policy, Rejection, TransportError, VerificationError
from client_sdk.appraisal.verifier import ChannelFacts, appraise
from client_sdk.transport.addresses import Connector, parse_appliance_address
from client_sdk.wire import names
from client_sdk.wire.attestation import AttestationBundle, AttestationClaims, AttestationRequest
from tests.e2e.programs import SLOW, run_client, run_program
from tests.vsock.conftest import MODEL, Place, serve_arguments

pytestmark = pytest.mark.model
QUESTION = "What is the capital of France?"
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}


def connector(url: str) -> Connector:
    found = parse_appliance_address(url).connector
    assert found is not None
    return found


def test_whole_and_streamed_answers_with_receipts(place: Place, policy: Policy) -> None:
    with Appliance(place.url, policy=policy) as appliance:
        result = appliance.attest()
        assert result.family == "insecure"
        answer = appliance.chat(QUESTION, **GREEDY)
        stream = appliance.stream(QUESTION, **GREEDY)
        assert "".join(stream) == answer.text
        assert answer.text
        for receipt in (answer.receipt, stream.receipt):
            assert receipt.claims.attestation == result.claims_digest
            assert receipt.claims.channel == result.claims.binder
        assert stream.receipt.claims.previous == answer.receipt.digest
        again = appliance.http.get(f"/v1/receipts/{answer.receipt.claims.cti.hex()}")
        assert (again.status_code, again.headers["content-type"]) == (200, "application/cose")
        assert appliance.receipt_gaps() == ()


async def test_the_async_client(place: Place, policy: Policy) -> None:
    async with AsyncAppliance(place.url, policy=policy) as appliance:
        answer = await appliance.chat(QUESTION, **GREEDY)
        stream = appliance.stream(QUESTION, **GREEDY)
        assert "".join([piece async for piece in stream]) == answer.text


def test_the_stock_openai_client(place: Place, policy: Policy) -> None:
    with Appliance(place.url, policy=policy) as appliance:
        client = appliance.openai()
        messages: Any = [{"role": "user", "content": QUESTION}]
        whole = client.chat.completions.create(messages=messages, **GREEDY)
        chunks = client.chat.completions.create(messages=messages, stream=True, **GREEDY)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert appliance.receipt_for(whole.id).claims.response.status == "complete"
        assert [model.id for model in client.models.list()] == [MODEL]


def test_the_command_line(place: Place, policy_file: Any) -> None:
    done = run_client("attest", place.url, "--policy", str(policy_file), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"] == "accept"
    wrong = run_client("attest", "vsock://0:1", "--policy", str(policy_file))
    assert wrong.returncode == 2
    assert "the hypervisor itself" in wrong.stderr


@pytest.mark.parametrize("size", [7 << 10, 64 << 10, 1 << 20])
def test_b095_requests_of_every_size_arrive(place: Place, policy: Policy, size: int) -> None:
    """The refusal's receipt commits to every byte that came."""
    with Appliance(place.url, policy=policy) as appliance:
        with pytest.raises(ApplianceError) as caught:
            appliance.chat("x" * size, model=MODEL, temperature=17)
        assert (caught.value.status, caught.value.verified, caught.value.param) == (400, True, "temperature")


def test_a_request_beyond_the_limit_is_refused_not_stuck(place: Place, policy: Policy) -> None:
    with Appliance(place.url, policy=policy) as appliance:
        with pytest.raises((ApplianceError, TransportError)) as caught:
            appliance.chat("x" * (16 << 20), model=MODEL)
        assert getattr(caught.value, "status", 413) == 413
        assert appliance.chat(QUESTION, **GREEDY).text


async def test_the_async_client_notices_that_its_request_is_not_wanted(place: Place, policy: Policy) -> None:
    async with AsyncAppliance(place.url, policy=policy) as appliance:
        with pytest.raises((ApplianceError, TransportError)) as caught:
            await appliance.chat("x" * (16 << 20), model=MODEL)
        assert getattr(caught.value, "status", 413) == 413
        assert (await appliance.chat(QUESTION, **GREEDY)).text


def test_plain_http_binds_no_channel_and_is_refused(place: Place, policy: Policy) -> None:
    nonce = os.urandom(32)
    body = AttestationRequest(nonce=nonce).encode()
    with connector(place.plain_url).connect(10) as sock:
        head = f"POST {names.PATH_ATTESTATION} HTTP/1.1\r\nhost: x\r\ncontent-type: application/cbor\r\n"
        sock.sendall(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: sock.recv(65_536), b""))
    head, _, bundle = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    claims = AttestationBundle.parse(bundle).claims
    assert claims is not None
    assert AttestationClaims.parse(claims).binder is None
    spki = generate_tls_key().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    channel = ChannelFacts(spki=spki, exported=bytes(32))
    with pytest.raises(VerificationError) as caught:
        appraise(bundle, nonce=nonce, channel=channel, policy=policy, now=time.time())
    assert caught.value.code is Rejection.TLS_KEY_MISMATCH  # it names none
    with Appliance(place.plain_url, policy=policy) as appliance, pytest.raises(TransportError):
        appliance.chat("never sent", model=MODEL)


def test_connection_churn_and_half_a_record_leave_the_listener_alone(place: Place, policy: Policy) -> None:
    """Peers that vanish, that say nothing, and that stop in the middle of a TLS record."""
    reach = connector(place.url)
    for number in range(120):
        with reach.connect(10) as sock:
            if number % 3 == 0:
                sock.sendall(b"\x16\x03\x01\x02\x00\x01")
            elif number % 3 == 1:
                sock.sendall(os.urandom(64))
    stalled = [reach.connect(10) for _ in range(20)]
    try:
        for sock in stalled:
            sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
        for _ in range(5):
            with Appliance(place.url, policy=policy) as appliance:
                assert appliance.attest().family == "insecure"
        with Appliance(place.url, policy=policy) as appliance:
            assert appliance.chat(QUESTION, **GREEDY).text
        stalled[0].settimeout(30 * SLOW)
        try:
            assert stalled[0].recv(1) == b"", "the handshake has its time limit"
        except ConnectionResetError:
            pass
    finally:
        for sock in stalled:
            sock.close()
    assert place.program.process.poll() is None


def test_nobody_on_that_port(place: Place, policy: Policy) -> None:
    url = place.url.replace(":5000", ":5999").replace(".sock", ".absent" if place.way == "unix" else ".sock")
    with Appliance(url, policy=policy) as appliance, pytest.raises(TransportError) as caught:
        appliance.attest()
    assert caught.value.code == "CONNECT_FAILED"


def test_b099_a_port_in_use_is_one_clear_line(place: Place) -> None:
    listen = "vsock:5000" if place.way == "vsock" else f"unix:{place.program.arguments[6].removeprefix('unix:')}"
    done = run_program("appliance", *serve_arguments(listen))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"appliance: cannot listen on {listen}: Address already in use"


def test_through_the_forwarder(forwarded: str, policy: Policy) -> None:
    """End to end all the same: the forwarder has seen TLS, and nothing it could use."""
    with Appliance(forwarded, policy=policy) as appliance:
        answer = appliance.chat(QUESTION, **GREEDY)
        assert "".join(appliance.stream(QUESTION, **GREEDY)) == answer.text


def test_sockets_are_closed(place: Place, policy: Policy) -> None:
    if place.way == "hybrid":
        return  # the emulated muxer lives in this process, and keeps its own
    before = len(os.listdir("/proc/self/fd"))
    with Appliance(place.url, policy=policy) as appliance:
        appliance.attest()
    assert len(os.listdir("/proc/self/fd")) == before
