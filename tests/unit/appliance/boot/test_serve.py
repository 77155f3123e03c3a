"""Sockets, signals and the orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.api.app import build_metrics_app
from appliance.boot.boot import Appliance
from appliance.boot.serve import Listeners, bind_listeners, run
from appliance.config.settings import Config, MetricsConfig, ServerConfig
from appliance.errors import BootError
from appliance.listener.certificates import CertificateRotator, generate_tls_key
from appliance.listener.connection import ConnectionLimits
from appliance.listener.sockets import bind_all
from appliance.listener.tls_server import make_protocol_class
from tests.unit.appliance.inference.service.rig import Rig


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


def config(metrics: str = "", *listen: str) -> Config:
    server = ServerConfig(grace_s=1.0, listen=listen or ("127.0.0.1:0",))
    return Config(server=server, metrics=MetricsConfig(listen=metrics))


def test_bound_sockets_do_not_listen_yet() -> None:
    (bound,) = bind_all(("127.0.0.1:0",))
    with bound.sock, socket.socket() as client:
        assert client.connect_ex(bound.sock.getsockname()) != 0


@pytest.mark.parametrize("bad", ["203.0.113.7:1", "a..b:1", "[::1%lo]:x", "unix:/nonexistent/a", "vsock:7:9"])
def test_one_bad_address_closes_the_others(bad: str, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BootError):
        bind_all(("127.0.0.1:0", f"unix:{tmp_path}/a", bad))
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metrics", ["", "127.0.0.1:0"])
async def test_a_signal_ends_serving_and_marks_the_service(metrics: str) -> None:
    rig = Rig()
    listeners = bind_listeners(config(metrics))

    def ready() -> None:
        with socket.create_connection(listeners.attested[0].sock.getsockname()[:2], timeout=1):
            os.kill(os.getpid(), signal.SIGTERM)

    await asyncio.wait_for(run(composed(rig), config(metrics), listeners, ready), 10)
    assert not rig.service.ready


async def test_a_signal_before_the_listeners_are_up_is_not_lost() -> None:
    rig = Rig()
    readied: list[bool] = []
    serving = asyncio.create_task(run(composed(rig), config(), bind_listeners(config()), lambda: readied.append(True)))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(serving, 10)
    assert readied == []


async def test_a_metrics_address_that_is_taken_is_found_before_anything_is_served() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(BootError, match="cannot listen on"):
            bind_listeners(config(f"127.0.0.1:{taken.getsockname()[1]}"))
        assert len(os.listdir("/proc/self/fd")) == before + 1


async def test_a_port_that_another_booting_appliance_took_first_is_a_boot_error() -> None:
    (first,) = bind_all(("127.0.0.1:0",))
    port = first.sock.getsockname()[1]
    second = Listeners(attested=bind_all((f"127.0.0.1:{port}",)))  # possible while neither listens
    first.listen(1)
    with first.sock, pytest.raises(BootError, match=f"cannot listen on 127.0.0.1:{port}"):
        await run(composed(Rig()), config(), second, lambda: None)
    assert second.attested[0].sock.fileno() < 0


async def test_every_kind_of_listener_is_served_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    rig = Rig()
    both = config("", "127.0.0.1:0", f"unix:{tmp_path}/tls", f"unix:{tmp_path}/second")
    both = replace(both, server=replace(both.server, unsafe_plain_http_listen=(f"unix:{tmp_path}/plain",)))
    listeners = bind_listeners(both)
    assert [bound.url for bound in listeners.plain] == [f"unix://{tmp_path}/plain"]
    asking: list[asyncio.Task[None]] = []
    seen: list[bytes] = []

    def ready() -> None:
        asking.append(asyncio.create_task(ask()))  # the loop alone would let it be collected

    async def ask() -> None:
        try:
            for name in ("tls", "second", "plain"):
                assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
                reader, writer = await asyncio.open_unix_connection(tmp_path / name)
                writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                seen.append((await reader.read())[:12])
                writer.close()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    await asyncio.wait_for(run(composed(rig), both, listeners, ready), 10)
    assert seen == [b"HTTP/1.1 200"] * 3
    assert list(tmp_path.iterdir()) == []
