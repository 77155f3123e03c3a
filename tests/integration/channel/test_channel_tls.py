"""The TLS layer of the listener: keys, certificates, broken peers, throughput."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import threading
import time

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from OpenSSL import SSL

from appliance.listener.connection import ConnectionLimits

GET = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"


def spki_of(tls: SSL.Connection) -> bytes:
    key = tls.get_peer_certificate(as_cryptography=True).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def ask(client) -> dict:
    client.send(GET)
    return json.loads(client.response().partition(b"\r\n\r\n")[2])


def test_both_ends_export_the_same_and_agree_on_key_and_suite(listen):
    server = listen()
    with server.connect() as one, server.connect() as two:
        first, second = ask(one), ask(two)
        assert first["ekm"] == one.tls.export_keying_material(b"Attestation", 32, b"n" * 32).hex()
        assert first["spki"] == spki_of(one.tls).hex()
        assert first["suite"] == one.tls.get_cipher_name()
        assert one.tls.get_protocol_version_name() == "TLSv1.3"
        assert first["ekm"] != second["ekm"]
        assert first["peer"] == "127.0.0.1"
    assert server.seen.requests[0][2] == "https"


def test_a_plain_listener_has_no_channel(listen):
    with listen(tls=False).connect() as client:
        facts = ask(client)
    assert facts["spki"] is None
    assert facts["suite"] is None


def test_rotation_changes_the_certificate_for_new_connections_only(listen):
    server = listen()
    with server.connect() as old:
        before = ask(old)
        serial = old.tls.get_peer_certificate(as_cryptography=True).serial_number
        server.offset[0] = 12 * 3600 + 1
        with server.connect() as new:
            assert new.tls.get_peer_certificate(as_cryptography=True).serial_number != serial
            assert ask(new)["spki"] == before["spki"]
        after = ask(old)
        assert after == before
        assert old.tls.get_peer_certificate(as_cryptography=True).serial_number == serial


def test_rotation_during_traffic_breaks_nothing(listen):
    server = listen()
    failures: list[BaseException] = []

    def traffic() -> None:
        try:
            for _ in range(10):
                with server.connect() as client:
                    for _ in range(3):
                        facts = ask(client)
                        assert facts["ekm"] == client.tls.export_keying_material(b"Attestation", 32, b"n" * 32).hex()
        except (AssertionError, OSError, SSL.Error) as error:
            failures.append(error)

    threads = [threading.Thread(target=traffic) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(1, 6):
        server.offset[0] = step * 50_000.0
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert failures == []


def test_nothing_is_ever_resumed(listen):
    server = listen()
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    with server.connect(context=context) as client:
        ask(client)
        session = client.tls.get_session()
        # OpenSSL gives up a session whose connection was not shut down: the test would prove nothing.
        client.tls.shutdown()

    with server.connect(context=context, session=session) as second:
        ask(second)
        assert SSL._lib.SSL_session_reused(second.tls._ssl) == 0
    assert server.stats.handshakes == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl tool")
@pytest.mark.parametrize(
    ("options", "success"),
    [
        (["-tls1_3"], True),
        (["-tls1_2"], False),
        (["-tls1_3", "-alpn", "http/1.1"], True),
        (["-tls1_3", "-alpn", "h2,http/1.1"], True),
        (["-tls1_3", "-alpn", "h2"], False),
        (["-tls1_3", "-groups", "P-256"], True),
    ],
)
def test_what_the_openssl_tool_can_negotiate(listen, options, success):
    server = listen()
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{server.port}", "-brief", *options]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=10, check=False)
    assert (b"CONNECTION ESTABLISHED" in done.stderr) == success, done.stderr
    assert server.stats.handshakes == int(success)
    assert server.stats.handshake_failures == int(not success)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\xff\xff" + b"a" * 70_000]
)
def test_garbage_instead_of_a_client_hello_is_dropped(listen, garbage):
    server = listen(limits=ConnectionLimits(handshake_s=1))
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        try:
            sock.sendall(garbage)
            while sock.recv(4096):
                pass
        except ConnectionError:
            pass
    with server.connect() as client:
        assert ask(client)["size"] == 0
    assert server.stats.handshake_failures + server.stats.handshake_timeouts == 1


def test_a_handshake_that_stalls_ends_in_time_and_holds_up_nobody(listen):
    server = listen(limits=ConnectionLimits(handshake_s=0.5))
    tls = SSL.Connection(SSL.Context(SSL.TLS_CLIENT_METHOD), None)
    tls.set_connect_state()
    with pytest.raises(SSL.WantReadError):
        tls.do_handshake()
    hello = tls.bio_read(65_536)
    for part in (b"", hello[:3], hello[:100], hello):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
            sock.sendall(part)
            with server.connect() as client:
                ask(client)
            started = time.monotonic()
            try:
                while sock.recv(65_536):
                    pass
            except ConnectionError:
                pass
            assert time.monotonic() - started < 2
    assert server.stats.handshake_timeouts == 4


def test_half_a_record_stalls_only_its_own_connection(listen):
    server = listen(limits=ConnectionLimits(head_s=0.5))
    with server.connect() as client, server.connect() as other:
        client.tls.sendall(GET)
        record = client.tls.bio_read(65_536)
        client.sock.sendall(record[: len(record) // 2])
        ask(other)
        assert client.ended()
    assert server.stats.requests == 1


def test_a_record_that_was_tampered_with_ends_the_connection(listen):
    server = listen()
    with server.connect() as client:
        client.tls.sendall(GET)
        record = bytearray(client.tls.bio_read(65_536))
        record[-1] ^= 1
        client.sock.sendall(record)
        assert client.ended()
    assert server.stats.requests == 0


def test_a_request_cut_by_the_network_never_runs_to_its_end(listen):
    server = listen()
    client = server.connect()
    client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
    client.sock.shutdown(socket.SHUT_WR)
    assert client.ended()
    client.close()
    assert server.seen.disconnects.wait(5)


def test_close_notify_is_answered_in_kind(listen):
    server = listen()
    with server.connect() as client:
        ask(client)
        client.tls.shutdown()
        client._flush()
        assert client.rest() == b""
        assert client.tls.get_shutdown() & SSL.RECEIVED_SHUTDOWN


@pytest.mark.parametrize("size", [0, 1, 7_000, 16_384, 16_385, 65_536, 1 << 20, 16 << 20])
def test_bodies_of_any_size_arrive_whole(listen, size):
    server = listen()
    body = hashlib.sha256(b"seed").digest() * (size // 32 + 1)
    body = body[:size]
    with server.connect() as client:
        client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + body)
        facts = json.loads(client.response().partition(b"\r\n\r\n")[2])
    assert facts["size"] == size
    assert facts["sha256"] == hashlib.sha256(body).hexdigest()


def test_a_large_answer_through_a_slow_reader_with_a_small_buffer_arrives_whole(listen):
    server = listen()
    size = 16 << 20
    digest = hashlib.sha256()
    with server.connect(receive_buffer=4096) as client:
        client.send(b"GET /download/%d HTTP/1.1\r\nHost: x\r\n\r\n" % size)
        data = b""
        while b"\r\n\r\n" not in data:
            data += client.receive()
        rest = data.partition(b"\r\n\r\n")[2]
        digest.update(rest)
        left = size - len(rest)
        time.sleep(0.3)
        # While nobody reads, the server may only have filled the buffers of the kernel.
        assert server.seen.blocks_sent * 65_536 < 12 << 20
        while left:
            piece = client.receive()
            assert piece
            digest.update(piece)
            left -= len(piece)
    block = bytes(range(256)) * 256
    assert digest.digest() == hashlib.sha256(block * (size // len(block))).digest()


def test_a_hundred_connections_at_once(listen):
    server = listen(limits=ConnectionLimits(max_per_peer=128))
    clients = [server.connect() for _ in range(100)]
    for client in clients:
        client.send(GET)
    keys = [json.loads(client.response().partition(b"\r\n\r\n")[2])["ekm"] for client in clients]
    assert len(set(keys)) == 100
    for client in clients:
        client.close()


def test_small_frames_leave_at_once(listen):
    server = listen()
    with server.connect() as client:
        started = time.monotonic()
        client.send(b"GET /stream/2000 HTTP/1.1\r\nHost: x\r\n\r\n")
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += client.receive()
        assert time.monotonic() - started < 2
    assert data.count(b"data: ") == 2000


def test_stopping_drops_a_connection_in_its_handshake(listen):
    server = listen()
    with socket.create_connection(("127.0.0.1", server.port)):
        time.sleep(0.1)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 3


def test_a_request_longer_than_the_grace_period_is_cut(listen):
    server = listen(grace_s=1)
    with server.connect() as client:
        client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        time.sleep(0.1)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 4
        assert b"HTTP/1.1 200" not in client.rest()
