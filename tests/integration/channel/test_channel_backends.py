"""The SDK's network backends against the real listener, and against servers that cheat."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable

import httpcore
import httpx
import pytest
from OpenSSL import SSL

from appliance.listener.certificates import generate_tls_key, issue_certificate, make_server_context
from client_sdk.errors import AuthenticityError, MalformedError, Rejection, TransportError
from client_sdk.transport.backend import AsyncAttestingBackend, AttestingBackend, apost_over_stream, post_over_stream

OPTIONS = {"content_type": "application/cbor", "timeout_s": 3, "limit_bytes": 1 << 16}
BARE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def judge(stream, response) -> dict:
    """Stands for the verifier: both ends must see the same channel."""
    facts = json.loads(response.body)
    assert facts["ekm"] == stream.export("Attestation", 32, b"n" * 32).hex()
    assert facts["spki"] == stream.spki.hex()
    return facts


class Sync:
    """One request through the blocking backend, in the same words as Async."""

    def __init__(self, attest=None):
        def default(stream):
            return judge(stream, post_over_stream(stream, "/echo", b"nonce", **OPTIONS))

        backend = AttestingBackend(attest=attest or default, now=time.time)
        self.pool = httpcore.ConnectionPool(network_backend=backend, ssl_context=BARE)

    def request(self, url, *, connect_s=5, **kwargs):
        extensions = {"timeout": {"connect": connect_s, "read": 5}}
        return self.pool.request("POST", url, extensions=extensions, **kwargs)

    def close(self):
        self.pool.close()


class Async:
    def __init__(self, attest=None):
        async def default(stream):
            return judge(stream, await apost_over_stream(stream, "/echo", b"nonce", **OPTIONS))

        async def given(stream):
            return attest(stream)

        self.runner = asyncio.Runner()
        backend = AsyncAttestingBackend(attest=given if attest else default, now=time.time)
        self.pool = httpcore.AsyncConnectionPool(network_backend=backend, ssl_context=BARE)

    def request(self, url, *, connect_s=5, **kwargs):
        extensions = {"timeout": {"connect": connect_s, "read": 5}}
        return self.runner.run(self.pool.request("POST", url, extensions=extensions, **kwargs))

    def close(self):
        self.runner.run(self.pool.aclose())
        self.runner.close()


@pytest.fixture(params=[Sync, Async], ids=["sync", "async"])
def client(request):
    made = []

    def make(attest=None):
        made.append(request.param(attest))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def cheat():
    """Run a TLS server whose every connection is handed to `script(connection)`; returns its port."""
    stops: list[Callable[[], None]] = []

    def start(script, *, context=None):
        key = generate_tls_key()
        certificate = issue_certificate(key, issued_at=time.time(), random_bytes=os.urandom)
        context = context or make_server_context(key, certificate)
        listener = socket.create_server(("127.0.0.1", 0))

        def serve_one(sock):
            sock.settimeout(5)
            connection = SSL.Connection(context, None)
            connection.set_accept_state()
            peer = Cheat(connection, sock)
            try:
                peer.drive(connection.do_handshake)
                script(peer)
            except (OSError, SSL.Error):
                pass
            finally:
                sock.close()

        def run():
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                serve_one(sock)

        thread = threading.Thread(target=run)
        thread.start()

        def stop():
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(10)

        stops.append(stop)
        return listener.getsockname()[1]

    yield start
    for stop in stops:
        stop()


class Cheat:
    def __init__(self, tls, sock):
        self.tls, self.sock = tls, sock

    def drive(self, operation):
        while True:
            try:
                result = operation()
            except SSL.WantReadError:
                self.flush()
                data = self.sock.recv(65_536)
                if not data:
                    raise ConnectionResetError from None
                self.tls.bio_write(data)
            else:
                self.flush()
                return result

    def flush(self):
        try:
            while True:
                self.sock.sendall(self.tls.bio_read(65_536))
        except SSL.WantReadError:
            pass

    def request(self):
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.drive(lambda: self.tls.recv(16_384))
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += self.drive(lambda: self.tls.recv(16_384))
        return head

    def send(self, data):
        self.drive(lambda: self.tls.sendall(data))

    def reply(self, body, *, more=b""):
        self.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b%b" % (len(body), body, more))


def test_every_pooled_connection_is_attested_and_reused(listen, client):
    server = listen()
    one = client()
    for _ in range(3):
        response = one.request(server.url("/echo"), content=b"abc")
        assert json.loads(response.content)["size"] == 3
        stream = response.extensions["network_stream"]
        assert stream.get_extra_info("attestation")["peer"] == "127.0.0.1"
        assert stream.get_extra_info("spki") == stream.spki
        assert stream.get_extra_info("server_addr") == ("127.0.0.1", server.port)
    assert server.stats.handshakes == 1
    assert len(server.seen.requests) == 4


def test_a_verdict_passes_through_unmapped_and_nothing_was_sent(listen, client):
    server = listen()

    def refuse(stream):
        assert stream.request_bytes_sent == 0
        raise AuthenticityError(Rejection.BINDER_MISMATCH, "no")

    with pytest.raises(AuthenticityError, match="BINDER_MISMATCH"):
        client(refuse).request(server.url("/echo"), content=b"secret")
    assert server.seen.requests == []


def test_httpx_does_not_hide_a_verdict(listen):
    server = listen()

    def refuse(stream):
        raise AuthenticityError(Rejection.WRONG_KEY, "no")

    transport = httpx.HTTPTransport(verify=BARE)
    transport._pool = httpcore.ConnectionPool(network_backend=AttestingBackend(attest=refuse, now=time.time))
    with httpx.Client(transport=transport) as http, pytest.raises(AuthenticityError):
        http.post(server.url("/echo"), content=b"secret")


def test_plain_http_is_refused(listen, client):
    server = listen(tls=False)
    with pytest.raises(TransportError, match="PLAINTEXT_REFUSED"):
        client().request(server.url("/echo"), content=b"secret")
    assert server.seen.requests == []


def test_the_count_of_request_bytes_starts_after_the_verdict(listen, client):
    server = listen()
    streams = []
    one = client(lambda stream: streams.append(stream) or "accepted")
    one.request(server.url("/echo"), content=b"abc")
    assert streams[0].attestation == "accepted"
    assert streams[0].request_bytes_sent > 3


@pytest.mark.parametrize("size", [0, 16_384, 65_537, 16 << 20])
def test_large_bodies_both_ways(listen, client, size):
    server = listen()
    one = client()
    body = os.urandom(1024) * (size // 1024 + 1)
    response = one.request(server.url("/echo"), content=body)
    assert json.loads(response.content)["sha256"] == hashlib.sha256(body).hexdigest()
    downloaded = one.request(server.url(f"/download/{size}")).content
    block = bytes(range(256)) * 256
    expected = (block * (size // len(block) + 1))[:size]
    assert hashlib.sha256(downloaded).digest() == hashlib.sha256(expected).digest()


def test_bytes_after_the_attestation_answer_are_a_rejection(cheat, client):
    port = cheat(lambda peer: (peer.request(), peer.reply(b"{}", more=b"HTTP/1.1 200 OK\r\n")))
    with pytest.raises(AuthenticityError, match="UNSOLICITED_BYTES"):
        client().request(f"https://127.0.0.1:{port}/", content=b"secret")


@pytest.mark.parametrize("delay_s", [0, 0.2])
def test_bytes_before_the_first_request_are_a_rejection(cheat, client, delay_s):
    sent = threading.Event()

    def script(peer):
        time.sleep(delay_s)
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        sent.set()
        peer.request()

    def attest(stream):
        assert sent.wait(5)
        time.sleep(0.05)
        return "accepted"

    with pytest.raises(AuthenticityError, match="UNSOLICITED_BYTES"):
        client(attest).request(f"https://127.0.0.1:{cheat(script)}/", content=b"secret")


def test_bytes_between_two_requests_are_a_rejection(cheat, client):
    sent = threading.Event()

    def script(peer):
        peer.request()
        peer.reply(b"one")
        time.sleep(0.1)
        peer.reply(b"two")
        sent.set()
        peer.request()

    port = cheat(script)
    one = client(lambda _: "accepted")
    assert one.request(f"https://127.0.0.1:{port}/", content=b"a").content == b"one"
    assert sent.wait(5)
    time.sleep(0.05)
    with pytest.raises(AuthenticityError, match="UNSOLICITED_BYTES"):
        one.request(f"https://127.0.0.1:{port}/", content=b"secret")


@pytest.mark.parametrize(
    "first", [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\none", b"HTTP/1.1 204 No Content\r\n\r\n"]
)
def test_bytes_in_the_same_record_as_the_end_of_an_answer_are_a_rejection(cheat, client, first):
    second = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\ntwo"
    port = cheat(lambda peer: (peer.request(), peer.send(first + second), peer.request()))
    with pytest.raises(AuthenticityError, match="UNSOLICITED_BYTES"):
        client(lambda _: "accepted").request(f"https://127.0.0.1:{port}/", content=b"a")


def test_chunked_and_interim_answers_are_not_mistaken_for_excess(cheat, client):
    interim, head = b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def script(peer):
        for _ in range(2):
            peer.request()
            peer.send(interim + head + b"3\r\nabc\r\n")
            peer.send(b"2\r\nde\r\n0\r\n\r\n")

    url = f"https://127.0.0.1:{cheat(script)}/"
    one = client(lambda _: "accepted")
    assert [one.request(url, content=b"a").content for _ in range(2)] == [b"abcde"] * 2


def test_a_connection_closed_while_idle_is_replaced_by_an_attested_one(listen, client):
    server = listen()
    attested = []
    one = client(lambda stream: attested.append(stream) or "accepted")
    one.request(server.url("/echo"), content=b"a")
    server.stop()
    with pytest.raises(httpcore.ConnectError):
        one.request(server.url("/echo"), content=b"a")
    assert len(attested) == 1


def test_an_answer_cut_without_close_notify_is_an_error(cheat, client):
    def script(peer):
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\nhalf of it")

    with pytest.raises(httpcore.ReadError):
        client(lambda _: "accepted").request(f"https://127.0.0.1:{cheat(script)}/", content=b"a")


@pytest.mark.parametrize(
    ("answer", "error", "code"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"a" * 100_000, MalformedError, "MALFORMED_RESPONSE"),
        (b"nonsense\r\n\r\n", MalformedError, "MALFORMED_RESPONSE"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 40_000, MalformedError, "MALFORMED_RESPONSE"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n",
            AuthenticityError,
            "CONTENT_ENCODING",
        ),
    ],
    ids=["too-long", "nonsense", "long-head", "encoded"],
)
def test_a_bad_attestation_answer_is_a_rejection(cheat, client, answer, error, code):
    port = cheat(lambda peer: (peer.request(), peer.send(answer), peer.request()))
    with pytest.raises(error, match=code):
        client().request(f"https://127.0.0.1:{port}/", content=b"secret")


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"])
def test_a_server_that_closes_in_the_attestation_is_network_trouble(cheat, client, start):
    port = cheat(lambda peer: (peer.request(), peer.send(start) if start else None))
    with pytest.raises(httpcore.ReadError):
        client().request(f"https://127.0.0.1:{port}/", content=b"secret")


def test_a_server_that_does_not_answer_times_out(cheat, client):
    def attest(stream):
        return post_over_stream(stream, "/", b"", content_type="application/cbor", timeout_s=0.3, limit_bytes=10)

    port = cheat(lambda peer: (peer.request(), peer.drive(lambda: peer.tls.recv(1))))
    with pytest.raises(httpcore.ReadTimeout):
        Sync(attest).request(f"https://127.0.0.1:{port}/", content=b"secret")


def test_a_silent_server_times_out_in_the_handshake(client):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        one = client()
        started = time.monotonic()
        with pytest.raises(httpcore.ConnectTimeout):
            one.request(f"https://127.0.0.1:{port}/", connect_s=0.3)
        assert time.monotonic() - started < 2


def test_a_tls_1_2_server_and_a_plain_one_are_connection_errors(cheat, client, listen):
    key = generate_tls_key()
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_max_proto_version(SSL.TLS1_2_VERSION)
    context.use_privatekey(key)
    context.use_certificate(issue_certificate(key, issued_at=time.time(), random_bytes=os.urandom))
    port = cheat(lambda peer: peer.request(), context=context)
    with pytest.raises(httpcore.ConnectError):
        client().request(f"https://127.0.0.1:{port}/", content=b"secret")
    plain = listen(tls=False)
    with pytest.raises(httpcore.ConnectError):
        client().request(f"https://127.0.0.1:{plain.port}/echo", content=b"secret")


def test_a_refused_connection_is_a_connection_error(client):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(httpcore.ConnectError):
        client().request(f"https://127.0.0.1:{port}/")


async def test_a_cancelled_attestation_closes_the_connection(listen):
    server = listen()
    entered = asyncio.Event()

    async def attest(stream):
        entered.set()
        await asyncio.sleep(60)

    backend = AsyncAttestingBackend(attest=attest, now=time.time)
    async with httpcore.AsyncConnectionPool(network_backend=backend, ssl_context=BARE) as pool:
        task = asyncio.create_task(pool.request("GET", server.url("/echo")))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    while server.stats.open:
        await asyncio.sleep(0.01)


async def test_many_requests_at_once_each_on_an_attested_connection(listen):
    server = listen()
    count = 0

    async def attest(stream):
        nonlocal count
        count += 1
        return judge(stream, await apost_over_stream(stream, "/echo", b"", **OPTIONS))

    backend = AsyncAttestingBackend(attest=attest, now=time.time)
    async with httpcore.AsyncConnectionPool(network_backend=backend, ssl_context=BARE, max_connections=50) as pool:
        responses = await asyncio.gather(*(pool.request("POST", server.url("/echo"), content=b"x") for _ in range(100)))
    assert [response.status for response in responses] == [200] * 100
    assert count == server.stats.handshakes == 50


def test_many_threads_share_one_blocking_pool(listen):
    server = listen()
    pool = Sync().pool
    answers: list[int] = []

    def work(number: int) -> None:
        for index in range(20):
            body = b"%d-%d" % (number, index)
            response = pool.request("POST", server.url("/echo"), content=body)
            assert json.loads(response.content)["sha256"] == hashlib.sha256(body).hexdigest()
            answers.append(response.status)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert answers == [200] * 160
