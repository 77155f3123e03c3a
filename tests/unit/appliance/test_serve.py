"""Sockets, signals and the orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import AsyncExitStack

import pytest

from appliance.api.app import build_metrics_app
from appliance.attestation.connection import ConnectionLimits
from appliance.attestation.ra_tls import CertificateRotator, generate_tls_key
from appliance.attestation.tls_server import make_protocol_class
from appliance.boot import Appliance
from appliance.config import Config, MetricsConfig, ServerConfig
from appliance.errors import BootError
from appliance.serve import _listen, bind_sockets, run
from tests.unit.appliance.service.rig import Rig


def composed(rig: Rig) -> Appliance:
    plain = make_protocol_class(contexts=None, limits=ConnectionLimits(), clock=time.monotonic)
    return Appliance(
        app=build_metrics_app(rig.service),
        metrics_app=build_metrics_app(rig.service),
        service=rig.service,
        protocol_class=plain,
        metrics_protocol_class=plain,
        rotator=CertificateRotator(generate_tls_key(), now=time.time, random_bytes=os.urandom),
        mode="insecure",
        stack=AsyncExitStack(),
    )


def config(metrics: str = "") -> Config:
    return Config(server=ServerConfig(grace_s=1.0), metrics=MetricsConfig(listen=metrics))


def test_bound_sockets_do_not_listen_yet() -> None:
    (sock,) = bind_sockets(("127.0.0.1:0",))
    with sock, socket.socket() as client:
        assert client.connect_ex(sock.getsockname()) != 0


@pytest.mark.parametrize("bad", ["203.0.113.7:1", "a..b:1", "[::1%lo]:x"])
def test_one_bad_address_closes_the_others(bad: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BootError):
        bind_sockets(("127.0.0.1:0", "127.0.0.1:0", bad))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("metrics", ["", "127.0.0.1:0"])
async def test_a_signal_ends_serving_and_marks_the_service(metrics: str) -> None:
    rig = Rig()
    sockets = bind_sockets(("127.0.0.1:0",))

    def ready() -> None:
        with socket.create_connection(sockets[0].getsockname()[:2], timeout=1):
            os.kill(os.getpid(), signal.SIGTERM)

    await asyncio.wait_for(run(composed(rig), config(metrics), sockets, ready), 10)
    assert not rig.service.ready


async def test_a_signal_before_the_listeners_are_up_is_not_lost() -> None:
    rig = Rig()
    readied: list[bool] = []
    serving = asyncio.create_task(
        run(composed(rig), config(), bind_sockets(("127.0.0.1:0",)), lambda: readied.append(True))
    )
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(serving, 10)
    assert readied == []


async def test_a_metrics_address_that_is_taken_is_found_before_anything_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sockets = bind_sockets(("127.0.0.1:0",))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with sockets[0], pytest.raises(BootError, match="cannot listen on"):
            await run(composed(Rig()), config(address), sockets, lambda: None)


def test_a_port_that_another_booting_appliance_took_first_is_a_boot_error() -> None:
    first = bind_sockets(("127.0.0.1:0",))
    port = first[0].getsockname()[1]
    second = bind_sockets((f"127.0.0.1:{port}",))  # possible while neither listens
    first[0].listen()
    try:
        with pytest.raises(BootError, match=f"cannot listen on 127.0.0.1:{port}"):
            _listen(second)
    finally:
        for sock in (*first, *second):
            sock.close()
