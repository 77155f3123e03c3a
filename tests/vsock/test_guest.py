"""What only the real address family shows: context ids, and how its sockets fail. Runs inside the guest."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from appliance.listener.sockets import local_cid
from client_sdk import Appliance, Policy, TransportError
from tests.e2e.programs import SLOW, free_port, make_policy, run_program, wait_for
from tests.vsock.conftest import IN_GUEST, SETTINGS, Place, Program, serve_arguments

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


def test_peers_that_vanish_in_the_middle_leave_no_connection_behind(model: str, tmp_path: Path) -> None:
    """More of them than `limits.connections` may be open at once: those in time are let in and counted out again, the
    others are refused, and as soon as the last of them is noticed somebody else is served."""
    metrics = f"127.0.0.1:{free_port()}"
    arguments, environ = serve_arguments("vsock:5300"), {"APPLIANCE_METRICS_LISTEN": metrics}
    policy = Policy.load(make_policy(tmp_path / "policy", arguments[1:], {**SETTINGS, **environ}))
    with Program(tmp_path / "log", arguments, environ=environ):
        for _ in range(300):
            with socket.socket(socket.AF_VSOCK) as sock:
                sock.settimeout(10)
                sock.connect((1, 5300))
        wait_for(
            lambda: all_seen(read_metrics(metrics), 300),
            limit_s=30 * SLOW,
            what="every peer was counted, and none is open",
        )
        with Appliance("vsock://1:5300", policy=policy) as appliance:
            assert appliance.attest().family == "insecure"


def read_metrics(address: str) -> Mapping[str, float]:
    text = httpx.get(f"http://{address}/metrics", trust_env=False).raise_for_status().text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def all_seen(metrics: Mapping[str, float], peers: int) -> bool:
    accepted, refused = metrics["appliance_accepted_connections"], metrics["appliance_refused_connections"]
    return accepted + refused >= peers and metrics["appliance_open_connections"] == 0
