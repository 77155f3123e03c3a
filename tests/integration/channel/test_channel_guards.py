"""What a hostile or broken client can send, over TLS and over plain TCP."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time

import pytest
from OpenSSL import SSL

from appliance.listener.connection import ConnectionLimits

QUICK = ConnectionLimits(handshake_s=0.4, head_s=0.4, body_idle_s=0.4, keep_alive_s=0.6, write_stall_s=1.0)


@pytest.fixture(params=[True, False], ids=["tls", "plain"])
def tls(request):
    return request.param


def post(path: bytes, *fields: bytes, body: bytes = b"") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n" + b"".join(f + b"\r\n" for f in fields) + b"\r\n" + body


SMUGGLED = b"GET /echo/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"

BAD = {
    "length-and-coding": (400, post(b"/echo", b"Content-Length: 3", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n")),
    "two-lengths": (400, post(b"/echo", b"Content-Length: 3", b"Content-Length: 4", body=b"abcd")),
    "same-length-twice": (400, post(b"/echo", b"Content-Length: 3", b"Content-Length: 3", body=b"abc")),
    "length-list": (400, post(b"/echo", b"Content-Length: 3, 3", body=b"abc")),
    "length-sign": (400, post(b"/echo", b"Content-Length: +3", body=b"abc")),
    "length-negative": (400, post(b"/echo", b"Content-Length: -3", body=b"abc")),
    "length-empty": (400, post(b"/echo", b"Content-Length: ", body=b"abc")),
    "bare-lf-head": (400, b"GET /echo HTTP/1.1\nHost: x\n\n"),
    "bare-lf-field": (400, b"GET /echo HTTP/1.1\r\nHost: x\nX: y\r\n\r\n"),
    "bare-cr-field": (400, b"GET /echo HTTP/1.1\r\nHost: x\rX: y\r\n\r\n"),
    "nul-field": (400, b"GET /echo HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n"),
    "obs-fold": (400, b"GET /echo HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n"),
    "space-before-colon": (400, b"GET /echo HTTP/1.1\r\nHost: x\r\nContent-Length : 3\r\n\r\nabc"),
    "no-host": (400, b"GET /echo HTTP/1.1\r\n\r\n"),
    "two-hosts": (400, b"GET /echo HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"),
    "chunk-junk": (400, post(b"/echo", b"Transfer-Encoding: chunked", body=b"3\r\nabcXX0\r\n\r\n")),
    "chunk-bare-lf": (400, post(b"/echo", b"Transfer-Encoding: chunked", body=b"3\nabc\n0\n\n")),
    "chunk-extension": (400, post(b"/echo", b"Transfer-Encoding: chunked", body=b"3;a=b\r\nabc\r\n0\r\n\r\n")),
    "chunk-space": (400, post(b"/echo", b"Transfer-Encoding: chunked", body=b"3 \r\nabc\r\n0\r\n\r\n")),
    "chunk-hex-prefix": (400, post(b"/echo", b"Transfer-Encoding: chunked", body=b"0x3\r\nabc\r\n0\r\n\r\n")),
    "chunk-overflow": (400, post(b"/echo", b"Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\nabc")),
    "chunk-negative": (400, post(b"/echo", b"Transfer-Encoding: chunked", body=b"-3\r\nabc\r\n0\r\n\r\n")),
    "trailer": (400, post(b"/echo", b"Transfer-Encoding: chunked", body=b"0\r\nX: y\r\n\r\n")),
    "coding-twice": (501, post(b"/echo", b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked")),
    "coding-list": (501, post(b"/echo", b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n")),
    "coding-xchunked": (501, post(b"/echo", b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n")),
    "http-1.0": (505, b"GET /echo HTTP/1.0\r\nHost: x\r\n\r\n"),
    "http-0.9": (400, b"GET /echo\r\n\r\n"),
    "http-2-preface": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "h2c": (400, b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"),
    "websocket": (400, b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"),
    "connect": (501, b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n"),
    "unknown-method": (501, b"BREW /echo HTTP/1.1\r\nHost: x\r\n\r\n"),
    "absolute-form": (400, b"GET http://example.org/echo HTTP/1.1\r\nHost: x\r\n\r\n"),
    "asterisk-form": (400, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"),
    "target-space": (400, b"GET /echo /x HTTP/1.1\r\nHost: x\r\n\r\n"),
    "target-fragment": (400, b"GET /echo#a HTTP/1.1\r\nHost: x\r\n\r\n"),
    "target-control": (400, b"GET /echo\x7f HTTP/1.1\r\nHost: x\r\n\r\n"),
    "target-long": (414, b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
    "expectation": (417, post(b"/echo", b"Expect: tea", b"Content-Length: 3", body=b"abc")),
    "many-fields": (431, b"GET /echo HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 200 + b"\r\n"),
    "head-too-large": (431, b"GET /echo HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 300_000 + b"\r\n\r\n"),
    "head-without-end": (431, b"GET /echo HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000),
    "garbage": (400, b"\x16\x03\x01 not http at all\r\n\r\n"),
}


@pytest.mark.parametrize("name", BAD)
def test_b129_bad_requests_are_refused_once_and_closed(shared, name):
    status, request = BAD[name]
    before = shared.stats.bad_requests
    with shared.connect() as client:
        client.send(request + SMUGGLED)
        reply = client.rest()
    assert reply.startswith(b"HTTP/1.1 %d " % status), reply
    assert reply.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert not any("smuggled" in path for _, path, _ in shared.seen.requests)
    assert shared.stats.bad_requests == before + 1


@pytest.mark.parametrize("piece", [1, 7])
def test_a_request_may_come_in_any_pieces(listen, tls, piece):
    server = listen(tls=tls)
    requests = post(b"/echo", b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n") + post(
        b"/echo", b"Content-Length: 5", body=b"abcde"
    )
    with server.connect() as client:
        for start in range(0, len(requests), piece):
            client.send(requests[start : start + piece])
        first, second = client.response(), client.response()
    assert b'"size": 5' in first
    assert b'"size": 5' in second


def test_empty_lines_before_a_request_are_ignored(listen, tls):
    with listen(tls=tls).connect() as client:
        client.send(b"\r\n\r\n" + SMUGGLED)
        assert client.response().startswith(b"HTTP/1.1 200")


def test_a_head_of_exactly_the_limit_passes_and_one_byte_more_does_not(listen, tls):
    server = listen(tls=tls)
    frame = b"GET /echo HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n"
    fill = 16_384 - len(frame) + 2
    for extra, status in ((0, b"200"), (1, b"431")):
        with server.connect() as client:
            client.send(frame % (b"a" * (fill + extra)))
            assert client.response().startswith(b"HTTP/1.1 " + status)


def test_silence_and_half_a_head_end_in_time(listen, tls):
    server = listen(tls=tls, limits=QUICK)
    with server.connect() as silent, server.connect() as slow:
        slow.send(b"GET /echo HTTP/1.1\r\nHo")
        started = time.monotonic()
        assert silent.rest() == b""
        assert slow.rest().startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started < 2
    assert server.stats.head_timeouts == 2


def test_a_head_that_drips_is_timed_from_its_first_byte(listen, tls):
    server = listen(tls=tls, limits=QUICK)
    with server.connect() as client:
        client.send(SMUGGLED)
        client.response()
        started = time.monotonic()
        for byte in b"\r\n\r\nGET /echo HTTP/1.1\r\n":
            client.send(bytes([byte]))
            time.sleep(0.1)
            if time.monotonic() - started > 0.7:
                break
        assert client.rest().startswith(b"HTTP/1.1 408")


def test_an_idle_kept_alive_connection_closes_quietly(listen, tls):
    server = listen(tls=tls, limits=QUICK)
    with server.connect() as client:
        client.send(SMUGGLED)
        client.response()
        started = time.monotonic()
        assert client.rest() == b""
        assert 0.4 < time.monotonic() - started < 2
    assert server.stats.head_timeouts == 0


@pytest.mark.parametrize("framing", [b"Content-Length: 10", b"Transfer-Encoding: chunked"])
def test_a_body_that_stalls_gets_408_and_the_application_a_disconnect(listen, tls, framing):
    server = listen(tls=tls, limits=QUICK)
    with server.connect() as client:
        client.send(post(b"/echo", framing, body=b"3\r\nabc"))
        assert client.rest().startswith(b"HTTP/1.1 408")
    assert server.seen.disconnects.wait(5)
    assert server.stats.body_timeouts == 1


def test_a_slow_body_that_moves_is_not_cut(listen, tls):
    server = listen(tls=tls, limits=QUICK)
    with server.connect() as client:
        client.send(post(b"/echo", b"Content-Length: 6"))
        for byte in b"abcdef":
            time.sleep(0.15)
            client.send(bytes([byte]))
        assert b'"size": 6' in client.response()


def test_an_early_answer_closes_without_reading_the_rest(listen, tls):
    server = listen(tls=tls)
    with server.connect() as client:
        client.send(post(b"/early", b"Content-Length: 10000000000", body=b"a" * 200_000))
        reply = client.response()
        assert reply.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in reply
        sent = 0
        with pytest.raises(OSError):  # noqa: PT012
            while sent < 64 << 20:
                client.send(b"a" * 65_536)
                sent += 65_536
        assert sent < 16 << 20


def test_connections_are_capped_per_peer_and_in_total(listen, tls):
    for limits, counter in (
        (ConnectionLimits(max_per_peer=3), "refused_peer"),
        (ConnectionLimits(max_connections=3), "refused_total"),
    ):
        server = listen(tls=tls, limits=limits)
        clients = [server.connect() for _ in range(3)]
        for client in clients:
            client.send(SMUGGLED)
            client.response()
        with pytest.raises((OSError, SSL.Error)), server.connect() as fourth:  # noqa: PT012
            fourth.send(SMUGGLED)
            if not fourth.receive():
                raise ConnectionResetError
        assert getattr(server.stats, counter) == 1
        clients.pop().close()
        deadline = time.monotonic() + 5
        while server.stats.open == 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        with server.connect() as again:
            again.send(SMUGGLED)
            assert again.response().startswith(b"HTTP/1.1 200")
        for client in clients:
            client.close()


def test_pipelined_requests_are_answered_in_order_and_latch_when_they_arrive(listen, tls):
    server = listen(tls=tls)
    get = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
    with server.connect() as client:
        client.send(post(b"/attest/one") + get % b"latched")
        assert client.response().endswith(b"attested")
        assert client.response().endswith(b"None")
        client.send(get % b"latched" + post(b"/attest/two") + get % b"latched")
        assert client.response().endswith(b"'one'")
        assert client.response().endswith(b"attested")
        assert client.response().endswith(b"'one'")
        client.send(get % b"latched")
        assert client.response().endswith(b"'two'")


def test_a_thousand_pipelined_requests_are_all_answered(listen, tls):
    server = listen(tls=tls)
    with server.connect() as client:
        client.send(SMUGGLED * 1000)
        data = b""
        while data.count(b"HTTP/1.1 200") < 1000:
            data += client.receive()
    assert len(server.seen.requests) == 1000


def test_the_application_sees_the_client_leave(listen, tls):
    server = listen(tls=tls)
    client = server.connect()
    client.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
    time.sleep(0.1)
    client.close()
    assert server.seen.disconnects.wait(5)


def test_a_client_that_does_not_read_is_dropped_and_holds_bounded_memory(listen, tls):
    server = listen(tls=tls, limits=QUICK)
    with server.connect(receive_buffer=4096) as client:
        client.send(b"GET /download/1000000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.6)
        # What the kernel's socket buffers took, and one block in ours.
        assert server.seen.blocks_sent * 65_536 < 16 << 20
        deadline = time.monotonic() + 10
        while server.stats.write_stalls == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.stats.write_stalls == 1


def test_an_exception_of_the_application_leaves_no_content_in_the_log(listen, tls, caplog):
    server = listen(tls=tls)
    with caplog.at_level(logging.DEBUG), server.connect() as client:
        client.send(b"GET /boom HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.rest().startswith(b"HTTP/1.1 500")
    assert "secret" not in caplog.text
    assert "ValueError" in caplog.text


def test_stopping_closes_idle_connections_and_lets_answers_finish(listen, tls):
    server = listen(tls=tls)
    with server.connect() as idle, server.connect() as busy:
        idle.send(SMUGGLED)
        idle.response()
        busy.send(post(b"/echo", b"Content-Length: 5", body=b"abc"))
        time.sleep(0.2)
        server.handle.stop()
        assert idle.rest() == b""
        busy.send(b"de")
        assert b'"size": 5' in busy.rest()
        server.stop()


def push(client, data: bytes, *, seconds: float) -> int:
    """Send `data` over and over for a while; returns how much the network took."""
    taken, deadline = 0, time.monotonic() + seconds
    client.sock.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while time.monotonic() < deadline:
            if client.tls is not None:
                client.tls.sendall(data)
                client._flush()
            else:
                client.sock.sendall(data)
            taken += len(data)
    return taken


def test_an_application_that_does_not_read_stops_the_sender_without_a_timeout(listen, tls):
    server = listen(tls=tls, limits=QUICK)
    size = 16 << 20
    with server.connect() as client:
        client.send(post(b"/hold", b"Content-Length: %d" % size))
        sender = threading.Thread(target=client.send, args=(b"a" * size,))
        sender.start()
        time.sleep(1)
        assert sender.is_alive()
        assert server.stats.body_timeouts == 0
        server.seen.release.set()
        sender.join(10)
        assert b'"size": %d' % size in client.response()


def test_pipelined_bytes_are_bounded_even_while_the_application_polls(listen, tls):
    server = listen(tls=tls)
    with server.connect() as client:
        client.send(b"GET /poll HTTP/1.1\r\nHost: x\r\n\r\n")
        assert push(client, SMUGGLED * 1000, seconds=2) < 16 << 20
        server.seen.release.set()


def test_a_unix_listener_has_the_same_guards(listen, tmp_path):
    server = listen(tls=False, unix=tmp_path / "s")
    for request, status in ((SMUGGLED, b"200"), (BAD["obs-fold"][1], b"400")):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(str(tmp_path / "s"))
            sock.sendall(request)
            reply = sock.recv(65_536)
            assert reply.startswith(b"HTTP/1.1 " + status)
    assert server.seen.channels[0].peer == "unix"
