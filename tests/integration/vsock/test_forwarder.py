"""The forwarder between real sockets: every byte, in order, with whatever the peers do in between."""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import selectors
import socket
import threading
import time
from pathlib import Path

import pytest

from appliance.config.addresses import UnixAddress
from tests.integration.vsock.conftest import Peer, StartForwarder, echo, rest
from tests.simulators.hybrid_muxer import HybridMuxer


def until(condition, what: str, limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture(params=["tcp", "unix"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/forward"


@pytest.mark.parametrize("size", [0, 1, 7 << 10, 64 << 10, 1 << 20, 16 << 20])
def test_b095_requests_of_every_size_come_back_whole(forward: StartForwarder, listen: str, size: int) -> None:
    data = os.urandom(size)
    with Peer(echo) as peer, forward(listen, peer.address).connect() as client:
        sender = threading.Thread(target=lambda: (client.sendall(data), client.shutdown(socket.SHUT_WR)))
        sender.start()
        assert hashlib.sha256(rest(client)).digest() == hashlib.sha256(data).digest()
        sender.join(20)


def test_b094_partial_writes_lose_nothing(forward: StartForwarder, listen: str, tmp_path: Path) -> None:
    """5 MB through small buffers, in both directions at once. TCP gets larger ones: below a segment it waits for its
    own timers."""
    small = 4096 if listen.startswith("unix:") else 65_536
    there, back = os.urandom(5_000_000), os.urandom(5_000_000)
    got: list[bytes] = []

    def talk(sock: socket.socket) -> None:
        sender = threading.Thread(target=lambda: (sock.sendall(back), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        got.append(rest(sock))
        sender.join(20)

    with (
        Peer(talk, tmp_path / "peer", buffer=4096) as peer,
        forward(listen, peer.address).connect(buffer_bytes=small) as client,
    ):
        sender = threading.Thread(target=lambda: (client.sendall(there), client.shutdown(socket.SHUT_WR)))
        sender.start()
        assert hashlib.sha256(rest(client)).digest() == hashlib.sha256(back).digest()
        sender.join(20)
        until(lambda: got, "the peer has read everything")
    assert hashlib.sha256(got[0]).digest() == hashlib.sha256(there).digest()


def test_a_half_closed_connection_goes_on_in_the_other_direction(forward: StartForwarder, listen: str) -> None:
    def talk(sock: socket.socket) -> None:
        question = rest(sock)  # until the client has closed its half
        time.sleep(0.1)
        sock.sendall(question[::-1])

    with Peer(talk) as peer:
        running = forward(listen, peer.address)
        with running.connect() as client:
            client.sendall(b"abc")
            client.shutdown(socket.SHUT_WR)
            assert rest(client) == b"cba"
        until(lambda: running.stats.open == 0, "the connection has ended")


def test_a_slow_reader_stops_the_sender_and_costs_little_memory(forward: StartForwarder, listen: str) -> None:
    sent = [0]

    def talk(sock: socket.socket) -> None:
        sock.settimeout(0.5)
        block = bytes(1 << 16)
        try:
            for _ in range(4000):
                sent[0] += sock.send(block)
        except TimeoutError:
            return

    with Peer(talk) as peer:
        running = forward(listen, peer.address)
        with running.connect() as client:
            time.sleep(1.0)
            taken = sent[0]
            assert taken < 32 << 20, "the kernel's buffers and one chunk, no more"
            assert len(rest(client)) == sent[0]


def test_one_that_reads_nothing_does_not_hold_up_others(forward: StartForwarder, listen: str) -> None:
    def talk(sock: socket.socket) -> None:
        kind = sock.recv(1)
        if kind == b"s":
            sock.sendall(bytes(64 << 20))
        else:
            sock.sendall(kind)

    with Peer(talk) as peer:
        running = forward(listen, peer.address)
        stuck = [running.connect() for _ in range(8)]
        for client in stuck:
            client.sendall(b"s")
        started = time.monotonic()
        for _ in range(50):
            with running.connect() as client:
                client.sendall(b"q")
                assert client.recv(1) == b"q"
        assert time.monotonic() - started < 5
        for client in stuck:
            client.close()
        until(lambda: running.stats.open == 0, "all have ended")


def test_a_thousand_connections_at_once(forward: StartForwarder, tmp_path: Path) -> None:
    """Each of them open until all are; every byte comes back on its own connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    selector, stop = selectors.DefaultSelector(), threading.Event()
    path = tmp_path / "peer"
    listener = socket.create_server(str(path), family=socket.AF_UNIX, backlog=1024)
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)

    def serve() -> None:
        while not stop.is_set():
            for key, _ in selector.select(0.1):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif data := sock.recv(65_536):
                    sock.sendall(data)
                else:
                    selector.unregister(sock)
                    sock.close()

    thread = threading.Thread(target=serve)
    thread.start()
    running = forward(f"unix:{tmp_path}/forward", f"unix:{path}", connections=1000)
    clients = [running.connect() for _ in range(1000)]
    try:
        until(lambda: running.stats.open == 1000, "all are open", 30)
        with running.connect() as one_more:
            for number, client in enumerate(clients):
                client.sendall(b"%04d" % number * 1000)
            for number, client in enumerate(clients):
                want, got = b"%04d" % number * 1000, b""
                while len(got) < len(want):
                    got += client.recv(65_536)
                assert got == want
            assert running.stats.accepted == 1000
            clients.pop().close()
            one_more.sendall(b"late")  # it had waited in the backlog
            assert one_more.recv(4) == b"late"
    finally:
        for client in clients:
            client.close()
        until(lambda: running.stats.open == 0, "all have ended", 30)
        stop.set()
        thread.join(10)
        for key in list(selector.get_map().values()):
            key.fileobj.close()
        selector.close()


def test_a_side_that_is_not_there_is_said_and_the_listener_stays(
    forward: StartForwarder, listen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "absent"
    running = forward(listen, f"unix:{path}")
    for _ in range(3):
        with running.connect() as client:
            assert rest(client) == b""
    assert running.stats.unreachable == 3
    assert f"cannot connect to unix:{path}: No such file or directory" in caplog.text
    with Peer(echo, path), running.connect() as client:
        client.sendall(b"back")
        assert client.recv(4) == b"back"


def test_a_side_that_is_slow_to_reach_is_given_up(forward: StartForwarder, listen: str, tmp_path: Path) -> None:
    with HybridMuxer(tmp_path / "v.sock", {}, reply=None):
        running = forward(listen, f"vsock+unix:{tmp_path}/v.sock:5000", reach_s=0.2)
        with running.connect() as client:
            assert rest(client) == b""
        assert running.stats.unreachable == 1


@pytest.mark.parametrize("who", ["client", "peer"])
def test_a_peer_that_vanishes_ends_the_other_side(forward: StartForwarder, who: str) -> None:
    """A reset is passed on as one: an orderly end would look like the end of an answer."""
    gone = threading.Event()
    ended: list[str] = []

    def talk(sock: socket.socket) -> None:
        sock.recv(1)
        if who == "peer":
            reset(sock)
            return
        gone.wait(10)
        try:
            ended.append("end" if sock.recv(1) == b"" else "data")
        except ConnectionResetError:
            ended.append("reset")

    with Peer(talk) as peer:
        running = forward("127.0.0.1:0", peer.address)
        client = running.connect()
        client.sendall(b"x")
        if who == "peer":
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            client.close()
        else:
            until(lambda: running.stats.open == 1, "it is through")
            time.sleep(0.1)
            reset(client)
            gone.set()
        until(lambda: running.stats.open == 0, "both are closed")
    assert ended == ([] if who == "peer" else ["reset"])


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def test_a_connection_that_carries_nothing_is_cut(forward: StartForwarder, listen: str) -> None:
    with Peer(echo) as peer:
        running = forward(listen, peer.address, idle_s=0.4)
        with running.connect() as client, running.connect() as busy:
            for _ in range(8):
                busy.sendall(b"x")
                assert busy.recv(1) == b"x"
                time.sleep(0.1)
            try:
                assert client.recv(1) == b""
            except ConnectionResetError:
                pass
            busy.sendall(b"y")
            assert busy.recv(1) == b"y"
        assert running.stats.idle == 1


def test_out_of_descriptors_is_survived(forward: StartForwarder, tmp_path: Path) -> None:
    with Peer(echo, tmp_path / "peer") as peer:
        running = forward(f"unix:{tmp_path}/forward", peer.address)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with running.connect() as early, socket.socket(socket.AF_UNIX) as late:
            early.sendall(b"a")
            assert early.recv(1) == b"a"
            late.settimeout(10)
            gc.collect()  # what other tests left would free descriptors in between, and let `late` in halfway
            used = max(int(fd) for fd in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(used, *limits), limits[1]))
            blockers = []
            try:
                while True:
                    blockers.append(os.dup(0))
            except OSError:
                pass
            try:
                late.connect(f"{tmp_path}/forward")
                time.sleep(0.3)
                early.sendall(b"b")
                assert early.recv(1) == b"b"
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for fd in blockers:
                    os.close(fd)
            late.sendall(b"c")
            assert late.recv(1) == b"c"


def test_a_clean_shutdown_lets_connections_end_and_cuts_the_rest(forward: StartForwarder, listen: str) -> None:
    def talk(sock: socket.socket) -> None:
        if sock.recv(1) == b"s":
            time.sleep(0.3)
            sock.sendall(b"done")
        else:
            sock.recv(1)

    with Peer(talk) as peer:
        running = forward(listen, peer.address)
        where = running.bound[0].place.path if running.bound[0].place else running.bound[0].sock.getsockname()
        with running.connect() as ending, running.connect() as staying:
            ending.sendall(b"s")
            staying.sendall(b"x")
            until(lambda: running.stats.open == 2, "both are open")
            started = time.monotonic()
            running.stop(grace_s=1.0)
            assert 0.9 < time.monotonic() - started < 5
            assert rest(ending) == b"done"
            try:
                assert staying.recv(1) == b""
            except ConnectionResetError:
                pass
        address = running.bound[0].address
        with socket.socket(socket.AF_UNIX if isinstance(address, UnixAddress) else socket.AF_INET) as late:
            assert late.connect_ex(where) != 0


def test_guest_initiated_connections_are_forwarded(forward: StartForwarder, tmp_path: Path) -> None:
    with Peer(echo) as peer, HybridMuxer(tmp_path / "v.sock", {}) as muxer:
        forward(f"vsock+unix:{tmp_path}/v.sock:8003", peer.address)
        with muxer.guest_connects(8003) as guest:
            guest.sendall(b"out")
            assert guest.recv(3) == b"out"
        with pytest.raises(ConnectionRefusedError):
            muxer.guest_connects(8004)
