"""What the verifier reads in an answer is what every other reader of the same bytes must read in it."""

from __future__ import annotations

import pytest

from client_sdk.client.answers import BlockReader
from client_sdk.errors import MalformedError, Rejection
from client_sdk.routes.chat import ROUTE_CHAT, DeltaCollector, read_whole

ID = b'"id":"chatcmpl-00","model":"m"'
MESSAGE = b'{"role":"assistant","content":"A"}'


def whole(choice: bytes) -> bytes:
    return b"{" + ID + b',"choices":[' + choice + b"]}"


def test_the_honest_forms_are_read() -> None:
    content = read_whole(ROUTE_CHAT, whole(b'{"index":0,"message":' + MESSAGE + b',"finish_reason":"stop"}'))
    assert content.texts == {0: "A"}
    collector = DeltaCollector(ROUTE_CHAT)
    collector.add(whole(b'{"index":0,"delta":{"content":"A"}},{"index":1,"delta":{"content":"B"}}'))
    assert collector.content().texts == {0: "A", 1: "B"}


@pytest.mark.parametrize(
    "body",
    [
        whole(b'{"index":0,"message":{"content":"B","content":"A"},"finish_reason":"stop"}'),
        whole(b'{"index":0,"message":{"content":"B","conten\\u0074":"A"},"finish_reason":"stop"}'),
        whole(b'{"index":0,"message":{"content":"B"},"message":' + MESSAGE + b',"finish_reason":"stop"}'),
        b'{"choices":[],' + whole(b'{"index":0,"message":' + MESSAGE + b',"finish_reason":"stop"}')[1:],
    ],
)
def test_a_key_given_twice_is_no_answer(body: bytes) -> None:
    """Python takes the last, other readers the first: nobody can say which one was verified."""
    with pytest.raises(MalformedError) as caught:
        read_whole(ROUTE_CHAT, body)
    assert caught.value.code == Rejection.MALFORMED_RESPONSE


@pytest.mark.parametrize(
    "frame",
    [
        whole(b'{"index":0,"delta":{"content":"B","content":"A"}}'),
        whole(b'{"index":0,"delta":{"content":"A"}},{"index":0,"delta":{"content":"B"}}'),
    ],
    ids=["key twice", "choice twice"],
)
def test_a_frame_says_each_thing_once(frame: bytes) -> None:
    with pytest.raises(MalformedError) as caught:
        DeltaCollector(ROUTE_CHAT).add(frame)
    assert caught.value.code == Rejection.MALFORMED_STREAM


@pytest.mark.parametrize("error", [b"", b'"error":null,'])
def test_display_and_verification_agree_on_what_an_error_is(error: bytes) -> None:
    frame = b"{" + error + whole(b'{"index":0,"delta":{"content":"A"}}')[1:]
    assert not DeltaCollector(ROUTE_CHAT).add(frame).error
    reader = BlockReader()
    assert reader.feed(b"data: " + frame + b"\n\n") == "A"
    assert reader.error is None
