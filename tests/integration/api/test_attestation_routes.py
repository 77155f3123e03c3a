"""The attestation endpoint: nonce in, evidence bound to this very connection out."""

from __future__ import annotations

import base64
import hashlib
import threading
import time

import pytest

from appliance.attestation.attester import Binding, Collected
from appliance.attestation.families.insecure import InsecureAttester
from appliance.errors import AttestationUnavailable
from client_sdk.wire import cbor
from tests import reference_decoder as reference
from tests.integration.api.conftest import Client, Running, StartApi, chat

SHOW = "/v1/attestation"
ATTEST = "/.well-known/attestation"


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?nonce=",
        "?nonce=abc",
        "?nonce=%C3%A9" + "a" * 62,
        "?nonce=0x" + "ab" * 31,
        "?nonce=" + "ab" * 31,
        "?nonce=" + "ab" * 33,
        "?nonce=" + "00" * 32,
        "?nonce=" + "ab" * 32 + "&nonce=" + "ab" * 32,
        "?nonce=" + "+" * 64,
        "?nonce=" + "ab%20" * 32,
        "?NONCE=" + "ab" * 32,
        "?nonce=%D9%A1" + "a" * 63,
    ],
)
def test_b030_every_wrong_nonce_is_400(shared: Running, query: str) -> None:
    with shared.connect() as client:
        assert client.ask("GET", SHOW + query).error == (400, "invalid_nonce", "nonce")
        assert client.ask("GET", SHOW + "?nonce=" + "ab" * 32).status == 200


def test_b030_a_megabyte_of_nonce_is_refused_early(shared: Running) -> None:
    with shared.connect() as client:
        client.send(b"GET " + SHOW.encode() + b"?nonce=" + b"a" * 40_000)
        assert b" 431 " in client.receive() or client.ended()
    with shared.connect() as client:
        assert client.ask("GET", "/healthz").status == 200


def test_the_get_form_shows_what_the_post_form_says(shared: Running) -> None:
    nonce = b"\xab" * 32
    with shared.connect() as client:
        document = client.ask("GET", f"{SHOW}?nonce={nonce.hex()}").document

        def read(text: str) -> bytes:
            return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

        bundle = cbor.encode(
            {
                "claims": read(document["claims"]),
                "evidence": [[kind, read(content)] for kind, content in document["evidence"]],
                "channel-proof": read(document["channel-proof"]),
            }
        )
        reference.check_bundle(bundle, client.held(nonce))
        assert (document["endorsements"], document["event-logs"]) == ([], [])
        # It never puts anything in force, and its claims cannot be continued.
        assert shared.receipt(client.chat())[-70004] is None
        reply = client.attest(have=sha256(read(document["claims"])))
        assert "claims" in reference.read_cbor(reply.body)


NONCE = cbor.encode({"nonce": b"n" * 32})
BAD = [
    b"",
    b"\xa0",
    b"x",
    NONCE[:-1],
    NONCE + b"\x00",
    cbor.encode({"nonce": b"n" * 31}),
    cbor.encode({"nonce": bytes(32)}),
    cbor.encode({"nonce": "n" * 32}),
    cbor.encode({"nonce": b"n" * 32, "have": b"h" * 31}),
    cbor.encode({"nonce": b"n" * 32, "have": None}),
    cbor.encode({"nonce": b"n" * 32, "extra": 1}),
    cbor.encode([b"n" * 32]),
    cbor.encode(b"n" * 32),
    b"\xbf" + NONCE[1:] + b"\xff",
    b"\xa2" + NONCE[1:] + NONCE[1:],
    b"\xa1\x78\x05nonce" + NONCE[7:],
    b"\x81" * 200,
]


@pytest.mark.parametrize("body", BAD)
def test_malformed_requests_are_400_and_put_nothing_in_force(shared: Running, body: bytes) -> None:
    with shared.connect() as client:
        reply = client.ask("POST", ATTEST, body)
        assert reply.status == 400
        assert reply.document["error"]["code"].startswith("malformed")
        assert shared.receipt(client.chat())[-70004] is None


def test_oversized_requests_are_413(shared: Running) -> None:
    with shared.connect() as client:
        assert client.ask("POST", ATTEST, b"x" * 257).error == (413, "body_too_large", None)
        assert client.ask("POST", ATTEST, b"x" * 256).status == 400
        assert client.ask("GET", ATTEST).error == (405, "method_not_allowed", None)


def test_an_answer_is_bound_to_its_connection_and_named_in_receipts(shared: Running) -> None:
    with shared.connect() as client, shared.connect() as other:
        assert shared.receipt(client.chat())[-70004] is None
        raw = client.attested(b"1" * 32)
        receipt = shared.receipt(client.chat())
        held = client.context
        assert receipt[-70004] == sha256(raw)
        assert receipt[-70005] == sha256(held["spki"] + held["exported"])
        assert shared.receipt(other.chat())[-70004] is None, "another connection has none"
        again = client.attested(b"2" * 32)
        assert again != raw
        assert shared.receipt(client.chat())[-70004] == sha256(again), "the last one holds"


