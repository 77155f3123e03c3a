"""Addresses off the network, and what a connector says when nobody answers in the way it should."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import httpx
import pytest

from client_sdk import Appliance, AsyncAppliance, Policy, TransportError, UnsafeAcceptInsecure
from client_sdk.transport.addresses import HybridConnector, SocketConnector, parse_appliance_address
from client_sdk.wire.vsock import check_unix_path, parse_cid, parse_port
from tests.simulators.hybrid_muxer import HybridMuxer

POLICY = Policy(models={"m": frozenset({bytes(range(32))})}, insecure=UnsafeAcceptInsecure())


def test_each_form_of_an_address() -> None:
    vsock = parse_appliance_address("vsock://3:4294967294")
    assert vsock.connector == SocketConnector(
        family=socket.AF_VSOCK, address=(3, 4294967294), where="vsock 3:4294967294"
    )
    assert str(vsock.origin) == "https://3-4294967294.vsock.invalid/"
    hybrid = parse_appliance_address("vsock+unix:///run/v%3Am.sock:5000")
    assert hybrid.connector == HybridConnector(path="/run/v:m.sock", port=5000)
    unix = parse_appliance_address("unix:///run/appliance.sock")
    assert isinstance(unix.connector, SocketConnector)
    assert (unix.connector.family, unix.connector.address) == (socket.AF_UNIX, "/run/appliance.sock")
    assert parse_appliance_address("https://h:1").connector is None


@pytest.mark.parametrize(
    "url",
    [
        "vsock://",
        "vsock://3",
        "vsock://3:",
        "vsock://abc:5000",
        "vsock://3:abc",
        "vsock://3:0",
        "vsock://3:4294967295",
        "vsock://3:4294967296",
        "vsock://3:99999999999999999999",
        "vsock://3:٣",
        "vsock://4294967295:1",
        "vsock://4294967296:1",
        "vsock://-1:1",
        "vsock://0:5000",
        "vsock://3:5000/v1",
        "vsock://3:5000?x",
        "vsock+unix:///run/v.sock",
        "vsock+unix:///run/v.sock:",
        "vsock+unix:///run/v.sock:0",
        "vsock+unix://run/v.sock:5000",
        "unix://run/a.sock",
        "unix:///",
        "unix:///a%00b",
        "unix:///run/a?b",
        "unix:///" + "x" * 107,
        "unix:/a",
    ],
)
def test_bad_addresses_are_refused_with_a_reason(url: str) -> None:
    with pytest.raises(ValueError, match=r"vsock|socket|address of an appliance"):
        parse_appliance_address(url)
    with pytest.raises(ValueError, match=r"."):
        Appliance(url, policy=POLICY)


def test_reserved_and_named_cids() -> None:
    assert [parse_cid("local"), parse_cid("host"), parse_cid("4294967294")] == [1, 2, 4294967294]
    with pytest.raises(ValueError, match="the hypervisor itself"):
        parse_cid("0")
    with pytest.raises(ValueError, match="any machine"):
        parse_cid("4294967295")
    assert parse_port("1") == 1
    assert check_unix_path("/" + "x" * 106)


def ask(url: str, *, connect_s: float = 5.0) -> tuple[TransportError, float]:
    """The TransportError of a chat, and the seconds it took."""
    started = time.monotonic()
    with Appliance(url, policy=POLICY) as appliance:
        appliance.http.timeout = httpx.Timeout(5, connect=connect_s)
        with pytest.raises(TransportError) as caught:
            appliance.chat("hi", model="m")
    return caught.value, time.monotonic() - started


async def aask(url: str, *, connect_s: float = 5.0) -> tuple[TransportError, float]:
    started = time.monotonic()
    async with AsyncAppliance(url, policy=POLICY) as appliance:
        appliance.http.timeout = httpx.Timeout(5, connect=connect_s)
        with pytest.raises(TransportError) as caught:
            await appliance.chat("hi", model="m")
    return caught.value, time.monotonic() - started


def both(url: str, *, connect_s: float = 5.0) -> list[TransportError]:
    """Both clients fail within the time they have."""
    outcomes = [ask(url, connect_s=connect_s), asyncio.run(aask(url, connect_s=connect_s))]
    assert all(took < connect_s + 2 for _, took in outcomes)
    return [error for error, _ in outcomes]


def test_nobody_at_a_unix_socket(tmp_path: Path) -> None:
    for error in both(f"unix://{tmp_path}/absent"):
        assert error.code == "CONNECT_FAILED"
        assert f"the unix socket {tmp_path}/absent" in error.message
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "left"))
    left.close()
    for error in both(f"unix://{tmp_path}/left"):
        assert f"nothing listens at the unix socket {tmp_path}/left" in error.message


def test_nobody_behind_a_hybrid_vsock(tmp_path: Path) -> None:
    with HybridMuxer(tmp_path / "v.sock", {}) as muxer:
        for error in both(f"vsock+unix://{muxer.path}:5000"):
            assert (error.code, "nothing listens on port 5000" in error.message) == ("CONNECT_FAILED", True)
        assert muxer.asked == [b"CONNECT 5000\n"] * 2
    for error in both(f"vsock+unix://{muxer.path}:5000"):
        assert f"the vsock at {muxer.path}" in error.message


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "hung up"),
        (b"OK", "hung up"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak hybrid vsock"),
        (b"OK \n", "does not speak hybrid vsock"),
        (b"OK x\n", "does not speak hybrid vsock"),
        (b"ok 1\n", "does not speak hybrid vsock"),
        (b"OK 1\r\n", "does not speak hybrid vsock"),
        (b"\n", "does not speak hybrid vsock"),
        (b"OK " + b"1" * 4096, "does not speak hybrid vsock"),
        (bytes(100), "does not speak hybrid vsock"),
    ],
)
def test_a_hybrid_vsock_that_answers_something_else(tmp_path: Path, reply: bytes, words: str) -> None:
    with HybridMuxer(tmp_path / "v.sock", {}, reply=reply) as muxer:
        for error in both(f"vsock+unix://{muxer.path}:5000"):
            assert error.code == "CONNECT_FAILED"
            assert words in error.message


def test_a_hybrid_vsock_that_does_not_answer(tmp_path: Path) -> None:
    with HybridMuxer(tmp_path / "v.sock", {}, reply=None) as muxer:
        for error in both(f"vsock+unix://{muxer.path}:5000", connect_s=0.3):
            assert error.code == "TIMED_OUT"


def test_a_machine_without_that_vsock_peer() -> None:
    """Here no transport is loaded, or no machine has this CID: either way a plain refusal, and quickly."""
    for error in both("vsock://4294967000:5000"):
        assert error.code in {"CONNECT_FAILED", "TIMED_OUT"}
        assert "vsock 4294967000:5000" in error.message or error.code == "TIMED_OUT"
