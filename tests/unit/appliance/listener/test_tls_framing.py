from __future__ import annotations

import socket

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.listener.connection import (
    ChannelState,
    ConnectionLimits,
    ConnectionStats,
    ConnectionTable,
    NoTlsChannel,
    describe_peer,
)
from appliance.listener.http_framing import BadHttp, Body, End, Head, Phase, RequestFramer, check_head

REQUESTS = [
    b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nA\r\n0123456789\r\n0\r\n\r\n",
    b"POST /d HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
]


def split(pieces: list[bytes]) -> list[bytes]:
    """The requests a framer finds in pieces of a stream, each as its bytes."""
    framer = RequestFramer(head_bytes=1024)
    found, current = [], b""
    for piece in pieces:
        for event, _ in framer.feed(piece):
            if isinstance(event, Head | Body):
                current += event.data
            elif isinstance(event, End):
                found.append(current)
                current = b""
    assert current == b""
    assert framer.phase is Phase.IDLE
    return found


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_boundaries_do_not_depend_on_how_the_bytes_arrive(requests, sizes):
    stream, pieces, position = b"".join(requests), [], 0
    for index in range(len(stream)):
        if position >= len(stream):
            break
        size = sizes[index % len(sizes)]
        pieces.append(stream[position : position + size])
        position += size
    assert split(pieces) == requests


@given(st.binary(max_size=300))
def test_any_bytes_are_framed_or_refused(data):
    framer = RequestFramer(head_bytes=128)
    try:
        events = [event for event, _ in framer.feed(data)]
    except BadHttp:
        return
    assert len([event for event in events if isinstance(event, End)]) <= len(data) / 28


class Count:
    """Callbacks of an httptools parser."""

    def __init__(self) -> None:
        self.begun = self.completed = 0

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_message_complete(self) -> None:
        self.completed += 1


@st.composite
def damaged(draw):
    """A stream of good requests with a few bytes replaced, inserted or removed."""
    stream = bytearray(b"".join(draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 3))):
        position = draw(st.integers(0, len(stream) - 1))
        filler = draw(
            st.sampled_from([b"", b"\r", b"\n", b"\r\n", b" ", b"\t", b"\0", b":", b",", b"0", b"5", b";", b"\xff"])
        )
        stream[position : position + draw(st.integers(0, 2))] = filler
        if not stream:
            return b""
    return bytes(stream)


@given(damaged())
def test_no_request_is_two_requests_to_the_next_parser(stream):
    framer, count = RequestFramer(head_bytes=1024), Count()
    parser = httptools.HttpRequestParser(count)
    ends = 0
    try:
        for event, _ in framer.feed(stream):
            if isinstance(event, End):
                ends += 1
                assert count.completed <= ends
            else:
                parser.feed_data(event.data)
                assert count.begun <= ends + 1
    except (BadHttp, httptools.HttpParserError):
        return
    assert count.completed == ends


def test_the_caller_may_stop_after_a_request():
    framer = RequestFramer(head_bytes=1024)
    rests = (rest for event, rest in framer.feed(REQUESTS[1] + REQUESTS[2]) if isinstance(event, End))
    assert next(rests) == REQUESTS[2]
    assert framer.phase is Phase.IDLE


@pytest.mark.parametrize(
    ("fields", "framing"),
    [
        (b"", (0, False)),
        (b"content-length: 7\r\n", (7, False)),
        (b"Content-Length: 10000000000\r\n", (10_000_000_000, False)),
        (b"Transfer-Encoding:\tChunked \r\n", (0, True)),
        (b"Expect: 100-Continue\r\nContent-Length: 1\r\n", (1, False)),
    ],
)
def test_body_framing(fields, framing):
    assert check_head(b"POST / HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n") == framing


def test_a_peer_s_connections_are_counted_and_released():
    stats = ConnectionStats()
    table = ConnectionTable(ConnectionLimits(max_connections=3, max_per_peer=2), stats)
    assert [table.admit("a"), table.admit("a"), table.admit("a")] == [True, True, False]
    assert [table.admit(None), table.admit("b")] == [True, False]
    assert (stats.open, stats.refused_peer, stats.refused_total) == (3, 1, 1)
    table.release("a")
    assert table.admit("b")


def test_machines_on_vsock_are_allowed_by_name_and_counted_each() -> None:
    stats = ConnectionStats()
    table = ConnectionTable(ConnectionLimits(max_per_peer=1, max_per_cid=2, allowed_cids=frozenset({2, 3})), stats)
    assert [table.admit("vsock:3"), table.admit("vsock:3"), table.admit("vsock:3")] == [True, True, False]
    assert [table.admit("vsock:2"), table.admit("vsock:4"), table.admit("::/64")] == [True, False, True]
    assert (stats.refused_peer, stats.refused_cid, stats.refused) == (1, 1, 2)
    table.release("vsock:3")
    assert table.admit("vsock:3")


def test_a_vsock_peer_that_is_gone_already_is_on_no_list() -> None:
    with socket.socket(socket.AF_VSOCK) as never_connected:
        peer, key = describe_peer(never_connected)
    assert peer == "gone"
    limits = ConnectionLimits(allowed_cids=frozenset({2}))
    assert not ConnectionTable(limits, ConnectionStats()).admit(key)


def test_peers_are_described_by_kind():
    left, right = socket.socketpair()
    with left, right:
        assert describe_peer(left) == ("unix", None)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert describe_peer(client) == ("127.0.0.1", "127.0.0.1")
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
    ):
        assert describe_peer(client) == ("::1", "::/64")


def test_a_plain_channel_exports_nothing():
    channel = ChannelState(tls=None, peer="unix", opened_at=0.0)
    assert channel.spki is None
    with pytest.raises(NoTlsChannel):
        channel.export("Attestation", 32, b"")