def test_receipts_are_signed_by_the_key_in_the_claims(shared: Running) -> None:
    with shared.connect() as client:
        claims = reference.read_claims(client.attested())
        assert claims["receipt-key"] == shared.cose_key
        assert claims["mode"] == "insecure"
        assert claims["config"] == bytes([7] * 32)
        assert shared.receipt(client.chat())[-70007] == claims["config"]


def test_a_second_connection_continues(shared: Running) -> None:
    with shared.connect() as first, shared.connect() as second:
        raw = first.attested(b"1" * 32)
        reply = second.attest(b"2" * 32, have=sha256(raw))
        assert set(reference.read_cbor(reply.body)) == {"channel-proof"}
        reference.check_bundle(reply.body, second.held(b"2" * 32) | {"claims": raw})
        receipt = shared.receipt(second.chat())
        held = second.held(b"2" * 32)
        assert receipt[-70004] == sha256(raw)
        assert receipt[-70005] == sha256(held["spki"] + held["exported"])


def test_unknown_and_expired_claims_get_the_full_form(api: StartApi) -> None:
    never = api(max_continued_s=0)
    first, second = never.connect(), never.connect()
    raw = first.attested()
    time.sleep(0.01)
    assert second.attested(have=sha256(raw)) != raw
    assert second.attested(have=b"?" * 32)


def test_a_request_latches_at_its_head(shared: Running) -> None:
    with shared.connect() as client:
        attest = client.bytes_of("POST", ATTEST, cbor.encode({"nonce": b"p" * 32}))
        client.send(attest + client.bytes_of("POST", "/v1/chat/completions", chat()))
        assert reference.read_cbor(client.reply().body)["claims"]
        assert shared.receipt(client.reply())[-70004] is None, "pipelined before the answer: nothing was in force"
        assert shared.receipt(client.chat())[-70004] is not None


# Overload


class Slow(InsecureAttester):
    """Evidence takes its time; one at a time, which the class checks itself."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(b"s" * 32)
        self.delay_s = delay_s
        self.running = 0
        self.most = 0

    def collect(self, binding: Binding) -> Collected:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(self.delay_s)
        self.running -= 1
        return super().collect(binding)


def test_too_many_quotes_are_503_and_others_are_unaffected(api: StartApi) -> None:
    running = api(quotes_per_s=0.5, burst=2)
    client, attested = running.connect(), running.connect()
    raw = attested.attested()
    client.attested()
    reply = client.attest()
    assert reply.error == (503, "attestation_overloaded", None)
    assert 1 <= int(reply.headers["retry-after"]) <= 3
    assert client.ask("GET", f"{SHOW}?nonce={'ab' * 32}").status == 503
    # The attestation before it still holds, continuing costs no quote, and answers go on.
    assert running.receipt(client.chat())[-70004] is not None
    assert client.attest(have=sha256(raw)).status == 200
    assert running.receipt(attested.chat())[-70004] == sha256(raw)


def test_one_peer_gets_a_quarter_of_the_queue_and_quotes_one_by_one(api: StartApi) -> None:
    slow = Slow(0.15)
    running = api(attester=slow, max_waiting=8)
    clients = [running.connect() for _ in range(5)]
    replies: list[int] = []

    def attest(client: Client) -> None:
        replies.append(client.attest().status)

    threads = [threading.Thread(target=attest, args=(client,)) for client in clients]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert running.connect().ask("GET", "/healthz").status == 200
    assert time.monotonic() - started < 0.15, "quoting is off the event loop"
    for thread in threads:
        thread.join()
    assert sorted(replies) == [200, 200, 503, 503, 503]
    assert slow.most == 1
    assert clients[0].attest().status == 200


def test_an_address_that_takes_all_evidence_it_can_get_leaves_some_for_others(api: StartApi) -> None:
    running = api(quotes_per_s=0.01, burst=64)
    greedy, statuses = running.connect(), []
    while len(statuses) < 100 and statuses[-1:] != [503]:
        statuses.append(greedy.attest().status)
    assert len(statuses) == 53, "three quarters of the burst, its own sixteenth, and a refusal"
    assert running.connect().attest().status == 503, "another connection from the same address"
    other = running.connect(source="127.0.0.2")
    assert [other.attest().status for _ in range(5)] == [200, 200, 200, 200, 503]
    assert running.connect(source="127.0.0.3").attest().status == 200


def test_evidence_that_cannot_be_made_is_503_and_nothing_is_in_force(api: StartApi) -> None:
    class Failing(InsecureAttester):
        def collect(self, binding: Binding) -> Collected:
            raise AttestationUnavailable("evidence_failed", "The device does not answer.", retry_after_s=30)

    running = api(attester=Failing(b"s" * 32))
    client = running.connect()
    reply = client.attest()
    assert (reply.error, reply.headers["retry-after"]) == ((503, "evidence_failed", None), "30")
    assert running.receipt(client.chat())[-70004] is None
