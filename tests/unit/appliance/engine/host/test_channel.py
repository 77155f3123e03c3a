from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.host.channel import (
    BlockingChannel,
    ChannelError,
    FrameReader,
    Message,
    connect,
    decode_body,
    encode_frame,
)

messages = st.dictionaries(
    st.text(max_size=8), st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=32), st.text(max_size=32)), max_size=5
)


@given(st.lists(messages, max_size=5), st.integers(1, 17))
def test_messages_survive_any_cut(sent: list[Message], size: int) -> None:
    stream = b"".join(encode_frame(message) for message in sent)
    reader = FrameReader()
    received = [each for at in range(0, len(stream), size) for each in reader.feed(stream[at : at + size])]
    assert received == sent
    assert not reader.pending


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_awaited(data: bytes) -> None:
    try:
        list(FrameReader(limit_bytes=64).feed(data))
    except ChannelError:
        pass


def test_announced_length_is_refused_before_the_body_arrives() -> None:
    with pytest.raises(ChannelError, match="exceeds the limit of 64"):
        list(FrameReader(limit_bytes=64).feed(struct.pack(">I", 65)))


def test_oversized_message_is_not_sent() -> None:
    with pytest.raises(ChannelError, match="exceeds the limit"):
        encode_frame({"text": "x" * 100}, limit_bytes=64)


@pytest.mark.parametrize("body", [b"\x80", b"\xa1\x01\x02", b"\xa1\x61a", b"\xbf\xff", b""])
def test_body_must_be_a_strict_map_with_text_keys(body: bytes) -> None:
    with pytest.raises(ChannelError):
        decode_body(body)


def test_end_inside_a_message_is_an_error_between_messages_it_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    channel = BlockingChannel(ours)
    theirs.sendall(encode_frame({"t": "ping"}))
    theirs.close()
    assert channel.receive() == {"t": "ping"}
    assert channel.receive() is None
    channel.close()
    ours, theirs = socket.socketpair()
    channel = BlockingChannel(ours)
    theirs.sendall(encode_frame({"t": "ping"})[:-1])
    theirs.close()
    with pytest.raises(ChannelError, match="in the middle"):
        channel.receive()
    channel.close()


async def test_asyncio_end_reports_messages_violations_and_the_end() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    got: list[Message] = []
    closed = asyncio.Event()
    protocol = await connect(ours, got.append, closed.set)
    peer = BlockingChannel(theirs)
    protocol.send({"n": 1})
    assert await asyncio.to_thread(peer.receive) == {"n": 1}
    peer.send({"n": 2})
    theirs.sendall(b"\xff\xff\xff\xff")
    await asyncio.wait_for(closed.wait(), 5)
    assert got == [{"n": 2}]
    assert protocol.violation is not None
    protocol.send({"n": 3})  # gone: swallowed
    peer.close()
