"""What only the real address family shows: context ids, and how its sockets fail. Runs inside the guest."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from appliance.vsock.listener import local_cid
from client_sdk import Appliance, Policy, TransportError
from tests.e2e.programs import run_program
from tests.vsock.conftest import IN_GUEST, Place, Program, serve_arguments

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not IN_GUEST, reason="no vsock transport in this kernel: `make vsock-test` runs it in a guest"),
]


@pytest.mark.parametrize(("allowed", "accepted"), [("3", False), ("host", False), ("local", True), ("7,1", True)])
def test_only_listed_machines_may_connect(
    allowed: str, accepted: bool, policy: Policy, tmp_path: Path, model: str
) -> None:
    arguments = serve_arguments("vsock:5100", plain="unix:/run/plain.sock")
    program = Program(tmp_path / "log", arguments, environ={"APPLIANCE_VSOCK_ALLOWED_CIDS": allowed})
    with program, Appliance("vsock://1:5100", policy=policy) as appliance:
        if accepted:
            assert appliance.chat("Hello", model=model, max_tokens=2).text
        else:
            with pytest.raises(TransportError):
                appliance.chat("Hello", model=model, max_tokens=2)


def test_a_forwarder_on_vsock_serves_listed_machines_only(place: Place, policy: Policy, tmp_path: Path) -> None:
    for port, cid in ((5200, "local"), (5201, "host")):
        arguments = ["vsock-forward", "--listen", f"vsock:{port}", "--to", place.to, "--allow-cid", cid]
        with (
            Program(tmp_path / f"{port}", arguments, ready="Forwarding vsock:"),
            Appliance(f"vsock://1:{port}", policy=policy) as appliance,
        ):
            if cid == "local":
                assert appliance.attest().family == "insecure"
            else:
                with pytest.raises(TransportError):
                    appliance.attest()


def test_connecting_where_nobody_listens_or_nobody_is(policy: Policy) -> None:
    for url, words in (("vsock://1:5999", "nothing listens at vsock 1:5999"), ("vsock://77:5000", "vsock 77:5000")):
        with Appliance(url, policy=policy) as appliance, pytest.raises(TransportError) as caught:
            appliance.attest()
        assert words in caught.value.message


def test_b099_listening_as_another_machine_is_explained() -> None:
    done = run_program("appliance", *serve_arguments("vsock:77:5000"))
    assert done.returncode == 1
    assert "cannot listen on vsock:77:5000: Cannot assign requested address" in done.stderr
    assert local_cid() in (None, 1)


def test_peers_that_vanish_in_the_middle_leave_no_connection_behind(place: Place, policy: Policy) -> None:
    for _ in range(300):
        with socket.socket(socket.AF_VSOCK) as sock:
            sock.settimeout(10)
            sock.connect((1, 5000))
    with Appliance(place.url, policy=policy) as appliance:
        assert appliance.attest().family == "insecure"
