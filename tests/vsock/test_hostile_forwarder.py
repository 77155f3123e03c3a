"""A forwarder needs no trust: one that changes, repeats, drops or diverts what it carries is caught."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from client_sdk import Appliance, Policy, SdkError, VerificationError
from client_sdk.transport.addresses import parse_appliance_address
from tests.e2e.programs import SLOW
from tests.vsock.conftest import IN_GUEST, MODEL, Place, Program, serve_arguments

pytestmark = pytest.mark.model
CANARY = "zebra-canary-4711"
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "temperature": 0}
Change = Callable[[int, bytes], bytes]


def honest(_number: int, data: bytes) -> bytes:
    return data


@dataclass
class Hostile:
    """Forwards connections to `urls` in turn. `there` and `back` get every piece with its number on its connection."""

    path: Path
    urls: list[str]
    there: Change = honest
    back: Change = honest
    seen: bytearray = field(default_factory=bytearray)
    recorded: list[bytes] = field(default_factory=list)
    connections: int = 0

    def __post_init__(self) -> None:
        self.url = f"unix://{self.path}"
        self._listener = socket.create_server(str(self.path), family=socket.AF_UNIX)
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in (self._listener, *self._open):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            connector = parse_appliance_address(self.urls[self.connections % len(self.urls)]).connector
            assert connector is not None
            self.connections += 1
            server = connector.connect(10)
            server.settimeout(None)
            self._open += [client, server]
            for source, sink, change, kept in (
                (client, server, self.there, None),
                (server, client, self.back, self.recorded),
            ):
                thread = threading.Thread(target=self._pump, args=(source, sink, change, kept), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, change: Change, kept: list[bytes] | None) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self.seen += data
                if kept is not None:
                    kept.append(data)
                sink.sendall(change(number, data))
                number += 1
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def flipped(which: int) -> Change:
    """One bit of the piece with this number is another one."""

    def change(number: int, data: bytes) -> bytes:
        middle = len(data) // 2
        return data if number != which else data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    return change


def dropped(which: int) -> Change:
    return lambda number, data: b"" if number == which else data


def doubled(which: int) -> Change:
    return lambda number, data: data + data if number == which else data


def refused(url: str, policy: Policy) -> SdkError:
    with Appliance(url, policy=policy, timeout_s=5 * SLOW) as appliance, pytest.raises(SdkError) as caught:
        appliance.chat(CANARY, **ASKED)
    return caught.value


def test_an_honest_one_learns_nothing_it_could_read(place: Place, policy: Policy, tmp_path: Path) -> None:
    with Hostile(tmp_path / "f", [place.url]) as between, Appliance(between.url, policy=policy) as appliance:
        assert appliance.chat(CANARY, model=MODEL, max_tokens=2).text
    assert CANARY.encode() not in between.seen
    assert b"HTTP/1.1" not in between.seen


@pytest.mark.parametrize("change", [flipped, dropped, doubled])
@pytest.mark.parametrize("direction", ["there", "back"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_tampering_with_any_piece(
    place: Place, policy: Policy, tmp_path: Path, change: Callable[[int], Change], direction: str, which: int
) -> None:
    """Hello, finished, attestation, request or answer: the outcome is an error, never another answer."""
    if change is dropped and IN_GUEST:
        return  # nothing of it depends on the kind of socket, and every case waits for a time limit
    with Appliance(place.url, policy=policy) as appliance:
        honest_text = appliance.chat(CANARY, **ASKED).text
    between = Hostile(tmp_path / "f", [place.url], **{direction: change(which)})
    with between, Appliance(between.url, policy=policy, timeout_s=5 * SLOW) as appliance:
        try:
            text = appliance.chat(CANARY, **ASKED).text
        except SdkError:
            return
    # Bytes that come twice behind an answer which had arrived whole, and was verified, are too late to do harm.
    assert (change, direction, text) == (doubled, "back", honest_text)


def test_replaying_a_recorded_server(place: Place, policy: Policy, tmp_path: Path) -> None:
    with Hostile(tmp_path / "first", [place.url]) as between:
        with Appliance(between.url, policy=policy) as appliance:
            assert appliance.attest().family == "insecure"
        recorded = list(between.recorded)
    assert len(recorded) >= 3

    def replay(number: int, _data: bytes) -> bytes:
        return recorded[number] if number < len(recorded) else b""

    with Hostile(tmp_path / "second", [place.url], back=replay) as between:
        refused(between.url, policy)


def test_swapping_the_backend_under_a_connection_and_between_them(place: Place, policy: Policy, tmp_path: Path) -> None:
    """Another genuine appliance with the same pins has other keys: what was proven for one is worth nothing there."""
    other = f"unix:{tmp_path}/other.sock"
    program = Program(tmp_path / "other.log", serve_arguments(other, plain=f"unix:{tmp_path}/other.plain"))
    with program, Hostile(tmp_path / "f", [place.url, f"unix://{tmp_path}/other.sock"]) as between:
        with Appliance(between.url, policy=policy) as appliance:
            first = appliance.chat("Hello", model=MODEL, max_tokens=2)
            for sock in list(between._open):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            second = appliance.chat("Hello", model=MODEL, max_tokens=2)
            assert second.receipt.claims.chain != first.receipt.claims.chain
            assert second.receipt.claims.attestation != first.receipt.claims.attestation
        assert between.connections == 2


def test_diverting_to_an_appliance_with_other_pins(place: Place, policy: Policy, tmp_path: Path) -> None:
    other = f"unix:{tmp_path}/other.sock"
    program = Program(tmp_path / "other.log", serve_arguments(other), environ={"APPLIANCE_SERVER_ISSUER": "somebody"})
    with program, Hostile(tmp_path / "f", [f"unix://{tmp_path}/other.sock"]) as between:
        error = refused(between.url, policy)
    assert isinstance(error, VerificationError)
    assert CANARY.encode() not in between.seen
